"""What a graph sees of the rest of its batch: molflt beside the attentions of PyTorch Geometric.

    python scripts/isolation.py --out runs/isolation

Outputs of a graph alone are compared with those in a batch, in float64 and with random weights;
PyG's modules get `to_dense_batch` and its mask, as in `GPSConv`, `SGFormer` and `Polynormer`.
Writes isolation.csv and prints a Markdown table.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.nn.attention import (
    PerformerAttention,
    PolynormerAttention,
    SGFormerAttention,
)
from torch_geometric.utils import to_dense_batch

from molflt.graph import GraphAttention

CHANNELS, HEADS = 32, 4
LARGE = 200  # atoms of the graph that pads the others


class Graph(NamedTuple):
    """One crystal."""

    x: Tensor
    pos: Tensor
    cell: Tensor


class Row(NamedTuple):
    """Largest relative changes of one mechanism."""

    mechanism: str
    batch: float
    padding: float
    order: float
    gradient: float


class Dense(nn.Module):
    """A module of PyG over dense batches, called as its own models call it."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, batch: Tensor, **_: Any) -> Tensor:
        """(atoms, channels) -> (atoms, channels); geometry is not read."""
        dense, mask = to_dense_batch(x, batch)
        return self.attention(dense, mask)[mask]


def ours(**options: Any) -> Callable[[], nn.Module]:
    """How to build a layer of molflt."""
    extra = {"num_features": 32, "max_frequency": 0.2, "image_cutoff": 4.0, **options}
    return lambda: GraphAttention(CHANNELS, HEADS, **extra)


def theirs(kind: type[nn.Module], **options: Any) -> Callable[[], nn.Module]:
    """How to build a module of PyG, with the width of heads that ours have."""
    return lambda: Dense(kind(CHANNELS, HEADS, head_channels=CHANNELS // HEADS, **options))


def mechanisms() -> dict[str, Callable[[], nn.Module]]:
    """All rows of the table."""
    found = {"molflt Performer": ours(position="none")}
    for placement in ("additive", "multiplicative"):
        for periodic in ("none", "images", "reciprocal"):
            found[f"molflt {placement}, periodic {periodic}"] = ours(
                placement=placement, periodic=periodic
            )
    for periodic in ("none", "reciprocal"):
        found[f"molflt multiplicative, near field, periodic {periodic}"] = ours(
            placement="multiplicative", near_field=3.0, periodic=periodic
        )
    found["molflt softmax with exact mask"] = ours(backend="softmax")
    for kind in (PerformerAttention, SGFormerAttention, PolynormerAttention):
        found[f"PyG {kind.__name__}"] = theirs(kind)
        found[f"PyG {kind.__name__}, qkv_bias=True"] = theirs(kind, qkv_bias=True)
    return found


def crystal(atoms: int, generator: torch.Generator) -> Graph:
    """Random atoms in a triclinic cell of 15 Å^3 each, in the default dtype."""
    side = (15.0 * atoms) ** (1 / 3)
    cell = side * (torch.eye(3) + 0.1 * torch.randn(3, 3, generator=generator))
    x = torch.randn(atoms, CHANNELS, generator=generator)
    return Graph(x, torch.rand(atoms, 3, generator=generator) @ cell, cell)


def collated(graphs: list[Graph]) -> dict[str, Tensor]:
    """Arguments of a layer."""
    sizes = torch.tensor([len(graph.x) for graph in graphs])
    return {
        "x": torch.cat([graph.x for graph in graphs]),
        "pos": torch.cat([graph.pos for graph in graphs]),
        "batch": torch.arange(len(graphs)).repeat_interleave(sizes),
        "cell": torch.stack([graph.cell for graph in graphs]),
    }


@torch.no_grad()
def outputs(layer: nn.Module, graphs: list[Graph]) -> list[Tensor]:
    """Of each graph, from one batch."""
    return list(layer(**collated(graphs)).split([len(graph.x) for graph in graphs]))


def change(found: list[Tensor], expected: list[Tensor]) -> float:
    """Largest absolute difference of a graph's outputs over their largest absolute value."""
    pairs = zip(found, expected, strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def leak(layer: nn.Module, graphs: list[Graph]) -> float:
    """Largest gradient of one graph's outputs in another's atoms, relative to its own."""
    given = collated(graphs)
    leaves = [given[name].requires_grad_() for name in ("x", "pos")]
    out, worst = layer(**given), 0.0
    for index in range(len(graphs)):
        own = given["batch"] == index
        grads = torch.autograd.grad(
            out[own].square().sum(), leaves, retain_graph=True, allow_unused=True
        )
        for grad in grads:
            if grad is not None and grad[own].any():
                worst = max(worst, (grad[~own].abs().max() / grad[own].abs().max()).item())
    return worst


def measured(name: str, build: Callable[[], nn.Module], cases: int, large: int) -> Row:
    """The largest changes over random graphs and weights; a case is a batch of five graphs."""
    found = []
    for seed in range(cases):
        torch.manual_seed(seed)
        layer, generator = build().eval(), torch.Generator().manual_seed(seed)
        sizes = torch.randint(3, 30, (5,), generator=generator).tolist()
        graphs = [crystal(atoms, generator) for atoms in sizes]
        alone = [outputs(layer, [graph])[0] for graph in graphs]
        together = outputs(layer, graphs)
        padded = outputs(layer, [*graphs, crystal(large, generator)])[:-1]
        backwards = outputs(layer, graphs[::-1])[::-1]
        found.append(
            (
                change(together, alone),
                change(padded, alone),
                change(backwards, together),
                leak(layer, graphs),
            )
        )
    return Row(name, *(max(column) for column in zip(*found, strict=True)))


def rows(cases: int, large: int = LARGE) -> list[Row]:
    """Every mechanism, in float64 (by default dtype: SGFormerAttention makes tensors of it)."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return [measured(name, build, cases, large) for name, build in mechanisms().items()]
    finally:
        torch.set_default_dtype(before)


def table(found: list[Row], large: int = LARGE) -> str:
    """Markdown, a line per mechanism."""
    lines = [
        f"| mechanism | in a batch | beside {large} atoms | batch reversed | gradient across |",
        "|---|---|---|---|---|",
    ]
    for row in found:
        numbers = " | ".join("0" if value == 0 else f"{value:.1e}" for value in row[1:])
        lines.append(f"| {row.mechanism} | {numbers} |")
    return "\n".join(lines)


def main(words: list[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="directory of isolation.csv; none without it")
    parser.add_argument("--cases", type=int, default=10, help="batches of five random graphs")
    parser.add_argument("--quick", action="store_true", help="one small case, in seconds")
    options = parser.parse_args(words)
    large = 40 if options.quick else LARGE
    found = rows(1 if options.quick else options.cases, large)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        with (options.out / "isolation.csv").open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(Row._fields)
            writer.writerows(
                [row.mechanism, *(f"{value:.3g}" for value in row[1:])] for row in found
            )
    print(table(found, large))
    return 0


if __name__ == "__main__":
    sys.exit(main())
