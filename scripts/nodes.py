"""Error and rotation scatter of a mask in three dimensions, by the rule that places its nodes.

    python scripts/nodes.py --out runs/nodes

The mask is exp(-|z|^2 / 2 s^2), its positions are uniform in a ball of diameter 2 R. Random rules
draw from the mask's own spectral density, the best there is; shells come from `suggest_nodes`.
Writes nodes.csv and nodes.png and prints a Markdown table.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from molflt.attention.nodes import NODES, Nodes
from molflt.attention.spectra import GaussianKernel
from molflt.attention.suggest import suggest_nodes
from molflt.plots.figure import SERIES, picture

RANDOM = ("gaussian", "orthogonal", "sobol")
OWN_SIGMA = 1 / (2 * math.pi)  # cycles per width s
RATIOS = (5.0, 10.0)


class Sizes(NamedTuple):
    """How much is measured."""

    nodes: tuple[int, ...]
    tolerances: tuple[float, ...]
    pairs: int
    draws: int
    distances: int
    rotations: int


FULL = Sizes(
    (16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
    (0.04, 0.03, 0.02, 0.01, 0.005, 0.003, 0.002, 0.001, 0.0005, 0.0003, 0.0002, 0.0001),
    2000,
    8,
    16,
    128,
)
QUICK = Sizes((16, 256), (0.03, 0.01), 200, 4, 4, 32)


class Point(NamedTuple):
    """One line of the table."""

    ratio: float
    rule: str
    nodes: int
    error: float
    scatter: float


def ball_pairs(count: int, ratio: float, generator: torch.Generator) -> Tensor:
    """Differences of points uniform in a ball of that diameter: (count, 3), in widths s."""
    points = torch.randn(2 * count, 3, dtype=torch.float64, generator=generator)
    draw = torch.rand(2 * count, 1, dtype=torch.float64, generator=generator)
    points = ratio / 2 * draw ** (1 / 3) * points / points.norm(dim=-1, keepdim=True)
    return points[:count] - points[count:]


@torch.no_grad()
def sampled(nodes: Nodes, spectrum: GaussianKernel, z: Tensor) -> Tensor:
    """The mask at the nodes: differences (n, 3) -> (heads, n)."""
    xi, coefficients = nodes.sample(spectrum)
    rows = [
        (2 * math.pi * z @ own.T).cos() @ row
        for own, row in zip(xi.expand(len(coefficients), -1, -1), coefficients, strict=True)
    ]
    return torch.stack(rows)


def measured(nodes: Nodes, ratio: float, sizes: Sizes, heads: int, seed: int) -> tuple[float, ...]:
    """Root mean squares over pairs and draws: of the error, and of the spread over rotations."""
    generator = torch.Generator().manual_seed(seed)
    spectrum = GaussianKernel(heads, length_range=(1.0, 1.0)).double()
    spectrum.amplitude.requires_grad_(False).fill_(1.0)
    z = ball_pairs(sizes.pairs, ratio, generator)
    error = sampled(nodes, spectrum, z) - (-0.5 * z.square().sum(dim=-1)).exp()
    # A vector turned at random points anywhere; its lengths are those of the pairs.
    length = z[: sizes.distances].norm(dim=-1)
    turned = torch.randn(
        sizes.distances, sizes.rotations, 3, dtype=torch.float64, generator=generator
    )
    turned = turned / turned.norm(dim=-1, keepdim=True) * length[:, None, None]
    values = sampled(nodes, spectrum, turned.flatten(0, 1))
    spread = values.unflatten(-1, (sizes.distances, sizes.rotations)).var(dim=-1)
    return error.square().mean().sqrt().item(), spread.mean().sqrt().item()


def points(sizes: Sizes, seed: int) -> list[Point]:
    """All rules at all sizes."""
    found = []
    for ratio in RATIOS:
        for rule in RANDOM:
            for r in sizes.nodes:
                nodes = NODES[rule](heads=sizes.draws, num_nodes=r, sigma=OWN_SIGMA).double()
                nodes.redraw_(torch.Generator().manual_seed(seed))
                numbers = measured(nodes, ratio, sizes, sizes.draws, seed)
                found.append(Point(ratio, rule, r, *numbers))
        for tol in sizes.tolerances:
            shells = suggest_nodes(ratio / 2, 1.0, tol).nodes.double()
            # Errors of shells are largest for the rare pairs that are nearest and farthest.
            more = sizes._replace(pairs=10 * sizes.pairs)
            numbers = measured(shells, ratio, more, 1, seed)
            point = Point(ratio, "shells", shells.num_nodes, *numbers)
            if point.nodes <= max(FULL.nodes) and point[:3] not in [other[:3] for other in found]:
                found.append(point)
    return found


def table(found: list[Point]) -> str:
    """Markdown, a line per rule and size."""
    head = "| 2R / s | rule | nodes r | rms error | scatter over rotations |"
    lines = [head, "|---|---|---|---|---|"]
    lines += [
        f"| {p.ratio:g} | {p.rule} | {p.nodes} | {p.error:.1e} | {p.scatter:.1e} |" for p in found
    ]
    return "\n".join(lines)


def draw(png: Path, found: list[Point]) -> None:
    """Error and scatter against the number of nodes, a column per diameter."""
    rows = (("error", "rms error, f(0) = 1"), ("scatter", "scatter over rotations"))
    with picture(png, figsize=(7, 5)) as figure:
        grid = figure.subplots(2, len(RATIOS), sharex=True, sharey=True, squeeze=False)
        for axes_row, (quantity, label) in zip(grid, rows, strict=True):
            axes_row[0].set_ylabel(label)
            for axes, ratio in zip(axes_row, RATIOS, strict=True):
                for color, rule in zip(SERIES, (*RANDOM, "shells"), strict=False):
                    own = [p for p in found if (p.ratio, p.rule) == (ratio, rule)]
                    x, y = [p.nodes for p in own], [getattr(p, quantity) for p in own]
                    axes.loglog(x, y, ".-", base=2, color=color, label=rule, linewidth=1)
                axes.set_yscale("log", base=10)
        for axes, ratio in zip(grid[0], RATIOS, strict=True):
            axes.set_title(f"2R / s = {ratio:g}", fontsize="small")
        figure.supxlabel("nodes r (pairs of columns)")
        handles = grid[0, 0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside upper center", ncols=4, frameon=False)


def main(words: list[str] | None = None) -> int:
    """Measures, draws and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/nodes"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, in seconds")
    options = parser.parse_args(words)
    options.out.mkdir(parents=True, exist_ok=True)
    found = points(QUICK if options.quick else FULL, options.seed)
    with (options.out / "nodes.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Point._fields)
        writer.writerows([*p[:3], f"{p.error:.4g}", f"{p.scatter:.4g}"] for p in found)
    draw(options.out / "nodes.png", found)
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
