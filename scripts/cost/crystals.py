"""Time and peak memory of one GraphAttention layer against the size of a crystal.

The input is one cubic cell of 10^2 to 10^5 atoms at random positions, with 12 Å^3 per atom. The
layer has a multiplicative kernel that is exact for pairs within 5 Å. Its far field uses nodes on
the reciprocal lattice, the N x N matrix or a mesh. Times are CPU times, and memory is measured with
the default settings of the allocator. See kit/layers.py for the measurement.
"""

from functools import partial
from typing import Any

import torch
from kit import layers
from kit.layers import FORWARD, TRAINING, AtomLayer
from kit.rows import Rows, exponent, markdown, names

KERNEL = {"position": "multiplicative", "near_field": 5.0, "mixing": "linear"}
LAYERS: dict[str, tuple[dict[str, Any], str]] = {
    "nodes": ({"periodic": "reciprocal"}, "-"),
    "N × N": ({"periodic": "reciprocal", "mixing": "quadratic"}, ":"),
    "mesh": ({"periodic": "mesh"}, "-"),
    "nodes, 8 features": ({"periodic": "reciprocal", "num_features": 8}, "--"),
    "mesh, 8 features": ({"periodic": "mesh", "num_features": 8}, "--"),
}
STUDY = layers.Study(
    *("cost.crystals", "atoms"),
    {name: partial(AtomLayer, **{**KERNEL, **own}) for name, (own, _) in LAYERS.items()},
    lambda atoms: torch.randn(atoms, layers.DIM),
    {name: (color, line) for color, (name, (_, line)) in enumerate(LAYERS.items())},
    allocator={},
)
ENDS, MESHES = (1000, 100_000), ("mesh", "mesh, 8 features")
LARGE = [(name, ENDS[1], False, TRAINING) for name in MESHES]
LARGE.append(("mesh, 8 features", 1_000_000, False, FORWARD))
QUICK = {"sizes": (100, 200), "rounds": 1, "mechanisms": ("mesh",)}
measure = partial(
    layers.measure_layers,
    STUDY,
    sizes=(100, 300, 1000, 3000, 10_000, 30_000, 100_000),
    rounds=3,
    seconds=200.0,
    gigabytes=8.0,
)
draw = partial(STUDY.draw, limit=8.0)


def table(rows: Rows) -> str:
    """Formats the costs of each pass, exponents of meshes, and the memory for large crystals."""
    parts = [layers.cost_table(rows, "atoms", which) for which in names(rows, "pass")]
    lines = []
    for name in MESHES:
        for what, quantity in (("time", "seconds"), ("memory", "MiB")):
            ends = [point for point in layers.curve(rows, name, quantity) if point[0] in ENDS]
            if len(ends) == len(ENDS):
                label = f"{what} of {name}, {ENDS[0]:,} to {ENDS[1]:,}"
                lines.append([label, f"{exponent(ends):.3g}"])
    parts += [markdown(["cost against atoms", "exponent"], lines)] if lines else []
    parts.append(layers.processes_table(rows, LARGE, "atoms"))
    return "\n\n".join(filter(None, parts))
