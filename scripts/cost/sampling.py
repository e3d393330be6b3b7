"""Time of a byte while images are drawn, from the first to the last, and images a second.

In every round all mechanisms take turns, and each draws the same number of images at once, from
nothing. `kit.tenths` says what the numbers are.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kit.decoders import decoders, held
from kit.rows import Promise, Rows
from kit.tenths import draw_tenths, measure_tenths, steepest, tenths_table

from molflt.sequence import PixelModel, sample
from molflt.sequence.pixels import START

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "pixels"
SIZES: dict[str, Any] = {"dim": 128, "heads": 8, "layers": 2, "ffn_dim": 512}
CHANNELS = 3
QUICK = {"side": 4, "images": 2, "rounds": 1}


def draw_images(model: PixelModel, images: int, seed: int) -> list[float]:
    """Seconds of each byte of so many images, drawn at once from nothing."""
    start = torch.full((images, 1), START)
    drawn = sample(model, start, model.longest, generator=torch.Generator().manual_seed(seed))
    seconds, since = [], time.thread_time()
    for _ in drawn:
        now = time.thread_time()
        seconds.append(now - since)
        since = now
    return seconds


def remembered(model: PixelModel, images: int) -> int:
    """Bytes of the state behind the last byte of all images."""
    last = torch.full((images, 1), START)
    with torch.inference_mode():
        _, state = model.advance(last.expand(-1, model.longest - 1))
        return held(model.advance(last, state)[1])


def measure(
    side: int = 32, images: int = 4, mechanisms: tuple[str, ...] = (), rounds: int = 3
) -> Rows:
    """Times and sizes of states."""
    models = decoders(CONFIGS, mechanisms, partial(PixelModel, CHANNELS, side, **SIZES))
    return measure_tenths(
        models,
        lambda model, turn: draw_images(model, images, turn),
        lambda model: remembered(model, images),
        rounds,
        images,
    )


table = partial(tenths_table, step="byte", sequences="images")
draw = partial(draw_tenths, step="byte")

PROMISES = [
    Promise("time of a byte with a state, last tenth / first", partial(steepest, least=768), 1.15)
]
