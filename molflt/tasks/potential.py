"""Energies, forces and stress of interatomic potentials."""

# No `from __future__ import annotations`: jsonargparse would import all that stands below
# TYPE_CHECKING, PyG included, to read annotations that are strings.

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from molflt.metrics import Metric
from molflt.tasks.base import Task
from molflt.tasks.structures import OfStructures

if TYPE_CHECKING:
    from torch_geometric.data import Batch

    from molflt.data.structures.potential_data import PotentialData

__all__ = ["PotentialTask", "point_errors"]

_HUBER = 0.01  # of the unit of forces: where the quadratic part ends, as in MACE's universal loss
_FORCE_LABELS = "force_labels_meV_per_A"
_NO_FORCE = 1.0  # meV/Å, mean size of a component: labels that are 0 but for noise


class _Errors(NamedTuple):
    """Errors of a batch, only of labels that are there."""

    energy: Tensor
    """(structures,), eV per atom"""
    forces: Tensor
    """(components,), eV/Å"""
    stress: Tensor
    """(structures with stress, 9), eV/Å^3"""
    virial: Tensor
    """the same times the volume per atom, eV per atom"""
    labels: Tensor
    """(components,), forces, eV/Å"""


class _PointSums(NamedTuple):
    energy: Tensor
    """sum of |error| per atom, eV"""
    energy_square: Tensor
    structures: Tensor
    forces: Tensor
    """sum of |error| over components, eV/Å"""
    forces_square: Tensor
    components: Tensor
    stress: Tensor
    """sum of |error| over components, eV/Å^3"""
    stresses: Tensor
    """how many components"""
    force_labels: Tensor
    """sum of |label| over components, eV/Å"""

    @classmethod
    def of(cls, errors: _Errors) -> "_PointSums":
        energy, forces, stress = (part.detach().double() for part in errors[:3])
        count = energy.new_tensor
        return cls(
            *(energy.abs().sum(), energy.square().sum(), count(energy.numel())),
            *(forces.abs().sum(), forces.square().sum(), count(forces.numel())),
            *(stress.abs().sum(), count(stress.numel())),
            errors.labels.double().abs().sum(),
        )

    def metrics(self) -> dict[str, float]:
        """meV per atom, meV/Å and, where there is stress, meV/Å^3; NaN where nothing is known."""
        energy, square, count, forces, forces_square, components, stress, stresses, labels = map(
            float, self
        )
        nan = float("nan")
        found = {
            "energy_mae_meV_per_atom": 1e3 * energy / count if count else nan,
            "energy_rmse_meV_per_atom": 1e3 * (square / count) ** 0.5 if count else nan,
            "force_mae_meV_per_A": 1e3 * forces / components if components else nan,
            "force_rmse_meV_per_A": 1e3 * (forces_square / components) ** 0.5
            if components
            else nan,
            _FORCE_LABELS: 1e3 * labels / components if components else nan,
        }
        return found | ({"stress_mae_meV_per_A3": 1e3 * stress / stresses} if stresses else {})


class PotentialTask(OfStructures, Task["Batch", "PotentialData"]):
    """Loss, optimizer and schedule of interatomic potentials.

    Loss = energy_weight L(energy per atom) + force_weight L(force components) + stress_weight
    L(virial per atom), each averaged over the labels that are there, in units of the root mean
    square force of the training set (times Å).

    Args:
        model: `molflt.graph.potential.Potential`, or what has its forward.
        energy_weight: see above.
        force_weight: see above.
        stress_weight: see above.
        loss: L. huber: |x| beyond 0.01, quadratic below; l1: |x|; mse: x^2, as in MACE and NequIP.
        references: an energy for each element, kept with the weights; the model learns what is
            left. fit: by least squares on the training set; a JSON or YAML file of energies in eV
            by symbol, as those of free atoms; none: learn energies as they are.
        optimization: arguments of `molflt.tasks.base.Task`.
    """

    sums: ClassVar[type[_PointSums]] = _PointSums
    metrics: ClassVar = {
        "force_mae_meV_per_A": Metric("force MAE", "meV/Å", "log"),
        "energy_mae_meV_per_atom": Metric("energy MAE", "meV/atom", "log"),
        "force_rmse_meV_per_A": Metric("force RMSE", "meV/Å", "log", measured_in=("val",)),
        "energy_rmse_meV_per_atom": Metric("energy RMSE", "meV/atom", "log", measured_in=("val",)),
        "stress_mae_meV_per_A3": Metric("stress MAE", "meV/Å³", "log", measured_in=("val",)),
    }
    best = "force_mae_meV_per_A"

    def ranking(self, found: Mapping[str, float]) -> list[str]:
        """Forces first, unless the labels are 0 (as by symmetry) or the loss has no forces."""
        names = super().ranking(found)
        if self.weights[1] and found.get(_FORCE_LABELS, math.inf) > _NO_FORCE:
            return names
        return sorted(names, key=lambda name: name.startswith("force"))

    def __init__(
        self,
        model: nn.Module,
        energy_weight: float = 1.0,
        force_weight: float = 10.0,
        stress_weight: float = 1.0,
        loss: Literal["huber", "l1", "mse"] = "huber",
        references: Literal["none", "fit"] | Path = "fit",
        **optimization: Any,
    ) -> None:
        super().__init__(model, **optimization)
        weights = {"energy": energy_weight, "force": force_weight, "stress": stress_weight}
        for name, weight in weights.items():
            if not weight >= 0:
                raise ValueError(f"task.{name}_weight must be at least 0; got {weight}")
        if not any(weights.values()):
            raise ValueError(
                "task.energy_weight, force_weight and stress_weight are 0; expected one above 0"
            )
        self.weights = tuple(weights.values())
        self.kind = loss
        self.references = references

    def prepare(self, data: "PotentialData") -> None:
        """Stores energies per element, and the size of forces, in the model's buffers."""
        self.check_data(data)
        if self.weights[1]:
            data.expect_forces()
        self.store_references(data, self.references)
        unit = self.model.get_buffer("energy_std")
        if unit == 1:  # else that of the weights that the run starts from
            unit.fill_(data.force_scale())

    def loss(self, batch: "Batch", progress: float) -> tuple[Tensor, _PointSums]:
        errors = point_errors(self._predict(batch), batch)
        scale = self.model.get_buffer("energy_std")
        parts = (errors.energy, errors.forces, errors.virial)
        total = errors.energy.new_zeros(())
        for weight, part in zip(self.weights, parts, strict=True):
            if part.numel():
                total = total + weight * self._mean(part / scale)
        return total, _PointSums.of(errors)

    def _mean(self, x: Tensor) -> Tensor:
        if self.kind == "huber":
            return F.huber_loss(x, torch.zeros_like(x), delta=_HUBER) / _HUBER
        return x.abs().mean() if self.kind == "l1" else x.square().mean()

    def judge(self, batch: "Batch") -> _PointSums:
        return _PointSums.of(point_errors(self._predict(batch), batch))


def point_errors(out: Mapping[str, Tensor], batch: "Batch") -> _Errors:
    """Predictions minus labels, where there are labels.

    Args:
        out: as `molflt.graph.potential.Potential` returns it.
        batch: with energy (graphs,) eV, forces (atoms, 3) eV/Å, stress (graphs, 3, 3) eV/Å^3; NaN
            where there is none.
    """
    counts = batch.ptr.diff()
    for name in ("energy", "forces"):
        if out[name].shape != batch[name].shape:
            raise ValueError(
                f"{name} and its labels must have one shape; got {tuple(out[name].shape)} and "
                f"{tuple(batch[name].shape)}"
            )
    energy = (out["energy"] - batch.energy) / counts
    forces = out["forces"] - batch.forces
    stress = out["stress"] - batch.stress
    known = stress.isfinite().flatten(1).all(dim=1)
    volume = torch.linalg.det(batch.cell.reshape(-1, 3, 3)).abs() / counts
    return _Errors(
        energy[batch.energy.isfinite()],
        forces[batch.forces.isfinite()],
        stress[known].flatten(1),
        (stress * volume[:, None, None])[known].flatten(1),
        batch.forces[batch.forces.isfinite()],
    )
