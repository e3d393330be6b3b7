"""Time and accuracy of machine code from AOTInductor, compared with the model.

Each form is compiled once per precision for any number of graphs and atoms; with the N x N matrix,
the model computes graphs of more than 2,048 atoms. Times are measured in float32 and differences in
float64. Times include neighbors, reciprocal nodes and padding, but not the collation of graphs.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kit.layers import crystals
from kit.rows import Row, Rows, choose, markdown
from kit.turns import paired, turns
from torch_geometric.data import Batch

from molflt.graph import EnergyRegressor
from molflt.graph.computation import CompiledEnergies, compile_energies

Pair = tuple[EnergyRegressor, CompiledEnergies]
DIM, HEADS, LAYERS = 128, 8, 4
RECOMMENDED = {"position": "multiplicative", "periodic": "reciprocal", "near_field": 5.0}
FORMS: dict[str, dict[str, Any]] = {
    "performer": {"position": "none"},
    "FLT": {"position": "spectral", "periodic": "none"},
    "reciprocal, near field": RECOMMENDED,
}
OC20 = "32 of 20 to 225"
BATCHES = {
    "1 of 1": [1],
    "1 of 60": [60],
    OC20: [20 + 205 * (13 * n % 32) // 31 for n in range(32)],
    "1 of 1000": [1000],
    "1 of 10000": [10_000],
    "1 of 100000": [100_000],
    "2 of 2 and 3": [2, 3],
}
PRECISIONS = ("float32", "float64")
CLASSES = 4  # number of batches into which graphs are sorted by size, as in `molflt predict`
FAR = ("1 of 10000", "1 of 100000")  # too large for the N x N matrix of the recommended form
QUICK = {"forms": ("performer",), "batches": ("2 of 2 and 3",), "rounds": 1, "dim": 8, "layers": 1}


def structures(sizes: list[int]) -> list[Batch]:
    """Returns batches of random crystals; the crystals in a batch are of similar size."""
    made = crystals(sorted(sizes))
    each = -(-len(made) // CLASSES)
    return [Batch.from_data_list(made[i : i + each]) for i in range(0, len(made), each)]


def all_energies(model: Callable[[Batch], Any], batches: list[Batch]) -> torch.Tensor:
    """Returns the energies of all graphs in eV."""
    with torch.inference_mode():
        return torch.cat([model(batch)["energy"] for batch in batches])


def regressor(form: str, dim: int, layers: int, dtype: torch.dtype) -> EnergyRegressor:
    """Returns an untrained regressor."""
    torch.manual_seed(0)
    sizes = {"heads": min(HEADS, dim), "layers": layers, "position_head": False}
    return EnergyRegressor(dim, **sizes, **FORMS[form]).to(dtype).eval()


def measure(
    rounds: int = 5,
    forms: tuple[str, ...] = tuple(FORMS),
    batches: tuple[str, ...] = tuple(BATCHES)[:-1],
    dim: int = DIM,
    layers: int = LAYERS,
) -> Rows:
    """Returns one row per form and batch."""
    chosen = choose(batches, BATCHES, "batch")
    rows = []
    for form in choose(forms, FORMS, "form"):
        with tempfile.TemporaryDirectory() as folder:
            pairs = []
            for precision in PRECISIONS:
                model = regressor(form, dim, layers, getattr(torch, precision))
                path = compile_energies(model, Path(folder) / f"{precision}.pt2")
                pairs.append((model, CompiledEnergies(model, path)))
            for name in chosen:
                if pairs[0][1].matrix and name in FAR:
                    continue
                rows.append({"form": form, **compared(name, pairs[0], pairs[-1], rounds)})
    return rows


def compared(name: str, timed: Pair, exact: Pair, rounds: int) -> Row:
    """Returns a row: times of the pair `timed`, and the energy difference of the pair `exact`."""
    given = structures(BATCHES[name])
    energies = [all_energies(model, given) for model in exact]
    works = {
        way: partial(all_energies, model, given)
        for way, model in zip(("model", "compiled"), timed, strict=True)
    }
    few = 1 if name in FAR else rounds
    seconds = turns(works, few, time.process_time)
    scale = energies[0].abs().max().clamp(min=1.0)
    return {
        "batch": name,
        "model": " ".join(f"{x:.6g}" for x in seconds["model"]),
        "seconds": seconds["compiled"],
        "difference": float((energies[0] - energies[1]).abs().max() / scale),
    }


def table(rows: Rows) -> str:
    lines = []
    for row in rows:
        both = [float(x) for x in str(row["model"]).split()], row["seconds"]
        times = [f"{1000 * statistics.median(seconds):.1f}" for seconds in both]
        times.append(f"{paired(*both):.2f}")
        lines.append([row["form"], row["batch"], *times, f"{row['difference']:.0e}"])
    head = ["form", "graphs, atoms", "model, ms", "machine code, ms", "model / code", "difference"]
    return markdown(head, lines)
