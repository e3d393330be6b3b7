"""A trained model on a data set: energies in the data set's order, and what they belong to."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import nn

__all__ = ["UNKNOWN", "Predictions", "infer", "resolve_device"]

UNKNOWN = "unknown"  # adsorbate of a structure without tags


@dataclass(frozen=True)
class Predictions:
    """What a model says about the structures of one source, in the order of the source.

    Attributes:
        sid: (systems,).
        natoms: (systems,).
        energy: predicted relaxed energies, (systems,), eV.
        target: labels y_relaxed, (systems,), eV; NaN where there is none.
        formula: Hill formula of each system.
        adsorbate: Hill formula of its atoms with tag 2, or "unknown".
        untagged: number of structures in which no atom has a tag above 0.
        unknown: symbols of the elements that the model has not seen in training.
    """

    sid: NDArray[np.int64]
    natoms: NDArray[np.int64]
    energy: NDArray[np.float64]
    target: NDArray[np.float64]
    formula: list[str]
    adsorbate: list[str]
    untagged: int
    unknown: list[str]

    @property
    def ids(self) -> NDArray[np.str_]:
        """The sids as strings, as OC20 writes them."""
        return self.sid.astype(np.str_)

    @property
    def labeled(self) -> NDArray[np.bool_]:
        """Which systems have a label."""
        return np.isfinite(self.target)

    def only_labeled(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Predicted energies and labels, eV, of the systems with a label."""
        return self.energy[self.labeled], self.target[self.labeled]


def resolve_device(name: str) -> str:
    """The device that "auto" stands for, or the named one if it is there.

    Args:
        name: auto, cpu, cuda or cuda:N.

    Raises:
        ValueError: if there is no such device.
    """
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(
            f"device {name!r}: expected auto, cpu, cuda or cuda:N; {str(error).splitlines()[0]}"
        ) from None
    return name


def infer(model: nn.Module, dataset: Any, batch_size: int, device: str, name: str) -> Predictions:
    """Runs a model over a data set, structures of similar size together.

    Args:
        model: `molflt.graph.regressor.EnergyRegressor`, on `device` and in evaluation mode.
        dataset: as :func:`molflt.data.open_dataset` returns it.
        batch_size: structures in a batch.
        device: where the model is.
        name: what the progress bar says.

    Raises:
        ValueError: if a structure cannot be used, a prediction is not finite, or a batch does not
            fit into the memory of the device.
    """
    import torch
    from torch_geometric.data import Batch
    from tqdm import tqdm

    from molflt.data.sampler import SizeBucketedBatchSampler

    count = len(dataset)
    sid, natoms = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    energy, target = np.empty(count), np.empty(count)
    formula, adsorbate = [""] * count, [""] * count
    untagged = 0
    present: set[int] = set()
    # disable=None: no bar where stderr is a file
    bar = tqdm(total=count, desc=name, unit=" systems", leave=False, disable=None)
    with bar, torch.inference_mode(), warnings.catch_warnings():
        # the caller says it once for all batches
        warnings.filterwarnings("ignore", message=".*no atom with tag > 0.*")
        for indices in SizeBucketedBatchSampler(dataset.natoms, batch_size):
            records = [dataset[i] for i in indices]
            batch = Batch.from_data_list(records).to(device)
            energy[indices] = _energies(model, batch, dataset.path)
            present.update(batch.atomic_numbers.unique().tolist())
            for i, record in zip(indices, records, strict=True):
                sid[i], natoms[i], target[i] = record.sid, record.natoms, float(record.y_relaxed)
                formula[i] = _hill(record.atomic_numbers.numpy())
                adsorbate[i] = _hill(record.atomic_numbers[record.tags == 2].numpy()) or UNKNOWN
                untagged += not bool((record.tags > 0).any())
            bar.update(len(indices))
    unknown = _unknown_elements(model, present)
    return Predictions(sid, natoms, energy, target, formula, adsorbate, untagged, unknown)


def _unknown_elements(model: nn.Module, present: set[int]) -> list[str]:
    from ase.data import chemical_symbols

    trained = getattr(model, "trained_elements", None)
    if trained is None:
        return []
    return [chemical_symbols[number] for number in sorted(present) if not bool(trained[number])]


def _energies(model: nn.Module, batch: Any, path: Path) -> NDArray[np.float64]:
    import torch

    try:
        energy: NDArray[np.float64] = model(batch)["energy"].double().cpu().numpy()
    except torch.OutOfMemoryError:
        raise ValueError(
            f"{path}: a batch of {batch.num_graphs} structures does not fit into the memory of "
            f"{batch.pos.device}; lower --batch-size"
        ) from None
    if energy.shape != (batch.num_graphs,):
        raise ValueError(
            f"the model must return one energy per structure, ({batch.num_graphs},); got "
            f"{energy.shape}"
        )
    bad = np.flatnonzero(~np.isfinite(energy))
    if len(bad):
        raise ValueError(
            f"{path}: sid {int(batch.sid[bad[0]])}: the predicted energy is {energy[bad[0]]} eV; "
            "expected a finite number; look at this structure, or use another checkpoint"
        )
    return energy


def _hill(numbers: NDArray[np.int64]) -> str:
    from ase.symbols import Symbols

    return str(Symbols(numbers).get_chemical_formula(mode="hill"))
