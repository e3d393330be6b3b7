"""``molflt data inspect``: a summary of structures as text, JSON and a figure."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from json import dumps
from pathlib import Path

import numpy as np

from molflt.data.structures import Reading
from molflt.data.structures.base import Tags, grouped
from molflt.data.structures.overlaps import equal_structures
from molflt.data.structures.sources import is_one_source, sources_in
from molflt.data.structures.summary import (
    Inspected,
    Purpose,
    Statistics,
    Summary,
    energies_in_words,
    summarize,
)

__all__ = ["inspect"]


def inspect(
    path: Path | Sequence[Path],
    json: bool = False,
    limit: int | None = None,
    skip_bad: bool = False,
    energy_key: str | None = None,
    tags: Tags = "oc20",
    forces_key: str | None = None,
    stress_key: str | None = None,
    recipe: Purpose | None = None,
) -> None:
    """Prints a summary of a file or folder of structures, with units and warnings.

    Invalid structures are skipped, counted and listed by reason. A folder is read file by file; a
    folder of shards counts as one file.

    Args:
        path: OC20 LMDB file or folder, compact store, or a file that ASE reads; or a folder of
            these.
        json: print one JSON object instead of text, with at least systems, atoms_total,
            with_labels, elements, energies_look_like and warnings; for a folder, with the keys
            path, splits (one object for each split) and others (names of other files).
        limit: number of structures to read, starting with the first.
        skip_bad: has no effect; accepted for compatibility with older scripts.
        energy_key: name of the energy (in eV) in a file that ASE reads; by default y_relaxed or, if
            it is missing, energy.
        tags: meaning of tags in a file that ASE reads: oc20 (0 subsurface, 1 surface, 2 adsorbate)
            or ase (layers from the top, 1, 2, ..., and 0 for adsorbates).
        forces_key: name of the forces (in eV/Å) in a file that ASE reads; by default forces or, if
            they are missing, REF_forces.
        stress_key: name of the stress (in eV/Å^3) or of a virial (in eV); by default stress or, if
            it is missing, REF_stress.
        recipe: labels to report: potential (energies, forces and stress at the positions) or is2re
            (relaxed energies); by default inferred from the labels.
    """
    reading = Reading(energy_key, "any" if recipe == "potential" else tags, forces_key, stress_key)
    if not isinstance(path, Path) and len(path) == 1:
        path = path[0]
    if isinstance(path, Path) and path.is_dir() and not is_one_source(path):
        _inspect_folder(path, json, lambda each: summarize(each, limit, reading, recipe))
        return
    summary = summarize(path, limit, reading, recipe).summary
    print(dumps(summary) if json else _as_text(summary))


def _inspect_folder(path: Path, json: bool, look: Callable[[Path], Inspected]) -> None:
    sources, others = sources_in(path)
    found: dict[str, Inspected] = {}
    for name, each in sources.items():
        try:
            found[name] = look(each)
        except ValueError as error:
            print(f"molflt: warning: {error}; left out", file=sys.stderr)
    if not found:
        raise ValueError(f"{path}: cannot read any of {', '.join(sources)}")
    for name, text in _shared(found):
        found[name].summary["warnings"].append(text)
    splits = {name: each.summary for name, each in found.items()}
    if json:
        print(dumps({"path": str(path), "splits": splits, "others": others}))
        return
    counts = ", ".join(f"{name} {summary['systems']:,}" for name, summary in splits.items())
    rest = f"; no structures in {', '.join(others)}" if others else ""
    print("\n\n".join([f"{path}: systems in {counts}{rest}", *map(_as_text, splits.values())]))


def _shared(found: dict[str, Inspected]) -> Iterator[tuple[str, str]]:
    """Yields (split, warning) for each split that shares structures with an earlier split."""
    equal = equal_structures(np.concatenate([each.features for each in found.values()]))
    ends = np.cumsum([len(each.sids) for each in found.values()])
    numbers = dict(zip(found, np.split(equal, ends[:-1]), strict=True))
    for other, name in itertools.combinations(found, 2):
        both = np.flatnonzero(np.isin(numbers[name], numbers[other]))
        if len(both):
            text = (
                f"structures in two splits: {len(both)} with the elements, cell and initial "
                f"positions of structures in {other}, for instance sid {found[name].sids[both[0]]}"
            )
            yield name, text


def _as_text(summary: Summary) -> str:
    atoms, potential = summary["atoms_per_system"], summary["recipe"] == "potential"
    label, relaxed = summary["label"], summary["label"] == "y_relaxed"
    words, warned = energies_in_words(summary), len(summary["warnings"])
    labels = {
        label: 0 if potential else summary["with_labels"],
        "energies": summary["with_energy"] if potential else 0,
        "forces": summary["with_forces"],
        "stress": summary["with_stress"],
    }
    rows = {
        "systems": summary["systems"],
        "atoms": f"{summary['atoms_total']} in total; per system {atoms['min']} to {atoms['max']}, "
        f"mean {atoms['mean']:.1f}",
        "elements": ", ".join(f"{name} {n}" for name, n in summary["elements"].items()),
        "tags": None if potential else ", ".join(f"{k} {n}" for k, n in summary["tags"].items()),
        "labels": ", ".join(f"{count} {name}" for name, count in labels.items() if count) or "none",
    }
    if relaxed:
        known = summary["energies_eV"].items()
        rows |= {name: _range(one, "eV") for name, one in known if one or name != "y_baseline"}
    elif not potential:
        rows[label] = _range(summary["energies_eV"]["y_relaxed"])
    if words:
        per_atom = _range(summary["energies_per_atom_eV"], "eV per atom")
        rows["per atom"] = f"{per_atom}\n{'':12}look like {words}"
    if relaxed:
        rows["displaced"] = _range(summary["displacements_A"], "Å") + " (free atoms)"
    if summary["forces_eV_per_A"] is not None:
        rows["forces"] = _range(summary["forces_eV_per_A"], "eV/Å") + " (magnitudes)"
    if summary["stress_eV_per_A3"] is not None:
        rows["stress"] = _range(summary["stress_eV_per_A3"], "eV/Å^3", digits=5) + " (components)"
    if summary["verified"] is not None:
        absent = "none; molflt data convert adds one"
        rows["digest"] = "correct" if summary["verified"] else absent
    rows["not used"] = ", ".join(summary["labels_not_used"]) or None
    bad = [(item["name"], item["reason"]) for item in summary["left_out"]]
    purpose = (
        "a potential" if potential else "relaxed energies" if relaxed else f"values of {label}"
    )
    found = f"; {warned} warning{'s' * (warned > 1)} below" if warned else ""
    return "\n".join(
        [
            f"{summary['path']}: for {purpose} (--recipe {summary['recipe']}){found}",
            *(f"{name:<12}{text}" for name, text in rows.items() if text is not None),
            *(f"warning: {text}" for text in summary["warnings"]),
            *(f"  left out {line}" for line in grouped(bad)),
        ]
    )


def _range(values: Statistics, unit: str = "", digits: int = 3) -> str:
    if values is None:
        return "unknown"
    low, high, mean, median = (
        f"{values[name]:.{digits}f}" for name in ("min", "max", "mean", "median")
    )
    return f"{low} to {f'{high} {unit}'.strip()}, mean {mean}, median {median}"
