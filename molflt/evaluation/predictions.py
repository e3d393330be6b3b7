"""A trained model on a data set: energies in the data set's order, and what they belong to."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from tqdm import tqdm

from molflt.atoms import Tag
from molflt.data.batches import SizeBucketedBatchSampler
from molflt.data.structures import Structures, open_dataset
from molflt.evaluation.ensemble import EnsembleRegressor
from molflt.evaluation.report import _warn
from molflt.memory import within_memory
from molflt.tasks.memory import expect_memory

if TYPE_CHECKING:
    from torch_geometric.data import Batch

__all__ = ["Predictions", "infer", "open_structures"]

_UNKNOWN = "unknown"  # adsorbate of a structure without tags


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
        members: what each member of an ensemble predicts, (systems, members), eV, whose mean is
            `energy`; None for one model.
    """

    sid: NDArray[np.int64]
    natoms: NDArray[np.int64]
    energy: NDArray[np.float64]
    target: NDArray[np.float64]
    formula: list[str]
    adsorbate: list[str]
    members: NDArray[np.float64] | None = None

    @property
    def by_training(self) -> NDArray[np.float64]:
        """Energies of each training, (systems, trainings), eV."""
        return self.energy[:, None] if self.members is None else self.members

    @property
    def spread(self) -> NDArray[np.float64]:
        """Standard deviation over the members of an ensemble, (systems,), eV."""
        return self.by_training.std(axis=1, ddof=1)

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


def open_structures(path: Path, skip_bad: bool) -> Structures:
    """Structures to predict energies of; warns of those that are left out.

    Args:
        path: a file that ASE reads, a compact store, or an OC20 LMDB.
        skip_bad: leave out structures that cannot be used, and list them.

    Raises:
        FileNotFoundError: if there is nothing.
        ValueError: if there are no structures, one cannot be used, or the file was changed since
            it was written.
    """
    dataset = open_dataset(path, skip_bad=skip_bad)
    dataset.verify()
    if dataset.bad:
        shown = "; ".join(f"{name}: {reason}" for name, reason in dataset.bad[:5])
        more = "; ..." if len(dataset.bad) > 5 else ""
        _warn(f"{path}: {len(dataset.bad)} bad structure(s) left out: {shown}{more}")
    if len(dataset) == 0:
        raise ValueError(
            f"{path}: no structures; expected at least one; got 0 "
            f"({len(dataset.bad)} left out as bad)"
        )
    return dataset


def infer(model: nn.Module, dataset: Structures, batch_size: int, name: str) -> Predictions:
    """Runs a model over a data set, structures of similar size together.

    Warns of elements that did not occur in training, and of structures without tags.

    Args:
        model: `molflt.graph.regressor.EnergyRegressor`, or an ensemble of such, in evaluation mode.
        dataset: as :func:`molflt.data.structures.open_dataset` returns it.
        batch_size: structures in a batch.
        name: what the progress bar says.

    Raises:
        ValueError: if a structure cannot be used, a prediction is not finite, or a batch does not
            fit into the memory of the device.
    """
    from torch_geometric.data import Batch

    device = next(iter(model.state_dict().values()), torch.empty(0)).device
    count = len(dataset)
    sid, natoms = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    several = len(model.members) if isinstance(model, EnsembleRegressor) else None
    target, members = np.empty(count), np.empty((count, several or 1))
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
            members[indices] = _energies(model, batch, dataset.path)
            present.update(batch.atomic_numbers.unique().tolist())
            for i, record in zip(indices, records, strict=True):
                sid[i], natoms[i], target[i] = record.sid, record.natoms, float(record.y_relaxed)
                formula[i] = _hill(record.atomic_numbers.numpy())
                adsorbate[i] = (
                    _hill(record.atomic_numbers[record.tags == Tag.ADSORBATE].numpy()) or _UNKNOWN
                )
                untagged += not bool((record.tags > Tag.SUBSURFACE).any())
            bar.update(len(indices))
    _warn_of_elements(model, present, name)
    if untagged:
        _warn(
            f"{name}: {untagged} of {count} structures have no atom with a tag above 0; their "
            "energies sum over all atoms instead of surface and adsorbate; set tags (0 subsurface, "
            "1 surface, 2 adsorbate)"
        )
    energy = members.mean(axis=1)
    shown = members if several else None
    return Predictions(sid, natoms, energy, target, formula, adsorbate, shown)


def _warn_of_elements(model: nn.Module, present: set[int], name: str) -> None:
    """Warns of elements that did not occur in training, or have no reference energy."""
    from ase.data import chemical_symbols

    def those_without(buffer: str) -> str:
        known = getattr(model, buffer, None)
        if known is None:
            return ""
        return ", ".join(chemical_symbols[z] for z in sorted(present) if not bool(known[z]))

    if unknown := those_without("trained_elements"):
        _warn(
            f"{name}: {unknown} did not occur in training; energies of structures with them "
            f"{_worth(model)}; train on data that have them"
        )
    fitted = getattr(model, "element_energies", None)
    if fitted is not None and fitted.any() and (unknown := those_without("element_energies")):
        _warn(
            f"{name}: no reference energy of {unknown}, which the training split does not have; "
            "total energies of structures with them are off by that"
        )


def _worth(model: nn.Module) -> str:
    """What energies of elements that training did not see are worth."""
    members = getattr(model, "members", [model])
    described = all(getattr(member, "descriptors", False) for member in members)
    return "rest on descriptors alone: expect larger errors" if described else "mean nothing"


def _energies(model: nn.Module, batch: Batch, path: Path) -> NDArray[np.float64]:
    """Of each member, (graphs, members), eV; one column for one model."""
    with within_memory(lambda: _largest(batch, path), "lower --batch-size"):
        try:
            expect_memory(model, batch)
            out = model(batch)
        except ValueError as error:
            raise ValueError(f"{_largest(batch, path)}: {error}") from None
    energy: NDArray[np.float64] = out["energy"].double().cpu().numpy()
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
    if "energy_by_member" not in out:
        return energy[:, None]
    by_member: NDArray[np.float64] = out["energy_by_member"].cpu().numpy()
    return by_member


def _largest(batch: Batch, path: Path) -> str:
    """What is in a batch, for messages."""
    counts = batch.ptr.diff()
    most = int(counts.argmax())
    return (
        f"{path}: a batch of {batch.num_graphs}, of which sid {int(batch.sid[most])} has "
        f"{int(counts[most]):,} atoms,"
    )


def _hill(numbers: NDArray[np.int64]) -> str:
    from ase.symbols import Symbols

    return str(Symbols(numbers).get_chemical_formula(mode="hill"))
