"""Evaluation of image classifiers: accuracy, confusions, mistakes, attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader

from molflt import plots
from molflt.data.images.base import LabeledImages
from molflt.data.images.datamodule import ImageData
from molflt.evaluation.common import (
    attention_of,
    batches,
    device_of,
    draw_attention,
    draw_encoding,
    load_classes,
    locality_of,
    named_images,
)
from molflt.evaluation.results import Evaluation, Results, begin_results, results_table, write_csv
from molflt.image.classifier import ImageClassifier
from molflt.tasks.images import ImageTask
from molflt.training.config import Config

__all__ = ["evaluate"]

_COLUMNS = {
    "n": ("n", 0),
    "top1_percent": ("top-1 / %", 2),
    "top5_percent": ("top-5 / %", 2),
    "cross_entropy": ("nats", 4),
    "nearest": ("nearest 10 %", 3),
    "farthest": ("farthest 10 %", 3),
}
_NOTE = "10 %: attention on that share of the patches, mean over heads and layers"


class _Classified(NamedTuple):
    """True classes, predicted classes and their probabilities, each (images,), and metrics."""

    label: NDArray[np.int64]
    predicted: NDArray[np.int64]
    confidence: NDArray[np.float64]
    metrics: dict[str, float]


def evaluate(
    run: Path,
    model: ImageClassifier,
    config: Config,
    out: Path,
    splits: list[str] | None = None,
    data: Path | None = None,
    batch_size: int = 64,
) -> Evaluation:
    """Evaluates an image classifier: top-1 and top-5 accuracy.

    Writes predictions.csv and, for the last split, wrong.png (the most confident mistakes),
    confusion.png, attention.png (each head of the last layer, for the first image) and, with a
    relative encoding, encoding.png.

    Args:
        splits: train, val or both; by default val.
        data: other images to evaluate instead: a folder of classes or an idx file.
        batch_size: images in a batch.

    Returns:
        Per split: top1_percent, top5_percent, cross_entropy (nats), n, nearest and farthest. The
        last two are the attention on the nearest and farthest 10 % of the patches, averaged over
        heads, layers and 16 images.
    """
    classes = load_classes(run, model.classes)
    results: Results = {}
    rows: list[dict[str, object]] = []
    for split, images in _datasets(config["data"], classes, splits, data).items():
        found = _classify(model, images, batch_size, split)
        results[split] = {**found.metrics, "n": len(found.label), **_locality(model, images)}
        columns = (found.label, found.predicted, found.confidence)
        rows += [
            {
                "split": split,
                "index": i,
                "class": classes[label],
                "predicted": classes[predicted],
                "probability": float(probability),
            }
            for i, (label, predicted, probability) in enumerate(zip(*columns, strict=True))
        ]
    pictures = ("wrong.png", "confusion.png", "attention.png", "encoding.png")
    begin_results(out, "predictions.csv", *pictures)
    files = [write_csv(out / "predictions.csv", rows), *_draw(out, model, images, found, classes)]
    table = f"{results_table('images', _COLUMNS, results)}\n\n{_NOTE}"
    return Evaluation(results, f"\n\n{table}\n", files)


def _classify(model: nn.Module, images: LabeledImages, batch_size: int, name: str) -> _Classified:
    logits, labels = [], []
    with batches(DataLoader(images, batch_size), name, f"{batch_size} images") as loaded:
        for batch, label in loaded:
            logits.append(model(batch.to(device_of(model))).double().cpu())
            labels.append(label)
            if not bool(logits[-1].isfinite().all()):
                raise ValueError(
                    f"{name}: a logit is not finite; expected numbers; use another checkpoint"
                )
    scores, label = torch.cat(logits), torch.cat(labels)
    metrics = ImageTask.sums.of(scores, label).metrics()
    confidence, predicted = scores.softmax(dim=1).max(dim=1)
    return _Classified(label.numpy(), predicted.numpy(), confidence.numpy(), metrics)


def _datasets(
    options: Mapping[str, object],
    classes: list[str],
    splits: Sequence[str] | None,
    other: Path | None,
) -> dict[str, LabeledImages]:
    """Returns name -> images; raises ValueError if their classes are not those of the run."""
    data, named = named_images(ImageData, options, splits, other)
    if data.classes != classes:
        raise ValueError(
            f"{data.sources['val']}: classes {', '.join(data.classes[:5])} ...; expected those of "
            f"the run, {', '.join(classes[:5])} ...; use data with the same classes"
        )
    return named


def _locality(model: ImageClassifier, images: LabeledImages) -> dict[str, float | None]:
    batch = torch.stack([images[i][0] for i in range(min(16, len(images)))]).to(device_of(model))
    places = model.places[0].double()
    # without matrix products, whose rounding would make equal distances differ
    distances = torch.cdist(places, places, compute_mode="donot_use_mm_for_euclid_dist")
    matrices = attention_of(model.stack, lambda: model(batch))
    return locality_of(matrices, distances, causal=False)


def _draw(
    out: Path, model: ImageClassifier, images: LabeledImages, found: _Classified, classes: list[str]
) -> list[Path]:
    files = [out / "confusion.png"]
    counts = np.zeros((len(classes), len(classes)), dtype=int)
    np.add.at(counts, (found.label, found.predicted), 1)
    plots.confusion(counts, classes, files[0])
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
        files.append(out / "wrong.png")
    first = images[0][0][None].to(device_of(model))
    title = "last layer, first image; patches row by row"
    files += draw_attention(model.stack, lambda: model(first), out / "attention.png", title)
    position, scale, side = model.stack.position, model.position_scale, model.side
    if position is not None and position.dim == 1:
        scale, side = 1.0, side**2
    return files + draw_encoding(position, scale, side, out / "encoding.png", "patches")
