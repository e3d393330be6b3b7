"""Training of interatomic potentials on energies, forces and stress."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from molflt.atoms import Batch
from molflt.data.structures.potential_data import PotentialData
from molflt.metrics import Metric
from molflt.tasks.base import Task
from molflt.tasks.structures import OfStructures, expect_same_shape

_HUBER = 0.01  # width of the quadratic part in normalized units, as in MACE's universal loss
_FORCE_LABELS = "force_labels_meV_per_A"
_NO_FORCE = 1.0  # meV/Å; below this mean magnitude, force labels count as zero


class _Errors(NamedTuple):
    """Errors of all predictions for which labels are known."""

    energy: Tensor  # (structures,), in eV per atom
    forces: Tensor  # (components,), in eV/Å
    stress: Tensor  # (structures with stress, 9), in eV/Å^3
    virial: Tensor  # stress times the volume per atom, in eV per atom
    labels: Tensor  # (components,), force labels in eV/Å


class _PointSums(NamedTuple):
    energy: Tensor  # sum of |error| per atom, in eV
    energy_square: Tensor
    structures: Tensor
    forces: Tensor  # sum of |error| over components, in eV/Å
    forces_square: Tensor
    components: Tensor
    stress: Tensor  # sum of |error| over components, in eV/Å^3
    stresses: Tensor  # number of components
    force_labels: Tensor  # sum of |label| over components, in eV/Å

    @classmethod
    def of(cls, errors: _Errors) -> Self:
        energy, forces, stress = (part.detach().double() for part in errors[:3])
        return cls(
            energy=energy.abs().sum(),
            energy_square=energy.square().sum(),
            structures=energy.new_tensor(energy.numel()),
            forces=forces.abs().sum(),
            forces_square=forces.square().sum(),
            components=forces.new_tensor(forces.numel()),
            stress=stress.abs().sum(),
            stresses=stress.new_tensor(stress.numel()),
            force_labels=errors.labels.double().abs().sum(),
        )

    def metrics(self) -> dict[str, float]:
        """Returns the errors of energies (meV/atom), forces (meV/Å) and stress (meV/Å^3).

        Without labels, the energy and force errors are NaN, and the stress error is omitted.
        """
        sums = {name: float(part) for name, part in self._asdict().items()}
        structures, components = sums["structures"] or math.nan, sums["components"] or math.nan
        metrics = {
            "energy_mae_meV_per_atom": 1e3 * sums["energy"] / structures,
            "energy_rmse_meV_per_atom": 1e3 * (sums["energy_square"] / structures) ** 0.5,
            "force_mae_meV_per_A": 1e3 * sums["forces"] / components,
            "force_rmse_meV_per_A": 1e3 * (sums["forces_square"] / components) ** 0.5,
            _FORCE_LABELS: 1e3 * sums["force_labels"] / components,
        }
        if sums["stresses"]:
            metrics["stress_mae_meV_per_A3"] = 1e3 * sums["stress"] / sums["stresses"]
        return metrics


class PotentialTask(OfStructures, Task[Batch, PotentialData]):
    """Loss, optimizer and schedule of interatomic potentials.

    Loss = energy_weight L(energy per atom) + force_weight L(force components) + stress_weight
    L(virial per atom), where each term is averaged over the available labels. Forces are divided by
    their root mean square on the training set (1 eV/Å if it is negligible) or, with --init, on that
    of the source; energies and virials are divided by this force times 1 Å.

    Args:
        model: `molflt.graph.potential.Potential`, or a model with the same `forward`.
        energy_weight: weight of energies.
        force_weight: weight of forces.
        stress_weight: weight of stress.
        loss: form of L. huber: quadratic up to 0.01 and linear beyond; l1: |x|; mse: x^2, as in
            MACE and NequIP.
        references: element energies, which are subtracted from the labels and stored with the
            weights. fit: least squares on the training set; a JSON or YAML file: energies in eV by
            symbol, such as those of free atoms; none: no references.
        optimization: further arguments of `molflt.tasks.base.Task`.
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
        self.weights = energy_weight, force_weight, stress_weight
        if not any(self.weights):
            raise ValueError(
                "task.energy_weight, force_weight and stress_weight are 0; increase at least one"
            )
        self.loss_form = loss
        self.references = references

    def prepare(self, data: PotentialData) -> None:
        """Stores element energies and the scale of the forces in buffers of the model."""
        self.check_data(data)
        if self.weights[1]:
            data.expect_forces()
        self.store_references(data, self.references)
        scale = self.model.get_buffer("energy_std")
        is_new = not any(getattr(self.model, "trained_elements", ()))
        if scale == 1 and is_new:  # otherwise it was set by initial weights
            scale.fill_(data.force_scale())

    def ranking(self, metrics: Mapping[str, float]) -> list[str]:
        """Ranks metrics last that are not trained, and forces if all are 0 by symmetry."""
        kinds = zip(("energy", "force", "stress"), self.weights, strict=True)
        last = [kind for kind, weight in kinds if not weight]
        if metrics.get(_FORCE_LABELS, math.inf) <= _NO_FORCE:
            last.append("force")
        return sorted(super().ranking(metrics), key=lambda name: name.startswith(tuple(last)))

    def loss(self, batch: Batch, progress: float) -> tuple[Tensor, _PointSums]:
        errors = point_errors(self.model(batch), batch)
        scale = self.model.get_buffer("energy_std")
        terms = (errors.energy, errors.forces, errors.virial)
        total = errors.energy.new_zeros(())
        for weight, error in zip(self.weights, terms, strict=True):
            if error.numel():
                total = total + weight * self._mean_loss(error / scale)
        return total, _PointSums.of(errors)

    def _mean_loss(self, x: Tensor) -> Tensor:
        if self.loss_form == "huber":
            return nn.functional.huber_loss(x, torch.zeros_like(x), delta=_HUBER) / _HUBER
        return x.abs().mean() if self.loss_form == "l1" else x.square().mean()


def point_errors(out: Mapping[str, Tensor], batch: Batch) -> _Errors:
    """Returns predictions minus labels for all known labels.

    Args:
        out: output of `molflt.graph.potential.Potential`.
        batch: structures with the labels energy (graphs,) in eV, forces (atoms, 3) in eV/Å and
            stress (graphs, 3, 3) in eV/Å^3; unknown labels are NaN.
    """
    counts = batch.ptr.diff()
    for name in ("energy", "forces"):
        expect_same_shape(name, out[name], batch[name])
    energy = (out["energy"] - batch.energy) / counts
    forces = out["forces"] - batch.forces
    stress = out["stress"] - batch.stress
    has_stress = stress.isfinite().flatten(1).all(dim=1)
    volume = torch.linalg.det(batch.cell.reshape(-1, 3, 3)).abs() / counts  # per atom
    return _Errors(
        energy[batch.energy.isfinite()],
        forces[batch.forces.isfinite()],
        stress[has_stress].flatten(1),
        (stress * volume[:, None, None])[has_stress].flatten(1),
        batch.forces[batch.forces.isfinite()],
    )
