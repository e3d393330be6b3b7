"""Time and peak memory of one GraphAttention layer against the number of atoms.

The input is one structure of 10^2 to 10^6 atoms at random positions, with 12 Å^3 per atom. See
kit/layers.py for the measurement.
"""

import time
from functools import partial

import torch
from kit import layers
from kit.layers import TRAINING, AtomLayer
from kit.rows import Rows
from torch import nn

KERNEL = {"position": "multiplicative"}


def pyg(atoms: int, causal: bool) -> nn.Module:
    """Builds PyG's Performer with as many ReLU features as molflt's layers have random features."""
    return layers.DenseBatch(layers.pyg_performer(layers.DIM, layers.HEADS, layers.FEATURES))


LAYERS = {
    "performer": (partial(AtomLayer, position="none"), "-"),
    "additive": (partial(AtomLayer, position="spectral"), "-"),
    "multiplicative": (partial(AtomLayer, **KERNEL), "-"),
    "multiplicative, near field": (partial(AtomLayer, **KERNEL, near_field=4.5), "-"),
    "PyG performer, relu": (pyg, "--"),
    # SDPA does not store an N x N matrix without a mask
    "softmax, no mask": (partial(AtomLayer, position="none", mixing="softmax"), ":"),
    "softmax, exact mask": (partial(AtomLayer, position="spectral", mixing="softmax"), ":"),
}
STUDY = layers.Study(
    *("cost.atoms", "atoms", {name: layer for name, (layer, _) in LAYERS.items()}),
    lambda atoms: torch.randn(atoms, layers.DIM),
    {name: (color, line) for color, (name, (_, line)) in enumerate(LAYERS.items())},
    clock=time.perf_counter,
)
MILLION = [(name, 1_000_000, False, TRAINING) for name in ("performer", "additive")]
CHEAP = ("multiplicative", "softmax, exact mask")
QUICK = {"sizes": (500, 1000), "rounds": 1, "mechanisms": CHEAP}
measure = partial(
    layers.measure_layers,
    STUDY,
    sizes=(100, 1000, 10_000, 100_000, 1_000_000),
    seconds=1800.0,
    gigabytes=16.0,
)
draw = partial(STUDY.draw, limit=16.0)


def table(rows: Rows) -> str:
    """Formats the costs of a layer, and the peak memory of processes with a million atoms."""
    parts = [layers.cost_table(rows, "atoms"), layers.processes_table(rows, MILLION, "atoms")]
    return "\n\n".join(filter(None, parts))
