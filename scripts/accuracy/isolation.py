"""Influence of other graphs in the same batch, in layers of molflt and PyTorch Geometric.

PyG's modules are called with the result of `to_dense_batch`, as in `GPSConv` and `SGFormer`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from kit.layers import DenseBatch
from kit.rows import Row, Rows, markdown
from torch import Tensor, nn
from torch_geometric.nn.attention import PerformerAttention, PolynormerAttention, SGFormerAttention

from molflt.graph import GraphAttention

DIM, HEADS = 32, 4
COLUMNS = ("batch", "padding", "order", "gradient")
QUICK = {"cases": 1, "large": 40}
Graph = tuple[Tensor, Tensor, Tensor]  # features, positions, cell


def theirs(kind: type[nn.Module], **options: Any) -> nn.Module:
    """Returns a module from PyG with heads that are as wide as those of molflt's layers."""
    return DenseBatch(kind(DIM, HEADS, head_channels=DIM // HEADS, **options))


def mechanisms() -> dict[str, Callable[[], nn.Module]]:
    """Returns functions that build the layers, keyed by mechanism."""
    ours = partial(GraphAttention, DIM, HEADS)
    few = partial(ours, num_features=32)
    schemes: dict[str, dict[str, Any]] = {
        "none": {"periodic": "none"},
        "images": {"periodic": "images", "image_cutoff": 4.0},
        "reciprocal": {"periodic": "reciprocal", "max_frequency": 0.2},
    }
    found: dict[str, Callable[[], nn.Module]] = {"molflt Performer": partial(few, position="none")}
    for label, position in (("additive", "spectral"), ("multiplicative", "multiplicative")):
        for periodic, options in schemes.items():
            name = f"molflt {label}, periodic {periodic}"
            found[name] = partial(few, position=position, **options)
    for periodic in ("none", "reciprocal"):
        found[f"molflt multiplicative, near field, periodic {periodic}"] = partial(
            few, position="multiplicative", near_field=3.0, **schemes[periodic]
        )
    found["molflt softmax with exact mask"] = partial(ours, mixing="softmax", periodic="none")
    for kind in (PerformerAttention, SGFormerAttention, PolynormerAttention):
        found[f"PyG {kind.__name__}"] = partial(theirs, kind)
        found[f"PyG {kind.__name__}, qkv_bias=True"] = partial(theirs, kind, qkv_bias=True)
    return found


def crystal(atoms: int, generator: torch.Generator) -> Graph:
    """Returns features and positions of random atoms, and their cell (about 15 Å^3 per atom)."""
    side = (15.0 * atoms) ** (1 / 3)
    cell = side * (torch.eye(3) + 0.1 * torch.randn(3, 3, generator=generator))
    x = torch.randn(atoms, DIM, generator=generator)
    return x, torch.rand(atoms, 3, generator=generator) @ cell, cell


def collated(graphs: list[Graph]) -> dict[str, Tensor]:
    """Batches graphs and returns the batch as keyword arguments for a layer."""
    x, pos, cells = zip(*graphs, strict=True)
    batch = torch.arange(len(graphs)).repeat_interleave(torch.tensor([len(own) for own in x]))
    return {"x": torch.cat(x), "pos": torch.cat(pos), "batch": batch, "cell": torch.stack(cells)}


@torch.no_grad()
def outputs(layer: nn.Module, graphs: list[Graph]) -> list[Tensor]:
    """Computes the outputs of all graphs in one batch and returns a tensor for each graph."""
    return list(layer(**collated(graphs)).split([len(x) for x, _, _ in graphs]))


def change(found: list[Tensor], expected: list[Tensor]) -> float:
    """Returns the largest relative change in outputs over all graphs."""
    pairs = zip(found, expected, strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def leak(layer: nn.Module, graphs: list[Graph]) -> float:
    """Measures how much the outputs of a graph depend on the inputs of other graphs.

    Returns the largest gradient with respect to inputs of other graphs, divided by the largest
    gradient with respect to inputs of the same graph.
    """
    given = collated(graphs)
    leaves = [given[name].requires_grad_() for name in ("x", "pos")]
    out, worst = layer(**given), 0.0
    for index in range(len(graphs)):
        own = given["batch"] == index
        total = out[own].square().sum()
        for grad in torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True):
            if grad is not None and grad[own].any():
                worst = max(worst, (grad[~own].abs().max() / grad[own].abs().max()).item())
    return worst


def changes(name: str, build: Callable[[], nn.Module], cases: int, large: int) -> Row:
    """Returns a row with the largest changes over several batches of five random graphs."""
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
        pairs = ((together, alone), (padded, alone), (backwards, together))
        found.append([*(change(*pair) for pair in pairs), leak(layer, graphs)])
    largest = map(max, zip(*found, strict=True))
    return {"mechanism": name, "large": large, **dict(zip(COLUMNS, largest, strict=True))}


def measure(cases: int = 10, large: int = 200) -> Rows:
    """Returns one row per layer, measured in float64.

    The default dtype is changed to float64, because SGFormerAttention uses the default dtype.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return [changes(name, build, cases, large) for name, build in mechanisms().items()]
    finally:
        torch.set_default_dtype(before)


def table(rows: Rows) -> str:
    large = rows[0]["large"]
    head = ["mechanism", "in a batch", f"with {large} atoms", "batch reversed", "gradient across"]
    lines = [
        [row["mechanism"], *(f"{row[c]:.1e}" if row[c] else "0" for c in COLUMNS)] for row in rows
    ]
    return markdown(head, lines)
