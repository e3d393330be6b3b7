"""Evaluation of image classifiers and of autoregressive image models."""

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from molflt import plots
from molflt.data.images.datamodule import ImageData, PixelData
from molflt.data.images.files import LabeledImages
from molflt.data.text.sentences import CLASSES
from molflt.evaluation import common
from molflt.evaluation.results import Evaluation, Results, results_table, write_csv
from molflt.image.classifier import ImageClassifier
from molflt.memory import within_memory
from molflt.sequence.language_model import LEVELS, PixelModel
from molflt.tasks.images import ImageTask
from molflt.training.config import Config

_NOTE = "10 %: attention to this share of the patches, mean over heads, layers and 16 images"
_AT_ONCE = 64  # number of images per batch for the histogram


def evaluate(
    run: Path, model: ImageClassifier, config: Config, out: Path, batch_size: int = 64, **which: Any
) -> Evaluation:
    """Evaluates an image classifier: top-1 and top-5 accuracy.

    Writes predictions.csv and, for the last split, attention.png (each head of the last layer, for
    the first image) and, with a relative encoding, encoding.png.

    Args:
        batch_size: number of images per batch.
        which: see `molflt.evaluation.common.named_images`.

    Returns:
        Per split: top1_percent, top5_percent, cross_entropy (nats), n, nearest and farthest. The
        last two are the attention to the nearest and farthest 10 % of the patches, averaged over
        heads, layers and the first 16 images.
    """
    classes = json.loads((run / CLASSES).read_bytes())
    results: Results = {}
    rows: list[dict[str, object]] = []
    options = {**config["data"], "class_names": classes}  # other images may lack some classes
    _, by_split = common.named_images(ImageData, options, **which)
    for split, images in by_split.items():
        batch = f"{batch_size} images"
        logits, labels = common.logits_of(model, DataLoader(images, batch_size), split, batch)
        metrics = ImageTask.sums.of(logits, labels).metrics()
        results[split] = {**metrics, "n": len(labels), **_locality(model, images)}
        probabilities, predicted = (x.tolist() for x in logits.softmax(dim=1).max(dim=1))
        for i, label in enumerate(labels.tolist()):
            names = {"class": classes[label], "predicted": classes[predicted[i]]}
            rows.append({"split": split, "index": i, **names, "probability": probabilities[i]})
    write_csv(out / "predictions.csv", rows)
    first = images[0][0][None].to(common.device_of(model))  # of the last split
    title = "last layer, first image; patches row by row"
    position, scale, side = model.stack.position, model.position_scale, model.side
    if position is not None and position.dim == 1:
        scale, side = 1.0, side**2
    common.draw_stack(out, model.stack, lambda: model(first), title, scale, side, "patches")
    return Evaluation(results, f"\n\n{results_table('images', results)}\n\n{_NOTE}\n")


def _locality(model: ImageClassifier, images: LabeledImages) -> dict[str, float | None]:
    first = [images[i][0] for i in range(min(16, len(images)))]
    batch = torch.stack(first).to(common.device_of(model))
    positions = model.places[0].double()
    # Matrix products are avoided because their rounding errors would make equal distances differ.
    distances = torch.cdist(positions, positions, compute_mode="donot_use_mm_for_euclid_dist")
    return common.locality_of(model.stack, lambda: model(batch), distances)


def evaluate_pixels(
    run: Path, model: PixelModel, config: Config, out: Path, batch_size: int = 16, **which: Any
) -> Evaluation:
    """Evaluates an autoregressive image model: bits per dimension.

    The baselines are a uniform distribution over the values of a byte (8 bits) and, for each
    position, a histogram of the values in the training images with add-one smoothing. Writes
    losses.png (loss against the position in the sequence), attention.png (each head of the last
    layer, for the first image) and, with a relative encoding, encoding.png.

    Args:
        batch_size: number of images per batch.
        which: see `molflt.evaluation.common.named_images`.

    Returns:
        Per split: bits_per_dim, uniform_bits_per_dim, histogram_bits_per_dim (null without the
        training images), n and bytes (total over all images).
    """
    data, by_split = common.named_images(PixelData, config["data"], **which)
    tables, note = _histograms(None if which.get("data") else data, config["data"], model)
    results: Results = {}
    curves: dict[str, NDArray[np.float64]] = {}
    for split, images in by_split.items():
        nats, histogram = _losses(model, images, tables, batch_size, split)
        curves[split] = nats.numpy()[None]
        results[split] = {
            "bits_per_dim": float(nats.mean()) / math.log(2),
            "uniform_bits_per_dim": math.log2(LEVELS),
            "histogram_bits_per_dim": histogram,
            "n": len(images),
            "bytes": len(images) * model.longest,
        }
    plots.losses_by_place(curves, out / "losses.png")
    image = next(iter(by_split.values()))[0][0][None].to(common.device_of(model))
    matrix = f"the attention matrix of an image of {model.longest:,} bytes"
    run_model = partial(model.image_log_likelihood, image)
    is_sequence = model.stack.position is None or model.stack.position.dim == 1
    axis = (model.longest, "tokens") if is_sequence else (model.image_size, "pixels")
    with within_memory(lambda: matrix, "use a smaller model or smaller images"):
        title = "last layer, first image; bytes row by row"
        common.draw_stack(out, model.stack, run_model, title, model.position_scale, *axis)
    return Evaluation(results, f"\n\n{results_table('images', results)}\n\n{note}\n")


def _histograms(
    data: PixelData | None, options: Mapping[str, object], model: PixelModel
) -> tuple[Tensor | None, str]:
    """Returns -log2 of the frequency of each value by position, (bytes per image, 256), and a note.

    The first result is None if the training images are missing.
    """
    if data is None:
        data = PixelData(**options)  # type: ignore[arg-type]  # as in `named_images`
        try:
            data.setup()
        except FileNotFoundError as error:
            return None, f"no histogram, because the training images are missing: {error}"
    train = data.datasets["train"]
    counts = torch.zeros(model.longest * LEVELS, dtype=torch.int64)
    first = LEVELS * torch.arange(model.longest)
    loader = DataLoader(train, _AT_ONCE)
    with common.batches(loader, model, "histogram", f"{_AT_ONCE} images") as loaded:
        for images, _ in loaded:
            values = model.bytes_of(images).cpu()
            counts += torch.bincount((values + first).flatten(), minlength=len(counts))
    bits = math.log2(len(train) + LEVELS) - (counts + 1).double().log2()
    note = f"histogram: frequencies at each position of {len(train):,} images"
    return bits.view(-1, LEVELS), note


def _losses(
    model: PixelModel, images: LabeledImages, tables: Tensor | None, batch_size: int, name: str
) -> tuple[Tensor, float | None]:
    """Returns the mean loss at each position in nats, and the mean bits per byte with `tables`."""
    nats, bits = torch.zeros(model.longest, dtype=torch.float64), 0.0
    positions = torch.arange(model.longest)
    batch = f"{batch_size} images of {model.longest:,} bytes"
    with common.batches(DataLoader(images, batch_size), model, name, batch) as loaded:
        for pixels, _ in loaded:
            loss = -model.image_log_likelihood(pixels).double().cpu()
            common.expect_finite(name, loss)
            nats += loss.sum(dim=0)
            if tables is not None:
                bits += float(tables[positions, model.bytes_of(pixels).cpu()].sum())
    histogram = None if tables is None else bits / (len(images) * model.longest)
    return nats / len(images), histogram
