"""Time of a step along a sequence that grows step by step, by tenths of the sequence.

Times are the processor's, medians over the steps of a tenth and over rounds; ratios are medians
over rounds of the ratio of two medians, or two sums, of one round. States are all memory that is
kept alive behind the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from kit.decoders import SOFTMAX, Model, keeps_sums
from kit.pictures import curves, legend
from kit.rows import Rows, markdown, names, pick
from kit.turns import paired
from molflt.plots.figure import SERIES, picture

TENTHS = 10


def measure_tenths(
    models: Mapping[str, Model],
    grow: Callable[[Model, int], list[float]],
    remembered: Callable[[Model], int],
    rounds: int,
    count: int,
) -> Rows:
    """A row for each mechanism and tenth; in every round all mechanisms take turns.

    Args:
        models: by mechanism.
        grow: seconds of each step of a model in a round with this number.
        remembered: bytes of a model's last state.
        rounds: how often each model grows its sequences.
        count: sequences that grow at once.
    """
    times: dict[str, list[list[float]]] = {name: [] for name in models}
    for turn in tqdm(range(rounds), desc="rounds", leave=False):
        for name, model in models.items():
            times[name].append(grow(model, turn))
    sizes = {name: remembered(model) for name, model in models.items()}

    def row(name: str, tenth: int) -> dict[str, Any]:
        parts = [[_tenth(one, part) for one in times[name]] for part in (0, tenth)]
        first, own = ([median(one) for one in part] for part in parts)
        sums = [sum(one) for one in times[name]]
        softmax = [sum(one) for one in times[SOFTMAX]] if SOFTMAX in times else None
        return {
            **{"mechanism": name, "tenth": tenth + 1},
            "median_ms": 1e3 * median(chain.from_iterable(parts[1])),
            "ratio": paired(own, first),
            "sequences_per_s": count / median(sums),
            "softmax_ratio": paired(softmax, sums) if softmax else None,
            **{"steps": len(times[name][0]), "sequences": count, "rounds": len(sums)},
            "state_bytes": sizes[name],
        }

    return [row(name, tenth) for name in times for tenth in range(TENTHS)]


def _tenth(seconds: list[float], number: int) -> list[float]:
    return seconds[number * len(seconds) // TENTHS : (number + 1) * len(seconds) // TENTHS]


def tenths_table(rows: Rows, step: str, sequences: str) -> str:
    """Time in the first, a middle and the last tenth, sequences a second, states.

    Args:
        rows: of `rows_of`.
        step: what a step is: "byte".
        sequences: what grows: "images".
    """
    head = ["", f"ms a {step}, first tenth", "middle / first", "last / first", f"{sequences}/s"]
    head += ["softmax's time / its", "state, KiB"]
    lines = []
    for name in names(rows, "mechanism"):
        first, middle, last = (
            pick(rows, mechanism=name, tenth=tenth)[0] for tenth in (1, TENTHS // 2 + 1, TENTHS)
        )
        softmax = first["softmax_ratio"]
        ratio = None if softmax is None else f"{softmax:.2f}"
        cells = [f"{first['median_ms']:.2f}", f"{middle['ratio']:.2f}", f"{last['ratio']:.2f}"]
        cells += [f"{first['sequences_per_s']:.3f}"]
        lines.append([name, *cells, ratio, f"{first['state_bytes'] / 1024:.0f}"])
    return markdown(head, lines)


def draw_tenths(png: Path, rows: Rows, step: str) -> None:
    """Time of a step along the sequence."""
    order = sorted(names(rows, "mechanism"), key=SOFTMAX.__eq__)
    styles = {name: (i, "-") for i, name in enumerate(order)}
    styles[SOFTMAX] = (len(SERIES) - 1, "-")
    with picture(png, figsize=(6.0, 4.0)) as figure:
        axes = figure.subplots()
        points = {
            name: [
                ((row["tenth"] - 0.5) / TENTHS * row["steps"], row["median_ms"])
                for row in pick(rows, mechanism=name)
            ]
            for name in order
        }
        curves(axes, points, styles, xlabel=f"{step}s so far", ylabel=f"ms per {step}")
        axes.set(xscale="linear", yscale="linear", xlim=(0, None), ylim=(0, None))
        legend(figure, axes)


def steepest(rows: Rows, least: int) -> float | None:
    """Largest ratio of the last tenth to the first of a mechanism other than softmax.

    Sequences of fewer than `least` steps say nothing.
    """
    last = [row for row in pick(rows, tenth=TENTHS) if keeps_sums(row["mechanism"])]
    return max((row["ratio"] for row in last if row["steps"] >= least), default=None)
