"""Choice of `mixing: auto` between its two forms, 10 to 10^4 atoms.

One layer on graphs of equal size, at least 1,000 atoms in all, at random places, 12 Å^3 each; every
placement of the positions, alone and in periodic cells, in linear time, through the N x N matrix,
and as `auto` chooses. Processor time of forward and backward; see kit/layers.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from kit.layers import TRAINING, AtomLayer, Mechanism, Study, measure_layers
from kit.rows import Promise, Rows, markdown, names, pick
from kit.turns import paired

DIM, FEATURES, NODES, NEAR = 128, 64, 16, 5.0
ATOMS = 1000  # at least, of a batch
MOST = 1.2
QUICK = {"sizes": (10, 40), "rounds": 1, "mechanisms": ("Performer: linear", "Performer: auto")}

FORMS = "linear", "quadratic", "auto"
KERNEL = {"position": "multiplicative"}
NEARBY = {**KERNEL, "near_field": NEAR}
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


def graphs(atoms: int) -> int:
    """Number of graphs of that size."""
    return -(-ATOMS // atoms)


def layer(atoms: int, causal: bool = False, **options: Any) -> AtomLayer:
    """A layer of ours on the graphs of a batch."""
    cells = "periodic" in options
    if not cells and options["position"] != "none":
        options["position_options"] = {"num_nodes": NODES}
    options = {"num_features": FEATURES, **options}
    return AtomLayer(atoms, graphs=graphs(atoms), cells=cells, **options)


MECHANISMS = {
    f"{kind}: {form}": Mechanism(partial(layer, mixing=form, **options), linear=form == "linear")
    for kind, options in KINDS.items()
    for form in FORMS
}
STUDY = Study(
    *("cost.forms", MECHANISMS, lambda atoms: torch.randn(graphs(atoms) * atoms, DIM)),
    budget=6.0,
    allocator={},
)
measure = partial(
    *(measure_layers, STUDY),
    sizes=(10, 30, 100, 300, 1000, 3000, 10_000),
    rounds=5,
    seconds=60.0,
    gigabytes=8.0,
)


def seconds(rows: Rows, kind: str, atoms: int) -> dict[str, list[float]]:
    """Times of each form that was measured."""
    found = {
        form: pick(rows, mechanism=f"{kind}: {form}", length=atoms, note=None, **{"pass": TRAINING})
        for form in FORMS
    }
    return {form: own[0]["seconds"] for form, own in found.items() if own}


def cases(rows: Rows) -> Iterator[tuple[str, int, dict[str, list[float]]]]:
    """Kind, size and seconds, where both `auto` and something to compare it with were measured."""
    for kind in KINDS:
        for atoms in names(rows, "length"):
            found = seconds(rows, kind, atoms)
            if "auto" in found and len(found) > 1:
                yield kind, atoms, found


def excess(found: dict[str, list[float]]) -> float:
    """Time of `auto` in units of the best form's."""
    auto = found["auto"]
    return max(paired(auto, own) for form, own in found.items() if form != "auto")


def table(rows: Rows) -> str:
    """Markdown: time of the matrix in units of sums in linear time, and of `auto` of the best."""
    sizes = names(rows, "length")
    parts = []
    for title, ratio in (
        ("N × N / linear", lambda f: paired(f["quadratic"], f["linear"])),
        ("auto / the better form", excess),
    ):
        cells: dict[str, dict[int, str]] = {kind: {} for kind in KINDS}
        for kind, atoms, found in cases(rows):
            if title[0] == "a" or len(found) == len(FORMS):
                cells[kind][atoms] = f"{ratio(found):.2f}"
        lines = [[kind, *(own.get(n, "–") for n in sizes)] for kind, own in cells.items() if own]
        parts.append(markdown([f"{title}, atoms per graph", *sizes], lines))
    return "\n\n".join(parts)


def worst(rows: Rows) -> float | None:
    """The largest excess of `auto` over the best form; None below 1,000 atoms a graph."""
    if max(names(rows, "length"), default=0) < 1000:
        return None  # one quick round of small graphs says nothing about time
    return max((excess(found) for *_, found in cases(rows)), default=None)


PROMISES = [
    Promise("auto / the better form, all kinds and sizes", worst, most=MOST),
]
