"""Time and peak memory of one layer of the recommended form on crystals, 10^3 to 10^5 atoms.

A multiplicative kernel, exact for pairs within 5 Å, of a cubic cell with N atoms at random places,
12 Å^3 each. The far field uses nodes on the reciprocal lattice, the N x N matrix, or a mesh; see
kit/layers.py. Times are processor times; the allocator has its defaults.
"""

import math
from functools import partial

import numpy as np
import torch
from kit import layers
from kit.layers import FORWARD, TRAINING
from kit.rows import Rows, markdown, names

DIM, NEAR = 128, 5.0
LIMIT = 8.0  # GB
ENDS = 1000, 100_000  # atoms
MESHES = ("mesh", "mesh, 8 features")
QUICK = {"sizes": (100, 200), "rounds": 1}


def made(periodic: str, features: int = 64, mixing: str = "linear") -> layers.Mechanism:
    """A layer of molflt."""
    options = {"periodic": periodic, "num_features": features, "mixing": mixing}
    form = {"position": "multiplicative", "near_field": NEAR, "cells": True}
    build = partial(layers.AtomLayer, **form, **options)
    return layers.Mechanism(build, linear=periodic == "mesh")


MECHANISMS = {
    "nodes": made("reciprocal"),
    "N × N": made("reciprocal", mixing="quadratic"),
    "mesh": made("mesh"),
    "nodes, 8 features": made("reciprocal", 8),
    "mesh, 8 features": made("mesh", 8),
}
STUDY = layers.Study(
    *("cost.crystals", "atoms", MECHANISMS, lambda atoms: torch.randn(atoms, DIM)),
    styles=dict(zip(MECHANISMS, enumerate(["-", ":", "-", "--", "--"]), strict=True)),
    allocator={},
)
measure = partial(
    *(layers.measure_layers, STUDY),
    sizes=(100, 300, 1000, 3000, 10_000, 30_000, 100_000),
    rounds=3,
    seconds=200.0,
    gigabytes=LIMIT,
)
draw = partial(STUDY.draw, limit=LIMIT)
LARGE = [(name, ENDS[1], False, TRAINING) for name in MESHES]
LARGE += [("mesh, 8 features", 1_000_000, False, FORWARD)]


def table(rows: Rows) -> str:
    """Markdown: costs of each pass, exponents of the meshes, and memory of large processes."""
    parts = [STUDY.table(rows, which) for which in names(rows, "pass")]
    lines = []
    for name in MESHES:
        low, high = (layers.trained(rows, name, size) for size in ENDS)
        for what, quantity in (("time", "seconds"), ("memory", "peak_MiB")):
            if low and high:
                factor = float(np.median(high[quantity])) / float(np.median(low[quantity]))
                power = math.log(factor) / math.log(ENDS[1] / ENDS[0])
                lines.append([f"{what} of {name}, {ENDS[0]:,} to {ENDS[1]:,}", f"{power:.3g}"])
    parts += [markdown(["cost against atoms", "exponent"], lines)] if lines else []
    return "\n\n".join(filter(None, [*parts, layers.processes_table(rows, LARGE, STUDY.unit)]))
