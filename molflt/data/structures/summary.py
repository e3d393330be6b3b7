"""What a source of structures holds: counts, elements, tags, energies, displacements, warnings."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, NotRequired, TypedDict

import numpy as np
import torch

from molflt.atoms import Tag
from molflt.data.structures import AS_IT_IS, Reading
from molflt.data.structures.convert import _OnePass
from molflt.data.structures.labels import (
    EnergyKind,
    energy_kind,
    force_fault,
    label_faults,
    per_atom,
)
from molflt.data.structures.overlaps import TOO_NEAR, atoms_coincide
from molflt.data.structures.sources import Paths, named

if TYPE_CHECKING:
    from torch_geometric.data import Data

__all__ = ["Inspected", "Summary", "summarize"]

_MOST_INITIAL = 100.0  # eV: an initial structure may be strained

_LABELS = ("y_init", "y_relaxed")


class Summary(TypedDict):
    """What a source holds, as `molflt data inspect --json` prints it.

    `verified` is whether the file has a digest, which then fits; None if its kind never has one.
    `energies_look_like` is "adsorption", "total" or "unknown", judged by y_relaxed per atom.
    Numbers of many structures are given as count, min, mean, median and max; None is unknown. Those
    of forces are of their magnitudes, those of stress of its nine components.
    """

    path: str
    systems: int
    atoms_total: int
    atoms_per_system: dict[str, float] | None
    with_labels: int
    with_relaxed_positions: int
    with_forces: int
    with_stress: int
    elements: dict[str, int]
    tags: dict[str, int]
    energies_eV: dict[str, dict[str, float] | None]
    energies_look_like: EnergyKind
    displacements_A: dict[str, float] | None
    forces_eV_per_A: dict[str, float] | None
    stress_eV_per_A3: dict[str, float] | None
    unwrapped_atoms: int
    verified: bool | None
    left_out: list[dict[str, str]]
    labels_not_used: list[str]
    warnings: list[str]
    plot: NotRequired[str]


class Inspected(NamedTuple):
    """What one pass over a source finds."""

    summary: Summary
    """plain numbers and strings"""
    energies: dict[str, np.ndarray]
    """labels by name, each (systems,), eV; NaN where there is none"""
    shown: Data
    """a structure of typical size to draw"""
    structures: dict[bytes, int]
    """digest of elements, cell and initial positions -> sid of the first that has it"""


def summarize(
    path: Paths, limit: int | None = None, skip_bad: bool = False, reading: Reading = AS_IT_IS
) -> Inspected:
    """One pass over a source.

    Args:
        path: what :func:`molflt.data.structures.open_dataset` opens.
        limit: look only at the first so many structures.
        skip_bad: leave out structures that are not valid, and list them.
        reading: what the entries of a file that ASE reads mean.
    """
    structures = _OnePass(path, limit, skip_bad, reading)
    counts, sids, digests = list[int](), list[int](), dict[bytes, int]()
    labels, looked = list[list[float]](), _Looked()
    elements, tags = Counter[int](), Counter[int]()
    displacements, moved_atoms = list[np.ndarray](), 0
    shown: Data | None = None
    for record, moved in structures:
        counts.append(record.natoms)
        sids.append(record.sid)
        digests.setdefault(_digest(record), record.sid)
        elements.update(record.atomic_numbers.tolist())
        tags.update(record.tags.tolist())
        moved_atoms += moved
        looked.take(record)
        labels.append([float(record[name]) for name in _LABELS])
        displacements += _displacements(record)
        if shown is None or (len(counts) <= 100 and record.natoms < shown.natoms):
            shown = record  # small structures are the ones a picture can show
    assert shown is not None  # OnePass raises when there are none
    energies = dict(zip(_LABELS, np.array(labels).T, strict=True))
    free_displacements = _joined(displacements)
    summary: Summary = {
        "path": str(named(path)),
        "systems": len(counts),
        "atoms_total": sum(counts),
        "atoms_per_system": _statistics(np.array(counts)),
        "with_labels": int(np.isfinite(energies["y_relaxed"]).sum()),
        "with_relaxed_positions": len(displacements),
        "with_forces": len(looked.forces),
        "with_stress": len(looked.stress),
        "elements": _by_symbol(elements),
        "tags": {tag.name.lower(): tags[tag] for tag in Tag},
        "energies_eV": {name: _statistics(values) for name, values in energies.items()},
        "energies_look_like": energy_kind(energies["y_relaxed"], np.array(counts)),
        "displacements_A": _statistics(free_displacements),
        "forces_eV_per_A": _statistics(_joined(looked.forces)),
        "stress_eV_per_A3": _statistics(_joined(looked.stress)),
        "unwrapped_atoms": moved_atoms,
        "verified": structures.verified,
        "left_out": [{"name": name, "reason": reason} for name, reason in structures.bad],
        "labels_not_used": structures.unused,
        "warnings": [],
    }
    known = sids, np.array(counts), len(free_displacements), structures.hint
    summary["warnings"] = _warnings(summary, energies, *known, len(digests), looked)
    return Inspected(summary, energies, shown, digests)


class _Looked:
    """What each structure is looked at for.

    Attributes:
        forces: magnitudes in each structure that has them, (atoms,), eV/Å.
        stress: components, (9,), eV/Å^3.
        absurd: sid, and what is wrong with a force.
        overlapping: sids of structures with two atoms at one place.
        untagged: how many have no tags.
    """

    def __init__(self) -> None:
        self.forces, self.stress = list[np.ndarray](), list[np.ndarray]()
        self.absurd, self.overlapping, self.untagged = list[tuple[int, str]](), list[int](), 0

    def take(self, record: Data) -> None:
        if bool(record.forces.isfinite().all()):
            self.forces.append(record.forces.double().norm(dim=1).numpy())
        if bool(record.stress.isfinite().all()):
            self.stress.append(record.stress.double().flatten().numpy())
        if reason := force_fault(record.forces.numpy()):
            self.absurd.append((record.sid, reason))
        self.overlapping += [record.sid] * atoms_coincide(record)
        self.untagged += not record.tags.any()


def _by_symbol(elements: Counter[int]) -> dict[str, int]:
    from ase.data import chemical_symbols

    return {chemical_symbols[number]: count for number, count in sorted(elements.items())}


def _digest(record: Data) -> bytes:
    """That of what a model sees of where which atoms are."""
    found = hashlib.blake2b(digest_size=16)
    for name in ("atomic_numbers", "cell", "pos"):
        found.update(record[name].numpy().tobytes())
    return found.digest()


def _displacements(record: Data) -> list[np.ndarray]:
    """Those of the free atoms, Å, if relaxed positions are known."""
    if torch.isnan(record.pos_relaxed).any():
        return []
    return [(record.pos_relaxed - record.pos)[~record.fixed].norm(dim=1).numpy()]


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.array([])


def _statistics(values: np.ndarray) -> dict[str, float] | None:
    """Count, min, mean, median and max of the finite values; None if there are none."""
    finite = values[np.isfinite(values)]
    if len(finite) == 0:
        return None
    return {
        "count": len(finite),
        "min": finite.min().item(),
        "mean": float(finite.mean()),
        "median": float(np.median(finite)),
        "max": finite.max().item(),
    }


def _warnings(
    summary: Summary,
    energies: dict[str, np.ndarray],
    sids: list[int],
    natoms: np.ndarray,
    free_atoms: int,
    hint: str,
    distinct: int,
    looked: _Looked,
) -> list[str]:
    systems = summary["systems"]
    found = []
    if looked.untagged:
        found.append(
            f"no tags: {looked.untagged} of {systems} systems have only tag 0, so surface and "
            "adsorbate are unknown"
        )
    found += _label_warnings(summary, energies, sids, natoms, hint)
    found += [
        f"absurd labels: {len(looked.absurd)} of {systems} systems, for instance sid {sid}: "
        f"{reason}"
        for sid, reason in looked.absurd[:1]
    ]
    without = systems - summary["with_relaxed_positions"]
    if without:
        found.append(f"no relaxed positions: {without} of {systems} systems have no pos_relaxed")
    if summary["unwrapped_atoms"]:
        found.append(
            "wrapped relaxed positions: unwrapped "
            f"{summary['unwrapped_atoms']} of {free_atoms} free atoms"
        )
    repeated = systems - len(set(sids))
    if repeated:
        found.append(f"repeated sids: {repeated} systems have the sid of an earlier one")
    if distinct < systems:
        found.append(
            f"repeated structures: {systems - distinct} of {systems} systems have the elements, "
            "cell and initial positions of an earlier one"
        )
    if looked.overlapping:
        found.append(
            f"atoms at one place: {len(looked.overlapping)} of {systems} systems have two closer "
            f"than {TOO_NEAR} Å, for instance sid {looked.overlapping[0]}"
        )
    if summary["left_out"]:
        found.append(f"left out: {len(summary['left_out'])} structures are not valid")
    return found


def _label_warnings(
    summary: Summary,
    energies: dict[str, np.ndarray],
    sids: list[int],
    natoms: np.ndarray,
    hint: str,
) -> list[str]:
    systems, kind = summary["systems"], summary["energies_look_like"]
    relaxed, found = energies["y_relaxed"], []
    missing = np.flatnonzero(~np.isfinite(relaxed))
    if len(missing):
        first = "" if len(missing) == systems else f", for instance sid {sids[missing[0]]}"
        why = f"; {hint}" if hint else ""
        found.append(
            f"no labels: {len(missing)} of {systems} systems have no y_relaxed{first}{why}"
        )
    absurd = label_faults(relaxed, natoms, required=False, at_pos=summary["with_forces"] > 0)
    for index, reason in list(absurd.items())[:1]:
        found.append(
            f"absurd labels: {len(absurd)} of {systems} systems, for instance sid {sids[index]}: "
            f"{reason}"
        )
    strained = np.flatnonzero(np.abs(energies["y_init"]) > _MOST_INITIAL)
    if len(strained) and kind == "adsorption":
        index = strained[0]
        found.append(
            f"absurd labels: |y_init| > {_MOST_INITIAL:g} eV in {len(strained)} systems, for "
            f"instance sid {sids[index]} with {energies['y_init'][index]:.3f} eV; expected "
            "adsorption energies"
        )
    if kind == "total" and summary["tags"]["adsorbate"]:
        found.append(
            f"total energies: y_relaxed is {per_atom(relaxed, natoms):.1f} eV per atom in the "
            "median; expected adsorption energies, as there are adsorbates; subtract those of the "
            "clean surface and of the molecule, or train with --task.references fit"
        )
    return found
