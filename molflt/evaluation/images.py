"""Evaluation of an image classifier: accuracy, confusions, what it gets wrong, where heads look."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from molflt import plots
from molflt.data.images.base import LabeledImages
from molflt.data.images.datamodule import ImageData
from molflt.evaluation.attention import _attention_of, _locality_of
from molflt.evaluation.report import Report, align, write_csv
from molflt.evaluation.results import begin_results
from molflt.evaluation.splits import named_images
from molflt.image.classifier import ImageClassifier
from molflt.memory import within_memory
from molflt.tasks.images import ImageTask
from molflt.training.config import Config

__all__ = ["classes_of", "evaluate"]


class _Classified(NamedTuple):
    """What a model makes of images, in the order of the data set."""

    label: NDArray[np.int64]
    """(images,)"""
    predicted: NDArray[np.int64]
    """the most probable class, (images,)"""
    confidence: NDArray[np.float64]
    """its probability, (images,)"""
    metrics: dict[str, float]


def evaluate(
    run: Path,
    model: ImageClassifier,
    config: Config,
    out: Path,
    splits: list[str] | None = None,
    data: Path | None = None,
    batch_size: int = 64,
) -> Report:
    """Evaluates an image classifier: top-1 and top-5 accuracy.

    Writes predictions.csv, wrong.png (the most confident mistakes), confusion.png, attention.png
    (each head of the last layer on the first image) and, if there is one, encoding.png. Pictures
    are of the last split.

    Args:
        run: folder of the training run.
        model: in evaluation mode.
        config: the run's.
        out: folder to write.
        splits: some of train and val; by default val.
        data: other images instead, a folder of classes or an idx file.
        batch_size: images in a batch.

    Returns:
        Per split: top1_percent, top5_percent, cross_entropy (nats), n, and the shares of attention
        on the nearest and farthest 10 % of the patches, mean over heads and layers, of 16 images.

    Raises:
        FileNotFoundError: if the images are missing.
        ValueError: if images cannot be used, or have other classes than the checkpoint.
    """
    classes = _classes(run, model.classes)
    results: dict[str, dict[str, float | None]] = {}
    rows: list[dict[str, object]] = []
    for split, images in _datasets(config["data"], classes, splits, data).items():
        found = _classify(model, images, batch_size, split)
        results[split] = {**found.metrics, "n": len(found.label), **_locality(model, images)}
        rows += _rows(split, found, classes)
    pictures = ("wrong.png", "confusion.png", "attention.png", "encoding.png")
    begin_results(out, "predictions.csv", *pictures)
    files = [write_csv(out / "predictions.csv", rows), *_draw(out, model, images, found, classes)]
    return Report(results, f"\n\n{_table(results)}\n", files)


def _classify(model: nn.Module, images: LabeledImages, batch_size: int, name: str) -> _Classified:
    """Runs a model over images; the progress bar has that name."""
    logits, labels = [], []
    device = next(model.parameters()).device
    batch_of = f"{name}: a batch of {batch_size} images"
    with torch.inference_mode(), within_memory(lambda: batch_of, "lower --batch-size"):
        for batch, label in tqdm(
            DataLoader(images, batch_size=batch_size), desc=name, leave=False, disable=None
        ):
            logits.append(model(batch.to(device)).double().cpu())
            labels.append(label)
            if not bool(logits[-1].isfinite().all()):
                raise ValueError(
                    f"{name}: a logit is not finite; expected numbers; use another checkpoint"
                )
    scores, label = torch.cat(logits), torch.cat(labels)
    metrics = ImageTask.sums.of(scores, label).metrics()
    confidence, predicted = scores.softmax(dim=1).max(dim=1)
    return _Classified(label.numpy(), predicted.numpy(), confidence.numpy(), metrics)


def _classes(run: Path, count: int) -> list[str]:
    path = run / "classes.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected the classes of this run")
    return classes_of(path.read_bytes(), str(path), count)


def classes_of(content: bytes, name: str, count: int) -> list[str]:
    """Names of the classes of a run, from what its classes.json holds.

    Args:
        content: of the file.
        name: of the file, for messages.
        count: classes that the model has.
    """
    try:
        classes: list[str] = json.loads(content)
    except (ValueError, RecursionError):
        classes = []
    if not isinstance(classes, list) or not all(isinstance(one, str) for one in classes):
        classes = []
    if not classes:
        raise ValueError(
            f"{name}: expected a JSON list of the names of classes; got something else; put back "
            "the file that was written in training"
        )
    if len(classes) != count:
        raise ValueError(
            f"{name}: {len(classes)} classes, but the checkpoint has {count}; put back the file "
            "that was written in training"
        )
    return classes


def _datasets(
    options: Mapping[str, object],
    classes: list[str],
    splits: Sequence[str] | None,
    other: Path | None,
) -> dict[str, LabeledImages]:
    """Name -> images, fitted and cut as the run's validation images."""
    data, named = named_images(ImageData, options, splits, other)
    if data.classes != classes:
        raise ValueError(
            f"{data.sources['val']}: classes {', '.join(data.classes[:5])} ...; expected those of "
            f"the run, {', '.join(classes[:5])} ...; use data with the same classes"
        )
    return named


def _locality(model: ImageClassifier, images: LabeledImages) -> dict[str, float | None]:
    device = next(model.parameters()).device
    batch = torch.stack([images[i][0] for i in range(min(16, len(images)))]).to(device)
    places = model.places[0].double()
    # matrix products would tell distances apart that are equal, and so would scaled places
    distances = torch.cdist(places, places, compute_mode="donot_use_mm_for_euclid_dist")
    matrices = _attention_of(model.stack, lambda: model(batch))
    return _locality_of(matrices, distances, causal=False)


def _rows(split: str, found: _Classified, classes: list[str]) -> list[dict[str, object]]:
    columns = (found.label, found.predicted, found.confidence)
    return [
        {
            "split": split,
            "index": i,
            "class": classes[label],
            "predicted": classes[predicted],
            "probability": float(sure),
        }
        for i, (label, predicted, sure) in enumerate(zip(*columns, strict=True))
    ]


def _table(results: Mapping[str, Mapping[str, float | None]]) -> str:
    head = ("images", "n", "top-1 / %", "top-5 / %", "nats", "nearest 10 %", "farthest 10 %")
    rows = [
        (
            name,
            f"{row['n']:,}",
            f"{row['top1_percent']:.2f}",
            f"{row['top5_percent']:.2f}",
            f"{row['cross_entropy']:.4f}",
            *("-" if row[key] is None else f"{row[key]:.3f}" for key in ("nearest", "farthest")),
        )
        for name, row in results.items()
    ]
    note = "10 %: attention on that share of the patches, mean over heads and layers"
    return f"{align([head, *rows])}\n\n{note}"


def _draw(
    out: Path, model: ImageClassifier, images: LabeledImages, found: _Classified, classes: list[str]
) -> list[Path]:
    names = ["confusion.png", "attention.png"]
    counts = np.zeros((len(classes), len(classes)), dtype=int)
    np.add.at(counts, (found.label, found.predicted), 1)
    plots.confusion(counts, classes, out / "confusion.png")
    mistakes = np.flatnonzero(found.predicted != found.label)
    mistakes = mistakes[np.argsort(-found.confidence[mistakes], kind="stable")][:32]
    if len(mistakes):
        captions = [
            f"{classes[found.label[i]]}\n→ {classes[found.predicted[i]]}, "
            f"{100 * found.confidence[i]:.0f} %"
            for i in mistakes
        ]
        wrong = [images[int(i)][0].numpy() for i in mistakes]
        title = "classified wrongly, the most confident first"
        plots.image_sheet(wrong, captions, out / "wrong.png", title)
        names.append("wrong.png")
    first = images[0][0][None].to(next(model.parameters()).device)
    matrices = _attention_of(model.stack, lambda: model(first), last=1)
    title = "last layer, first image; patches row by row"
    plots.attention_matrices(matrices[-1][0], out / "attention.png", title=title)
    position = model.stack.position
    if position is not None and plots.has_bias(position):
        if position.dim == 2:
            step = model.position_scale  # of neighboring patches, in the encoding's unit of length
            unit = "patches" if step == 1 else f"{1 / step:g} patches"
            plots.rpe_surfaces(position, out / "encoding.png", (model.side - 1) * step, unit)
        else:
            plots.rpe_curves(position, out / "encoding.png", model.side**2 - 1, unit="patches")
        names.append("encoding.png")
    return [out / name for name in names]
