"""``molflt data inspect``: a summary of structures as YAML or JSON."""

import itertools
import sys
from collections.abc import Callable, Iterator
from json import dumps
from pathlib import Path

import numpy as np

from molflt.commands.options import refuse_idle, yaml_of
from molflt.data.structures import Reading
from molflt.data.structures.base import Tags, grouped
from molflt.data.structures.overlaps import equal_structures
from molflt.data.structures.sources import is_one_source, sources_in
from molflt.data.structures.summary import Inspected, Purpose, Summary, summarize


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
    splits = {name: split.summary for name, split in by_split.items()}
    if json:
        print(dumps({"path": str(path), "splits": splits, "others": others}))
    else:
        readable = {name: _readable(summary) for name, summary in splits.items()}
        print(yaml_of({"path": str(path), "splits": readable, "others": others}))


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
