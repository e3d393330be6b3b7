"""Time and peak memory of one GraphAttention layer against the number of atoms, 10^2 to 10^6.

One structure of N atoms at random places, 12 Å^3 each as in a metal; see kit/layers.py.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from kit.layers import (
    AtomLayer,
    DenseBatch,
    Mechanism,
    Study,
    cost_table,
    draw_costs,
    measure_layers,
    pyg_performer,
)
from kit.rows import Promise, Rows, pick
from torch import nn

DIM, HEADS, FEATURES, NODES, NEAR = 128, 8, 64, 16, 4.5
LIMIT = 16.0  # GB
QUICK = {"sizes": (500, 1000), "rounds": 1}


def pyg(atoms: int, causal: bool) -> nn.Module:
    """PyTorch Geometric's Performer with as many features as ours, of a ReLU."""
    return DenseBatch(pyg_performer(DIM, HEADS, FEATURES))


def made(position: str, linear: bool = True, **options: Any) -> Mechanism:
    """A layer of ours; exact softmax has no random features."""
    if options.get("mixing") != "softmax":
        options["num_features"] = FEATURES
        if position != "none":
            options["position_options"] = {"num_nodes": NODES}
    return Mechanism(partial(AtomLayer, position=position, **options), linear=linear)


MECHANISMS = {
    "performer": made("none"),
    "additive": made("spectral"),
    "multiplicative": made("multiplicative"),
    "multiplicative, near field": made("multiplicative", near_field=NEAR),
    "PyG performer, relu": Mechanism(pyg, "torch_geometric"),
    "softmax, no mask": made("none", mixing="softmax"),  # SDPA keeps no N x N matrix
    "softmax, exact mask": made("spectral", mixing="softmax", linear=False),
}
STYLES = dict(zip(MECHANISMS, enumerate(["-"] * 4 + ["--", ":", ":"]), strict=True))
STUDY = Study("cost.atoms", MECHANISMS, lambda n: torch.randn(n, DIM), clock=time.perf_counter)
measure = partial(
    *(measure_layers, STUDY),
    sizes=(100, 1000, 10_000, 100_000, 1_000_000),
    seconds=1800.0,
    gigabytes=LIMIT,
)
table = partial(cost_table, unit="atoms")
draw = partial(draw_costs, unit="atoms", styles=STYLES, limit=LIMIT)


def gigabytes(rows: Rows, name: str) -> float | None:
    """Peak memory at 10^6 atoms; infinite if it was skipped."""
    found = pick(rows, mechanism=name, length=1_000_000)
    if not found:
        return None
    return float("inf") if found[0]["note"] else found[0]["process_MiB"] * 2**20 / 1e9


PROMISES = [
    Promise(
        f"GB of the process of {name} with 10^6 atoms",
        lambda rows, name=name: gigabytes(rows, name),
        most=LIMIT,
    )
    for name in ("performer", "additive")
]
