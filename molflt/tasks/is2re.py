"""Relaxed energies and, beside them, the displacements of the relaxation."""

# No `from __future__ import annotations`: jsonargparse would import all that stands below
# TYPE_CHECKING, PyG included, to read annotations that are strings.

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from molflt.data.structures import augment
from molflt.metrics import EWT_THRESHOLD, Metric
from molflt.tasks.base import Task
from molflt.tasks.structures import OfStructures

if TYPE_CHECKING:
    from torch_geometric.data import Batch

    from molflt.data.structures.datamodule import IS2REData

__all__ = ["IS2RETask"]


class _EnergySums(NamedTuple):
    absolute: Tensor
    """sum of |error|, eV"""
    square: Tensor
    """sum of error^2, eV^2"""
    within: Tensor
    """structures with |error| strictly below EWT_THRESHOLD"""
    structures: Tensor
    displacement: Tensor
    """sum over training batches of their displacement errors, Å"""
    batches: Tensor
    """number of these; 0 in validation, or if the model predicts none"""

    @classmethod
    def of(
        cls,
        energy: Tensor,
        target: Tensor,
        displacement: Tensor | None = None,
        known: Tensor | None = None,
    ) -> "_EnergySums":
        """Of predictions and labels, (structures,) each, eV, and a displacement error, Å.

        The error counts if `known`, (atoms,), holds for any of the atoms.
        """
        _same_shape(energy, target)
        error = (energy.double() - target.double()).abs()
        within = (error < EWT_THRESHOLD).double()
        return cls(
            *(error.sum(), error.square().sum(), within.sum(), error.new_tensor(len(error))),
            error.new_zeros(()) if displacement is None else displacement.detach().double(),
            error.new_zeros(()) if known is None else known.any().double(),
        )

    def metrics(self) -> dict[str, float]:
        absolute, square, within, structures, displacement, batches = (float(part) for part in self)
        found = {
            "mae_eV": absolute / structures,
            "ewt_percent": 100.0 * within / structures,
            "mse_eV2": square / structures,
        }
        return found | ({"displacement_mae_A": displacement / batches} if batches else {})


class IS2RETask(OfStructures, Task["Batch", "IS2REData"]):
    """Loss, optimizer and schedule of IS2RE direct training (3D-Graphormer, arXiv:2203.04810).

    Loss = L1(normalized energy) + w(t) L1(displacement), where the displacement error is averaged
    over the free atoms of a structure and then over structures, and w falls linearly over training.
    Structures without relaxed positions have no second term. A model that moves atoms between its
    passes is judged by the mean error of the displacements after each pass.

    Args:
        model: `molflt.graph.regressor.EnergyRegressor`, or what has its forward.
        position_weight: w at the first step; 0 with a final 0 leaves displacements out.
        position_weight_final: w at the last step.
        energy_mean: eV, subtracted from energies in the loss; null: that of the training set.
        energy_std: eV, divides energies in the loss; null: that of the training set.
        references: an energy for each element, kept with the weights; the model learns what is
            left. fit: by least squares on the training set; a JSON or YAML file of energies in eV
            by symbol; none: learn energies as they are; null: fit if the model reads adsorbates
            ("adsorbate"), else as they are, and totals are refused. Of all atoms for total energies
            (model.readout: all), of adsorbate atoms otherwise.
        rotate: turn and mirror every training structure at random, about z (the surface normal)
            or in all directions. FLT's random nodes are not rotation invariant; this teaches them.
        interpolate: share of training structures that start from a random point of the straight way
            from their initial to their relaxed positions, where these are known. Energies are those
            of the relaxed structure all the same.
        noise: standard deviation of normal noise on the free atoms of such structures, Å.
        repeat: share of training structures whose slab is repeated in the plane, 2 x 1, 1 x 2 or
            2 x 2, with one adsorbate, see `molflt.data.structures.augment.repeat`. The model learns
            that energies do not depend on the size of the cell.
        optimization: arguments of `molflt.tasks.base.Task`.
    """

    sums: ClassVar[type[_EnergySums]] = _EnergySums
    metrics: ClassVar = {
        "mae_eV": Metric("MAE", "eV", "log"),
        "ewt_percent": Metric("EwT", "%", digits=2, largest_is_best=True),
        "displacement_mae_A": Metric("displacement MAE", "Å", "log", measured_in=("train",)),
        "mse_eV2": Metric("MSE", "eV²", "log", measured_in=("val",)),
    }
    best = "mae_eV"

    def __init__(
        self,
        model: nn.Module,
        position_weight: float = 15.0,
        position_weight_final: float = 1.0,
        energy_mean: float | None = None,
        energy_std: float | None = None,
        references: Literal["none", "fit"] | Path | None = None,
        rotate: Literal["none", "z", "all"] = "none",
        interpolate: float = 0.0,
        noise: float = 0.0,
        repeat: float = 0.0,
        **optimization: Any,
    ) -> None:
        super().__init__(model, **optimization)
        if energy_std is not None and not energy_std > 0:
            raise ValueError(f"task.energy_std must be more than 0.0; got {energy_std}")
        if references not in (None, "none") and energy_mean is not None:
            raise ValueError(
                f"task.references={references} leaves no mean to subtract; got "
                f"task.energy_mean={energy_mean}; leave one of them out"
            )
        if not 0 <= repeat <= 1:
            raise ValueError(f"task.repeat must lie in [0, 1]; got {repeat}")
        if not 0 <= interpolate <= 1 or noise < 0 or (noise and not interpolate):
            raise ValueError(
                "task.interpolate must lie in [0, 1], and task.noise be at least 0 and go with it; "
                f"got interpolate={interpolate}, noise={noise}"
            )
        self.position_weight = position_weight
        self.position_weight_final = position_weight_final
        self.energy_mean = energy_mean
        self.energy_std = energy_std
        self.references = references
        self.rotate = rotate
        self.interpolate = interpolate
        self.noise = noise
        self.repeat = repeat

    def prepare(self, data: "IS2REData") -> None:
        """Stores energies per element, mean and standard deviation, eV, in the model's buffers."""
        self.check_data(data)
        if self.interpolate:
            data.expect_relaxed(f"task.interpolate={self.interpolate:g}")
        if self.repeat:
            data.expect_slabs(f"task.repeat={self.repeat:g}")
        mean, std, references = self.energy_mean, self.energy_std, self.references
        from molflt.graph.heads import by_contact

        slab, adsorbate = by_contact(self.model)
        if slab or references is None:
            data.refuse_totals()
        if slab:
            _refuse_offsets(mean, references if adsorbate else None)
            mean = 0.0
            references = "none" if adsorbate else references or "fit"
        if fit := self.store_references(data, references, of_adsorbates=slab):
            found = fit.mean, fit.std or 1.0
        elif mean is None or std is None:
            found = data.normalizer()
        else:
            found = mean, std
        self.model.get_buffer("energy_mean").fill_(found[0] if mean is None else mean)
        self.model.get_buffer("energy_std").fill_(found[1] if std is None else std)

    def loss(self, batch: "Batch", progress: float) -> tuple[Tensor, _EnergySums]:
        if self.interpolate:
            batch = augment.interpolate(batch, self.interpolate, self.noise)
        if self.repeat:
            batch = augment.repeat(batch, self.repeat)
        if self.rotate != "none":
            matrices = augment.random_orthogonal(batch.num_graphs, self.rotate)
            batch = augment.rotate(batch, matrices)
        out = self._predict(batch)
        energy, target = out["energy"], batch.y_relaxed
        _same_shape(energy, target)
        scale = self.model.get_buffer("energy_std")
        loss = F.l1_loss(energy / scale, target / scale)
        displacement = known = None
        if "displacement" in out:
            by_pass = out.get("displacement_by_pass", out["displacement"][None])
            errors = torch.stack([_displacement_error(moved, batch) for moved in by_pass])
            loss = loss + self._position_weight(progress) * errors.mean()
            displacement, known = errors[-1], _goal(batch)[1]
        return loss, _EnergySums.of(energy.detach(), target, displacement, known)

    def judge(self, batch: "Batch") -> "_EnergySums":
        return _EnergySums.of(self._predict(batch)["energy"], batch.y_relaxed)

    def _position_weight(self, progress: float) -> float:
        return self.position_weight + progress * (self.position_weight_final - self.position_weight)


def _refuse_offsets(mean: float | None, references: str | Path | None) -> None:
    """Raises ValueError for energies that would be added where nothing is adsorbed."""
    for name, given in {"energy_mean": mean, "references": references}.items():
        if given not in (None, "none"):
            raise ValueError(
                f"task.{name}={given} would be added to structures without adsorption; expected "
                "none with this model.readout; leave it out, or take --model.readout all"
            )


def _goal(batch: "Batch") -> tuple[Tensor, Tensor]:
    """Displacements to learn, (atoms, 3), Å, and of which atoms: free ones that have one."""
    target = batch.pos_relaxed - batch.pos
    return target, torch.isfinite(target).all(dim=1) & ~batch.fixed


def _displacement_error(displacement: Tensor, batch: "Batch") -> Tensor:
    """Mean absolute error per component over free atoms, per structure, then over structures.

    Returns:
        Scalar, Å; 0, with a graph to differentiate, if no structure has relaxed positions.

    """
    target, known = _goal(batch)
    target = torch.where(known[:, None], target, torch.zeros_like(target))
    error = (displacement - target).abs().mean(dim=1) * known
    graphs = batch.num_graphs
    total = error.new_zeros(graphs).scatter_add_(0, batch.batch, error)
    count = error.new_zeros(graphs).scatter_add_(0, batch.batch, known.to(error.dtype))
    per_graph = total / count.clamp(min=1)
    mean: Tensor = per_graph.sum() / (count > 0).sum().clamp(min=1)
    return mean


def _same_shape(energy: Tensor, target: Tensor) -> None:
    if energy.shape != target.shape:
        raise ValueError(
            f"energies and labels must have one shape; got {tuple(energy.shape)} and "
            f"{tuple(target.shape)}"
        )
