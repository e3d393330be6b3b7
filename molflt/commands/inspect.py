"""``molflt data inspect``: a summary of structures as YAML or JSON."""

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from json import dumps
from pathlib import Path
from typing import Any, Literal

import numpy as np

from molflt.atoms import MAX_ATOMIC_NUMBER, Data, Tag, symbol
from molflt.commands.options import refuse_idle, yaml_of
from molflt.data.structures import AS_IT_IS, Reading, open_dataset
from molflt.data.structures.ase_labels import named_options
from molflt.data.structures.base import Tags, grouped
from molflt.data.structures.convert import one_pass
from molflt.data.structures.geometry import Survey, equal_structures, one_tagged, overlaps_of
from molflt.data.structures.labels import (
    MOST_FRAMES,
    energy_kind,
    label_faults,
    most_adsorption,
    per_atom,
    point_fault,
    unit_fault,
)
from molflt.data.structures.sources import Paths, is_one_source, named, sources_in
from molflt.files import counted

Purpose = Literal["potential", "is2re"]
_Labels = dict[str, np.ndarray]

_LABELS = ("y_init", "y_relaxed", "y_baseline", "energy")

Summary = dict[str, Any]
"""Summary of a source, as printed by `molflt data inspect --json`.

`recipe` is the recipe that fits the labels, and `label` is the name of its target: y_relaxed,
energy, or the `energy_key` of another property. `energies_look_like` is "adsorption", "total" or
"unknown", judged by the energy per atom; for potentials, "total" or "unknown". `verified` is True
if the digest of a compact store matches, False if the store has no digest, and None for other
formats. Distributions are given as count, min, mean, median and max, or None if unknown.
Distributions of forces are over magnitudes, and distributions of stress are over components.
"""


class Inspected(Survey):
    """Labels and counts of structures, collected with each structure, and their summary."""

    def __init__(self) -> None:
        super().__init__()
        self.summary: Summary = {}  # after the last structure
        self.natoms: list[int] = []
        self.labels: list[list[float]] = []  # of `_LABELS`
        self.forces: list[np.ndarray] = []  # magnitudes (N,), in eV/Å
        self.stress: list[np.ndarray] = []  # components (9,), in eV/Å^3
        self.displacements: list[np.ndarray] = []  # lengths (free atoms,), in Å
        self.compositions = np.zeros(MAX_ATOMIC_NUMBER + 1)  # number of atoms of each element
        self.tags: Counter[int] = Counter()
        self.point_faults: list[tuple[int, str]] = []  # sid, reason
        self.limits: list[float] = []  # of adsorption energies
        self.with_energy: list[Data] = []  # the first `MOST_FRAMES`

    def __call__(self, record: Data) -> None:
        super().__call__(record)
        self.natoms.append(int(record.natoms))
        self.labels.append([float(record[name]) for name in _LABELS])
        self.compositions += np.bincount(record.atomic_numbers, minlength=MAX_ATOMIC_NUMBER + 1)
        self.tags.update(record.tags.tolist())
        if bool(record.forces.isfinite().all()):
            self.forces.append(record.forces.double().norm(dim=1).numpy())
        if bool(record.stress.isfinite().all()):
            self.stress.append(record.stress.double().flatten().numpy())
        if not bool(record.pos_relaxed.isnan().any()):
            moves = (record.pos_relaxed - record.pos)[~record.fixed]
            self.displacements.append(moves.norm(dim=1).numpy())
        self.limits.append(most_adsorption(record))
        if reason := point_fault(record):
            self.point_faults.append((self.sids[-1], reason))
        if len(self.with_energy) < MOST_FRAMES and bool(record.energy.isfinite()):
            self.with_energy.append(record)


def inspect(
    path: list[Path],
    json: bool = False,
    limit: int | None = None,
    energy_key: str | None = None,
    tags: Tags | None = None,
    forces_key: str | None = None,
    stress_key: str | None = None,
    recipe: Purpose | None = None,
) -> None:
    """Prints a summary of a file or folder of structures, with units and warnings, as YAML.

    Invalid structures are skipped, counted and listed by reason. A folder is read file by file; a
    folder of shards counts as one file.

    Args:
        path: files that ASE reads, compact stores, OC20 LMDBs, a folder of them, or patterns.
        json: print one JSON object instead of YAML, with at least systems, atoms_total,
            with_labels, elements, energies_look_like and warnings; for a folder, with the keys
            path, splits (one object for each split) and others (names of other files). The YAML
            omits unknown values, rounds numbers, and groups invalid structures by reason.
        limit: number of structures to read, starting with the first.
        energy_key: name of the energy, in eV, in ASE's formats; by default y_relaxed, else energy
            (for potentials energy, else REF_energy).
        tags: oc20 (0 subsurface, 1 surface, 2 adsorbate), ase (layer numbers from the top, 1, 2,
            ..., and 0 for adsorbates) or, for any source, guess (from the geometry).
        forces_key: name of the forces, in eV/Å, in ASE's formats; by default forces or REF_forces.
        stress_key: name of the stress, in eV/Å^3, or, if it contains "virial" but not "stress", of
            a virial, in eV; by default stress, else REF_stress.
        recipe: labels to report: potential (energies, forces and stress at the positions) or is2re
            (relaxed energies); by default inferred from the labels.
    """
    if recipe == "potential":
        refuse_idle("--recipe potential", "potentials do not read tags", {"tags": tags})
    convention = "any" if recipe == "potential" else tags or "oc20"
    reading = Reading(energy_key, convention, forces_key, stress_key)
    one = path[0] if len(path) == 1 else None
    if one is not None and one.is_dir() and not is_one_source(one):
        _inspect_folder(one, json, lambda source: summarize(source, limit, reading, recipe))
        return
    summary = summarize(one or path, limit, reading, recipe).summary
    print(dumps(summary) if json else yaml_of(_readable(summary)))


def _inspect_folder(path: Path, json: bool, inspected: Callable[[Path], Inspected]) -> None:
    """Prints a summary of each source in a folder; `inspected` summarizes one source."""
    sources, others = sources_in(path)
    by_split: dict[str, Inspected] = {}
    for name, source in sources.items():
        try:
            by_split[name] = inspected(source)
        except (ValueError, OSError) as error:
            print(f"molflt: warning: {error}; skipped", file=sys.stderr)
    if not by_split:
        raise ValueError(f"{path}: cannot read any of {', '.join(sources)}")
    for name, text in _shared_structures(by_split):
        by_split[name].summary["warnings"].append(text)
    splits = {name: x.summary if json else _readable(x.summary) for name, x in by_split.items()}
    content = {"path": str(path), "splits": splits, "others": others}
    print(dumps(content) if json else yaml_of(content))


def _shared_structures(by_split: dict[str, Inspected]) -> Iterator[tuple[str, str]]:
    """Yields (split, warning) for each split that shares structures with an earlier split."""
    groups = equal_structures(np.concatenate([split.features for split in by_split.values()]))
    ends = np.cumsum([len(split.sids) for split in by_split.values()])
    groups_of = dict(zip(by_split, np.split(groups, ends[:-1]), strict=True))
    for other, name in itertools.combinations(by_split, 2):
        shared = np.flatnonzero(np.isin(groups_of[name], groups_of[other]))
        if len(shared):
            sid = by_split[name].sids[shared[0]]
            text = (
                f"structures in two splits: {len(shared)} with the elements, cell and initial "
                f"positions of structures in {other}, for instance sid {sid}"
            )
            yield name, text


def _readable(summary: Summary) -> Summary:
    """Returns the known entries of a summary, with invalid structures grouped by reason."""
    bad = grouped((item["name"], item["reason"]) for item in summary["left_out"])
    energies = {name: x for name, x in summary["energies_eV"].items() if x is not None}
    entries = summary | {"left_out": bad, "energies_eV": energies}
    return {name: value for name, value in entries.items() if value not in (None, [], {})}


def summarize(
    path: Paths,
    limit: int | None = None,
    reading: Reading = AS_IT_IS,
    recipe: Purpose | None = None,
) -> Inspected:
    """Summarizes a source in a single pass; invalid structures are skipped and listed.

    Args:
        path: source for :func:`molflt.data.structures.open_dataset`.
        limit: maximum number of structures to use, from the start.
        reading: interpretation of the entries in files that ASE reads.
        recipe: intended recipe; inferred from the labels by default.
    """
    dataset = open_dataset(path, skip_bad=True, reading=reading, once=True)
    verified = dataset.verify()
    seen = Inspected()
    for record in one_pass(dataset, limit):
        seen(record)
    labels = dict(zip(_LABELS, np.array(seen.labels).T, strict=True))
    natoms = np.array(seen.natoms)
    if recipe is None and not dataset.quantity:
        relaxations = seen.displacements or seen.tags[Tag.ADSORBATE]
        totals = not relaxations and energy_kind(labels["energy"], natoms) == "total"
        recipe = "potential" if seen.forces or seen.stress or totals else None
    label = "energy" if recipe == "potential" else "y_relaxed"
    energies = labels[label]
    names = ["y_init", "y_relaxed", "y_baseline"]
    kind = energy_kind(energies, natoms)
    if recipe == "potential":
        same = np.array_equal(labels["y_relaxed"], energies, equal_nan=True)  # the same entry
        names = [label] if same else ["y_relaxed", label]
        if kind == "adsorption":  # the magnitude does not exclude formation energies
            kind = "unknown"
    summary: Summary = {
        "path": str(named(path)),
        "recipe": recipe or "is2re",
        "label": dataset.quantity or label,
        "systems": len(natoms),
        "atoms_total": int(natoms.sum()),
        "atoms_per_system": _statistics([natoms]),
        "with_labels": int(np.isfinite(labels["y_relaxed"]).sum()),
        "with_relaxed_positions": len(seen.displacements),
        "with_energy": int(np.isfinite(labels["energy"]).sum()),
        "with_forces": len(seen.forces),
        "with_stress": len(seen.stress),
        "elements": {symbol(z): int(seen.compositions[z]) for z in seen.compositions.nonzero()[0]},
        "tags": {tag.name.lower(): seen.tags[tag] for tag in Tag},
        "energies_eV": {name: _statistics([labels[name]]) for name in names},
        "energies_per_atom_eV": None if dataset.quantity else _statistics([energies / natoms]),
        "energies_look_like": "unknown" if dataset.quantity else kind,
        "displacements_A": _statistics(seen.displacements),
        "forces_eV_per_A": _statistics(seen.forces),
        "stress_eV_per_A3": _statistics(seen.stress),
        "verified": verified,
        "left_out": [{"name": name, "reason": reason} for name, reason in dataset.bad],
        "labels_not_used": dataset.unused,
    }
    warn = _warn_of_points if recipe == "potential" else _warn_of_relaxed
    warnings = [*warn(summary, seen, labels, dataset.hint), *_warn_of_copies(summary, seen)]
    seen.summary = summary | {"warnings": warnings}
    return seen


def _statistics(parts: list[np.ndarray]) -> dict[str, float] | None:
    values = np.concatenate(parts) if parts else np.array([])
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


def _warn_of_points(summary: Summary, seen: Inspected, labels: _Labels, hint: str) -> Iterator[str]:
    systems, unused = summary["systems"], summary["labels_not_used"]
    advice = {name: named_options(unused, name) for name in ("forces", "stress")}
    for name, text in {"energy": hint, **advice}.items():
        missing = systems - summary[f"with_{name}"]
        if missing and (text or name != "stress"):  # stress is often absent
            yield f"no {name}: {missing} of {systems} systems" + (f"; {text}" if text else "")
    if fault := unit_fault(seen.with_energy):
        yield f"wrong units: {fault}"
    else:
        yield from _implausible(seen.point_faults, systems)


def _warn_of_relaxed(
    summary: Summary, seen: Inspected, labels: _Labels, hint: str
) -> Iterator[str]:
    systems, kind = summary["systems"], summary["energies_look_like"]
    relaxed, natoms = labels["y_relaxed"], np.array(seen.natoms)
    if count := len(seen.untagged):
        yield f"no tags: {count} of {systems} systems have only tag 0, which means unknown"
    if seen.one_tag:
        yield one_tagged(seen.one_tag, systems)
    missing = np.flatnonzero(~np.isfinite(relaxed))
    if len(missing):
        first = "" if len(missing) == systems else f", for instance sid {seen.sids[missing[0]]}"
        text = f"no labels: {len(missing)} of {systems} systems have no {summary['label']}{first}"
        yield f"{text}; {hint}" if hint else text
    at_pos = summary["with_forces"] > 0
    limits = seen.limits.__getitem__
    faults = label_faults(relaxed, natoms, required=False, at_pos=at_pos, kind=kind, limits=limits)
    yield from _implausible([(seen.sids[i], reason) for i, reason in faults.items()], systems)
    if kind == "total" and summary["tags"]["adsorbate"]:
        yield (
            f"total energies: the median of y_relaxed is {per_atom(relaxed, natoms):.1f} eV per "
            "atom; expected adsorption energies, because there are adsorbates; subtract energies "
            "of the clean surface and the molecule, or train with --task.references fit"
        )
    yield from _implausible(seen.point_faults, systems)
    unrelaxed = systems - summary["with_relaxed_positions"]
    if unrelaxed and summary["label"] == "y_relaxed":
        yield f"no relaxed positions: {unrelaxed} of {systems} systems have no pos_relaxed"


def _implausible(faults: list[tuple[int, str]], systems: int) -> Iterator[str]:
    if faults:
        sid, reason = faults[0]
        count = f"{len(faults)} of {systems} systems, for instance sid {sid}"
        yield f"implausible labels: {count}: {reason}"


def _warn_of_copies(summary: Summary, seen: Inspected) -> Iterator[str]:
    systems = summary["systems"]
    if repeated := systems - len(set(seen.sids)):
        yield f"repeated sids: {repeated} systems have the sid of an earlier one"
    if repeated := systems - len(np.unique(equal_structures(np.array(seen.features)))):
        yield (
            f"repeated structures: {repeated} of {systems} systems have the elements, cell and "
            "initial positions of an earlier one"
        )
    if seen.overlapping:
        yield overlaps_of("coinciding atoms", seen.overlapping, systems)
    if summary["left_out"]:
        yield f"skipped: {counted(len(summary['left_out']), 'invalid structure')}"
