"""One line from a name to a model that can be used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, overload

from molflt.files import shown
from molflt.pretrained.energies import EnergyPredictor
from molflt.pretrained.pixels import ImageWriter
from molflt.pretrained.sentences import GapFiller, SentenceLabeler, Translator
from molflt.pretrained.tokens import ImageLabeler, TextWriter
from molflt.pretrained.trained import read_trained
from molflt.training.sources import HUB

__all__ = ["load"]

_Loaded = (
    EnergyPredictor
    | ImageWriter
    | TextWriter
    | ImageLabeler
    | GapFiller
    | SentenceLabeler
    | Translator
)
_KINDS: tuple[type[_Loaded], ...] = get_args(_Loaded)  # a model of bytes is one of language, too


@overload
def load(
    source: None = ...,
    device: str = ...,
    *,
    checkpoint: str | None = ...,
    also: Sequence[str | Path] = ...,
    compiled: bool = ...,
) -> EnergyPredictor: ...


@overload  # what it is stands in the file: `EnergyPredictor.from_pretrained(source)` has a type
def load(
    source: str | Path | None,
    device: str = ...,
    *,
    checkpoint: str | None = ...,
    also: Sequence[str | Path] = ...,
    compiled: bool = ...,
) -> Any: ...


def load(
    source: str | Path | None = None,
    device: str = "cpu",
    *,
    checkpoint: str | None = None,
    also: Sequence[str | Path] = (),
    compiled: bool = False,
) -> _Loaded:
    """Loads a trained model.

    Args:
        source: the folder of a run; a model that `save_pretrained` or `molflt export` has written,
            its folder or its model.safetensors; weights within a run; ``hf:OWNER/NAME`` on the
            Hugging Face Hub; or one that comes with the package, by default the recommended one.
        device: cpu, cuda, cuda:N, or auto.
        checkpoint: of a run: best (the default), last, or the path of a safetensors file.
        also: further runs that make an ensemble with `source`, whose spread is an uncertainty.
        compiled: compute energies, and nothing else, with the machine code beside an exported
            model that `molflt export --compiled true` has written. Only for what you trust.

    Returns:
        An object that predicts energies, writes text, labels or draws images, labels sentences
        or translates them, or fills gaps, as the model was trained to. Its static type is Any;
        `EnergyPredictor.from_pretrained(source)` and the like return their own type.

    Raises:
        FileNotFoundError: if there is nothing of that name.
        ValueError: naming what is damaged, why the Hub has given nothing, why there is no machine
            code for this model, or that `also` is no list.
    """
    if isinstance(also, str | Path):
        raise ValueError(f"also={also!r}: expected a list of runs; write [{str(also)!r}]")
    if compiled:
        _check_compiled(source, device)
    trained = read_trained(source, checkpoint, device, also)
    for kind in _KINDS:
        if isinstance(trained.model, kind.models):
            found = kind(trained)
            if compiled:
                found.use_compiled()
            return found
    raise ValueError(
        f"{trained.path}: a model of the recipe {shown(trained.recipe)}, which nothing here uses; "
        "expected energies, texts or images; take molflt.training.checkpoint.load_run"
    )


def _check_compiled(source: str | Path | None, device: str) -> None:
    if device != "cpu":
        raise ValueError(f"compiled=True computes on the CPU; got device={device!r}; leave one out")
    if str(source).startswith(HUB):
        raise ValueError(
            f"{source}: machine code is not taken from the Hub; export it with --compiled true here"
        )
