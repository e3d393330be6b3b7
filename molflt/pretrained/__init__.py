"""Trained models from runs, exports and the Hugging Face Hub."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from molflt.files import shown
from molflt.pretrained.base import Pretrained, read_trained
from molflt.pretrained.energies import EnergyPredictor, Prediction
from molflt.pretrained.tokens import (
    GapFiller,
    ImageLabeler,
    ImageWriter,
    SentenceLabeler,
    TextWriter,
    Translator,
)
from molflt.training.config import HUB

__all__ = ["EnergyPredictor", "GapFiller", "ImageLabeler", "Prediction", "SentenceLabeler"]
__all__ += ["ImageWriter", "TextWriter", "Translator", "load"]

# PixelModel is also a LanguageModel
_KINDS: tuple[type[Pretrained], ...] = (EnergyPredictor, ImageWriter, TextWriter, ImageLabeler)
_KINDS += (GapFiller, SentenceLabeler, Translator)


# The type depends on the file; `EnergyPredictor.from_pretrained(source)` has a static type.
def load(
    source: str | Path | None = None,
    device: str = "cpu",
    *,
    checkpoint: str | None = None,
    also: Sequence[str | Path] = (),
    compiled: bool = False,
) -> Any:
    """Loads a trained model.

    Args:
        source: folder of a run; folder or model.safetensors of an exported model; weights in a run;
            ``hf:OWNER/NAME`` on the Hugging Face Hub; or the name of a model that comes with the
            package, by default the recommended model.
        device: cpu, cuda, cuda:N, or auto.
        checkpoint: best (the default), last, or a safetensors file; requires a training run.
        also: further runs that form an ensemble with `source`, whose spread indicates the
            uncertainty.
        compiled: compute energies on the CPU with the machine code that `molflt export --compiled
            true` wrote next to an exported model. Only use code that you trust.

    Returns:
        An object with the methods of the trained task, for instance an `EnergyPredictor`. Its
        static type is Any; `EnergyPredictor.from_pretrained(source)` returns an `EnergyPredictor`.
    """
    if isinstance(also, str | Path):
        raise ValueError(f"also={also!r}: expected a list of runs; write [{str(also)!r}]")
    if compiled and device != "cpu":
        raise ValueError(f"compiled=True requires the CPU; got device={device!r}")
    if compiled and str(source).startswith(HUB):
        raise ValueError(
            f"{source}: compiled=True does not load code from the Hub; export with --compiled true"
        )
    trained = read_trained(source, checkpoint, device, also)
    kind = next((kind for kind in _KINDS if isinstance(trained.model, kind.models)), None)
    if kind is None:
        raise ValueError(
            f"{trained.path}: expected a model of energies, text or images; got recipe "
            f"{shown(trained.recipe)}; use molflt.training.checkpoint.load_run"
        )
    loaded: Any = kind(trained)
    if compiled:
        if kind is not EnergyPredictor or not trained.path.is_file():
            raise ValueError(f"{trained.path}: compiled needs an exported model of energies")
        loaded.use_compiled()
    return loaded
