"""Time of the form that `mixing: auto` chooses, and of both forms, for 10 to 10^4 atoms.

The inputs are graphs of equal size with at least 1,000 atoms in total, at random positions with 12
Å^3 per atom. Positions enter as additive masks, multiplicative kernels or not at all, without and
with periodic cells. Each layer is measured in the linear form, with the N x N matrix, and in the
form that `auto` chooses. Times are CPU times. kit/layers.py describes the measurement.
"""

from functools import partial
from typing import Any

import torch
from kit import layers
from kit.layers import AtomLayer, Mechanism
from kit.rows import Rows, markdown, names
from kit.turns import paired

LEAST = 1000  # atoms in a batch
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
        f"{kind}: {form}": Mechanism(partial(AtomLayer, least=LEAST, mixing=form, **options))
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


def excess(found: dict[str, list[float]]) -> float:
    """Returns the time of `auto` divided by the time of the faster form."""
    return max(paired(found["auto"], own) for form, own in found.items() if form != "auto")


def table(rows: Rows) -> str:
    """Returns time ratios: of the two forms, and of `auto` to the faster form."""
    sizes = names(rows, "length")
    times: dict[str, list[dict[str, list[float]]]] = {}
    for kind in KINDS:
        found = [{f: layers.trained(rows, f"{kind}: {f}", n) for f in FORMS} for n in sizes]
        times[kind] = [{form: one["seconds"] for form, one in own.items() if one} for own in found]
    parts = []
    for title, least, ratio in (
        ("N × N / linear", 3, lambda found: paired(found["quadratic"], found["linear"])),
        ("auto / the better form", 2, excess),
    ):
        lines = []
        for kind, every in times.items():
            shown = [own if "auto" in own and len(own) >= least else None for own in every]
            if any(shown):
                lines.append([kind, *(f"{ratio(own):.2f}" if own else "–" for own in shown)])
        parts.append(markdown([f"{title}, atoms per graph", *sizes], lines))
    return "\n\n".join(parts)
