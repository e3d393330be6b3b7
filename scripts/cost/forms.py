"""Choice of `mixing: auto` between its two forms, 10 to 10^4 atoms.

One layer on graphs of equal size, at least 1,000 atoms in all, at random places, 12 Å^3 each. Every
placement of the positions is measured alone and in periodic cells: in linear time, through the N x
N matrix, and as chosen by `auto`. Processor time of forward and backward; see kit/layers.py.
"""

from functools import partial
from typing import Any

import torch
from kit import layers
from kit.rows import Rows, markdown, names
from kit.turns import paired

DIM, FEATURES, NODES, NEAR = 128, 64, 16, 5.0
ATOMS = 1000  # at least, of a batch
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


def layer(atoms: int, causal: bool = False, **options: Any) -> layers.AtomLayer:
    """A layer of molflt on the graphs of a batch."""
    cells = "periodic" in options
    if not cells and options["position"] != "none":
        options["position_options"] = {"num_nodes": NODES}
    options = {"num_features": FEATURES, **options}
    return layers.AtomLayer(atoms, graphs=graphs(atoms), cells=cells, **options)


MECHANISMS = {
    f"{kind}: {form}": layers.Mechanism(partial(layer, mixing=form, **options))
    for kind, options in KINDS.items()
    for form in FORMS
}
STUDY = layers.Study(
    *("cost.forms", "atoms", MECHANISMS, lambda atoms: torch.randn(graphs(atoms) * atoms, DIM)),
    budget=6.0,
    allocator={},
)
measure = partial(
    *(layers.measure_layers, STUDY),
    sizes=(10, 30, 100, 300, 1000, 3000, 10_000),
    rounds=5,
    seconds=60.0,
    gigabytes=8.0,
)


def seconds(rows: Rows, kind: str, atoms: int) -> dict[str, list[float]]:
    """Times of the forms that were measured."""
    found = {form: layers.trained(rows, f"{kind}: {form}", atoms) for form in FORMS}
    return {form: own["seconds"] for form, own in found.items() if own}


def excess(found: dict[str, list[float]]) -> float:
    """Time of `auto` in units of the better form's."""
    return max(paired(found["auto"], own) for form, own in found.items() if form != "auto")


def table(rows: Rows) -> str:
    """Markdown: time of the matrix in units of linear time, and of `auto` of the better form."""
    sizes = names(rows, "length")
    parts = []
    for title, least, ratio in (
        ("N × N / linear", 3, lambda found: paired(found["quadratic"], found["linear"])),
        ("auto / the better form", 2, excess),
    ):
        lines = []
        for kind in KINDS:
            found = [seconds(rows, kind, atoms) for atoms in sizes]
            shown = ["auto" in own and len(own) >= least for own in found]
            if any(shown):
                pairs = zip(found, shown, strict=True)
                lines.append([kind, *(f"{ratio(own):.2f}" if show else "–" for own, show in pairs)])
        parts.append(markdown([f"{title}, atoms per graph", *sizes], lines))
    return "\n\n".join(parts)
