"""Evaluation of potentials: errors of energies, forces and stress, with trivial baselines."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from molflt import plots
from molflt.atoms import Batch, symbol
from molflt.data.structures.base import AS_TRAINED
from molflt.data.structures.domain import Domain
from molflt.data.structures.labels import unit_fault
from molflt.data.structures.potential_data import SinglePoints
from molflt.evaluation.energies import errors_by_group, size_ranges
from molflt.evaluation.evaluated import EvaluationData, warn_of_labels
from molflt.evaluation.predictions import Predictions, infer
from molflt.evaluation.results import Evaluation, Results, results_table, write_csv
from molflt.files import warn
from molflt.tasks.potential import PotentialTask, point_errors
from molflt.training.config import Config

_Array = NDArray[np.float64]
_COLUMNS = (
    "energy_mae_meV_per_atom", "baseline_energy_mae_meV_per_atom", "force_mae_meV_per_A",
    "force_rmse_meV_per_A", "baseline_force_mae_meV_per_A", "stress_mae_meV_per_A3",
)  # fmt: skip


class Points(NamedTuple):
    """Predictions of a potential for the structures of one source, in the order of the source."""

    energies: Predictions
    force_mae: _Array  # (systems,), force MAE of each structure in eV/Å; NaN without labels
    metrics: dict[str, float]  # metrics over all structures, as in training
    elements: NDArray[np.int64]  # (atoms,), atomic numbers of the atoms with force labels
    forces: _Array  # (2, atoms, 3), labels and predictions for these atoms, in eV/Å


def evaluate(
    run: Path,
    model: nn.Module,
    config: Config,
    out: Path,
    batch_size: int = 32,
    forces_key: str | None = AS_TRAINED,
    stress_key: str | None = AS_TRAINED,
    **which: Any,
) -> Evaluation:
    """Evaluates a potential.

    Writes predictions.csv (energy and force MAE of each structure) and parity.png (energies per
    atom, minus the mean label of the structures of the split with the same formula). With force
    labels, also writes forces.png (predicted against labeled components) and errors_by_group.csv
    (force errors by element and by size).

    Args:
        batch_size: number of structures per batch.
        forces_key: key of the forces (in eV/Å); the default is chosen in the same way as
            `energy_key`.
        stress_key: key of the stress (in eV/Å^3); the default is chosen in the same way.
        which: see `molflt.evaluation.evaluated.EvaluationData`.

    Returns:
        Per split: the metrics of training except the energy RMSE, in meV/atom, meV/Å and meV/Å^3;
        the errors of two baselines, which predict the sum of element energies plus a constant per
        atom that is fitted to the split, and zero forces; and n, the number of structures.
    """
    source = EvaluationData(run, config, forces_key=forces_key, stress_key=stress_key, **which)
    results: Results = {}
    found: dict[str, Points] = {}
    datasets: dict[str, SinglePoints] = {}
    rows: list[dict[str, object]] = []
    domain = source.domain(model)
    for split, dataset in source.open(model, domain).items():
        points = datasets[split] = SinglePoints(dataset)
        if not len(points):
            raise ValueError(
                f"{points.path}: no structure has the energy of its own positions; "
                + (dataset.hint or "use molflt predict, which does not need labels")
            )
        if fault := unit_fault(points):
            warn(f"{split}: {fault}")
        if points.without_energy:
            warn(f"{split}: {points.without_energy} structures have no energy and are skipped")
        warn_of_labels(split, dataset, points.absurd)
        part = found[split] = infer_points(model, points, batch_size, split, domain)
        numbers = {"force_mae_eV_per_A": part.force_mae}
        rows += part.energies.rows(split, points, ("formula",), numbers)
        row = {name: part.metrics.get(name) for name in _COLUMNS}
        results[split] = row = {**row, **_baseline(model, points), "n": len(points)}
        mae, baseline = row["energy_mae_meV_per_atom"], row["baseline_energy_mae_meV_per_atom"]
        if mae is not None and baseline is not None and mae > baseline > 0:
            warn(
                f"{split}: the energy MAE, {mae:.1f} meV/atom, is larger than the MAE of reference "
                f"energies per element and a constant, {baseline:.1f} meV/atom; train longer, or "
                "increase task.energy_weight"
            )
    write_csv(out / "predictions.csv", rows)
    _draw(out, found, datasets)
    table = results_table("split", results, n=("structures", 0))
    text = "\n\n".join(filter(None, (f" on {source.data.root}", source.absent, table)))
    return Evaluation(results, f"{text}\n")


def _baseline(model: nn.Module, points: SinglePoints) -> dict[str, float | None]:
    """Returns the errors of trivial predictions: energies from compositions, and zero forces."""
    references = model.get_buffer("element_energies").cpu().numpy()
    of_elements = points.compositions(np.arange(len(points))) @ references
    residual = (points.y_relaxed - of_elements) / points.natoms
    error = np.abs(residual - np.median(residual))
    return {
        "baseline_energy_mae_meV_per_atom": 1e3 * float(error.mean()),
        "baseline_force_mae_meV_per_A": 1e3 * points.force_size if points.with_forces else None,
    }


def _draw(out: Path, found: Mapping[str, Points], datasets: Mapping[str, SinglePoints]) -> None:
    energies, names, forces = {}, {}, {}
    for split, points in found.items():
        part = points.energies
        groups = np.unique(part.formula, return_inverse=True)[1]
        means = (np.bincount(groups, part.target) / np.bincount(groups))[groups]
        scale = 1e3 / part.natoms  # eV to meV/atom
        energies[split] = scale * (part.target - means), scale * (part.energy - means)
        names[split] = [
            f"sid {datasets[split].name(i, part.sid[i])} {formula}"
            for i, formula in enumerate(part.formula)
        ]
        if points.forces.size:
            label, predicted = 1e3 * points.forces.reshape(2, -1)
            forces[split] = label, predicted
    quantity = "energy minus the mean for its formula"
    plots.parity(energies, out / "parity.png", names, quantity, "meV/atom")
    if forces:
        plots.parity(forces, out / "forces.png", quantity="force component", unit="meV/Å")
        write_csv(out / "errors_by_group.csv", _force_errors(found))


def _force_errors(found: Mapping[str, Points]) -> list[dict[str, Any]]:
    """Groups force errors in meV/Å: errors of atoms by element, errors of structures by size."""
    numbers = np.concatenate([part.elements for part in found.values()])
    forces = np.concatenate([part.forces for part in found.values()], axis=1)
    symbols = np.array([symbol(z) for z in numbers])
    natoms = np.concatenate([part.energies.natoms for part in found.values()])
    mae = 1e3 * np.concatenate([part.force_mae for part in found.values()])
    known = np.isfinite(mae)
    of_atoms, metric = 1e3 * np.abs(forces[1] - forces[0]).mean(axis=1), "mae_meV_per_A"
    groups = errors_by_group(of_atoms, {"element": symbols}, metric)
    if known.any():
        groups += errors_by_group(mae[known], {"natoms": size_ranges(natoms[known])}, metric)
    return groups


def infer_points(
    model: nn.Module, dataset: SinglePoints, batch_size: int, name: str, domain: Domain | None
) -> Points:
    """Evaluates a potential on a data set; see `molflt.evaluation.predictions.infer`."""
    elements: list[NDArray[np.int64]] = []
    forces: list[_Array] = []
    force_mae = np.empty(len(dataset))
    totals = torch.zeros(len(PotentialTask.sums._fields), dtype=torch.float64)

    def add(indices: Sequence[int], batch: Batch, out: Mapping[str, Tensor]) -> None:
        totals.add_(torch.stack(list(PotentialTask.sums.of(point_errors(out, batch)))).cpu())
        error = (out["forces"] - batch.forces).abs().mean(dim=1).double()
        total = error.new_zeros(batch.num_graphs).index_add(0, batch.batch, error)
        force_mae[indices] = (total / batch.ptr.diff()).cpu().numpy()
        known = batch.forces.isfinite().all(dim=1)
        pair = torch.stack((batch.forces[known], out["forces"][known]))
        forces.append(pair.double().cpu().numpy())
        elements.append(batch.atomic_numbers[known].cpu().numpy())

    energies = infer(model, dataset, batch_size, name, domain, on_batch=add)
    return Points(
        replace(energies, target=dataset.y_relaxed),  # y_relaxed of records may differ
        force_mae,
        PotentialTask.sums(*totals).metrics(),
        np.concatenate(elements),
        np.concatenate(forces, axis=1),
    )
