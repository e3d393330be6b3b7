"""Time of a byte while images are drawn, from the first to the last, and images a second.

In every round all mechanisms take turns, and each draws the same number of images at once, from
nothing. Times are the processor's, medians over the bytes of a tenth of the sequence and over
rounds; ratios are medians over rounds of the ratio of two medians, or two sums, of one round.
Memory is that of all tensors that the state keeps alive behind the last byte.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from kit.decoders import SOFTMAX, decoders, held
from kit.pictures import curves, legend
from kit.rows import Promise, Rows, markdown, names, pick
from kit.turns import paired
from tqdm import tqdm

from molflt.plots.figure import SERIES, picture
from molflt.sequence import PixelModel, sample
from molflt.sequence.pixels import START

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "pixels"
SIZES: dict[str, Any] = {"dim": 128, "heads": 8, "layers": 2, "ffn_dim": 512}
CHANNELS = 3
TENTHS = 10
QUICK = {"side": 4, "images": 2, "rounds": 1}

Times = dict[str, list[list[float]]]  # seconds of each byte of each round


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


def measure(
    side: int = 32, images: int = 4, mechanisms: tuple[str, ...] = (), rounds: int = 3
) -> Rows:
    """Times and sizes of states.

    Raises:
        ValueError: a mechanism or a number outside its range.
    """
    for name, value, least in (("side", side, 4), ("images", images, 1), ("rounds", rounds, 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}; got {value}")
    models = decoders(CONFIGS, mechanisms, partial(PixelModel, CHANNELS, side, **SIZES))
    times: Times = {name: [] for name in models}
    for turn in tqdm(range(rounds), desc="rounds", leave=False):
        for name, model in models.items():
            times[name].append(draw_images(model, images, turn))
    sizes = {}
    for name, model in models.items():
        with torch.inference_mode():
            last = torch.full((images, 1), START)
            _, state = model.advance(last.expand(-1, model.longest - 1))
            sizes[name] = held(model.advance(last, state)[1])
    return rows_of(times, sizes, images)


def rows_of(times: Times, sizes: dict[str, int], images: int) -> Rows:
    """A row for each mechanism and tenth; ratios of a byte's time to that in the first tenth."""

    def row(name: str, tenth: int) -> dict[str, Any]:
        parts = [[_tenth(one, part) for one in times[name]] for part in (0, tenth)]
        first, own = ([median(one) for one in part] for part in parts)
        sums = [sum(one) for one in times[name]]
        softmax = [sum(one) for one in times[SOFTMAX]] if SOFTMAX in times else None
        return {
            **{"mechanism": name, "tenth": tenth + 1},
            "median_ms": 1e3 * median(chain.from_iterable(parts[1])),
            "ratio": paired(own, first),
            "images_per_s": images / fmean(sums),
            "softmax_ratio": paired(softmax, sums) if softmax else None,
            **{"bytes": len(times[name][0]), "images": images, "rounds": len(sums)},
            "state_bytes": sizes[name],
        }

    return [row(name, tenth) for name in times for tenth in range(TENTHS)]


def _tenth(seconds: list[float], number: int) -> list[float]:
    return seconds[number * len(seconds) // TENTHS : (number + 1) * len(seconds) // TENTHS]


def table(rows: Rows) -> str:
    """Time in the first, a middle and the last tenth, images a second, states."""
    head = ["", "ms a byte, first tenth", "middle / first", "last / first", "images/s"]
    head += ["softmax's time / its", "state, KiB"]
    lines = []
    for name in names(rows, "mechanism"):
        first, middle, last = (
            pick(rows, mechanism=name, tenth=tenth)[0] for tenth in (1, TENTHS // 2 + 1, TENTHS)
        )
        softmax = first["softmax_ratio"]
        ratio = None if softmax is None else f"{softmax:.2f}"
        cells = [f"{first['median_ms']:.2f}", f"{middle['ratio']:.2f}", f"{last['ratio']:.2f}"]
        cells += [f"{first['images_per_s']:.3f}"]
        lines.append([name, *cells, ratio, f"{first['state_bytes'] / 1024:.0f}"])
    return markdown(head, lines)


def draw(png: Path, rows: Rows) -> None:
    """Time of a byte along the sequence."""
    order = sorted(names(rows, "mechanism"), key=SOFTMAX.__eq__)
    styles = {name: (i, "-") for i, name in enumerate(order)}
    styles[SOFTMAX] = (len(SERIES) - 1, "-")
    with picture(png, figsize=(6.0, 4.0)) as figure:
        axes = figure.subplots()
        points = {
            name: [
                ((row["tenth"] - 0.5) / TENTHS * row["bytes"], row["median_ms"])
                for row in pick(rows, mechanism=name)
            ]
            for name in order
        }
        curves(axes, points, styles, xlabel="bytes so far", ylabel="ms per byte")
        axes.set(xscale="linear", yscale="linear", xlim=(0, None), ylim=(0, None))
        legend(figure, axes)


def steepest(rows: Rows) -> float | None:
    """Largest ratio of the last tenth to the first of a mechanism other than softmax."""
    last = [row for row in pick(rows, tenth=TENTHS) if row["mechanism"] != SOFTMAX]
    last = [row for row in last if row["bytes"] >= 768]  # shorter sequences say nothing
    return max((row["ratio"] for row in last), default=None)


PROMISES = [Promise("time of a byte with a state, last tenth / first", steepest, 1.15)]
