"""Time and peak memory of one GraphAttention layer against the number of atoms, 10^2 to 10^6.

One structure of N atoms at random places, 12 Å^3 each as in a metal; see kit/layers.py.
"""

import time
from functools import partial
from typing import Any

import torch
from kit import layers
from kit.rows import Rows
from torch import nn

DIM, HEADS, FEATURES, NODES, NEAR = 128, 8, 64, 16, 4.5
LIMIT = 16.0  # GB
QUICK = {"sizes": (500, 1000), "rounds": 1}


def pyg(atoms: int, causal: bool) -> nn.Module:
    """PyG's Performer with the same number of features, of a ReLU."""
    return layers.DenseBatch(layers.pyg_performer(DIM, HEADS, FEATURES))


def made(position: str, linear: bool = True, **options: Any) -> layers.Mechanism:
    """A layer of molflt; exact softmax has no random features."""
    if options.get("mixing") != "softmax":
        options["num_features"] = FEATURES
        if position != "none":
            options["position_options"] = {"num_nodes": NODES}
    build = partial(layers.AtomLayer, position=position, **options)
    return layers.Mechanism(build, linear=linear)


MECHANISMS = {
    "performer": made("none"),
    "additive": made("spectral"),
    "multiplicative": made("multiplicative"),
    "multiplicative, near field": made("multiplicative", near_field=NEAR),
    "PyG performer, relu": layers.Mechanism(pyg, "torch_geometric"),
    "softmax, no mask": made("none", mixing="softmax"),  # SDPA keeps no N x N matrix
    "softmax, exact mask": made("spectral", mixing="softmax", linear=False),
}
STUDY = layers.Study(
    *("cost.atoms", "atoms", MECHANISMS, lambda n: torch.randn(n, DIM)),
    styles=dict(zip(MECHANISMS, enumerate(["-"] * 4 + ["--", ":", ":"]), strict=True)),
    clock=time.perf_counter,
)
measure = partial(
    *(layers.measure_layers, STUDY),
    sizes=(100, 1000, 10_000, 100_000, 1_000_000),
    seconds=1800.0,
    gigabytes=LIMIT,
)
draw = partial(STUDY.draw, limit=LIMIT)
LARGE = [(name, 1_000_000, False, layers.TRAINING) for name in ("performer", "additive")]


def table(rows: Rows) -> str:
    """Markdown: costs, and the memory of whole processes with a million atoms."""
    parts = STUDY.table(rows), layers.processes_table(rows, LARGE, STUDY.unit)
    return "\n\n".join(filter(None, parts))
