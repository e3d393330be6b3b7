"""What is learned: relaxed energies and, beside them, the displacements of the relaxation."""

from __future__ import annotations

from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch_geometric.data import Batch
from torch_geometric.utils import scatter

from molflt.data.augment import along_the_way, random_orthogonal, turn
from molflt.metrics import EWT_THRESHOLD

__all__ = ["IS2RETask", "energy_summary", "energy_sums", "lr_factor"]


class IS2RETask(pl.LightningModule):
    """Loss, optimizer and schedule of IS2RE direct training (3D-Graphormer, arXiv:2203.04810).

    Loss = L1(normalized energy) + w(t) L1(displacement), where the displacement error is averaged
    over the free atoms of a structure and then over structures, and w falls linearly over training.
    Structures without relaxed positions have no second term. A model that moves atoms between its
    passes is judged by the mean error of the displacements after each pass.

    Args:
        model: `molflt.graph.regressor.EnergyRegressor`, or what has its forward.
        lr: peak learning rate.
        warmup_steps: steps of linear growth of the learning rate; then it falls linearly to 0 at
            the last step.
        betas: Adam's averaging coefficients.
        eps: Adam's term in the denominator.
        weight_decay: Adam's coupled (L2) weight decay.
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
        redraw_every: steps between draws of new random features; null keeps the first ones.
        seed: of dropout and of redrawn features.

    Raises:
        ValueError: for an option outside its range.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 3e-4,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        position_weight: float = 15.0,
        position_weight_final: float = 1.0,
        energy_mean: float | None = None,
        energy_std: float | None = None,
        rotate: Literal["none", "z", "all"] = "none",
        interpolate: float = 0.0,
        noise: float = 0.0,
        redraw_every: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value, low in (
            ("lr", lr, 0.0),
            ("warmup_steps", warmup_steps, -1),
            ("energy_std", 1.0 if energy_std is None else energy_std, 0.0),
            ("redraw_every", 1 if redraw_every is None else redraw_every, 0),
        ):
            if not value > low:
                raise ValueError(f"task.{name} must be more than {low}; got {value}")
        if not 0 <= interpolate <= 1 or noise < 0 or (noise and not interpolate):
            raise ValueError(
                "task.interpolate must lie in [0, 1], and task.noise be at least 0 and go with it; "
                f"got interpolate={interpolate}, noise={noise}"
            )
        self.model = model
        self.lr = lr
        self.warmup_steps = warmup_steps
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.position_weight = position_weight
        self.position_weight_final = position_weight_final
        self.energy_mean = energy_mean
        self.energy_std = energy_std
        self.rotate = rotate
        self.interpolate = interpolate
        self.noise = noise
        self.redraw_every = redraw_every
        self.seed = seed
        self.gradient_norm = float("nan")
        self.last_lr = lr
        self._validation: list[Tensor] = []

    def set_normalizer(self, mean: float, std: float) -> None:
        """Stores mean and standard deviation of energies, eV, in the model's buffers."""
        self.model.get_buffer("energy_mean").fill_(mean)
        self.model.get_buffer("energy_std").fill_(std)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Makes the randomness of a step a function of seed, rank and step.

        So a resumed run, whichever step it resumes from, draws the same dropout on every rank.
        """
        words = np.random.SeedSequence([self.seed, self.global_step, self.global_rank])
        torch.manual_seed(int(words.generate_state(1, np.uint64)[0] >> np.uint64(1)))
        if self.redraw_every and self.global_step and self.global_step % self.redraw_every == 0:
            common = np.random.SeedSequence([self.seed, self.global_step])  # alike on all ranks
            generator = torch.Generator().manual_seed(int(common.generate_state(1)[0]))
            redraw: Any = self.model.redraw_
            redraw(generator)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """One loss.

        Raises:
            ValueError: if the loss is not finite; names step, sids and learning rate.
        """
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
        if not bool(torch.isfinite(loss)):
            raise ValueError(self._diverged("loss", loss.item(), batch))
        self._sids = batch.sid
        self.last_lr = self.learning_rate()
        return {
            "loss": loss,
            "sums": energy_sums(energy.detach(), target),
            "displacement_mae": displacement_mae,
        }

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips the norm of the gradient, and refuses one that is not finite.

        Raises:
            ValueError: if the norm is not finite; one such step would spoil all weights. With
                16-mixed precision the gradient scaler skips such a step instead.
        """
        limit = float("inf") if gradient_clip_val is None else gradient_clip_val
        norm = nn.utils.clip_grad_norm_(self.parameters(), limit)
        self.gradient_norm = float(norm)
        if not np.isfinite(self.gradient_norm) and self.trainer.precision != "16-mixed":
            raise ValueError(self._diverged("gradient norm", self.gradient_norm, None))

    def on_validation_epoch_start(self) -> None:
        self._validation = []

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._validation.append(energy_sums(self.model(batch)["energy"], batch.y_relaxed))

    def validation_metrics(self) -> dict[str, float]:
        """Metrics over the whole split and all ranks, from sums and counts; all ranks call it."""
        zero = torch.zeros(4, dtype=torch.float64, device=self.device)
        sums = torch.stack([zero, *self._validation]).sum(dim=0)
        total: Any = self.trainer.strategy.reduce(sums, reduce_op="sum")
        return energy_summary(total)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = torch.optim.Adam(
            self.parameters(),
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
        )
        steps = self.trainer.max_steps

        def factor(step: int) -> float:
            return lr_factor(step, self.warmup_steps, steps)

        scheduler = LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def on_train_start(self) -> None:
        """Recomputes the learning rate: a resumed run may have got more steps than its checkpoint.

        Where it has not, this is the number that the checkpoint holds, bit for bit.
        """
        for config in self.trainer.lr_scheduler_configs:
            factor = lr_factor(self.global_step, self.warmup_steps, self.trainer.max_steps)
            for group, base in zip(
                config.scheduler.optimizer.param_groups, config.scheduler.base_lrs, strict=True
            ):
                group["lr"] = base * factor

    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return float(self.trainer.optimizers[0].param_groups[0]["lr"])

    def _position_weight(self) -> float:
        progress = self.global_step / max(1, self.trainer.max_steps)
        return self.position_weight + progress * (self.position_weight_final - self.position_weight)

    def _diverged(self, what: str, value: float, batch: Batch | None) -> str:
        sids = (self._sids if batch is None else batch.sid).tolist()
        return (
            f"{what} is {value} at step {self.global_step} with learning rate "
            f"{self.learning_rate():.3g} on sids {', '.join(map(str, sids))}; expected a finite "
            "number; the last good checkpoint is kept; look at these structures, or lower task.lr"
        )


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


def lr_factor(step: int, warmup_steps: int, max_steps: int) -> float:
    """Learning rate of a step (from 0) in units of its peak: up linearly, then down to 0."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return max(0.0, (max_steps - step) / max(1, max_steps - warmup_steps))


def _same_shape(energy: Tensor, target: Tensor) -> None:
    if energy.shape != target.shape:
        raise ValueError(
            f"energies and labels must have one shape; got {tuple(energy.shape)} and "
            f"{tuple(target.shape)}"
        )
