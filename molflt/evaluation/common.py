"""Steps that evaluations of several recipes share."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from molflt import plots
from molflt.attention import Attention, Position
from molflt.data.images.base import LabeledImages
from molflt.data.images.datamodule import ImageData
from molflt.data.text.sentences import CLASSES
from molflt.data.text.tokenizer import TOKENIZER, Tokenizer
from molflt.data.text.vocabulary import Vocabulary
from molflt.memory import within_memory
from molflt.metrics import locality
from molflt.tasks.base import Task

__all__ = ["attention_of", "batches", "chosen_splits", "classes_of", "device_of"]
__all__ += ["draw_attention", "draw_encoding", "expect_finite", "load_classes", "load_tokenizer"]
__all__ += ["load_vocabulary", "locality_of", "named_images", "named_sources", "tokenizer_of"]
__all__ += ["require", "total_of", "vocabulary_of"]

_RESTORE = "restore the file that was written in training"
_Call = tuple[Attention, tuple[Any, ...], dict[str, Any]]
_Batch = TypeVar("_Batch")
_Images = TypeVar("_Images", bound=ImageData)
_Part = TypeVar("_Part")
_Sized = TypeVar("_Sized", bound=Sized)


def chosen_splits(
    there: Collection[str], splits: Sequence[str] | None, usual: Sequence[str], other: Path | None
) -> list[str]:
    """Returns the splits of a run to evaluate, by default `usual`; `other` are other data."""
    if splits and other is not None:
        raise ValueError("give either --splits or --data; got both")
    wanted = list(dict.fromkeys(splits or usual))
    for name in wanted:
        if name not in there:
            raise ValueError(f"the run has no split {name!r}; expected some of {', '.join(there)}")
    return wanted


def named_sources(
    data: Mapping[str, object], splits: Sequence[str] | None, other: Path | None
) -> dict[str, str]:
    """Returns the texts to evaluate by name; each is a file or an hf: name.

    The default of `splits` is val, and also test if the options `data` of the run name it.
    """
    named = {name: str(data[name]) for name in ("train", "val", "test") if data[name]}
    usual = [name for name in named if name != "train"]
    wanted = chosen_splits(named, splits, usual, other)
    if other is not None:
        return {Path(other).name: str(other)}
    return {name: named[name] for name in wanted}


def named_images(
    kind: type[_Images],
    options: Mapping[str, object],
    splits: Sequence[str] | None,
    other: Path | None,
) -> tuple[_Images, dict[str, LabeledImages]]:
    """Returns the data of a run, and the images to evaluate by name, prepared as for validation."""
    wanted = chosen_splits(("train", "val"), splits, ["val"], other)
    if other is not None:
        options = {**options, "train": other, "val": other, "val_fraction": None}
        options |= {"train_labels": None, "val_labels": None}
    data = kind(**options)  # type: ignore[arg-type]  # from a checked configuration
    data.setup()
    return data, {name if other is None else Path(other).name: data.judged(name) for name in wanted}


def require(module: str, use: str, extra: str) -> Any:
    """Imports an optional module, which `use` needs and which an extra of molflt contains."""
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0].replace("sklearn", "scikit-learn")
        raise ModuleNotFoundError(
            f"{use} needs the package {package}, which is not installed; run: pip install "
            f"molflt[{extra}]"
        ) from None


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of a model."""
    return next(model.parameters()).device


@contextmanager
def batches(source: Iterable[_Batch], name: str, batch: str) -> Iterator[Iterable[_Batch]]:
    """Yields batches for inference, with a progress bar.

    An out-of-memory error becomes a ValueError that describes a `batch`, such as "64 images".
    """
    what = f"{name}: a batch of {batch}"
    with torch.inference_mode(), within_memory(lambda: what, "lower --batch-size"):
        yield tqdm(source, desc=name, leave=False, disable=None)


def expect_finite(name: str, values: Tensor, what: str = "the probability of a token") -> None:
    """Raises ValueError if values are not finite, for instance losses or logits."""
    if not bool(values.isfinite().all()):
        raise ValueError(f"{name}: {what} is not finite; expected a number; use another checkpoint")


def total_of(
    task: Task[Any, Any], source: Iterable[Sequence[Tensor]], name: str, batch: str
) -> Tensor:
    """Returns the sums of a task over batches, (fields,); see `Task.summarize`."""
    device, total = device_of(task.model), torch.zeros((), dtype=torch.float64)
    with batches(source, name, batch) as loaded:
        for one in loaded:
            sums = task.judge(tuple(part.to(device) for part in one))
            total = total + torch.stack(list(sums)).cpu()
    expect_finite(name, total)
    return total


def draw_attention(stack: nn.Module, run: Callable[[], object], png: Path, title: str) -> None:
    """Draws the attention of each head of the last layer, averaged over the batch, if it exists.

    See `attention_of` for `stack` and `run`.
    """
    if matrices := attention_of(stack, run, last=1):
        plots.attention_matrices(matrices[-1].mean(dim=0), png, title=title)


def draw_encoding(
    position: Position | None, scale: float, tokens: int, png: Path, what: str = "tokens"
) -> None:
    """Draws a relative encoding, if it exists, against the offset of tokens.

    Neighbors of the `tokens` along each axis, which are `what`, are `scale` units of length apart.
    """
    if position is not None and plots.has_bias(position):
        unit = what if scale == 1 else f"{1 / scale:g} {what}"
        draw = plots.rpe_curves if position.dim == 1 else plots.rpe_surfaces
        draw(position, png, (tokens - 1) * scale, unit)


def attention_of(
    stack: nn.Module, run: Callable[[], object], last: int | None = None
) -> list[Tensor]:
    """Returns a tensor (batch, heads, queries, keys) for each call of an attention layer, in order.

    The layers are those of `stack`, a part of the model that `run` calls once; `last` is the number
    of matrices to compute, counted from the end, or None for all.
    """
    calls: list[_Call] = []

    def note(layer: nn.Module, inputs: tuple[object, ...], options: dict[str, object]) -> None:
        calls.append((cast(Attention, layer), inputs, options))

    layers = [module for module in stack.modules() if isinstance(module, Attention)]
    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    with torch.no_grad():
        run()
        for hook in hooks:
            hook.remove()
        calls = calls[-last if last else 0 :]
        return [layer.weights(*inputs, **options) for layer, inputs, options in calls]


def locality_of(matrices: list[Tensor], distances: Tensor, causal: bool) -> dict[str, float | None]:
    """Returns the attention on the "nearest" and the "farthest" 10 % of the tokens.

    They are averaged over heads and layers, see `attention_of` and `molflt.metrics.locality`, and
    None if rows of attention are not probabilities (normalize "none" or "unmasked"). The
    `distances` are (tokens, tokens), in any unit.
    """
    apart = distances.double().cpu().numpy()
    try:
        shares = [locality(w.double().cpu().numpy(), apart, causal=causal) for w in matrices]
    except ValueError:
        return {"nearest": None, "farthest": None}
    return {
        "nearest": float(np.mean([share.nearest for share in shares])),
        "farthest": float(np.mean([share.farthest for share in shares])),
    }


def load_vocabulary(run: Path, size: int) -> Vocabulary:
    """Loads the vocabulary of a run; raises ValueError if it has another size."""
    return _load(run / "vocabulary.json", vocabulary_of, size)


def load_tokenizer(run: Path, size: int) -> Tokenizer:
    """Loads the tokenizer of a run and checks its size."""
    return _load(run / TOKENIZER, tokenizer_of, size)


def load_classes(run: Path, count: int) -> list[str]:
    """Loads the names of the classes of a run and checks their number."""
    return _load(run / CLASSES, classes_of, count)


def _load(path: Path, parse: Callable[[bytes, str, int], _Part], size: int) -> _Part:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected the {path.stem} of this run")
    return parse(path.read_bytes(), str(path), size)


def vocabulary_of(content: bytes, name: str, size: int) -> Vocabulary:
    """Parses the content of vocabulary.json; `name` is its path, for messages."""
    return _sized(Vocabulary.from_json(content, name), name, size, "tokens")


def tokenizer_of(content: bytes, name: str, size: int) -> Tokenizer:
    """Parses the content of tokenizer.json; see `vocabulary_of`."""
    return _sized(Tokenizer.from_json(content, name), name, size, "tokens")


def classes_of(content: bytes, name: str, count: int) -> list[str]:
    """Parses the content of classes.json; see `vocabulary_of`."""
    found: object = None
    with suppress(ValueError):
        found = json.loads(content)
    if not isinstance(found, list):
        raise ValueError(
            f"{name}: expected a JSON list of the names of classes; got something else; {_RESTORE}"
        )
    return _sized(found, name, count, "classes")


def _sized(found: _Sized, name: str, size: int, what: str) -> _Sized:
    if len(found) != size:
        raise ValueError(
            f"{name}: {len(found):,} {what}, but the checkpoint has {size:,}; expected those of "
            f"the training; {_RESTORE}"
        )
    return found
