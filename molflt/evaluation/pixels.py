"""Evaluation of autoregressive image models: bits per dimension, with two baselines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from molflt import plots
from molflt.data.images.base import LabeledImages
from molflt.data.images.datamodule import PixelData
from molflt.evaluation.common import (
    attention_of,
    batches,
    device_of,
    draw_encoding,
    expect_finite,
    named_images,
)
from molflt.evaluation.results import Evaluation, Results, begin_results, results_table
from molflt.memory import within_memory
from molflt.sequence.pixels import LEVELS, PixelModel
from molflt.tasks.language import PixelTask
from molflt.training.config import Config

__all__ = ["evaluate"]

_AT_ONCE = 64  # images in a batch for the histogram
_AROUND = 7  # pixels above and to the sides in the picture of attention
_COLUMNS = {
    "n": ("n", 0),
    "bits_per_dim": ("bits/dim", 3),
    "histogram_bits_per_dim": ("histogram", 3),
    "uniform_bits_per_dim": ("uniform", 3),
}


def evaluate(
    run: Path,
    model: PixelModel,
    config: Config,
    out: Path,
    splits: list[str] | None = None,
    data: Path | None = None,
    batch_size: int = 16,
) -> Evaluation:
    """Evaluates an autoregressive image model: bits per dimension.

    The baselines are the uniform distribution of a byte, 8 bits, and the histogram of each
    position: the frequency of each value in the training images, with every count increased by one.
    Writes losses.png (loss against the position in the sequence), attention.png (attention of the
    last layer on the pixels around each pixel, averaged over one image) and, with a relative
    encoding, encoding.png.

    Args:
        splits: train, val or both; by default val.
        data: other images to evaluate instead: a folder of classes or an idx file.
        batch_size: images in a batch.

    Returns:
        Per split: bits_per_dim, uniform_bits_per_dim, histogram_bits_per_dim (null without the
        training images), n and bytes (of all images).
    """
    options = config["data"]
    own, named = named_images(PixelData, options, splits, data)
    for images in named.values():
        _expect_alike(images, model)
    tables, note = _histograms(own if data is None else None, options, model)
    results: Results = {}
    curves: dict[str, NDArray[np.float64]] = {}
    for split, images in named.items():
        nats, histogram = _judge(model, images, tables, batch_size, split)
        curves[split] = nats.numpy()[None]
        count = len(images)
        sums = PixelTask.sums(nats.sum(), torch.tensor(nats.numel()))
        results[split] = {
            **sums.metrics(),
            "uniform_bits_per_dim": math.log2(LEVELS),
            "histogram_bits_per_dim": histogram,
            "n": count,
            "bytes": count * model.longest,
        }
    begin_results(out, "losses.png", "attention.png", "encoding.png")
    files = [out / "losses.png"]
    plots.losses_by_place(curves, files[0])
    files += _draw_attention(model, next(iter(named.values()))[0][0], out)
    text = f"\n\n{results_table('images', _COLUMNS, results)}\n\n{note}\n"
    return Evaluation(results, text, files + _draw(model, out))


def _expect_alike(images: LabeledImages, model: PixelModel) -> None:
    """Raises ValueError if the images differ in size or channels from those in training."""
    if (images.channels, images.size[0]) != (model.channels, model.image_size):
        raise ValueError(
            f"{images.path}: expected images of {model.image_size} pixels and {model.channels} "
            f"channels, as in training; got {images.size[0]} and {images.channels}; use such images"
        )


def _histograms(
    own: PixelData | None, options: Mapping[str, object], model: PixelModel
) -> tuple[Tensor | None, str]:
    """Returns the bits of each value at each position of training images, and a line about them.

    The bits are -log2((n + 1) / (images + 256)), (bytes of an image, 256); None without training
    images.
    """
    if own is None:
        own = PixelData(**options)  # type: ignore[arg-type]  # as in `named_images`
        try:
            own.setup()
        except FileNotFoundError as error:
            return None, f"no histogram, because the training images are missing: {error}"
    train = own.datasets["train"]
    counts = torch.zeros(model.longest * LEVELS, dtype=torch.int64)
    first = LEVELS * torch.arange(model.longest)
    with batches(DataLoader(train, _AT_ONCE), "histogram", f"{_AT_ONCE} images") as loaded:
        for images, _ in loaded:
            values = model.bytes_of(images.to(device_of(model))).cpu()
            counts += torch.bincount((values + first).flatten(), minlength=len(counts))
    bits = math.log2(len(train) + LEVELS) - (counts + 1).double().log2()
    return bits.view(-1, LEVELS), f"histogram of each position: {len(train):,} training images"


def _judge(
    model: PixelModel, images: LabeledImages, tables: Tensor | None, batch_size: int, name: str
) -> tuple[Tensor, float | None]:
    """Returns the mean nats at each position, (bytes of an image,), and the tables' mean bits."""
    nats, bits = torch.zeros(model.longest, dtype=torch.float64), 0.0
    place = torch.arange(model.longest)
    batch_of = f"{batch_size} images of {model.longest:,} bytes"
    with batches(DataLoader(images, batch_size), name, batch_of) as loaded:
        for batch, _ in loaded:
            given = batch.to(device_of(model))
            loss = -model.image_log_likelihood(given).double().cpu()
            expect_finite(name, loss)
            nats += loss.sum(dim=0)
            if tables is not None:
                bits += float(tables[place, model.bytes_of(given).cpu()].sum())
    histogram = None if tables is None else bits / (len(images) * model.longest)
    return nats / len(images), histogram


def _draw(model: PixelModel, out: Path) -> list[Path]:
    position, png = model.stack.position, out / "encoding.png"
    line = position is None or position.dim == 1
    axis = (model.longest, png, "tokens") if line else (model.image_size, png, "pixels")
    return draw_encoding(position, model.position_scale, *axis)


def _draw_attention(model: PixelModel, image: Tensor, out: Path) -> list[Path]:
    """Draws the attention of the last layer for an image (channels, side, side)."""
    given = image[None].to(device_of(model))
    what = f"the attention matrix of an image of {model.longest:,} bytes"
    with within_memory(lambda: what, "use a smaller model or smaller images"):
        matrices = attention_of(model.stack, lambda: model.image_log_likelihood(given), last=1)
    if not matrices:
        return []
    png = out / "attention.png"
    around = _around(matrices[-1][0], model)
    plots.attention_around(around, png, title="last layer, mean over the pixels of an image")
    return [png]


def _around(weights: Tensor, model: PixelModel) -> Tensor:
    """Returns the mean weight for each offset, summed over channels, (heads, rows, columns).

    In the weights, (heads, bytes, bytes), key j has seen byte j - 1, and the first key has seen
    nothing.
    """
    heads, channels, side = len(weights), model.channels, model.image_size
    reach = min(_AROUND, side - 1)
    known = torch.cat((weights[..., 1:], torch.zeros_like(weights[..., :1])), dim=-1)
    pixels = known.unflatten(2, (side, side, channels)).sum(dim=-1)
    pixels = pixels.unflatten(1, (side, side, channels)).mean(dim=3)  # [h, r, c, r, c]
    out = weights.new_zeros(heads, reach + 1, 2 * reach + 1)
    for up in range(reach + 1):
        rows = pixels.diagonal(-up, 1, 3)  # [h, column, key's column, row]
        for right in range(-reach, reach + 1):
            own = rows.diagonal(right, 1, 2)
            out[:, reach - up, reach + right] = own.flatten(1).mean(dim=1)
    return out
