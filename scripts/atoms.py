"""Time and peak memory of one GraphAttention layer against the number of atoms, 10^2 to 10^6.

    python scripts/atoms.py --out runs/atoms
    python scripts/atoms.py --out runs/atoms --atoms 100 1000 10000 --mechanisms softmax "additive"

One structure of N atoms at random places, 12 Å^3 each as in a metal; 128 channels, 8 heads, m = 64,
16 Fourier nodes; float32, one thread, forward and backward. Beside ours: softmax with the exact
mask, softmax without a mask, and PyTorch Geometric's Performer through `to_dense_batch`.

How time and memory are measured is described in scripts/scaling.py. A pass that takes longer than
its budget of seconds is timed once, in the process in which its memory is measured. What would need
more than 16 GB or `--seconds`, judged from the sizes before, is skipped and says so.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import scaling
import scaling_report as report
import torch
from scaling import ROUNDS, Bench, Mechanism
from scaling_report import TRAINING, Costs, Target, Times, bar, curve, exponent, upper_half
from torch import Tensor, nn
from torch_geometric.utils import to_dense_batch

from molflt.graph import GraphAttention
from molflt.plots.figure import SERIES, picture

CHANNELS, HEADS, FEATURES, NODES, NEAR = 128, 8, 64, 16, 4.5
VOLUME = 12.0  # Å^3 per atom
ATOMS = (100, 1000, 10_000, 100_000, 1_000_000)
LIMIT = 16e9 / 2**20  # MiB
PROMISED = ("performer", "additive")  # what has to stay within the limit


class Structure(nn.Module):
    """A layer of ours and the places of the atoms that it mixes."""

    def __init__(self, atoms: int, causal: bool = False, **options: Any) -> None:
        super().__init__()
        self.register_buffer("pos", torch.rand(atoms, 3) * (VOLUME * atoms) ** (1 / 3))
        self.layer = GraphAttention(
            CHANNELS, HEADS, num_features=FEATURES, num_nodes=NODES, **options
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.pos)


class PyG(nn.Module):
    """PyTorch Geometric's Performer with as many features as ours, of a ReLU."""

    def __init__(self, atoms: int, causal: bool = False) -> None:
        super().__init__()
        from torch_geometric.nn.attention import PerformerAttention
        from torch_geometric.nn.attention.performer import orthogonal_matrix

        width = CHANNELS // HEADS
        self.layer = PerformerAttention(CHANNELS, HEADS, head_channels=width)
        self.layer.fast_attn.num_rows = FEATURES
        self.layer.fast_attn.projection_matrix = orthogonal_matrix(FEATURES, width)

    def forward(self, x: Tensor) -> Tensor:
        dense, mask = to_dense_batch(x, x.new_zeros(len(x), dtype=torch.long))
        return self.layer(dense, mask)[mask]


def made(who: str = "molflt", linear: bool = True, **options: Any) -> Mechanism:
    return Mechanism(partial(Structure, **options), who, (False,), linear)


MECHANISMS: Mapping[str, Mechanism] = {
    "performer": made(position="none"),
    "additive": made(),
    "multiplicative": made(placement="multiplicative"),
    "multiplicative, near field": made(placement="multiplicative", near_field=NEAR),
    "PyG performer, relu": Mechanism(PyG, "torch_geometric", (False,)),
    "softmax, no mask": made(position="none", backend="softmax"),  # SDPA keeps no N x N matrix
    "softmax, exact mask": made(backend="softmax", linear=False),
}


def prepare(name: str, causal: bool, atoms: int, which: str) -> Callable[[], None]:
    """A function that makes one pass, and leaves no gradient behind."""
    torch.manual_seed(0)
    layer = MECHANISMS[name].build(atoms, causal)
    back = which == TRAINING
    x = torch.randn(atoms, CHANNELS, requires_grad=back)

    def once() -> None:
        with torch.set_grad_enabled(back):
            out = layer(x)
        if back:
            out.sum().backward()
            x.grad = None
            layer.zero_grad(set_to_none=True)

    return once


def targets(costs: Costs) -> list[Target]:
    """The largest structure within 16 GB, all that the process holds included."""
    atoms = max((key[2] for key in costs), default=0)
    found = []
    for name in PROMISED:
        cost = costs.get((name, False, atoms, TRAINING))
        if cost is not None:
            peak = cost.get("process", float("inf")) * 2**20 / 1e9
            text = f"{name}, forward and backward of {atoms} atoms, GB in the process"
            found.append(Target(text, peak, "<= 16", peak <= 16))
    return found


def table(costs: Costs, times: Times) -> str:
    """Markdown: the largest structure that was run, cost per atom there, and fitted exponents."""
    head = ["", "whose", "atoms", "s", "MiB", "µs per atom", "KiB per atom"]
    lines = [bar([*head, "time ~ N^", "memory ~ N^"]), bar(["---"] * 9)]
    for name, mechanism in MECHANISMS.items():
        both = [curve(costs, times, name, False, TRAINING, what) for what in ("seconds", "MiB")]
        if not both[0]:
            continue
        (atoms, seconds), (_, mib) = (points[-1] for points in both)
        cells = [f"{seconds:.3g}", f"{mib:.0f}"]
        cells += [f"{1e6 * seconds / atoms:.3g}", f"{1024 * mib / atoms:.3g}"]
        slopes = [f"{exponent(upper_half(points)):.2f}" for points in both]
        lines.append(bar([name, mechanism.who, str(atoms), *cells, *slopes]))
    skipped = [
        f"- {key[0]}, {key[2]} atoms: {c['note']}" for key, c in costs.items() if "note" in c
    ]
    return "\n".join([*lines, "", *skipped]).strip()


def draw(png: Path, costs: Costs, times: Times) -> None:
    """Time and memory of forward and backward in doubly logarithmic panels."""
    with picture(png, figsize=(6.0, 3.4)) as figure:
        panels = figure.subplots(1, 2, sharex=True)
        labels = {"seconds": "forward and backward, s", "MiB": "peak memory, MiB"}
        for axes, (quantity, label) in zip(panels, labels.items(), strict=True):
            for index, (name, mechanism) in enumerate(MECHANISMS.items()):
                points = curve(costs, times, name, False, TRAINING, quantity)
                if points:
                    style = "--" if mechanism.who != "molflt" else "-"
                    style = ":" if name.startswith("softmax") else style
                    options = {"color": SERIES[index % len(SERIES)], "marker": "o", "label": name}
                    axes.plot(*zip(*points, strict=True), style, markersize=3, **options)
            axes.set(xscale="log", yscale="log", xlabel="atoms", ylabel=label)
            axes.grid(alpha=0.25)
        panels[1].axhline(LIMIT, color="gray", linewidth=0.8)
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize="small")


def write(out: Path, costs: Costs, times: Times) -> None:
    """Writes atoms.csv, atoms.png and atoms.md, and prints the last."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "atoms.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, report.COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(report.rows(costs, times, MECHANISMS))
    draw(out / "atoms.png", costs, times)
    verdicts = "\n".join(f"    {target}" for target in targets(costs))
    text = f"{table(costs, times)}\n\n{verdicts}\n"
    (out / "atoms.md").write_text(text)
    print(text)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/atoms"))
    parser.add_argument("--atoms", type=int, nargs="+", default=list(ATOMS))
    parser.add_argument("--mechanisms", nargs="+", choices=MECHANISMS, default=list(MECHANISMS))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="most turns of a mechanism")
    parser.add_argument("--seconds", type=float, default=1800.0, help="longest pass to be started")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    options = parse(words)
    torch.set_num_threads(1)
    bench = Bench(__file__, MECHANISMS, prepare, LIMIT, options.seconds)
    if options.serve:
        scaling.serve(bench)
        return 0
    sizes = sorted(options.atoms)
    write(
        options.out,
        *scaling.measure(options.mechanisms, sizes, options.rounds, (TRAINING,), bench),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
