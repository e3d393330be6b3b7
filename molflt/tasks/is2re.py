"""Relaxed energies and, beside them, the displacements of the relaxation."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Batch
from torch_geometric.utils import scatter

from molflt.data.augment import along_the_way, random_orthogonal, turn
from molflt.metrics import EWT_THRESHOLD
from molflt.tasks.base import Task

__all__ = ["IS2RETask", "energy_summary", "energy_sums"]


class IS2RETask(Task):
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
        rotate: turn and mirror every training structure at random, about z (the surface normal)
            or in all directions. FLT's random nodes are not rotation invariant; this teaches them.
        interpolate: share of training structures that start from a random point of the straight way
            from their initial to their relaxed positions. Energies are those of the relaxed
            structure all the same.
        noise: standard deviation of normal noise on the free atoms of such structures, Å.
        optimization: arguments of `molflt.tasks.base.Task`.

    Raises:
        ValueError: for an option outside its range.
    """

    unit = "atoms"
    sums_width = 4
    train_metrics = ("mae_eV", "ewt_percent", "displacement_mae_A")
    val_metrics = ("mae_eV", "ewt_percent", "mse_eV2")
    best = "mae_eV"

    def __init__(
        self,
        model: nn.Module,
        position_weight: float = 15.0,
        position_weight_final: float = 1.0,
        energy_mean: float | None = None,
        energy_std: float | None = None,
        rotate: Literal["none", "z", "all"] = "none",
        interpolate: float = 0.0,
        noise: float = 0.0,
        **optimization: Any,
    ) -> None:
        super().__init__(model, **optimization)
        if energy_std is not None and not energy_std > 0:
            raise ValueError(f"task.energy_std must be more than 0.0; got {energy_std}")
        if not 0 <= interpolate <= 1 or noise < 0 or (noise and not interpolate):
            raise ValueError(
                "task.interpolate must lie in [0, 1], and task.noise be at least 0 and go with it; "
                f"got interpolate={interpolate}, noise={noise}"
            )
        self.position_weight = position_weight
        self.position_weight_final = position_weight_final
        self.energy_mean = energy_mean
        self.energy_std = energy_std
        self.rotate = rotate
        self.interpolate = interpolate
        self.noise = noise

    def prepare(self, data: Any) -> None:
        """Stores mean and standard deviation of energies, eV, in the model's buffers."""
        mean, std = self.energy_mean, self.energy_std
        if mean is None or std is None:
            found = data.normalizer()
            mean, std = found[0] if mean is None else mean, found[1] if std is None else std
        self.model.get_buffer("energy_mean").fill_(mean)
        self.model.get_buffer("energy_std").fill_(std)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss; and `energy_sums`, the displacement error in Å (NaN without a head), and 1."""
        if self.interpolate:
            batch = along_the_way(batch, self.interpolate, self.noise)
        if self.rotate != "none":
            batch = turn(batch, random_orthogonal(batch.num_graphs, self.rotate))
        out = self.model(batch)
        energy, target = out["energy"], batch.y_relaxed
        _same_shape(energy, target)
        scale = self.model.get_buffer("energy_std")
        loss = F.l1_loss(energy / scale, target / scale)
        displacement_mae = torch.full_like(loss, float("nan")).detach()
        if "displacement" in out:
            by_pass = out.get("displacement_by_pass", out["displacement"][None])
            errors = torch.stack([displacement_error(moved, batch) for moved in by_pass])
            loss = loss + self._position_weight() * errors.mean()
            displacement_mae = errors[-1].detach()
        sums = energy_sums(energy.detach(), target)
        return loss, torch.cat([sums, displacement_mae.reshape(1), sums.new_ones(1)])

    def sums(self, batch: Batch) -> Tensor:
        """As :func:`energy_sums`."""
        return energy_sums(self.model(batch)["energy"], batch.y_relaxed)

    def summarize(self, sums: Tensor) -> dict[str, float]:
        """As :func:`energy_summary`, and the displacement error of training in Å."""
        metrics = energy_summary(sums[:4])
        if len(sums) > 4:
            metrics["displacement_mae_A"] = float(sums[4] / sums[5])
        return metrics

    def size(self, batch: Batch) -> int:
        """Atoms."""
        return int(batch.num_nodes)

    def items(self, batch: Batch) -> str:
        return f"sids {', '.join(map(str, batch.sid.tolist()))}"

    def _position_weight(self) -> float:
        progress = self.global_step / max(1, self.trainer.max_steps)
        return self.position_weight + progress * (self.position_weight_final - self.position_weight)


def displacement_error(displacement: Tensor, batch: Batch) -> Tensor:
    """Mean absolute error per component over free atoms, per structure, then over structures.

    Args:
        displacement: predicted, (atoms, 3), Å.
        batch: pos, pos_relaxed (atoms, 3) Å, the latter unwrapped or NaN; fixed, batch (atoms,).

    Returns:
        Scalar, Å; 0, with a graph to differentiate, if no structure has relaxed positions.
    """
    target = batch.pos_relaxed - batch.pos
    known = torch.isfinite(target).all(dim=1) & ~batch.fixed
    target = torch.where(known[:, None], target, torch.zeros_like(target))
    error = (displacement - target).abs().mean(dim=1) * known
    graphs = batch.num_graphs
    total = scatter(error, batch.batch, dim=0, dim_size=graphs, reduce="sum")
    count = scatter(known.to(error.dtype), batch.batch, dim=0, dim_size=graphs, reduce="sum")
    per_graph = total / count.clamp(min=1)
    return per_graph.sum() / (count > 0).sum().clamp(min=1)


def energy_sums(energy: Tensor, target: Tensor) -> Tensor:
    """Sum of |error|, of error^2, count of |error| < EWT_THRESHOLD and count: (4,) float64.

    Sums over batches and ranks add up to the metrics of the whole split (see `molflt.metrics`).

    Args:
        energy: predicted, (structures,), eV.
        target: (structures,), eV.

    Raises:
        ValueError: if the shapes differ; broadcasting would give a wrong number, not an error.
    """
    _same_shape(energy, target)
    error = (energy.double() - target.double()).abs()
    within = (error < EWT_THRESHOLD).double()
    return torch.stack(
        [error.sum(), error.square().sum(), within.sum(), within.new_tensor(len(error))]
    )


def energy_summary(sums: Tensor) -> dict[str, float]:
    """MAE in eV, EwT in percent and mean square error in eV^2, from :func:`energy_sums`."""
    absolute, square, within, count = sums.tolist()
    return {
        "mae_eV": absolute / count,
        "ewt_percent": 100.0 * within / count,
        "mse_eV2": square / count,
    }


def _same_shape(energy: Tensor, target: Tensor) -> None:
    if energy.shape != target.shape:
        raise ValueError(
            f"energies and labels must have one shape; got {tuple(energy.shape)} and "
            f"{tuple(target.shape)}"
        )
