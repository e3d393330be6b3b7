"""Predictions of a trained model for a data set, with warnings about unusual structures."""

import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import tqdm

from molflt.atoms import Batch, Data, Tag, symbol
from molflt.data.batches import SizeBucketedBatchSampler
from molflt.data.structures import AS_IT_IS, Reading, Structures, open_dataset
from molflt.data.structures.base import element_faults, without
from molflt.data.structures.domain import Domain
from molflt.data.structures.geometry import adsorbates, atoms_coincide, overlaps_of
from molflt.data.structures.labels import other_kind
from molflt.data.structures.sources import Paths
from molflt.data.structures.tags import Tagged
from molflt.evaluation.ensemble import EnsembleRegressor, expect_same_totals, has_references
from molflt.evaluation.results import finite_row
from molflt.files import counted, warn
from molflt.graph.geometry import Atoms
from molflt.graph.heads import by_contact, undescribed
from molflt.graph.periodic import Auto
from molflt.graph.potential import Potential
from molflt.graph.regressor import EnergyRegressor
from molflt.memory import within_memory

UNKNOWN = "unknown"  # adsorbate and slab of a structure without tags
_ADSORBATES = "adsorbate_energy"  # output of the model
_LISTED = 5  # maximum number of reasons in a warning
_NUMBERED = re.compile(r"(?:([^:]*: )(-?\d+(?:[.,]\d+)*))?(.+)")  # label, number, rest
_ARRAYS = ("sid", "natoms", "members", "target", "baseline", "new_elements")
_GUESS_TAGS = "find tags from the geometry with --tags guess (tags='guess')"
_SET_TAGS = "set tags yourself, 0 subsurface, 1 surface and 2 adsorbate"
_SET_CELL = "if it is an adsorbate on a slab, store the cell and the periodic axes"


@dataclass(frozen=True)
class Predictions:
    """Predictions of a model for the structures of one source, in the order of the source.

    Attributes:
        sid: (systems,), sids of the systems.
        natoms: (systems,), number of atoms.
        members: (systems, members), relaxed energies in eV, predicted by each member of an
            ensemble; (systems, 1) for a single model.
        target: (systems,), labels y_relaxed in eV; NaN if the label is missing.
        baseline: (systems,), energies y_baseline in eV; NaN if a system has no baseline.
        new_elements: elements of each system that do not occur in the training data, such as
            "Cu-Pd"; "" if all elements occur or the domain is unknown.
        formula: Hill formula of each system.
        adsorbate: Hill formula of the atoms with tag 2 of each system, or "unknown".
        outside: descriptions of how each system differs from the training data.
        by_atom: requested outputs for each system, if the model predicts them: "displacement"
            (atoms, 3) in Å, "embedding" (atoms, dim), "forces" (atoms, 3) in eV/Å, and "stress"
            (1, 3, 3) in eV/Å^3.
        slab: elements of the atoms without tag 2 of each system, such as Cu-Pt, or "unknown" if no
            atom has tag 2.
        by_adsorbate: energies of the adsorbates of each system, in eV, which sum to its energy;
            None for models that do not predict them.
    """

    sid: NDArray[np.int64]
    natoms: NDArray[np.int64]
    members: NDArray[np.float64]
    target: NDArray[np.float64]
    baseline: NDArray[np.float64]
    new_elements: NDArray[np.str_]
    formula: Sequence[str]
    adsorbate: Sequence[str]
    slab: Sequence[str]
    outside: Sequence[Sequence[str]]
    by_atom: Mapping[str, Sequence[NDArray[np.float32]]]
    by_adsorbate: Sequence[tuple[float, ...] | None]

    @property
    def energy(self) -> NDArray[np.float64]:
        """Returns the predicted relaxed energies of the systems in eV, averaged over members."""
        return self.members.mean(axis=1)

    @property
    def spread(self) -> NDArray[np.float64]:
        """Returns the sample standard deviation over the members for each system, in eV."""
        return self.members.std(axis=1, ddof=1)

    @property
    def is_new(self) -> NDArray[np.bool_]:
        """Returns a mask of the systems with elements that do not occur in the training data."""
        return self.new_elements != ""

    @property
    def labeled(self) -> NDArray[np.bool_]:
        """Returns a mask of the systems with a label."""
        return np.isfinite(self.target)

    def rows(
        self,
        split: str,
        dataset: Structures,
        names: Sequence[str],
        columns: Mapping[str, NDArray[np.float64]],
    ) -> list[dict[str, object]]:
        """Returns rows of predictions.csv, with None for NaN.

        Args:
            split: name of the split.
            dataset: the predicted structures.
            names: attributes to include: "formula", "adsorbate", "slab".
            columns: further numbers (systems,) by name, such as the errors.
        """
        numbers = {"energy_eV": self.energy, "target_eV": self.target, **columns}
        return [
            {
                "split": split,
                "sid": int(self.sid[i]),
                **dataset.origin(i),
                **{name: getattr(self, name)[i] for name in names},
                "natoms": int(self.natoms[i]),
                **finite_row(numbers, i),
            }
            for i in range(len(self.sid))
        ]

    def only_labeled(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns the predicted energies and the labels, in eV, of the systems with a label."""
        return self.energy[self.labeled], self.target[self.labeled]


@dataclass
class _Notes:
    """Properties of all predicted structures, for warnings."""

    elements: set[int] = field(default_factory=set)
    adsorbed: set[int] = field(default_factory=set)  # elements of adsorbates
    overlapping: list[int] = field(default_factory=list)  # sids; atoms coincide
    untagged: int = 0  # number of structures without a tag above 0
    quantity: str = ""  # of the labels; "" for energies
    on_mesh: int = 0  # number of structures for which the model uses a mesh

    def add(self, record: Data) -> None:
        numbers, tags = record.atomic_numbers, record.tags
        self.elements.update(numbers.tolist())
        self.adsorbed.update(numbers[tags == Tag.ADSORBATE].tolist())
        if atoms_coincide(record):
            self.overlapping.append(int(record.sid))
        self.untagged += not bool((tags > Tag.SUBSURFACE).any())


def open_structures(
    path: Paths,
    skip_bad: bool,
    reading: Reading = AS_IT_IS,
    model: nn.Module | None = None,
    domain: Domain | None = None,
    trained: Reading = AS_IT_IS,
) -> Structures:
    """Opens the structures to predict; see `open_dataset` and `check_structures`."""
    dataset = open_dataset(path, skip_bad, reading._replace(for_prediction=True), trained=trained)
    return check_structures(dataset, model, domain)


def domain_for(model: nn.Module, domain: Domain) -> Domain:
    """Returns the training domain, without tags for potentials, which do not read them."""
    known = domain.without_tags() if isinstance(model, Potential) else domain
    return replace(known, zero=by_contact(model))


def check_structures(
    dataset: Structures, model: nn.Module | None = None, domain: Domain | None = None
) -> Structures:
    """Returns the structures that can be predicted and warns about skipped structures.

    If the data set skips invalid structures, structures with unsupported elements and structures
    that the training domain rejects are also skipped.
    """
    path = dataset.path
    dataset.verify()
    unsupported = undescribed(model) if model is not None and dataset.skip_bad else ()
    faults = element_faults(dataset, unsupported)
    if domain is not None and dataset.skip_bad:
        refusals = {i: domain.refusal(record) for i, record in enumerate(dataset)}
        faults |= {i: reason for i, reason in refusals.items() if reason}
    dataset = without(dataset, faults)
    if text := dataset.skipped():
        warn(text)
    if len(dataset) == 0:
        raise ValueError(
            f"{path}: expected at least one structure; got 0 ({len(dataset.bad)} invalid skipped)"
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
    """Evaluates a model on a data set, in batches of structures of similar size.

    Warns about elements that did not occur in training, structures without tags or with coincident
    atoms, and structures outside the domain.

    Args:
        model: `molflt.graph.regressor.EnergyRegressor`, or an ensemble of such models, in
            evaluation mode.
        dataset: see :func:`molflt.data.structures.open_dataset`.
        batch_size: number of structures per batch.
        name: name of the data for the progress bar and messages.
        domain: domain of the training data; None skips the comparison with it.
        by_atom: outputs to keep: "displacement", "embedding", "forces", "stress".
        force: predict structures that the domain rejects, with a warning, instead of raising an
            error.
        on_batch: function that is called with the indices of each batch, the batch, and the output
            of the model.
    """
    from torch_geometric.data import Batch

    if isinstance(model, EnsembleRegressor) and len(dataset):
        expect_same_totals(model, dataset)
    trained_on = None if domain is None else domain.baseline
    if trained_on and dataset.baseline not in ("", trained_on):
        warn(
            f"{name}: y_baseline is from {dataset.baseline}; expected the same as in training, "
            f"{trained_on}; energies may be wrong by their difference; compute the baseline again"
        )
    device = next(iter(model.state_dict().values()), torch.empty(0)).device
    slab_by_contact, unsupported = by_contact(model)[0], undescribed(model)
    rows: dict[int, dict[str, Any]] = {}
    notes = _Notes(quantity=dataset.quantity)
    # disable=None: no bar if stderr is a file
    bar = tqdm(total=len(dataset), desc=name, unit=" systems", leave=False, disable=None)
    with bar, torch.device("cpu"), torch.inference_mode(), warnings.catch_warnings():
        # `_warn` issues one warning for all batches.
        warnings.filterwarnings("ignore", message=".*without an atom with tag > 0.*")
        for indices in SizeBucketedBatchSampler(dataset.natoms, batch_size):
            records = [dataset[i] for i in indices]
            for record in records:  # before the batch is moved to a GPU
                present = set(record.atomic_numbers.unique().tolist())
                refuse_undescribed(present, unsupported, f"{dataset.path}: sid {int(record.sid)}")
                if domain is not None and not force:
                    _expect_tags(record, domain, dataset, slab_by_contact)
            batch = Batch.from_data_list(records).to(device)
            out = _outputs(model, batch, dataset.path)
            outputs = {key: out[key].float() for key in by_atom if key in out}
            if slab_by_contact and _ADSORBATES in out:
                outputs[_ADSORBATES] = out[_ADSORBATES]
            energies = _energies(out, batch, dataset.path)
            natoms = [record.natoms for record in records]
            parts = {
                key: value.cpu().split(natoms if len(value) == len(batch.pos) else 1)
                for key, value in outputs.items()
            }
            for k, i in enumerate(indices):
                atomic = {key: part[k].numpy().copy() for key, part in parts.items()}
                rows[i] = _row(records[k], energies[k], atomic, domain, force)
                notes.add(records[k])
            notes.on_mesh += _count_on_mesh(model, batch)
            if on_batch is not None:
                on_batch(indices, batch, out)
            bar.update(len(indices))
    predictions = _as_columns([rows[i] for i in range(len(dataset))])
    warn_of_elements(model, notes.elements, name, notes.adsorbed)
    if domain is not None or isinstance(model, Potential):
        notes.untagged = 0  # reported by the domain, and without effect on potentials
    _warn(predictions, name, domain, notes)
    return predictions


def _as_columns(rows: Sequence[Mapping[str, Any]]) -> Predictions:
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    columns |= {name: np.array(columns[name]) for name in _ARRAYS}
    outputs = columns["by_atom"]
    columns["by_atom"] = {name: [output[name] for output in outputs] for name in outputs[0]}
    return Predictions(**columns)


def _row(
    record: Data,
    energies: NDArray[np.float64],
    by_atom: dict[str, NDArray[np.float32]],
    domain: Domain | None,
    force: bool,
) -> dict[str, Any]:
    """Returns the fields of `Predictions` for one structure."""
    reasons: list[str] = []
    if domain is not None:
        refusal = domain.refusal(record) if force else ""  # without `force`, it raises an error
        energy = domain.beyond_labels(float(energies.mean()))
        reasons = list(filter(None, dict.fromkeys([refusal, *domain.outside(record), energy])))
    numbers, adsorbed = record.atomic_numbers.numpy(), record.tags.numpy() == Tag.ADSORBATE.value
    by_adsorbate: tuple[float, ...] | None = None
    if _ADSORBATES in by_atom:
        labels, atomic = adsorbates(record)[adsorbed], by_atom.pop(_ADSORBATES)[adsorbed]
        by_adsorbate = tuple(np.bincount(labels, atomic).tolist())
        if domain is not None and domain.zero[1] and 0.0 in by_adsorbate and not adsorbed.all():
            reasons.append("adsorbate out of reach of the slab, with an energy of 0")
    slab = numbers[~adsorbed] if adsorbed.any() else numbers[:0]
    return {
        "sid": int(record.sid),
        "natoms": len(numbers),
        "members": energies,
        "target": float(record.y_relaxed),
        "baseline": float(record.y_baseline),
        "formula": _hill(numbers),
        "adsorbate": _hill(numbers[adsorbed]) or UNKNOWN,
        "outside": reasons,
        "by_atom": by_atom,
        "slab": "-".join(sorted(map(symbol, set(slab.tolist())))) or UNKNOWN,
        "by_adsorbate": by_adsorbate,
        "new_elements": "" if domain is None else domain.new_elements(record),
    }


def _warn(predictions: Predictions, name: str, domain: Domain | None, notes: _Notes) -> None:
    count = len(predictions.sid)
    if notes.on_mesh:
        warn(
            f"{name}: {notes.on_mesh} of {count} structures are large; their sums over reciprocal "
            "nodes use a mesh (model.periodic auto); --mesh-order 6 or 8 is more accurate"
        )
    if notes.untagged:
        warn(
            f"{name}: {notes.untagged} of {count} structures have no atom with a tag above 0; "
            "their energies are sums over all atoms instead of surface and adsorbate; set tags "
            "(0 subsurface, 1 surface, 2 adsorbate), or find them with --tags guess"
        )
    if notes.overlapping:
        warn(overlaps_of(name, sorted(notes.overlapping), count))
    if reasons := counted_reasons(predictions.outside):
        outside = sum(map(bool, predictions.outside))
        more = f"; and {len(reasons) - _LISTED} more" if len(reasons) > _LISTED else ""
        warn(
            f"{name}: {outside} of {count} structures are outside the training data; expect "
            f"larger errors: {'; '.join(reasons[:_LISTED])}{more}"
        )
    labels = (predictions.target, predictions.natoms)
    if domain and (text := other_kind(*labels, domain.kind, notes.quantity)):
        warn(f"{name}: {text}")


def _count_on_mesh(model: nn.Module, batch: Batch) -> int:
    """Counts the structures for which the model uses a mesh instead of reciprocal nodes."""
    member = model.members[0] if isinstance(model, EnsembleRegressor) else model
    if not isinstance(member, EnergyRegressor) or member.encoding is None:
        return 0
    scheme = member.encoding.periodic
    if type(scheme) is not Auto:
        return 0
    atoms = Atoms.of(batch, member.embedding.element.weight, charged=True)
    if member.subsurface is not True:
        atoms, _ = member.without_subsurface(atoms)
    mask = scheme.on_mesh(atoms.geometry)
    return 0 if mask is None else int(mask.sum())


def _expect_tags(record: Data, domain: Domain, dataset: Structures, slab_by_contact: bool) -> None:
    """Raises ValueError for a structure that the domain rejects."""
    if reason := domain.refusal(record):
        advice = _SET_TAGS if isinstance(dataset, Tagged) else _GUESS_TAGS
        if not record.pbc.any():
            advice = _SET_CELL
        if not slab_by_contact or record.tags.any():
            advice += ", or predict anyway with --force (force=True)"
        formula = _hill(record.atomic_numbers.numpy())
        raise ValueError(
            f"{dataset.path}: sid {int(record.sid)} ({formula}): {reason}; its energy would be "
            f"meaningless; {advice}"
        )


def counted_reasons(outside: Sequence[Sequence[str]]) -> list[str]:
    """Returns one line for each reason, with the number of structures, sorted by this number.

    Reasons that differ only in a number are combined, for example to "atoms: 120 to 150, trained on
    52 to 66 (3 structures)".
    """
    numbers_by_text: dict[tuple[str, str], list[str]] = {}
    for reason in chain.from_iterable(outside):
        label, number, rest = _NUMBERED.findall(reason)[0]
        numbers_by_text.setdefault((label, rest), []).append(number)
    lines = []
    for (label, rest), numbers in sorted(numbers_by_text.items(), key=lambda item: -len(item[1])):
        ordered = sorted(numbers, key=lambda number: float(number.replace(",", "") or 0))
        low, high = ordered[0], ordered[-1]
        span = low if low == high else f"{low} to {high}"
        lines.append(f"{label}{span}{rest} ({counted(len(numbers), 'structure')})")
    return lines


def _outputs(model: nn.Module, batch: Batch, path: Path) -> Mapping[str, Tensor]:
    """Evaluates the model on a batch; error messages identify its largest structure."""

    def described() -> str:
        count, largest = map(int, batch.ptr.diff().max(dim=0))
        sid = int(batch.sid[largest])
        return f"{path}: a batch of {batch.num_graphs}, in which sid {sid} has {count:,} atoms"

    with within_memory(lambda: f"{described()},", "lower --batch-size"):
        try:
            return model(batch)
        except ValueError as error:
            text = re.sub(r"graph (\d+)", lambda m: f"sid {batch.sid[int(m[1])]}", str(error))
            raise ValueError(f"{described()}: {text}") from None


def _energies(out: Mapping[str, Tensor], batch: Batch, path: Path) -> NDArray[np.float64]:
    """Returns energies (graphs, members) in eV; a single model counts as one member."""
    energy = out["energy"].double().cpu().numpy()
    if len(bad := np.flatnonzero(~np.isfinite(energy))):
        raise ValueError(
            f"{path}: sid {int(batch.sid[bad[0]])}: the predicted energy is {energy[bad[0]]} eV; "
            "expected a finite number; check this structure, or use a different checkpoint"
        )
    return out["energy_by_member"].cpu().numpy() if "energy_by_member" in out else energy[:, None]


def _hill(numbers: NDArray[np.int64]) -> str:
    from ase.symbols import Symbols

    return str(Symbols(numbers).get_chemical_formula(mode="hill"))


def refuse_undescribed(present: set[int], unsupported: frozenset[int], name: str) -> None:
    """Raises ValueError if `present` contains `unsupported` elements, which lack descriptors."""
    if unknown := unsupported & present:
        raise ValueError(
            f"{name}: element {min(unknown)} has no known descriptors; omit such structures "
            "(--skip-bad), or use a model that was trained without descriptors"
        )


def warn_of_elements(
    model: nn.Module, present: set[int], name: str, adsorbed: set[int] | None = None
) -> None:
    """Warns about elements that did not occur in training or have no reference energy.

    Models of adsorption energies need references only for the elements in `adsorbed`; None stands
    for all elements.
    """

    def missing(models: Sequence[nn.Module], buffer: str, numbers: set[int]) -> str:
        buffers = [getattr(each, buffer, None) for each in models]
        known = [values for values in buffers if values is not None]
        zero = [z for z in sorted(numbers) if not all(bool(values[z]) for values in known)]
        return ", ".join(map(symbol, zero))

    members = list(getattr(model, "members", [model]))
    if unknown := missing(members, "trained_elements", present):
        described = all(getattr(member, "descriptors", False) for member in members)
        effect = "rely on descriptors; expect larger errors" if described else "are meaningless"
        warn(
            f"{name}: {unknown} did not occur in training; energies of structures with these "
            f"elements {effect}; train on data that contain them"
        )
    fitted = [member for member in members if has_references(member)]
    counted = present if adsorbed is None or not by_contact(model)[0] else adsorbed
    if unknown := missing(fitted, "element_energies", counted):
        warn(
            f"{name}: no reference energy of {unknown}, which the training split does not contain; "
            "energies of structures with these elements are wrong by the missing references"
        )
