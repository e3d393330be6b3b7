"""Time and peak memory of one Transformer block against the number of patches of an image.

    python scripts/patches.py --out runs/patches
    python scripts/patches.py --patches 196 784 --mechanisms "flt" "log-linear" --gigabytes 2

The measurement of FLT (arXiv:2302.01925), fig. 1, in two dimensions and at a size for a CPU: one
block, pre-norm, of width 384 with 12 heads and a feed-forward width of 1536, m = 64, and one image,
forward and backward, float32, one thread; relative encodings see row and column, and are evaluated
in every pass. Patches are square numbers.

    log-linear                 NPRF (arXiv:2106.12566), in blocks or by FFT as `toeplitz` chooses
    log-linear, FFT            by FFT, a few features and columns of values at a time
    log-linear, FFT at once    by FFT of all of them, as published: O(N m d) memory per head
    flt                        a Gaussian mixture, l = 2, at r = 64 nodes
    softmax, 2-D bias          the exact form of log-linear, with its N x N matrix per head

How time and memory are measured is described in scripts/scaling.py, except that time is the
processor's, so that other jobs on the machine do not lengthen it. What would need more than
`--gigabytes` or `--seconds`, judged from the sizes before, is not run, and the table says so.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import scaling
import scaling_report as report
import torch
from scaling import ROUNDS, Bench, Mechanism
from scaling_report import TRAINING, Costs, Key, Times, bar, curve, expected, exponent, upper_half
from torch import Tensor, nn

from molflt.attention import Attention, Block, make_position
from molflt.attention.encoding import Position
from molflt.plots.figure import SERIES, picture

DIM, HEADS, FFN, FEATURES, NODES, GAUSSIANS = 384, 12, 1536, 64, 64, 25
PATCHES = (196, 400, 784, 1600, 3136)
GIGABYTES, SECONDS = 6.0, 60.0
# Seconds of all turns of a mechanism at one size. A longer pass is timed once, where its memory is
# measured; as every block goes back to the system there, transforms take up to three times as long.
BUDGET = 30.0
TOEPLITZ = {"position": "toeplitz", "normalize_qk": True}  # as configs/image/log-linear.yaml


class Patches(nn.Module):
    """A block, its encoding, and the places of the patches of a square image, row by row."""

    def __init__(
        self, patches: int, causal: bool = False, position: str = "none", **options: Any
    ) -> None:
        super().__init__()
        side = math.isqrt(patches)
        line = torch.arange(side) - (side - 1) / 2
        self.register_buffer("places", torch.cartesian_prod(line, line)[None])
        sizes: dict[str, dict[str, Any]] = {
            "toeplitz": {"shape": (side, side)},
            "spectral": {
                **{"dim": 2, "spectrum": "gaussian_mixture"},
                **{"num_nodes": NODES, "num_gaussians": GAUSSIANS},
            },
        }
        self.position: Position | None = make_position(
            position, HEADS, DIM // HEADS, **sizes.get(position, {})
        )
        options.setdefault("num_features", FEATURES)
        attention = Attention(DIM, HEADS, position=self.position, causal=causal, **options)
        self.block = Block(attention, FFN)

    def forward(self, x: Tensor) -> Tensor:
        encoding = None
        if self.position is not None:
            encoding = self.position(self.block.attention.mixing, self.places, self.places)
        return self.block(x, encoding)


class ByFFT(Patches):
    """Log-linear by FFT at every size, all features and columns at once if asked."""

    def __init__(self, patches: int, causal: bool = False, whole: bool = False) -> None:
        super().__init__(patches, causal, **TOEPLITZ)
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        layer, form = (import_module(f"molflt.attention.{n}") for n in ("layer", "toeplitz"))
        most = {"cpu": 2**62} if self.whole else {}
        method = partial(form.toeplitz, method="fft")
        with patch.object(layer, "toeplitz", method), patch.dict(form.TRANSIENT, most):
            return super().forward(x)


def made(
    linear: bool = True, build: Callable[..., nn.Module] = Patches, **options: Any
) -> Mechanism:
    return Mechanism(partial(build, **options), "molflt", (False,), linear)


MECHANISMS: Mapping[str, Mechanism] = {
    "performer": made(),
    "flt": made(position="spectral"),
    "log-linear": made(**TOEPLITZ),
    "log-linear, FFT": made(build=ByFFT),
    "log-linear, FFT at once": made(build=ByFFT, whole=True),
    "softmax": made(mixing="softmax"),  # SDPA keeps no N x N matrix
    "softmax, 2-D bias": made(mixing="softmax", position="toeplitz", linear=False),
}


def prepare(name: str, causal: bool, patches: int, which: str) -> Callable[[], None]:
    """A function that makes one pass, and leaves no gradient behind."""
    torch.manual_seed(0)
    block = MECHANISMS[name].build(patches, causal)
    x = torch.randn(1, patches, DIM, requires_grad=True)

    def once() -> None:
        block(x).sum().backward()
        x.grad = None
        block.zero_grad(set_to_none=True)

    return once


def over(costs: Costs, key: Key, gigabytes: float) -> str:
    """Why there is no number: a limit was passed, or what went wrong."""
    note: str = costs[key]["note"]
    if not note.startswith("skipped"):
        return note
    by_memory = expected(costs, key, "MiB") * 2**20 > gigabytes * 1e9
    return f"over {gigabytes:g} GB" if by_memory else "too slow"


def cell(costs: Costs, times: Times, key: Key, quantity: str, limit: float) -> str:
    """Seconds or MiB, or why there are none; empty for what was not asked for."""
    if key not in costs:
        return ""
    if "note" in costs[key]:
        return over(costs, key, limit)
    value = report.value(costs[key], times[key], quantity)
    return f"{value:.3g}" if quantity == "seconds" else f"{value:.0f}"


def against_flt(costs: Costs, times: Times, name: str) -> list[tuple[int, float, float]]:
    """(patches, time, memory) of a mechanism in units of FLT's, where both were run."""
    found = []
    for key in times:
        other = ("flt", *key[1:])
        if key[0] == name and other in times:
            memory = costs[key]["MiB"] / costs[other]["MiB"]
            found.append((key[2], report.paired(times, key, other), memory))
    return found


def table(costs: Costs, times: Times, limit: float) -> str:
    """Markdown: time and memory at every size with fitted exponents, and ratios to FLT."""
    sizes = sorted({key[2] for key in costs})
    names = [name for name in MECHANISMS if any(key[0] == name for key in costs)]
    lines = []
    for quantity, title in (("seconds", "time, s"), ("MiB", "peak memory, MiB")):
        lines += ["", bar([title, *map(str, sizes), "~ N^"]), bar(["---"] * (len(sizes) + 2))]
        for name in names:
            keys = [(name, False, n, TRAINING) for n in sizes]
            slope = exponent(upper_half(curve(costs, times, name, False, TRAINING, quantity)))
            cells = [cell(costs, times, key, quantity, limit) for key in keys]
            lines.append(bar([name, *cells, "" if math.isnan(slope) else f"{slope:.2f}"]))
    lines += ["", bar(["time, memory / FLT", *map(str, sizes)]), bar(["---"] * (len(sizes) + 1))]
    for name in names:
        ratios = {
            n: f"{seconds:.2f}, {mib:.2f}" for n, seconds, mib in against_flt(costs, times, name)
        }
        if name != "flt" and ratios:
            lines.append(bar([name, *(ratios.get(n, "") for n in sizes)]))
    skipped = [f"- {k[0]}, {k[2]} patches: {c['note']}" for k, c in costs.items() if "note" in c]
    return "\n".join([*lines, "", *skipped]).strip()


def draw(png: Path, costs: Costs, times: Times) -> None:
    """Time and memory of forward and backward in doubly logarithmic panels."""
    with picture(png, figsize=(7.0, 3.8)) as figure:
        panels = figure.subplots(1, 2, sharex=True)
        labels = {"seconds": "forward and backward, s", "MiB": "peak memory, MiB"}
        for axes, (quantity, label) in zip(panels, labels.items(), strict=True):
            for index, name in enumerate(MECHANISMS):
                points = curve(costs, times, name, False, TRAINING, quantity)
                style = ":" if name.startswith("softmax") else "--" if "FFT" in name else "-"
                options = {"color": SERIES[index], "marker": "o", "markersize": 3, "label": name}
                if points:
                    axes.plot(*zip(*points, strict=True), style, **options)
            sizes = sorted({key[2] for key in costs})
            axes.set(xscale="log", yscale="log", xlabel="patches", ylabel=label)
            axes.set_xticks(sizes, [str(n) for n in sizes], fontsize="small")
            axes.minorticks_off()
            axes.grid(alpha=0.25)
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize="small")


def write(out: Path, costs: Costs, times: Times, limit: float) -> None:
    """Writes patches.csv, patches.png and patches.md, and prints the last."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "patches.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, report.COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(report.rows(costs, times, MECHANISMS))
    draw(out / "patches.png", costs, times)
    text = f"{table(costs, times, limit)}\n"
    (out / "patches.md").write_text(text)
    print(text)


def expect(sizes: Sequence[int], names: Sequence[str], rounds: int) -> None:
    """Raises ValueError for options outside their range."""
    if unknown := [name for name in names if name not in MECHANISMS]:
        raise ValueError(
            f"mechanism {unknown[0]!r} is unknown; expected some of {'; '.join(MECHANISMS)}"
        )
    got = " ".join(map(str, sizes))
    if any(n < 1 or math.isqrt(n) ** 2 != n for n in sizes):
        raise ValueError(f"patches must be square numbers, such as 196 of 14 x 14; got {got}")
    if any(a >= b for a, b in pairwise(sizes)):
        raise ValueError(f"patches must increase; got {got}; sort them")
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1; got {rounds}")


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/patches"))
    parser.add_argument("--patches", type=int, nargs="+", default=list(PATCHES))
    parser.add_argument("--mechanisms", nargs="+", metavar="NAME", default=list(MECHANISMS))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="most turns of a mechanism")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="longest pass to be started")
    parser.add_argument("--gigabytes", type=float, default=GIGABYTES, help="most of a pass")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Returns 2 for options outside their range."""
    options = parse(words)
    torch.set_num_threads(1)
    most_mib = options.gigabytes * 1e9 / 2**20
    bench = Bench(
        __file__, MECHANISMS, prepare, most_mib, options.seconds, BUDGET, time.process_time
    )
    if options.serve:
        scaling.serve(bench)
        return 0
    try:
        expect(options.patches, options.mechanisms, options.rounds)
    except ValueError as error:
        print(f"patches.py: error: {error}", file=sys.stderr)
        return 2
    measured = scaling.measure(
        options.mechanisms, options.patches, options.rounds, (TRAINING,), bench
    )
    write(options.out, *measured, options.gigabytes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
