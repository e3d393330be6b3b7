"""Relaxed energies, with displacements during relaxation as an auxiliary target."""

from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from molflt.atoms import Batch
from molflt.data.structures import augment
from molflt.data.structures.base import with_bar
from molflt.data.structures.datamodule import IS2REData
from molflt.files import is_first_process, warn
from molflt.graph import EnergyRegressor
from molflt.graph.heads import by_contact
from molflt.metrics import EWT_THRESHOLD, Metric
from molflt.tasks.base import Task
from molflt.tasks.structures import OfStructures, expect_same_shape

_WEIGHT, _FINAL_WEIGHT = 15.0, 1.0  # defaults of position_weight and position_weight_final
_AT_ONCE = 32  # number of structures predicted at once
_LEAST_SCALE = 0.5  # scale of initial predictions below which a warning is issued


class _EnergySums(NamedTuple):
    absolute: Tensor  # sum of |error|, in eV
    square: Tensor  # sum of error^2, in eV^2
    within: Tensor  # number of structures with |error| strictly below EWT_THRESHOLD
    structures: Tensor
    displacement: Tensor  # sum of the displacement errors of training batches, in Å
    batches: Tensor  # number of batches with displacement errors; 0 in validation

    @classmethod
    def of(
        cls,
        energy: Tensor,
        target: Tensor,
        displacement: Tensor | None = None,
        known: Tensor | None = None,
    ) -> Self:
        """Computes the sums from predicted energies and labels, each (structures,), both in eV.

        The displacement error, in Å, is included if `known` is True for any atom.
        """
        expect_same_shape("energies", energy, target)
        error = (energy.double() - target.double()).abs()
        within = (error < EWT_THRESHOLD).double()
        zero = error.new_zeros(())
        return cls(
            absolute=error.sum(),
            square=error.square().sum(),
            within=within.sum(),
            structures=error.new_tensor(len(error)),
            displacement=zero if displacement is None else displacement.detach().double(),
            batches=zero if known is None else known.any().double(),
        )

    def metrics(self) -> dict[str, float]:
        absolute, square, within, structures, displacement, batches = (float(part) for part in self)
        metrics = {
            "mae_eV": absolute / structures,
            "ewt_percent": 100.0 * within / structures,
            "mse_eV2": square / structures,
        }
        if batches:
            metrics["displacement_mae_A"] = displacement / batches
        return metrics


class IS2RETask(OfStructures, Task[Batch, IS2REData]):
    """Loss, optimizer and schedule of IS2RE direct training (3D-Graphormer, arXiv:2203.04810).

    Loss = L1(normalized energy) + w(t) L1(displacement). The displacement error is averaged over
    the free atoms of a structure and then over structures; w changes linearly during training.
    Structures without relaxed positions contribute only to the first term. If the model moves atoms
    between its passes, the displacement errors of all passes are averaged.

    Args:
        model: `molflt.graph.regressor.EnergyRegressor`, or a model with the same `forward`.
        position_weight: w at the first step. If both weights are 0, displacements are ignored.
        position_weight_final: w after the last step.
        energy_mean: energy, in eV, that is subtracted with model.readout all; null uses the mean of
            the training set. Other readouts subtract 0 and reject other values.
        energy_std: energy, in eV, by which energies are divided; null uses the standard deviation
            of the training set.
        references: element energies, which are subtracted from the labels and stored with the
            weights. fit: least squares on the training set; adapt: least squares after subtracting
            the predictions of the initial weights (--init), scaled to fit the labels; a JSON or
            YAML file: energies in eV by symbol; none: no references; null (the default): fit for
            model.readout adsorbate, otherwise none; total energies are rejected. With readout all,
            all atoms have references; with adsorbate, adsorbate atoms; contact accepts only none.
        rotate: random rotations and reflections of training structures: only those that preserve z
            (the surface normal), or all. FLT's random nodes are not rotationally invariant.
        interpolate: fraction of training structures that start at a random point between their
            initial and relaxed positions, if both are known. The label remains the relaxed energy.
        noise: standard deviation, in Å, of Gaussian noise added to the positions of the free atoms
            in these structures.
        repeat: fraction of training structures whose slab is repeated 2 x 1, 1 x 2 or 2 x 2 times
            in the plane, while the adsorbate is not; see `molflt.data.structures.augment.repeat`.
            The model learns that energies do not depend on the size of the cell.
        optimization: further arguments of `molflt.tasks.base.Task`.
    """

    model: EnergyRegressor
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
        position_weight: float = _WEIGHT,
        position_weight_final: float = _FINAL_WEIGHT,
        energy_mean: float | None = None,
        energy_std: float | None = None,
        references: Literal["none", "fit", "adapt"] | Path | None = None,
        rotate: Literal["none", "z", "all"] = "none",
        interpolate: float = 0.0,
        noise: float = 0.0,
        repeat: float = 0.0,
        **optimization: Any,
    ) -> None:
        super().__init__(model, **optimization)
        if references not in (None, "none") and energy_mean is not None:
            raise ValueError(
                f"task.references={references} already removes the mean; got "
                f"task.energy_mean={energy_mean}; remove one of the two"
            )
        if noise and not interpolate:
            raise ValueError(f"task.noise={noise} has no effect without task.interpolate")
        self.position_weight = position_weight
        self.position_weight_final = position_weight_final
        self.energy_mean = energy_mean
        self.energy_std = energy_std
        self.references = references
        self.rotate = rotate
        self.interpolate = interpolate
        self.noise = noise
        self.repeat = repeat

    def check_new(self) -> None:
        super().check_new()
        weight, final = self.position_weight, self.position_weight_final
        idle = getattr(self.model, "position_head", True) is None
        if idle and (weight not in (0, _WEIGHT) or final not in (0, _FINAL_WEIGHT)):
            raise ValueError(
                f"task.position_weight={weight:g} and task.position_weight_final={final:g} need "
                "--model.position_head true; set both to 0"
            )

    def prepare(self, data: IS2REData) -> None:
        """Stores element energies, and the mean and standard deviation of energies, in the model.

        All values are in eV.
        """
        self.check_data(data)
        if self.interpolate:
            data.expect_relaxed(f"task.interpolate={self.interpolate:g}")
        slab_by_contact, adsorbate_by_contact = by_contact(self.model)
        mean, references = self._offsets(data, slab_by_contact, adsorbate_by_contact)
        if slab_by_contact:
            data.expect_tags()
        if self.repeat:
            data.expect_slabs(f"task.repeat={self.repeat:g}")
        predicted = self._scale_readout(data, slab_by_contact) if references == "adapt" else 0.0
        fit = self.store_references(data, references, slab_by_contact, predicted)
        std = self.energy_std
        if mean is None or std is None:  # otherwise the labels need not be read
            data_mean, data_std = data.normalizer() if fit is None else (fit.mean, fit.std or 1.0)
            mean = data_mean if mean is None else mean
            std = data_std if std is None else std
        if data.reading.baseline_key is not None:
            self.model.adds_baseline.fill_(True)
            # references are fitted before the first step, and this start may remain the best
            self.model.trained_elements[data.elements()] = True
            if data.initial is None:
                self.model.readout.scale_(0.0)
        self.model.energy_mean.fill_(mean)
        scale = self.model.energy_std
        if references == "adapt":  # keeps the scaled energies
            self.model.readout.scale_(float(scale / std))
        scale.fill_(std)

    def _offsets(
        self, data: IS2REData, slab_by_contact: bool, adsorbate_by_contact: bool
    ) -> tuple[float | None, Literal["none", "fit", "adapt"] | Path | None]:
        """Returns `energy_mean` and `references` for the readout; rejects conflicting options."""
        mean, references = self.energy_mean, self.references
        if self.repeat and references is not None and not slab_by_contact:
            raise ValueError(
                f"task.repeat={self.repeat:g} expects adsorption energies, which repeated slabs "
                f"keep; got task.references={references}, as for totals; set --task.repeat 0"
            )
        if slab_by_contact or references is None:
            data.refuse_totals()
        if not slab_by_contact:
            return mean, references
        offsets = {"energy_mean": mean, "references": references if adsorbate_by_contact else None}
        for name, value in offsets.items():
            if value not in (None, "none", 0.0):
                raise ValueError(
                    f"task.{name}={value} would also shift the energies of structures "
                    "without an adsorbate; remove it, or use --model.readout all"
                )
        return 0.0, "none" if adsorbate_by_contact else references or "fit"

    def _scale_readout(self, data: IS2REData, of_adsorbates: bool) -> NDArray[np.float64]:
        """Scales the readout by ridge regression (prior 1 ± 0.3); returns predictions in eV."""
        if data.initial is None:
            raise ValueError(
                "task.references=adapt requires initial weights with domain.json; "
                "got none; add --init, or use --task.references fit"
            )
        dataset, energies = data.datasets["train"], []
        self.model.eval()
        with torch.no_grad():
            starts = range(0, len(dataset), _AT_ONCE)
            for start in with_bar(starts, "predicting training structures"):
                records = [dataset[i] for i in range(start, min(start + _AT_ONCE, len(dataset)))]
                energies.append(self.model(data.collate(records))["energy"])
        self.model.train()
        predicted = torch.cat(energies).numpy()
        atoms = dataset.compositions(np.arange(len(dataset)), of_adsorbates).astype(np.float64)

        def residuals(energies: NDArray[np.float64]) -> NDArray[np.float64]:
            return energies - atoms @ np.linalg.lstsq(atoms, energies, rcond=None)[0]

        x, y = residuals(predicted), residuals(data.targets())
        scale = float(1 + x @ (y - x) / (x @ x + 1.0))
        if is_first_process():
            print(
                f"task.references=adapt: predictions of the initial weights times {scale:.3f} plus "
                f"references have an MAE of {np.abs(y - scale * x).mean():.3f} eV on the labels"
            )
        if scale < _LEAST_SCALE:
            warn(
                f"predictions of the initial weights hardly explain the labels (scale "
                f"{scale:.2f}); compare with a training run without --init"
            )
        self.model.readout.scale_(scale)
        return scale * predicted

    @property
    def validates_start(self) -> bool:
        """Returns True if an untrained model predicts baseline energies plus references."""
        return bool(self.model.adds_baseline)

    def loss(self, batch: Batch, progress: float) -> tuple[Tensor, _EnergySums]:
        if self.interpolate:
            batch = augment.interpolate(batch, self.interpolate, self.noise)
        if self.repeat:
            batch = augment.repeat(batch, self.repeat)
        if self.rotate != "none":
            matrices = augment.random_orthogonal(batch.num_graphs, self.rotate)
            batch = augment.rotate(batch, matrices)
        out = self.model(batch)
        energy, target = out["energy"], batch.y_relaxed
        scale = self.model.energy_std
        loss = nn.functional.l1_loss(energy / scale, target / scale)
        if "displacement" not in out:
            return loss, _EnergySums.of(energy.detach(), target)
        by_pass = out.get("displacement_by_pass", out["displacement"][None])
        errors = torch.stack([_displacement_error(predicted, batch) for predicted in by_pass])
        loss = loss + self._position_weight(progress) * errors.mean()
        known = _target_displacements(batch)[1]
        return loss, _EnergySums.of(energy.detach(), target, errors[-1], known)

    def validation_sums(self, batch: Batch) -> "_EnergySums":
        return _EnergySums.of(self.model(batch)["energy"], batch.y_relaxed)

    def _position_weight(self, progress: float) -> float:
        return self.position_weight + progress * (self.position_weight_final - self.position_weight)


def _target_displacements(batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns target displacements (atoms, 3) in Å, and a mask of the free atoms with a target."""
    target = batch.pos_relaxed - batch.pos
    return target, torch.isfinite(target).all(dim=1) & ~batch.fixed


def _displacement_error(displacement: Tensor, batch: Batch) -> Tensor:
    """Averages absolute errors in Å over free atoms, then structures; 0 without known positions."""
    target, known = _target_displacements(batch)
    target = torch.where(known[:, None], target, torch.zeros_like(target))
    error = (displacement - target).abs().mean(dim=1) * known
    graphs = batch.num_graphs
    total = error.new_zeros(graphs).scatter_add_(0, batch.batch, error)
    count = error.new_zeros(graphs).scatter_add_(0, batch.batch, known.to(error.dtype))
    by_graph = total / count.clamp(min=1)
    return by_graph.sum() / (count > 0).sum().clamp(min=1)
