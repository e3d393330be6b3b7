"""Time of a byte while images are sampled, from the first to the last, and images per second.

In every round all mechanisms take turns. Each samples the same number of images together, without
given bytes; kit/decoding.py defines the numbers.
"""

import time
from functools import partial
from typing import Any

import torch
from kit.decoding import decoders, draw_tenths, held, measure_tenths, tenths_table
from kit.rows import Rows

from molflt.sequence import PixelModel, sample
from molflt.sequence.pixels import START

SIZES: dict[str, Any] = {"dim": 128, "heads": 8, "layers": 2, "ffn_dim": 512}
CHANNELS = 3
QUICK = {"side": 4, "images": 2, "rounds": 1}


def draw_images(model: PixelModel, images: int, seed: int) -> list[float]:
    """Seconds of each byte of images that are sampled together."""
    start = torch.full((images, 1), START)
    drawn = sample(model, start, model.longest, generator=torch.Generator().manual_seed(seed))
    seconds, since = [], time.thread_time()
    for _ in drawn:
        now = time.thread_time()
        seconds.append(now - since)
        since = now
    return seconds


def remembered(model: PixelModel, images: int) -> int:
    """Bytes of the state after the last byte of all images."""
    last = torch.full((images, 1), START)
    with torch.inference_mode():
        _, state = model.advance(last.expand(-1, model.longest - 1))
        return held(model.advance(last, state)[1])


def measure(
    side: int = 32, images: int = 4, mechanisms: tuple[str, ...] = (), rounds: int = 3
) -> Rows:
    """Times and sizes of states."""
    return measure_tenths(
        decoders("pixels", mechanisms, partial(PixelModel, CHANNELS, side, **SIZES)),
        lambda model, turn: draw_images(model, images, turn),
        lambda model: remembered(model, images),
        rounds,
        images,
    )


table = partial(tenths_table, step="byte", sequences="images")
draw = partial(draw_tenths, step="byte")
