"""Functions shared by the evaluations of several recipes."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from tqdm import tqdm

from molflt import plots
from molflt.attention import Attention, Position, Stack
from molflt.data.batches import BatchedData
from molflt.data.images.datamodule import ImageData
from molflt.data.images.files import LabeledImages
from molflt.evaluation.results import Evaluation, Results, results_table
from molflt.memory import within_memory
from molflt.metrics import locality
from molflt.tasks.base import Task
from molflt.training.config import Config
from molflt.training.recipes import Recipe

_Batch = TypeVar("_Batch")
_Images = TypeVar("_Images", bound=ImageData)


def chosen_splits(
    known: Collection[str], splits: Sequence[str] | None, usual: Sequence[str], data: Path | None
) -> list[str]:
    """Returns `splits`, or `usual` if it is empty; raises ValueError for splits that do not exist.

    `known` contains the splits of the run. `data` is the value of --data, which conflicts with
    `splits`.
    """
    if splits and data is not None:
        raise ValueError("expected either --splits or --data; got both")
    chosen = list(dict.fromkeys(splits or usual))
    for name in chosen:
        if name not in known:
            raise ValueError(
                f"the run has no split {name!r}; expected one or more of {', '.join(known)}"
            )
    return chosen


def named_sources(
    options: Mapping[str, object], splits: list[str] | None = None, data: Path | None = None
) -> dict[str, str]:
    """Returns the texts to evaluate, keyed by the name of the split or file.

    Args:
        options: data options of the run.
        splits: any of train, val and test; by default val, and test if the run has a test split.
        data: a different text to evaluate: a file; for translations, the path of the two files
            without the language extensions.
    """
    sources = {name: str(options[name]) for name in ("train", "val", "test") if options[name]}
    usual = [name for name in sources if name != "train"]
    chosen = chosen_splits(sources, splits, usual, data)
    if data is not None:
        return {Path(data).name: str(data)}
    return {name: sources[name] for name in chosen}


def named_images(
    kind: type[_Images],
    options: Mapping[str, object],
    splits: list[str] | None = None,
    data: Path | None = None,
) -> tuple[_Images, dict[str, LabeledImages]]:
    """Returns the data of a run after setup, and the images to evaluate, keyed by name.

    The images are processed as in validation. If `data` is set, it replaces the data of the run.

    Args:
        kind: class of the data.
        options: data options of the run.
        splits: train, val or both; by default val.
        data: different images to evaluate: a folder with a subfolder for each class, or an idx
            file.
    """
    chosen = chosen_splits(("train", "val"), splits, ["val"], data)
    if data is not None:
        options = {**options, "train": data, "val": data, "val_fraction": None}
        options |= {"train_labels": None, "val_labels": None}
    images = kind(**options)  # type: ignore[arg-type]  # from a checked configuration
    images.setup()
    parts = {name: name for name in chosen} if data is None else {Path(data).name: "val"}
    return images, {name: images.for_evaluation(part) for name, part in parts.items()}


def evaluate(
    run: Path, model: nn.Module, config: Config, out: Path, batch_size: int | None = None
) -> Evaluation:
    """Evaluates a run with the metrics of its task on the validation set, as in training.

    This function is used for recipes that do not have their own evaluation function.

    Args:
        batch_size: number of items per batch; defaults to the value used in training.

    Returns:
        For the split "val", the metrics of the task and n, the number of items.
    """
    recipe = Recipe.of(config)
    task: Task[Any, Any] = recipe.load("task")(model, **config["task"])
    changed = {} if batch_size is None else {"batch_size": batch_size}
    data: BatchedData[Any] = recipe.load("data")(**config["data"] | changed)
    data.setup()
    total = total_of(task, data.val_dataloader(), "val", f"{data.batch_size} {data.items}")
    results: Results = {"val": {**task.summarize(total), "n": len(data.datasets["val"])}}
    metrics = {name: task.metrics[name] for name in results["val"] if name in task.metrics}
    columns = {name: (metric.axis, metric.digits) for name, metric in metrics.items()}
    table = results_table("split", results, ["n", *columns], n=(data.items, 0), **columns)
    return Evaluation(results, f"\n\n{table}\n")


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of a model."""
    return next(model.parameters()).device


@contextmanager
def batches(
    source: Iterable[_Batch], model: nn.Module, name: str, batch: str
) -> Iterator[Iterable[_Batch]]:
    """Yields the batches of a source for inference, on the device of a model, with a progress bar.

    If memory is insufficient, raises a ValueError that contains `batch`, the size of a batch as
    text, such as "64 images".
    """
    task, device = f"{name}: a batch of {batch}", device_of(model)
    with torch.inference_mode(), within_memory(lambda: task, "lower --batch-size"):
        bar = tqdm(source, desc=name, leave=False, disable=None)
        yield (tree_map(lambda x: x.to(device) if hasattr(x, "to") else x, each) for each in bar)


def expect_finite(name: str, values: Tensor, what: str = "the probability of a token") -> None:
    """Raises ValueError if values, such as losses or logits, are not finite."""
    if not bool(values.isfinite().all()):
        raise ValueError(f"{name}: {what} is not finite; use a different checkpoint")


def total_of(task: Task[Any, Any], source: Iterable[object], name: str, batch: str) -> Tensor:
    """Returns the sums of a task over all batches: a tensor (fields,) for `Task.summarize`."""
    total = torch.zeros((), dtype=torch.float64)
    with batches(source, task.model, name, batch) as loaded:
        for inputs in loaded:
            sums = task.validation_sums(inputs)
            total = total + torch.stack([part.cpu().double() for part in sums])
    expect_finite(name, total)
    return total


def logits_of(
    model: nn.Module, source: Iterable[Sequence[Tensor]], name: str, batch: str
) -> tuple[Tensor, Tensor]:
    """Returns float64 logits (items, classes) and labels (items,).

    The labels are the last part of each batch. See `batches` for `name` and `batch`.
    """
    logits, labels = [], []
    with batches(source, model, name, batch) as loaded:
        for *inputs, label in loaded:
            logits.append(model(*inputs).double().cpu())
            labels.append(label.cpu())
            expect_finite(name, logits[-1], "a logit")
    return torch.cat(logits), torch.cat(labels)


def draw_stack(
    out: Path,
    stack: Stack,
    run: Callable[[], object],
    title: str,
    scale: float,
    tokens: int,
    what: str = "tokens",
) -> None:
    """Draws the attention of the last layer, averaged over the batch, and the relative encoding.

    Parts that the model does not have are not drawn. See `attention_of` for `run` and
    `draw_encoding` for `scale`, `tokens` and `what`.
    """
    if matrices := attention_of(stack, run, last=1):
        plots.attention_matrices(matrices[-1].mean(dim=0), out / "attention.png", title=title)
    draw_encoding(stack.position, scale, tokens, out / "encoding.png", what)


def draw_encoding(
    position: Position | None, scale: float, tokens: int, png: Path, what: str = "tokens"
) -> None:
    """Plots a relative encoding against the token offset, unless it has no bias or one offset.

    `tokens` is the number of tokens along each axis, `scale` is the distance between neighboring
    tokens, and `what` is the word for tokens in the axis label.
    """
    if position is not None and tokens > 1 and plots.has_bias(position):
        unit = what if scale == 1 else f"{1 / scale:g} {what}"
        draw = plots.rpe_curves if position.dim == 1 else plots.rpe_surfaces
        draw(position, png, (tokens - 1) * scale, unit)


def attention_of(
    stack: nn.Module, run: Callable[[], object], last: int | None = None
) -> list[Tensor]:
    """Returns the attention matrices (batch, heads, queries, keys) of the layers in `stack`.

    `run` calls the model. Each call of a layer contributes one matrix. If `last` is not None, only
    the matrices of the `last` calls are computed.
    """
    calls: list[tuple[Attention, tuple[Any, ...], dict[str, Any]]] = []

    def record(layer: nn.Module, inputs: tuple[object, ...], options: dict[str, object]) -> None:
        calls.append((cast(Attention, layer), inputs, options))

    layers = [module for module in stack.modules() if isinstance(module, Attention)]
    hooks = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    with torch.no_grad():
        run()
        for hook in hooks:
            hook.remove()
        if last is not None:
            calls = calls[-last:]
        return [layer.weights(*inputs, **options) for layer, inputs, options in calls]


def locality_of(
    stack: nn.Module, run: Callable[[], object], distances: Tensor, causal: bool = False
) -> dict[str, float | None]:
    """Returns the share of attention to the "nearest" and "farthest" 10 % of the tokens.

    Both shares are averages over heads and layers. They are None if the attention does not sum to
    1, as with normalize "none". See `attention_of` for `stack` and `run`, and
    `molflt.metrics.locality` for `distances`, of shape (tokens, tokens).
    """
    offsets = distances.double().cpu().numpy()
    matrices = attention_of(stack, run)
    try:
        shares = [locality(w.double().cpu().numpy(), offsets, causal=causal) for w in matrices]
    except ValueError:
        return {"nearest": None, "farthest": None}
    return {
        "nearest": float(np.mean([share.nearest for share in shares])),
        "farthest": float(np.mean([share.farthest for share in shares])),
    }
