"""A potential on a data set: energies, forces and stress beside their labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from tqdm import tqdm

from molflt.data.batches import SizeBucketedBatchSampler
from molflt.data.structures import Structures
from molflt.data.structures.overlaps import atoms_coincide, overlaps_of
from molflt.evaluation.elements import expect_described, warn_of_elements
from molflt.evaluation.predictions import Predictions, _hill
from molflt.evaluation.report import _warn
from molflt.graph.heads import undescribed
from molflt.memory import within_memory
from molflt.tasks.potential import PotentialTask, point_errors

if TYPE_CHECKING:
    from torch_geometric.data import Batch

_Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Points:
    """What a potential says about the structures of one source, in their order.

    Attributes:
        energies: predictions and labels of energies, eV.
        force_mae: mean error of the force components of each structure, (systems,), eV/Å; NaN
            without labels.
        metrics: of all of them together, as in training.
        elements: atomic numbers of the atoms with labeled forces, (atoms,).
        forces: their labels and predictions, (2, atoms, 3), eV/Å.
    """

    energies: Predictions
    force_mae: _Numbers
    metrics: dict[str, float]
    elements: NDArray[np.int64]
    forces: _Numbers


def infer_points(model: nn.Module, dataset: Structures, batch_size: int, name: str) -> Points:
    """Runs a potential over a data set, structures of similar size together.

    Warns of elements that did not occur in training, and of atoms at one place.

    Args:
        model: `molflt.graph.potential.Potential`, in evaluation mode.
        dataset: structures, with or without labels.
        batch_size: structures in a batch.
        name: what the progress bar says.

    Raises:
        ValueError: if a structure cannot be used, a prediction is not finite, or a batch does not
            fit into the memory of the device.
    """
    from torch_geometric.data import Batch

    device = next(iter(model.state_dict().values()), torch.empty(0)).device
    count = len(dataset)
    columns = {key: np.empty(count) for key in ("energy", "target", "forces")}
    numbers = {key: np.empty(count, dtype=np.int64) for key in ("sid", "natoms")}
    formula, present, beyond = [""] * count, set[int](), undescribed(model)
    elements, overlapping = list[NDArray[np.int64]](), list[int]()
    forces: list[_Numbers] = []
    totals = torch.zeros(len(PotentialTask.sums._fields), dtype=torch.float64)
    bar = tqdm(total=count, desc=name, unit=" systems", leave=False, disable=None)
    with bar:
        for indices in SizeBucketedBatchSampler(dataset.natoms, batch_size):
            records = [dataset[i] for i in indices]
            expect_described(records, beyond, dataset.path)
            batch = Batch.from_data_list(records).to(device)
            judged = _judged(model, batch, f"{dataset.path}: {name}")
            totals += judged.sums.cpu()
            elements.append(judged.elements)
            forces.append(judged.forces)
            columns["energy"][indices] = judged.energy
            columns["target"][indices] = batch.energy.cpu().numpy()
            columns["forces"][indices] = judged.force_mae
            numbers["sid"][indices] = batch.sid.cpu().numpy()
            numbers["natoms"][indices] = batch.ptr.diff().cpu().numpy()
            present.update(batch.atomic_numbers.unique().tolist())
            for i, start, stop in zip(indices, batch.ptr[:-1], batch.ptr[1:], strict=True):
                formula[i] = _hill(batch.atomic_numbers[start:stop].cpu().numpy())
            at_one = zip(indices, map(atoms_coincide, records), strict=True)
            overlapping += [i for i, found in at_one if found]
            bar.update(len(indices))
    warn_of_elements(model, present, name)
    if overlapping:
        sids = numbers["sid"][sorted(overlapping)].tolist()
        _warn(overlaps_of(name, sids, count))
    energies = Predictions(
        numbers["sid"], numbers["natoms"], columns["energy"], columns["target"], formula, formula
    )
    return Points(
        energies,
        columns["forces"],
        PotentialTask.sums(*totals).metrics(),
        np.concatenate(elements),
        np.concatenate(forces, axis=1),
    )


class _Judged(NamedTuple):
    """What a potential says about a batch, as in `Points`."""

    energy: _Numbers
    sums: torch.Tensor
    force_mae: _Numbers
    elements: NDArray[np.int64]
    forces: _Numbers


def _judged(model: nn.Module, batch: Batch, where: str) -> _Judged:

    def named() -> str:
        return f"{where}: a batch of {batch.num_graphs} with {batch.num_nodes:,} atoms"

    with within_memory(named, "lower --batch-size"):
        try:
            out = model(batch)
        except ValueError as error:
            raise ValueError(f"{named()}: {error}") from None
    energy: _Numbers = out["energy"].cpu().numpy()
    bad = np.flatnonzero(~np.isfinite(energy))
    if len(bad):
        raise ValueError(
            f"{where}: sid {int(batch.sid[bad[0]])}: the predicted energy is {energy[bad[0]]} eV; "
            "expected a finite number; look at this structure, or use another checkpoint"
        )
    sums = torch.stack(list(PotentialTask.sums.of(point_errors(out, batch))))
    wrong = (out["forces"] - batch.forces).abs().mean(dim=1).double()
    total = wrong.new_zeros(batch.num_graphs).index_add(0, batch.batch, wrong)
    known = batch.forces.isfinite().all(dim=1)
    forces = torch.stack((batch.forces[known], out["forces"][known])).double().cpu().numpy()
    elements = batch.atomic_numbers[known].cpu().numpy()
    return _Judged(energy, sums, (total / batch.ptr.diff()).cpu().numpy(), elements, forces)
