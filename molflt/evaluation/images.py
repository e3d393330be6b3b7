"""Evaluation of an image classifier: accuracy, confusions, what it gets wrong, where heads look."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from molflt import plots
from molflt.checkpoint import load_run
from molflt.data.image_data import ImageData
from molflt.evaluation.attention import attention_of, locality_of
from molflt.evaluation.inference import resolve_device
from molflt.evaluation.report import align, csv_text, write_results
from molflt.files import write_atomically
from molflt.tasks.images import image_metrics, image_sums

__all__ = ["Classified", "classify", "evaluate"]


class Classified(NamedTuple):
    """What a model makes of images, in the order of the data set."""

    probability: NDArray[np.float64]
    """(images, classes)"""
    label: NDArray[np.int64]
    """(images,)"""
    sums: Tensor
    """see `molflt.tasks.images.image_sums`"""

    @property
    def predicted(self) -> NDArray[np.int64]:
        """The most probable class of each image, (images,)."""
        return self.probability.argmax(axis=1)


def evaluate(
    run: Path,
    splits: Sequence[str] | None = None,
    data: Path | None = None,
    checkpoint: str = "best",
    out: Path | None = None,
    batch_size: int = 64,
    device: str = "auto",
) -> dict[str, dict[str, Any]]:
    """Evaluates an image classifier: top-1 and top-5 accuracy.

    Writes results.json, predictions.csv, wrong.png (the most confident mistakes), confusion.png,
    attention.png (each head of the last layer on the first image) and, if there is one,
    encoding.png. Pictures are of the last split.

    Args:
        run: folder of a training run.
        splits: some of "train" and "val"; by default "val".
        data: other images instead, a folder of classes or an idx file.
        checkpoint: best, last, or a safetensors file.
        out: folder to write; by default the run's.
        batch_size: images in a batch.
        device: auto, cpu, cuda or cuda:N.

    Returns:
        Per split: top1_percent, top5_percent, cross_entropy (nats), n, and the shares of attention
        on the nearest and farthest 10 % of the patches, mean over heads and layers, of 16 images.

    Raises:
        FileNotFoundError: if the run, its checkpoint, or the images are missing.
        ValueError: if images cannot be used, or have other classes than the checkpoint.
    """
    run, out = Path(run), run if out is None else Path(out)
    model, config = load_run(run, checkpoint, device := resolve_device(device))
    classes = _classes(run, model.classes)
    results: dict[str, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    for split, images in _datasets(config["data"], classes, splits, data).items():
        found = classify(model, images, batch_size, device, split)
        results[split] = {
            **image_metrics(found.sums),
            "n": len(found.label),
            **_locality(model, images, device),
        }
        rows += _rows(split, found, classes)
    write_atomically(out / "predictions.csv", csv_text(rows).encode())
    write_results(out, results)
    names = ["results.json", "predictions.csv", *_draw(out, model, images, found, classes, device)]
    print(f"{run}, checkpoint {checkpoint}\n\n{_table(results)}\n")
    print("written: " + ", ".join(str(out / name) for name in names))
    return results


def classify(model: Any, images: Any, batch_size: int, device: str, name: str) -> Classified:
    """Runs a model over images.

    Args:
        model: `molflt.image.ImageClassifier`, on `device` and in evaluation mode.
        images: data set of (image, label).
        batch_size: images in a batch.
        device: where the model is.
        name: what the progress bar says.

    Raises:
        ValueError: if a logit is not finite.
    """
    probability, label, sums = [], [], torch.zeros(4, dtype=torch.float64)
    with torch.inference_mode():
        for batch, labels in tqdm(
            DataLoader(images, batch_size=batch_size), desc=name, leave=False, disable=None
        ):
            logits = model(batch.to(device)).double().cpu()
            if not bool(logits.isfinite().all()):
                raise ValueError(
                    f"{name}: a logit is not finite; expected numbers; use another checkpoint"
                )
            sums += image_sums(logits, labels)
            probability.append(logits.softmax(dim=1).numpy())
            label.append(labels.numpy())
    return Classified(np.concatenate(probability), np.concatenate(label), sums)


def _classes(run: Path, count: int) -> list[str]:
    path = run / "classes.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected the classes of this run")
    classes: list[str] = json.loads(path.read_text())
    if len(classes) != count:
        raise ValueError(
            f"{path}: {len(classes)} classes, but the checkpoint has {count}; put back the file "
            "that was written in training"
        )
    return classes


def _datasets(
    options: Mapping[str, Any],
    classes: list[str],
    splits: Sequence[str] | None,
    other: Path | None,
) -> dict[str, Any]:
    """Name -> images in the size of the run's validation images."""
    options = {**options, "resize": None}
    if other is not None:
        if splits:
            raise ValueError("give either --splits or --data; got both")
        options |= {"train": other, "val": other, "train_labels": None, "val_labels": None}
        options["val_fraction"] = None
    wanted = list(dict.fromkeys(splits or ["val"]))
    if unknown := sorted(set(wanted) - {"train", "val"}):
        raise ValueError(f"the run has no split {unknown[0]!r}; expected some of train, val")
    data = ImageData(**options)
    data.setup()
    if data.classes != classes:
        raise ValueError(
            f"{data.sources['val']}: classes {', '.join(data.classes[:5])} ...; expected those of "
            f"the run, {', '.join(classes[:5])} ...; use data with the same classes"
        )
    if other is not None:
        return {Path(other).name: data.datasets["val"]}
    return {name: data.datasets[name] for name in wanted}


def _locality(model: Any, images: Any, device: str) -> dict[str, float | None]:
    batch = torch.stack([images[i][0] for i in range(min(16, len(images)))]).to(device)
    places = model.positions[0].float()
    matrices = attention_of(model.stack, lambda: model(batch))
    return locality_of(matrices, torch.cdist(places, places), causal=False)


def _rows(split: str, found: Classified, classes: list[str]) -> list[dict[str, Any]]:
    confidence = found.probability.max(axis=1)
    return [
        {
            "split": split,
            "index": i,
            "class": classes[label],
            "predicted": classes[predicted],
            "probability": float(sure),
        }
        for i, (label, predicted, sure) in enumerate(
            zip(found.label, found.predicted, confidence, strict=True)
        )
    ]


def _table(results: Mapping[str, Mapping[str, Any]]) -> str:
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
    out: Path, model: Any, images: Any, found: Classified, classes: list[str], device: str
) -> list[str]:
    names = ["confusion.png", "attention.png"]
    counts = np.zeros((len(classes), len(classes)), dtype=int)
    np.add.at(counts, (found.label, found.predicted), 1)
    plots.confusion(counts, classes, out / "confusion.png")
    confidence = found.probability.max(axis=1)
    mistakes = np.flatnonzero(found.predicted != found.label)
    mistakes = mistakes[np.argsort(-confidence[mistakes], kind="stable")][:32]
    if len(mistakes):
        wrong = [
            plots.Misclassified(
                images[int(i)][0].numpy(),
                classes[found.label[i]],
                classes[found.predicted[i]],
                float(confidence[i]),
            )
            for i in mistakes
        ]
        plots.image_sheet(wrong, out / "wrong.png", "classified wrongly, the most confident first")
        names.append("wrong.png")
    first = images[0][0][None].to(device)
    matrices = attention_of(model.stack, lambda: model(first))
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
    return names
