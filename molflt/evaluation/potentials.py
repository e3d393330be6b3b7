"""Evaluation of a potential: errors of energies, forces and stress beside trivial predictions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import nn

from molflt import plots
from molflt.data.structures.base import AS_TRAINED
from molflt.data.structures.force_units import unit_fault
from molflt.data.structures.potential_data import SinglePoints
from molflt.evaluation.evaluated import EvaluationData
from molflt.evaluation.groups import force_errors, without_compositions
from molflt.evaluation.points import Points, infer_points
from molflt.evaluation.report import Report, _warn, align, write_csv
from molflt.evaluation.results import begin_results
from molflt.training.config import Config

__all__ = ["evaluate"]

_COLUMNS = {  # metric -> heading
    "energy_mae_meV_per_atom": "E MAE / meV/atom",
    "baseline_energy_mae_meV_per_atom": "E baseline",
    "force_mae_meV_per_A": "F MAE / meV/Å",
    "force_rmse_meV_per_A": "F RMSE",
    "baseline_force_mae_meV_per_A": "F baseline",
    "stress_mae_meV_per_A3": "stress MAE / meV/Å³",
}

_FILES = ("predictions.csv", "parity.png", "forces.png", "errors_by_group.csv", "errors.png")


def evaluate(
    run: Path,
    model: nn.Module,
    config: Config,
    out: Path,
    splits: list[str] | None = None,
    data: Path | None = None,
    batch_size: int = 32,
    skip_bad: bool = False,
    energy_key: str | None = AS_TRAINED,
    forces_key: str | None = AS_TRAINED,
    stress_key: str | None = AS_TRAINED,
) -> Report:
    """Evaluates a potential.

    Writes predictions.csv (energies and mean force errors of each structure), parity.png (energies
    less what their elements give) and, if there are labels of forces, forces.png (components
    against their labels), errors_by_group.csv and errors.png (of forces, by element and by size).

    Args:
        run: folder of the training run.
        model: `molflt.graph.potential.Potential`, in evaluation mode.
        config: the run's.
        out: folder to write.
        splits: names of splits; by default those of OC20's four for validation that are there,
            else the one that training validated on.
        data: folder of the data set, or one file; by default that of the run's configuration.
        batch_size: structures in a batch.
        skip_bad: leave out structures that cannot be used, and list them.
        energy_key: entry of files that ASE reads that is the energy, eV; by default that of the
            training, if a source has such entries; null for energy, else REF_energy.
        forces_key: array of forces, eV/Å; default as for `energy_key`.
        stress_key: entry of the stress, eV/Å^3; default as for `energy_key`.

    Returns:
        Per split the metrics of training, in meV/atom, meV/Å and meV/Å^3, and of the trivial
        predictions: energies of the elements plus a constant per atom, and no forces. n is the
        number of structures.
    """
    keys = {"energy_key": energy_key, "forces_key": forces_key, "stress_key": stress_key}
    source = EvaluationData(run, config, data, skip_bad, **keys)
    results: dict[str, dict[str, float | None]] = {}
    found: dict[str, Points] = {}
    datasets: dict[str, SinglePoints] = {}
    for split, dataset in source.open(source.choose(splits), model, source.domain()).items():
        points = SinglePoints(dataset)
        if not len(points):
            raise ValueError(
                f"{points.path}: no structure has an energy at its positions; "
                + (dataset.hint or "molflt predict needs no labels")
            )
        if fault := unit_fault(points):
            _warn(f"{split}: {fault}")
        if points.without_energy:
            _warn(f"{split}: {points.without_energy} structures without an energy are left out")
        for index, reason in list(points.absurd.items())[:1]:
            _warn(
                f"{split}: sid {int(dataset[index].sid)}: {reason}; counted in the errors all the "
                f"same ({len(points.absurd)} such); leave it out with molflt data convert "
                "--skip-bad"
            )
        datasets[split] = points
        found[split] = infer_points(model, points, batch_size, split)
        baseline = _baseline(model, points)
        metrics: dict[str, float | None] = {
            name: found[split].metrics.get(name) for name in _COLUMNS
        }
        results[split] = {**metrics, **baseline, "n": len(points)}
        _warn_if_trivial(split, results[split])
    begin_results(out, *_FILES)
    files = [write_csv(out / "predictions.csv", _rows(datasets, found)), *_draw(out, found)]
    table = [["split", "structures", *_COLUMNS.values()]]
    for split, row in results.items():
        cells = ("-" if (x := row[name]) is None else f"{x:.2f}" for name in _COLUMNS)
        table.append([split, f"{row['n']:,}", *cells])
    on = "\n\n".join(filter(None, (f" on {source}", source.absent, align(table))))
    return Report(results, f"{on}\n", files)


def _warn_if_trivial(split: str, row: Mapping[str, float | None]) -> None:
    """Names energies that are worse than those of the elements alone."""
    error, trivial = row["energy_mae_meV_per_atom"], row["baseline_energy_mae_meV_per_atom"]
    if error is not None and trivial is not None and error > trivial > 0:
        _warn(
            f"{split}: energy MAE {error:.1f} meV/atom is {error / trivial:.1f} times that of "
            f"energies per element alone ({trivial:.1f}); train longer, or raise "
            "task.energy_weight"
        )


def _elements(model: nn.Module, points: SinglePoints) -> np.ndarray:
    """What elements give, (structures,), eV."""
    own = model.get_buffer("element_energies").cpu().numpy()
    given: np.ndarray = points.compositions(np.arange(len(points))) @ own
    return given


def _baseline(model: nn.Module, points: SinglePoints) -> dict[str, float | None]:
    """Errors of energies of the elements plus the best constant per atom, and of no forces."""
    rest = (points.y_relaxed - _elements(model, points)) / points.natoms
    energy = 1e3 * float(np.abs(rest - np.median(rest)).mean())
    return {
        "baseline_energy_mae_meV_per_atom": energy,
        "baseline_force_mae_meV_per_A": 1e3 * points.force_size if points.with_forces else None,
    }


def _draw(out: Path, found: Mapping[str, Points]) -> list[Path]:
    """Writes the pictures, and errors of forces by group."""
    files = [out / "parity.png"]
    panels, names = {}, {}
    for split, part in found.items():
        own = part.energies
        panels[split] = without_compositions(own.formula, own.natoms, own.target, own.energy)
        names[split] = [f"sid {sid} {f}" for sid, f in zip(own.sid, own.formula, strict=True)]
    plots.parity(panels, files[0], names, "energy less the mean of its formula", "meV/atom")
    forces = {split: 1e3 * part.forces.reshape(2, -1) for split, part in found.items()}
    pairs = {split: (pair[0], pair[1]) for split, pair in forces.items() if pair.size}
    if not pairs:
        return files
    plots.parity(pairs, out / "forces.png", quantity="force component", unit="meV/Å")
    groups = force_errors(found)
    plots.errors(groups, {}, out / "errors.png", unit="meV/Å")
    rows = [
        {
            "split": "all",
            "kind": kind,
            "group": group.group,
            "n": group.n,
            "mae_meV_per_A": group.mae,
        }
        for kind, own in groups.items()
        for group in own
    ]
    table = write_csv(out / "errors_by_group.csv", rows)
    return [*files, out / "forces.png", out / "errors.png", table]


def _rows(
    datasets: Mapping[str, SinglePoints], found: Mapping[str, Points]
) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for split, part in found.items():
        own = part.energies
        columns = (own.sid, own.formula, own.natoms, own.energy, own.target, part.force_mae)
        rows += [
            {
                "split": split,
                "sid": int(sid),
                **datasets[split].origin(i),
                "formula": formula,
                "natoms": int(natoms),
                "energy_eV": float(energy),
                "target_eV": float(target),
                "force_mae_eV_per_A": float(wrong) if np.isfinite(wrong) else None,
            }
            for i, (sid, formula, natoms, energy, target, wrong) in enumerate(
                zip(*columns, strict=True)
            )
        ]
    return rows
