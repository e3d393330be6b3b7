"""Time of linear attention, the N x N matrix, and the form that `auto` selects, by graph size.

The inputs are graphs of equal size, from 10 to 10^4 atoms, with at least 1,000 atoms in total, at
random positions with 12 Å^3 per atom. Positions are used in additive masks, in multiplicative
kernels or not at all, with and without periodic cells. Each layer is measured in the linear form,
with the N x N matrix, and in the form that `auto` selects. Times are CPU times. See kit/layers.py
for the measurement.
"""

from functools import partial
from typing import Any

import torch
from kit import layers
from kit.layers import AtomLayer
from kit.rows import Rows, markdown, names

LEAST = 1000  # minimum number of atoms in a batch
KERNEL = {"position": "multiplicative"}
NEARBY = {**KERNEL, "near_field": 5.0}
FORMS = "linear", "quadratic", "auto"
KINDS: dict[str, dict[str, Any]] = {
    "Performer": {"position": "none"},
    "additive": {"position": "spectral"},
    "multiplicative": KERNEL,
    "multiplicative, near field": NEARBY,
    "cells, additive": {"position": "spectral", "periodic": "reciprocal"},
    "cells, near field": {**NEARBY, "periodic": "reciprocal"},
    "cells, near field, 8 features": {**NEARBY, "periodic": "reciprocal", "num_features": 8},
    "cells, mesh": {**NEARBY, "periodic": "mesh"},
}
STUDY = layers.Study(
    *("cost.forms", "atoms"),
    {
        f"{kind}: {form}": partial(AtomLayer, least=LEAST, mixing=form, **options)
        for kind, options in KINDS.items()
        for form in FORMS
    },
    lambda atoms: torch.randn(-(-LEAST // atoms) * atoms, layers.DIM),
    budget=6.0,
    allocator={},
)
QUICK = {"sizes": (10, 40), "rounds": 1, "mechanisms": ("Performer: linear", "Performer: auto")}
measure = partial(
    layers.measure_layers,
    STUDY,
    sizes=(10, 30, 100, 300, 1000, 3000, 10_000),
    rounds=5,
    gigabytes=8.0,
)


def table(rows: Rows) -> str:
    """Formats time ratios: the N x N matrix to the linear form, and `auto` to the faster form."""
    sizes, parts = names(rows, "length"), []
    ratios = {"N × N / linear": [("quadratic", "linear")]}
    ratios["auto / the better form"] = [("auto", "linear"), ("auto", "quadratic")]
    for title, pairs in ratios.items():
        lines = []
        for kind in KINDS:
            every = [[ratio(rows, kind, size, *pair) for pair in pairs] for size in sizes]
            known = [[value for value in own if value is not None] for own in every]
            if any(known):
                lines.append([kind, *(f"{max(own):.2f}" if own else "–" for own in known)])
        parts.append(markdown([f"{title}, atoms per graph", *sizes], lines))
    return "\n\n".join(parts)


def ratio(rows: Rows, kind: str, size: int, one: str, other: str) -> float | None:
    """Returns the time of `one` divided by the time of `other`; None if not measured."""
    return layers.cost_ratio(rows, "time", f"{kind}: {one}", f"{kind}: {other}", size)
