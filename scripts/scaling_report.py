"""Table, picture and targets of scripts/scaling.py."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from molflt.plots.figure import SERIES, picture

FORWARD, TRAINING = PASSES = ("forward", "forward+backward")
COLUMNS = (
    *("mechanism", "who", "causal", "length", "pass"),
    *("median_s", "peak_MiB", "rounds", "note"),
)
# Ours are solid, others' dashed; one color for one kind of attention.
KINDS = {
    "softmax": 6,
    "softmax, spectral mask": 3,
    "softmax, Toeplitz bias": 7,
    "performer": 0,
    "performer, relu": 5,
    "flt": 1,
    "flt, l = 1": 1,
    "log-linear": 4,
    "elu": 3,
    "fnet": 2,
    "performer-pytorch": 0,
    "PyG performer, relu": 5,
    "transformers fnet": 2,
}

Key = tuple[str, bool, int, str]  # mechanism, causal, length, pass
Costs = dict[Key, dict[str, Any]]
Times = dict[Key, list[float]]


class Target(NamedTuple):
    """What was promised, what came out, and the bound that it is held to."""

    text: str
    value: float
    bound: str
    passed: bool

    def __str__(self) -> str:
        verdict = "PASS" if self.passed else "FAIL"
        return f"{verdict}  {self.text}: {self.value:.2f}, target {self.bound}"


def exponent(points: list[tuple[int, float]]) -> float:
    """Slope in the doubly logarithmic plane: cost ~ length^exponent; nan for a single point."""
    if len(points) < 2:
        return math.nan
    x, y = ([math.log(value) for value in axis] for axis in zip(*points, strict=True))
    return statistics.linear_regression(x, y).slope


def expected(costs: Costs, key: Key, quantity: str) -> float:
    """What a length will need, from the two lengths before, or in proportion to the one before."""
    name, causal, length, which = key
    known = [
        (other[2], found[quantity])
        for other, found in costs.items()
        if (other[0], other[1], other[3]) == (name, causal, which) and quantity in found
    ]
    if not known:
        return 0.0
    slope = exponent(known[-2:]) if len(known) > 1 else 1.0
    return known[-1][1] * (length / known[-1][0]) ** slope


def curve(
    costs: Costs, times: Times, name: str, causal: bool, which: str, quantity: str
) -> list[tuple[int, float]]:
    """(length, seconds or MiB) of a mechanism, without what was skipped."""
    points = []
    for key, found in costs.items():
        if (key[0], key[1], key[3]) == (name, causal, which) and "note" not in found:
            points.append((key[2], value(found, times[key], quantity)))
    return points


def value(found: dict[str, Any], seconds: list[float], quantity: str) -> float:
    """Peak MiB, or median seconds over the rounds."""
    return found["MiB"] if quantity == "MiB" else statistics.median(seconds)


def upper_half(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The points of the longer half of the lengths, the middle one included, but at least two."""
    return points[min(len(points) // 2, max(0, len(points) - 2)) :]


def rows(costs: Costs, times: Times, mechanisms: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the CSV; seconds and MiB are empty where a mechanism was skipped."""
    table = []
    for (name, causal, length, which), found in costs.items():
        own = times.get((name, causal, length, which), [])
        labels = (name, mechanisms[name].who, causal, length, which)
        numbers: tuple = ("", "", 0, found.get("note", ""))
        if own:
            numbers = (f"{statistics.median(own):.6g}", f"{found['MiB']:.1f}", len(own), "")
        table.append(dict(zip(COLUMNS, (*labels, *numbers), strict=True)))
    return table


def paired(times: Times, one: Key, other: Key) -> float:
    """Median over rounds of the ratio of two mechanisms' seconds in the same round."""
    return statistics.median(a / b for a, b in zip(times[one], times[other], strict=False))


def targets(costs: Costs, times: Times) -> list[Target]:
    """The four promises at the longest length, as far as both sides were measured."""
    length = max((key[2] for key in costs), default=0)
    found = []

    def compare(label: str, one: str, other: str, causal: bool, time: float, memory: float) -> None:
        """Bounds on one / other; above 1 they say how much cheaper the first has to be."""
        a, b = ((name, causal, length, TRAINING) for name in (one, other))
        if not (times.get(a) and times.get(b)):
            return
        for what, ratio, bound in (
            ("time", paired(times, a, b), time),
            ("peak memory", costs[a]["MiB"] / costs[b]["MiB"], memory),
        ):
            if not math.isnan(bound):
                least = causal and other == "performer-pytorch"
                ratio = 1 / ratio if least else ratio
                order = f"{other} / {one}" if least else f"{one} / {other}"
                passed = ratio >= bound if least else ratio <= bound
                text = f"({label}) {what}, {order}, {length} tokens"
                found.append(Target(text, ratio, f"{'>=' if least else '<='} {bound:g}", passed))

    for name in ("flt", "flt, l = 1"):
        compare("a, b", name, "performer", False, 1.6, 1.35)
    compare("c", "performer", "performer-pytorch", True, 8.0, 5.0)
    compare("d", "fnet", "transformers fnet", False, 1.0, math.nan)
    return found


def table(costs: Costs, times: Times, mechanisms: Mapping[str, Any]) -> str:
    """Markdown: costs of training at the longest length that was run, and fitted exponents."""
    head = ["", "whose", "tokens", "forward, s", "with backward, s", "MiB", "MiB, with backward"]
    lines = []
    for causal in (False, True):
        lines += ["", f"**{'Causal' if causal else 'Every token sees all others'}**", ""]
        lines += [bar([*head, "time ~ N^", "memory ~ N^"]), bar(["---"] * 9)]
        for name, mechanism in mechanisms.items():
            ran = curve(costs, times, name, causal, TRAINING, "MiB")
            if not ran:
                continue
            longest = ran[-1][0]
            keys = [(name, causal, longest, which) for which in PASSES]
            cells = [
                "" if key not in times else format(value(costs[key], times[key], what), spec)
                for what, spec in (("seconds", ".3g"), ("MiB", ".0f"))
                for key in keys
            ]
            slopes = [
                f"{exponent(upper_half(curve(costs, times, name, causal, TRAINING, what))):.2f}"
                for what in ("seconds", "MiB")
            ]
            lines.append(bar([name, mechanism.who, str(longest), *cells, *slopes]))
    skipped = [
        f"- {key[0]}{', causal' if key[1] else ''}, {key[2]} tokens, {key[3]}: {found['note']}"
        for key, found in costs.items()
        if "note" in found
    ]
    return "\n".join([*lines, "", *skipped]).strip()


def bar(cells: list[str]) -> str:
    """A line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def draw(png: Path, costs: Costs, times: Times, mechanisms: Mapping[str, Any]) -> None:
    """Time and memory of forward and backward, causal and not, in doubly logarithmic panels."""
    with picture(png, figsize=(9.0, 7.2)) as figure:
        grid = figure.subplots(2, 2, sharex=True, sharey="row")
        for column, causal in enumerate((False, True)):
            for axes, quantity in zip(grid[:, column], ("seconds", "MiB"), strict=True):
                for name, mechanism in mechanisms.items():
                    points = curve(costs, times, name, causal, TRAINING, quantity)
                    if points:
                        style = "-" if mechanism.who == "molflt" else "--"
                        style = ":" if name.startswith("softmax,") else style
                        marker = "s" if name == "flt, l = 1" else "o"
                        color = SERIES[KINDS.get(name, 7)]
                        axes.plot(
                            *zip(*points, strict=True),
                            style,
                            color=color,
                            marker=marker,
                            markersize=3,
                            linewidth=1.2,
                            label=name,
                        )
                axes.set(xscale="log", yscale="log")
                axes.grid(alpha=0.25)
            grid[0, column].set_title("causal" if causal else "every token sees all others")
            lengths = sorted({key[2] for key in costs})
            grid[1, column].set_xticks(lengths, [str(n) for n in lengths], fontsize="small")
            grid[1, column].minorticks_off()
            grid[1, column].set_xlabel("tokens")
        grid[0, 0].set_ylabel("forward and backward, s")
        grid[1, 0].set_ylabel("peak memory, MiB")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")


def write(out: Path, costs: Costs, times: Times, mechanisms: Mapping[str, Any]) -> None:
    """Writes scaling.csv, scaling.png and scaling.md, and prints the last."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "scaling.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows(costs, times, mechanisms))
    draw(out / "scaling.png", costs, times, mechanisms)
    verdicts = "\n".join(f"    {target}" for target in targets(costs, times))
    text = f"{table(costs, times, mechanisms)}\n\n{verdicts}\n"
    (out / "scaling.md").write_text(text)
    print(text)
