"""Time and peak memory of one GraphAttention layer on atoms at random places, 12 Å^3 each.

atoms      one structure of 10^2 to 10^6 atoms
crystals   one cubic cell of 10^3 to 10^5 atoms and a multiplicative kernel, exact for pairs within
           5 Å; the far field uses nodes on the reciprocal lattice, the N x N matrix, or a mesh;
           processor time, and memory with the allocator's defaults
forms      graphs of equal size, at least 1,000 atoms in all; every placement of the positions is
           measured alone and in periodic cells: in linear time, through the N x N matrix, and as
           chosen by `auto`; processor time

See kit/layers.py for the measurement.
"""

import math
import time
from functools import partial
from typing import Any

import numpy as np
import torch
from kit import Benchmark
from kit.layers import (
    FORWARD,
    TRAINING,
    AtomLayer,
    DenseBatch,
    Mechanism,
    Study,
    measure_layers,
    processes_table,
    pyg_performer,
    trained,
)
from kit.rows import Rows, markdown, names
from kit.turns import paired
from torch import nn

DIM, HEADS, FEATURES, NODES = 128, 8, 64, 16
LEAST = 1000  # atoms of a batch in `forms`
KERNEL = {"position": "multiplicative"}
NEARBY = {**KERNEL, "near_field": 5.0}


def pyg(atoms: int, causal: bool) -> nn.Module:
    """PyG's Performer with the same number of features, of a ReLU."""
    return DenseBatch(pyg_performer(DIM, HEADS, FEATURES))


def graphs(atoms: int) -> int:
    """Number of graphs of that size in a batch of `forms`."""
    return -(-LEAST // atoms)


def layer(atoms: int, causal: bool = False, graphs: int = 1, **options: Any) -> AtomLayer:
    """A layer; exact softmax has no random features, and lattices have their own nodes."""
    cells = "periodic" in options
    if options.get("mixing") != "softmax":
        options = {"num_features": FEATURES, **options}
        if not cells and options["position"] != "none":
            options["position_options"] = {"num_nodes": NODES}
    return AtomLayer(atoms, graphs=graphs, cells=cells, **options)


def made(position: str, linear: bool = True, **options: Any) -> Mechanism:
    """A layer on one structure."""
    return Mechanism(partial(layer, position=position, **options), linear=linear)


ATOMS = {
    "performer": (made("none"), "-"),
    "additive": (made("spectral"), "-"),
    "multiplicative": (made("multiplicative"), "-"),
    "multiplicative, near field": (made("multiplicative", near_field=4.5), "-"),
    "PyG performer, relu": (Mechanism(pyg, "torch_geometric"), "--"),
    "softmax, no mask": (made("none", mixing="softmax"), ":"),  # SDPA keeps no N x N matrix
    "softmax, exact mask": (made("spectral", mixing="softmax", linear=False), ":"),
}
ATOMS_STUDY = Study(
    *("cost.graphs:ATOMS_STUDY", "atoms", {name: made for name, (made, _) in ATOMS.items()}),
    lambda atoms: torch.randn(atoms, DIM),
    {name: (color, line) for color, (name, (_, line)) in enumerate(ATOMS.items())},
    clock=time.perf_counter,
)
CRYSTALS: dict[str, tuple[dict[str, Any], str]] = {
    "nodes": ({"periodic": "reciprocal"}, "-"),
    "N × N": ({"periodic": "reciprocal", "mixing": "quadratic"}, ":"),
    "mesh": ({"periodic": "mesh"}, "-"),
    "nodes, 8 features": ({"periodic": "reciprocal", "num_features": 8}, "--"),
    "mesh, 8 features": ({"periodic": "mesh", "num_features": 8}, "--"),
}
CRYSTALS_STUDY = Study(
    *("cost.graphs:CRYSTALS_STUDY", "atoms"),
    {n: made(**{**NEARBY, "mixing": "linear", **options}) for n, (options, _) in CRYSTALS.items()},
    lambda atoms: torch.randn(atoms, DIM),
    {name: (color, line) for color, (name, (_, line)) in enumerate(CRYSTALS.items())},
    allocator={},
)
ENDS, MESHES = (1000, 100_000), ("mesh", "mesh, 8 features")
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


def batched(atoms: int, causal: bool, **options: Any) -> AtomLayer:
    return layer(atoms, graphs=graphs(atoms), **options)


FORMS_STUDY = Study(
    *("cost.graphs:FORMS_STUDY", "atoms"),
    {
        f"{kind}: {form}": Mechanism(partial(batched, mixing=form, **options))
        for kind, options in KINDS.items()
        for form in FORMS
    },
    lambda atoms: torch.randn(graphs(atoms) * atoms, DIM),
    budget=6.0,
    allocator={},
)


def table_atoms(rows: Rows) -> str:
    """Markdown: costs, and the memory of whole processes with a million atoms."""
    keys = [(name, 1_000_000, False, TRAINING) for name in ("performer", "additive")]
    return "\n\n".join(
        filter(None, [ATOMS_STUDY.table(rows), processes_table(rows, keys, "atoms")])
    )


def table_crystals(rows: Rows) -> str:
    """Markdown: costs of each pass, exponents of the meshes, and memory of large processes."""
    parts = [CRYSTALS_STUDY.table(rows, which) for which in names(rows, "pass")]
    lines = []
    for name in MESHES:
        low, high = (trained(rows, name, size) for size in ENDS)
        for what, quantity in (("time", "seconds"), ("memory", "peak_MiB")):
            if low and high:
                factor = float(np.median(high[quantity])) / float(np.median(low[quantity]))
                power = math.log(factor) / math.log(ENDS[1] / ENDS[0])
                lines.append([f"{what} of {name}, {ENDS[0]:,} to {ENDS[1]:,}", f"{power:.3g}"])
    parts += [markdown(["cost against atoms", "exponent"], lines)] if lines else []
    keys = [(name, ENDS[1], False, TRAINING) for name in MESHES]
    keys += [("mesh, 8 features", 1_000_000, False, FORWARD)]
    return "\n\n".join(filter(None, [*parts, processes_table(rows, keys, "atoms")]))


def excess(found: dict[str, list[float]]) -> float:
    """Time of `auto` in units of the better form's."""
    return max(paired(found["auto"], own) for form, own in found.items() if form != "auto")


def table_forms(rows: Rows) -> str:
    """Markdown: time of the matrix in units of linear time, and of `auto` of the better form."""
    sizes = names(rows, "length")
    times: dict[str, list[dict[str, list[float]]]] = {}
    for kind in KINDS:
        found = [{form: trained(rows, f"{kind}: {form}", n) for form in FORMS} for n in sizes]
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


DECADES = (100, 1000, 10_000, 100_000, 1_000_000)
CELLS = (100, 300, 1000, 3000, 10_000, 30_000, 100_000)
GRAPHS = (10, 30, 100, 300, 1000, 3000, 10_000)
LIMITS: dict[str, Any] = {"seconds": 200.0, "gigabytes": 8.0}
BENCHMARKS = {
    "atoms": Benchmark(
        "Time and peak memory of one GraphAttention layer against the number of atoms.",
        partial(measure_layers, ATOMS_STUDY, sizes=DECADES, seconds=1800.0, gigabytes=16.0),
        table_atoms,
        {"sizes": (500, 1000), "rounds": 1},
        *(partial(ATOMS_STUDY.draw, limit=16.0), ATOMS_STUDY),
    ),
    "crystals": Benchmark(
        "Time and peak memory of one layer of the recommended form on crystals.",
        partial(measure_layers, CRYSTALS_STUDY, sizes=CELLS, rounds=3, **LIMITS),
        table_crystals,
        {"sizes": (100, 200), "rounds": 1},
        *(partial(CRYSTALS_STUDY.draw, limit=8.0), CRYSTALS_STUDY),
    ),
    "forms": Benchmark(
        "Choice of `mixing: auto` between its two forms, 10 to 10^4 atoms.",
        partial(measure_layers, FORMS_STUDY, sizes=GRAPHS, rounds=5, gigabytes=8.0),
        table_forms,
        {"sizes": (10, 40), "rounds": 1, "mechanisms": ("Performer: linear", "Performer: auto")},
    ),
}
