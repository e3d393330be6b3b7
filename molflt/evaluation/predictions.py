"""Predictions of a trained model for a data set, with warnings about unknown elements."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import tqdm

from molflt.atoms import Tag
from molflt.data.batches import SizeBucketedBatchSampler
from molflt.data.structures import AS_IT_IS, Reading, Structures, open_dataset
from molflt.data.structures.domain import Domain
from molflt.data.structures.labels import other_kind
from molflt.data.structures.overlaps import atoms_coincide, overlaps_of
from molflt.data.structures.parts import element_faults, without
from molflt.data.structures.sources import Paths
from molflt.data.structures.tags import Tagged, adsorbates
from molflt.evaluation.ensemble import EnsembleRegressor, expect_same_totals, has_references
from molflt.evaluation.results import warn
from molflt.graph.heads import by_contact, undescribed
from molflt.graph.potential import Potential
from molflt.memory import within_memory

if TYPE_CHECKING:
    from torch_geometric.data import Batch, Data

__all__ = ["UNKNOWN", "Predictions", "check_structures", "counted_reasons", "expect_described"]
__all__ += ["hill", "infer", "open_structures", "refuse_undescribed"]
__all__ += ["warn_of_elements"]

UNKNOWN = "unknown"  # adsorbate and slab of a structure without tags
_LISTED = 5  # reasons listed in a warning
_NUMBERED = re.compile(r"(?:([^:]*: )(-?\d+(?:[.,]\d+)*))?(.+)")  # label, number, rest
_FORCE = "or predict anyway with --force (force=True)"
_INSTEAD = f"find tags from the geometry with --tags guess (tags='guess'), {_FORCE}"
_SET_TAGS = f"set tags yourself, 0 subsurface, 1 surface and 2 adsorbate, {_FORCE}"


@dataclass(frozen=True)
class Predictions:
    """Predictions of a model for the structures of one source, in the order of the source.

    Attributes:
        sid: (systems,).
        natoms: numbers of atoms, (systems,).
        energy: predicted relaxed energies, (systems,), eV.
        target: labels y_relaxed, (systems,), eV; NaN without a label.
        formula: Hill formula of each system.
        adsorbate: Hill formula of the atoms with tag 2 of each system, or "unknown".
        members: predictions of each member of an ensemble, (systems, members), eV, whose mean is
            `energy`; None for a single model.
        outside: for each system, descriptions of how it differs from the training data.
        by_atom: for each system, the requested outputs that the model predicts: "displacement"
            (atoms, 3), Å; "embedding" (atoms, dim); "forces" (atoms, 3), eV/Å.
        slab: elements of the atoms without tag 2 of each system, such as Cu-Pt, or "unknown" if no
            atom has tag 2; empty for potentials.
        by_adsorbate: energies of the adsorbates of each system, eV, which sum to its energy; empty
            for models that do not predict them.
    """

    sid: NDArray[np.int64]
    natoms: NDArray[np.int64]
    energy: NDArray[np.float64]
    target: NDArray[np.float64]
    formula: list[str]
    adsorbate: list[str]
    members: NDArray[np.float64] | None = None
    outside: Sequence[Sequence[str]] = ()
    by_atom: Mapping[str, Sequence[NDArray[np.float32]]] = field(default_factory=dict)
    slab: Sequence[str] = ()
    by_adsorbate: Sequence[tuple[float, ...]] = ()

    @property
    def by_training(self) -> NDArray[np.float64]:
        """Returns the energies of each training run, (systems, trainings), eV."""
        return self.energy[:, None] if self.members is None else self.members

    @property
    def spread(self) -> NDArray[np.float64]:
        """Returns the standard deviation over the members of an ensemble, (systems,), eV."""
        return self.by_training.std(axis=1, ddof=1)

    @property
    def ids(self) -> NDArray[np.str_]:
        """Returns the sids as strings, as OC20 writes them."""
        return self.sid.astype(np.str_)

    @property
    def labeled(self) -> NDArray[np.bool_]:
        """Returns a mask of the systems with a label."""
        return np.isfinite(self.target)

    def only_labeled(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns predicted energies and labels, eV, of the systems with a label."""
        return self.energy[self.labeled], self.target[self.labeled]


def open_structures(
    path: Paths,
    skip_bad: bool,
    reading: Reading = AS_IT_IS,
    model: nn.Module | None = None,
    domain: Domain | None = None,
) -> Structures:
    """Opens structures to predict; see `open_dataset` and `check_structures`."""
    dataset = open_dataset(path, skip_bad, reading._replace(for_prediction=True))
    return check_structures(dataset, model, domain)


def check_structures(
    dataset: Structures, model: nn.Module | None = None, domain: Domain | None = None
) -> Structures:
    """Returns the structures that can be predicted; warns about those that are omitted.

    If bad structures are omitted, so are structures with elements that the model does not support
    and structures that its training domain refuses.
    """
    path = dataset.path
    dataset.verify()
    beyond = undescribed(model) if model is not None and dataset.skip_bad else ()
    faults = element_faults(dataset, beyond)
    if domain is not None and dataset.skip_bad:
        refused = {i: domain.refusal(record) for i, record in enumerate(dataset)}
        faults |= {i: reason for i, reason in refused.items() if reason}
    if faults:
        dataset = without(dataset, None, faults)
    if text := dataset.left_out():
        warn(text)
    if len(dataset) == 0:
        raise ValueError(
            f"{path}: no structures; expected at least one; got 0 "
            f"({len(dataset.bad)} left out as bad)"
        )
    return dataset


def infer(
    model: nn.Module,
    dataset: Structures,
    batch_size: int,
    name: str,
    domain: Domain | None = None,
    by_atom: Collection[str] = (),
    force: bool = False,
    on_batch: Callable[[Sequence[int], Batch, Mapping[str, Tensor]], None] | None = None,
) -> Predictions:
    """Runs a model over a data set, in batches of structures of similar size.

    Warns about elements that did not occur in training, structures without tags or with coincident
    atoms, and structures outside the domain.

    Args:
        model: `molflt.graph.regressor.EnergyRegressor`, or an ensemble of them, in evaluation mode.
        dataset: see :func:`molflt.data.structures.open_dataset`.
        batch_size: structures in a batch.
        name: name of the data for the progress bar and messages.
        domain: domain of the training; None skips the comparison.
        by_atom: outputs per atom to keep: "displacement", "embedding", "forces".
        force: also predict structures that the domain check rejects, with a warning.
        on_batch: called with the indices of each batch, the batch, and the output of the model.
    """
    from torch_geometric.data import Batch

    if isinstance(model, EnsembleRegressor):
        expect_same_totals(model, dataset)
    device = next(iter(model.state_dict().values()), torch.empty(0)).device
    several = len(model.members) if isinstance(model, EnsembleRegressor) else None
    rows, beyond = _Rows(len(dataset), several or 1), undescribed(model)
    shared = by_contact(model)[0]
    # disable=None: no bar if stderr is a file
    bar = tqdm(total=len(dataset), desc=name, unit=" systems", leave=False, disable=None)
    with bar, torch.device("cpu"), torch.inference_mode(), warnings.catch_warnings():
        # replaced by one warning for all batches
        warnings.filterwarnings("ignore", message=".*without an atom with tag > 0.*")
        for indices in SizeBucketedBatchSampler(dataset.natoms, batch_size):
            records = [dataset[i] for i in indices]
            expect_described(records, beyond, dataset.path)
            if domain is not None and not force:
                _expect_tags(records, domain, dataset)
            batch = Batch.from_data_list(records).to(device)
            out = _outputs(model, batch, dataset.path)
            rows.members[indices] = _energies(out, batch, dataset.path)
            for i, record in zip(indices, records, strict=True):
                rows.take(i, record, domain, force)
            kept = {one: out[one] for one in by_atom if one in out}
            rows.take_atoms(indices, kept, [record.natoms for record in records])
            if shared and "adsorbate_energy" in out:
                rows.take_adsorbates(indices, records, out["adsorbate_energy"])
            if on_batch is not None:
                on_batch(indices, batch, out)
            bar.update(len(indices))
    warn_of_elements(model, rows.present, name, rows.adsorbed)
    rows.warn(name, domain, isinstance(model, Potential))
    return rows.predictions(several is not None)


class _Rows:
    """Predictions of each system, filled batch by batch."""

    def __init__(self, count: int, members: int) -> None:
        self.sid, self.natoms = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
        self.target, self.members = np.empty(count), np.empty((count, members))
        self.formula, self.adsorbate, self.slab = ([""] * count for _ in range(3))
        self.outside: list[Sequence[str]] = [()] * count
        self.by_atom: dict[str, list[NDArray[np.float32]]] = {}
        self.by_adsorbate: list[tuple[float, ...]] = []
        self.untagged = 0
        self.overlapping: list[int] = []
        self.present: set[int] = set()
        self.adsorbed: set[int] = set()

    def take(self, i: int, record: Data, domain: Domain | None, force: bool) -> None:
        from ase.data import chemical_symbols

        self.sid[i], self.natoms[i] = record.sid, record.natoms
        self.target[i] = float(record.y_relaxed)
        self.present.update(record.atomic_numbers.unique().tolist())
        adsorbed = record.tags == Tag.ADSORBATE.value
        self.adsorbed.update(record.atomic_numbers[adsorbed].tolist())
        self.formula[i] = hill(record.atomic_numbers.numpy())
        self.adsorbate[i] = hill(record.atomic_numbers[adsorbed].numpy()) or UNKNOWN
        slab = record.atomic_numbers[~adsorbed] if bool(adsorbed.any()) else adsorbed[:0]
        self.slab[i] = "-".join(sorted(chemical_symbols[z] for z in slab.unique())) or UNKNOWN
        self.untagged += not bool((record.tags > Tag.SUBSURFACE).any())
        self.overlapping += [i] * atoms_coincide(record)
        if domain is not None:
            refused = domain.refusal(record) if force else ""
            beyond = domain.beyond_labels(float(self.members[i].mean()))
            found = [refused, *domain.outside(record), beyond]
            self.outside[i] = [reason for reason in dict.fromkeys(found) if reason]

    def take_atoms(
        self, indices: Sequence[int], out: Mapping[str, Tensor], natoms: Sequence[int]
    ) -> None:
        for name, tensor in out.items():
            kept = self.by_atom.setdefault(name, [np.empty((0, 0), np.float32)] * len(self.sid))
            parts = tensor.float().cpu().split(list(natoms))
            for i, part in zip(indices, parts, strict=True):
                kept[i] = part.numpy().copy()

    def take_adsorbates(
        self, indices: Sequence[int], records: Sequence[Data], energies: Tensor
    ) -> None:
        self.by_adsorbate = self.by_adsorbate or [()] * len(self.sid)
        parts = energies.cpu().split([record.natoms for record in records])
        for i, record, part in zip(indices, records, parts, strict=True):
            labels = adsorbates(record)
            kept = labels >= 0
            self.by_adsorbate[i] = tuple(np.bincount(labels[kept], part.numpy()[kept]).tolist())

    def warn(self, name: str, domain: Domain | None, untagged: bool) -> None:
        count = len(self.sid)
        if self.untagged and not untagged and domain is None:
            warn(
                f"{name}: {self.untagged} of {count} structures have no atom with a tag above 0; "
                "their energies sum over all atoms instead of surface and adsorbate; set tags (0 "
                "subsurface, 1 surface, 2 adsorbate), or find them with --tags guess"
            )
        if self.overlapping:
            sids = [int(self.sid[i]) for i in sorted(self.overlapping)]
            warn(overlaps_of(name, sids, count))
        if domain is None:
            return
        if reasons := counted_reasons(self.outside):
            far = sum(map(bool, self.outside))
            more = [f"and {len(reasons) - _LISTED} more"] * (len(reasons) > _LISTED)
            warn(
                f"{name}: {far} of {count} structures are outside the training data, expect larger "
                f"errors: {'; '.join([*reasons[:_LISTED], *more])}"
            )
        if text := other_kind(self.target, self.natoms, domain.kind):
            warn(f"{name}: {text}")

    def predictions(self, ensemble: bool) -> Predictions:
        return Predictions(
            self.sid,
            self.natoms,
            self.members.mean(axis=1),
            self.target,
            self.formula,
            self.adsorbate,
            self.members if ensemble else None,
            self.outside,
            self.by_atom,
            self.slab,
            self.by_adsorbate,
        )


def _expect_tags(records: Sequence[Data], domain: Domain, dataset: Structures) -> None:
    """Raises ValueError for structures with implausible tags."""
    refused = [(domain.refusal(record), record) for record in records]
    if found := [(reason, record) for reason, record in refused if reason]:
        reason, record = found[0]
        formula = hill(record.atomic_numbers.numpy())
        more = f" (and {len(found) - 1} more structures)" if len(found) > 1 else ""
        raise ValueError(
            f"{dataset.path}: sid {int(record.sid)} ({formula}){more}: {reason}; its energy would "
            f"be meaningless; {_SET_TAGS if isinstance(dataset, Tagged) else _INSTEAD}"
        )


def counted_reasons(outside: Sequence[Sequence[str]]) -> list[str]:
    """Counts the structures with each reason, most frequent first; numbers become ranges.

    Returns:
        Lines such as "atoms: 120 to 150, at most 80 in training (3 structures)".
    """
    found: dict[tuple[str, str], list[str]] = {}
    for reasons in outside:
        for reason in reasons:
            what, number, rest = _NUMBERED.findall(reason)[0]
            found.setdefault((what, rest), []).append(number)
    lines = []
    for (what, rest), numbers in sorted(found.items(), key=lambda one: -len(one[1])):
        ends = sorted(dict.fromkeys(numbers), key=lambda one: float(one.replace(",", "") or 0))
        span = " to ".join(dict.fromkeys([ends[0], ends[-1]]))
        count = f"{len(numbers)} structure{'s' * (len(numbers) > 1)}"
        lines.append(f"{what}{span}{rest} ({count})")
    return lines


def _outputs(model: nn.Module, batch: Batch, path: Path) -> Mapping[str, Tensor]:
    """Runs the model on a batch; errors name its largest structure."""
    with within_memory(lambda: f"{_largest(batch, path)},", "lower --batch-size"):
        try:
            out: Mapping[str, Tensor] = model(batch)
        except ValueError as error:
            raise ValueError(f"{_largest(batch, path)}: {error}") from None
    return out


def _energies(out: Mapping[str, Tensor], batch: Batch, path: Path) -> NDArray[np.float64]:
    """Returns the energies of each member, (graphs, members), eV; a single model has one column."""
    energy: NDArray[np.float64] = out["energy"].double().cpu().numpy()
    if energy.shape != (batch.num_graphs,):
        raise ValueError(
            f"the model must return one energy per structure, ({batch.num_graphs},); got "
            f"{energy.shape}"
        )
    if len(bad := np.flatnonzero(~np.isfinite(energy))):
        raise ValueError(
            f"{path}: sid {int(batch.sid[bad[0]])}: the predicted energy is {energy[bad[0]]} eV; "
            "expected a finite number; check this structure, or use another checkpoint"
        )
    if "energy_by_member" not in out:
        return energy[:, None]
    by_member: NDArray[np.float64] = out["energy_by_member"].cpu().numpy()
    return by_member


def _largest(batch: Batch, path: Path) -> str:
    """Describes a batch by its largest structure."""
    counts = batch.ptr.diff()
    most = int(counts.argmax())
    return (
        f"{path}: a batch of {batch.num_graphs}, of which sid {int(batch.sid[most])} has "
        f"{int(counts[most]):,} atoms"
    )


def hill(numbers: NDArray[np.int64]) -> str:
    """Returns the Hill formula of atomic numbers."""
    from ase.symbols import Symbols

    return str(Symbols(numbers).get_chemical_formula(mode="hill"))


def expect_described(records: Sequence[Data], beyond: frozenset[int], path: Path) -> None:
    """Raises ValueError for an element without descriptors, before the batch goes to a GPU."""
    for record in records if beyond else ():
        present = set(record.atomic_numbers.unique().tolist())
        refuse_undescribed(present, beyond, f"{path}: sid {int(record.sid)}")


def refuse_undescribed(present: set[int], beyond: frozenset[int], name: str) -> None:
    """Raises ValueError if an element of a structure is among those without descriptors."""
    if unknown := beyond & present:
        raise ValueError(
            f"{name}: no descriptors are known of element {min(unknown)}; omit such structures, as "
            "--skip_bad does, or use a model that was trained without descriptors"
        )


def warn_of_elements(
    model: nn.Module, present: set[int], name: str, adsorbed: set[int] | None = None
) -> None:
    """Warns about elements that did not occur in training or lack a reference energy.

    Models of adsorption energies need references only for the elements in `adsorbed`; None means
    all elements.
    """
    from ase.data import chemical_symbols

    def without_buffer(models: Sequence[nn.Module], buffer: str, numbers: set[int]) -> str:
        known = [held for one in models if (held := getattr(one, buffer, None)) is not None]
        lacking = [z for z in sorted(numbers) if not all(bool(each[z]) for each in known)]
        return ", ".join(chemical_symbols[z] for z in lacking)

    members = list(getattr(model, "members", [model]))
    if unknown := without_buffer(members, "trained_elements", present):
        described = all(getattr(member, "descriptors", False) for member in members)
        effect = "only use descriptors: expect larger errors" if described else "are meaningless"
        warn(
            f"{name}: {unknown} did not occur in training; energies of structures with them "
            f"{effect}; train on data that have them"
        )
    fitted = [one for one in members if has_references(one)]
    counted = present if adsorbed is None or not by_contact(model)[0] else adsorbed
    if unknown := without_buffer(fitted, "element_energies", counted):
        warn(
            f"{name}: no reference energy of {unknown}, which the training split lacks; total "
            "energies of structures with them are off by that"
        )
