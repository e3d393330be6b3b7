"""Evaluation of an autoregressive model of images: bits per dimension, beside two baselines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from molflt import plots
from molflt.data.images.base import LabeledImages
from molflt.data.images.datamodule import PixelData
from molflt.evaluation.attention import _attention_of
from molflt.evaluation.report import Report, align
from molflt.evaluation.results import begin_results
from molflt.evaluation.splits import named_images
from molflt.evaluation.tokens import draw_encoding, expect_finite
from molflt.memory import within_memory
from molflt.sequence.pixels import LEVELS, PixelModel
from molflt.tasks.pixels import PixelTask
from molflt.training.config import Config

__all__ = ["evaluate"]

_AT_ONCE = 64  # images that are counted at once
_AROUND = 7  # pixels up and to the sides in the picture of attention


def evaluate(
    run: Path,
    model: PixelModel,
    config: Config,
    out: Path,
    splits: list[str] | None = None,
    data: Path | None = None,
    batch_size: int = 16,
) -> Report:
    """Evaluates an autoregressive model of images: bits per dimension.

    Beside it are 8 bits, a byte of which nothing is known, and the histogram of each place: how
    often each value is there in the training images, each counted once more. Writes losses.png
    (loss against the place in the sequence), attention.png (of the last layer: where around a
    pixel, mean over the pixels of one image) and, if there is one, encoding.png.

    Args:
        run: folder of the training run.
        model: in evaluation mode.
        config: the run's.
        out: folder to write.
        splits: some of train and val; by default val.
        data: other images instead, a folder of classes or an idx file.
        batch_size: images in a batch.

    Returns:
        Per split: bits_per_dim, uniform_bits_per_dim, histogram_bits_per_dim (null where the
        training images are not there), n and bytes (of all images).

    Raises:
        FileNotFoundError: if the images are missing.
        ValueError: if images cannot be used, or have another size than those of training.
    """
    options = config["data"]
    own, named = named_images(PixelData, options, splits, data)
    for images in named.values():
        _expect_alike(images, model)
    tables, note = _histograms(own if data is None else None, options, model)
    results: dict[str, dict[str, float | None]] = {}
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
    return Report(results, f"\n\n{_table(results)}\n\n{note}\n", files + _draw(model, out))


def _expect_alike(images: LabeledImages, model: PixelModel) -> None:
    """Raises ValueError for images that the model cannot take."""
    if (images.channels, images.size[0]) != (model.channels, model.image_size):
        raise ValueError(
            f"{images.path}: expected images of {model.image_size} pixels and {model.channels} "
            f"channels, as in training; got {images.size[0]} and {images.channels}; use others"
        )


def _histograms(
    own: PixelData | None, options: Mapping[str, object], model: PixelModel
) -> tuple[Tensor | None, str]:
    """Bits of each value at each place of the training images, and a line about them.

    Args:
        own: data that have the training images, if they are open.
        options: the run's, to open them.
        model: which says in what order bytes come.

    Returns:
        -log2 of (n + 1) / (images + 256), (bytes of an image, 256), or None without the images.
    """
    if own is None:
        own = PixelData(**options)  # type: ignore[arg-type]  # as in `named_images`
        try:
            own.setup()
        except FileNotFoundError as error:
            return None, f"histogram: none, because training images are missing: {error}"
    train = own.datasets["train"]
    counts = torch.zeros(model.longest * LEVELS, dtype=torch.int64)
    first = LEVELS * torch.arange(model.longest)
    for images in _batches(train, _AT_ONCE, "histogram"):
        values = model.bytes_of(images.to(next(model.parameters()).device)).cpu()
        counts += torch.bincount((values + first).flatten(), minlength=len(counts))
    bits = math.log2(len(train) + LEVELS) - (counts + 1).double().log2()
    return bits.view(-1, LEVELS), f"histogram of each place: {len(train):,} training images"


def _judge(
    model: PixelModel, images: LabeledImages, tables: Tensor | None, batch_size: int, name: str
) -> tuple[Tensor, float | None]:
    """Mean nats of the model at each place, (bytes of an image,), and mean bits of the tables."""
    device = next(model.parameters()).device
    nats, bits = torch.zeros(model.longest, dtype=torch.float64), 0.0
    place = torch.arange(model.longest)
    batch_of = f"{name}: a batch of {batch_size} images of {model.longest:,} bytes"
    with torch.inference_mode(), within_memory(lambda: batch_of, "lower --batch-size"):
        for batch in _batches(images, batch_size, name):
            loss = -model.image_log_likelihood(batch.to(device)).double().cpu()
            expect_finite(name, loss)
            nats += loss.sum(dim=0)
            if tables is not None:
                bits += float(tables[place, model.bytes_of(batch.to(device)).cpu()].sum())
    histogram = None if tables is None else bits / (len(images) * model.longest)
    return nats / len(images), histogram


def _batches(images: LabeledImages, size: int, name: str) -> Iterator[Tensor]:
    """Bytes (batch, channels, side, side), in order, with a progress bar."""
    for batch, _ in tqdm(DataLoader(images, size), desc=name, leave=False, disable=None):
        yield batch


def _draw(model: PixelModel, out: Path) -> list[Path]:
    position, scale = model.stack.position, model.position_scale
    png = out / "encoding.png"
    if position is None or position.dim == 1:
        return draw_encoding(position, scale, model.longest, model.longest, png)
    if not plots.has_bias(position):
        return []
    unit = "pixels" if scale == 1 else f"{1 / scale:g} pixels"
    plots.rpe_surfaces(position, png, (model.image_size - 1) * scale, unit)
    return [png]


def _draw_attention(model: PixelModel, image: Tensor, out: Path) -> list[Path]:
    """Where the heads of the last layer look in an image (channels, side, side)."""
    given = image[None].to(next(model.parameters()).device)
    what = f"the attention matrix of an image of {model.longest:,} bytes"
    with within_memory(lambda: what, "use a smaller model or smaller images"):
        matrices = _attention_of(model.stack, lambda: model.image_log_likelihood(given), last=1)
    if not matrices:
        return []
    png = out / "attention.png"
    around = _around(matrices[-1][0], model)
    plots.attention_around(around, png, title="last layer, mean over the pixels of an image")
    return [png]


def _around(weights: Tensor, model: PixelModel) -> Tensor:
    """Mean weights of the pixels around each pixel, channels summed, where there are such.

    Args:
        weights: (heads, bytes, bytes); key j knows byte j - 1, the first one none.
        model: whose they are.

    Returns:
        (heads, rows up to the pixel's own, columns to both sides).
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


def _table(results: Mapping[str, Mapping[str, float | None]]) -> str:
    head = ("images", "n", "bits/dim", "histogram", "uniform")
    keys = ("bits_per_dim", "histogram_bits_per_dim", "uniform_bits_per_dim")
    rows = [
        (
            name,
            f"{row['n']:,}",
            *("-" if row[key] is None else f"{row[key]:.3f}" for key in keys),
        )
        for name, row in results.items()
    ]
    return align([head, *rows])
