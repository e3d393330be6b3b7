"""Time and peak memory of one layer of the recommended form on crystals, 10^3 to 10^5 atoms.

A multiplicative kernel, exact for pairs within 5 Å, of one cubic cell with N atoms at random
places, 12 Å^3 each: its far field by nodes on the reciprocal lattice, by the N x N matrix, or on a
mesh; see kit/layers.py. Processor time, and memory with the allocator as users have it.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from kit.layers import (
    FORWARD,
    TRAINING,
    AtomLayer,
    Mechanism,
    Study,
    cost_table,
    draw_costs,
    measure_layers,
)
from kit.rows import Promise, Rows, names, pick

DIM, NEAR = 128, 5.0
LIMIT = 8.0  # GB
ENDS = 1000, 100_000  # atoms
MOST, ROOM = 1_000_000, 16.0  # atoms of a forward pass, GB
QUICK = {"sizes": (100, 200), "rounds": 1}


def made(periodic: str, features: int = 64, mixing: str = "linear") -> Mechanism:
    """A layer of ours."""
    options = {"periodic": periodic, "num_features": features, "mixing": mixing}
    form = {"position": "multiplicative", "near_field": NEAR, "cells": True}
    return Mechanism(partial(AtomLayer, **form, **options), linear=periodic == "mesh")


MECHANISMS = {
    "nodes": made("reciprocal"),
    "N × N": made("reciprocal", mixing="quadratic"),
    "mesh": made("mesh"),
    "nodes, 8 features": made("reciprocal", 8),
    "mesh, 8 features": made("mesh", 8),
}
STYLES = dict(zip(MECHANISMS, enumerate(["-", ":", "-", "--", "--"]), strict=True))
STUDY = Study(
    *("cost.crystals", MECHANISMS, lambda atoms: torch.randn(atoms, DIM)),
    allocator={},
)
measure = partial(
    *(measure_layers, STUDY),
    sizes=(100, 300, 1000, 3000, 10_000, 30_000, 100_000),
    rounds=3,
    seconds=200.0,
    gigabytes=LIMIT,
)
draw = partial(draw_costs, unit="atoms", styles=STYLES, limit=LIMIT)


def growth(rows: Rows, quantity: str, name: str) -> float | None:
    """Exponent of a cost of training from 10^3 to 10^5 atoms; None unless both were measured."""
    found = [
        pick(rows, mechanism=name, length=size, note=None, **{"pass": TRAINING}) for size in ENDS
    ]
    if not all(found):
        return None
    low, high = (float(np.median(own[0][quantity])) for own in found)
    return math.log(high / low) / math.log(ENDS[1] / ENDS[0])


def table(rows: Rows) -> str:
    """Costs of training, and of forward passes where they were measured."""
    passes = names(rows, "pass")
    return "\n\n".join(cost_table(rows, "atoms", one) for one in passes)


def whole(rows: Rows, name: str, atoms: int, which: str) -> float | None:
    """GB of the process that made a pass over so many atoms; None unless it was measured."""
    found = pick(rows, mechanism=name, length=atoms, note=None, **{"pass": which})
    return float(found[0]["process_MiB"]) * 2**20 / 1e9 if found else None


PROMISES = [
    Promise(
        f"exponent of {what} of {name}, {ENDS[0]:,} to {ENDS[1]:,} atoms",
        lambda rows, quantity=quantity, name=name: growth(rows, quantity, name),
        most=1.15,
    )
    for name in ("mesh", "mesh, 8 features")
    for what, quantity in (("time", "seconds"), ("memory", "peak_MiB"))
]
PROMISES += [
    Promise(
        f"GB of the process of {name} with {atoms:,} atoms, {which}",
        partial(whole, name=name, atoms=atoms, which=which),
        most=most,
    )
    for name, atoms, which, most in (
        ("mesh", ENDS[1], TRAINING, LIMIT),
        ("mesh, 8 features", ENDS[1], TRAINING, LIMIT),
        ("mesh, 8 features", MOST, FORWARD, ROOM),
    )
]
