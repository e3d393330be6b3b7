"""``molflt data inspect``: what a source of structures holds, as text, JSON and a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from json import dumps
from pathlib import Path

from molflt.data.structures import Reading
from molflt.data.structures.base import Tags
from molflt.data.structures.sources import is_one_source, sources_in
from molflt.data.structures.summary import Inspected, Summary, summarize

__all__ = ["inspect"]


def inspect(
    path: Path,
    json: bool = False,
    plot: Path | None = None,
    limit: int | None = None,
    skip_bad: bool = False,
    energy_key: str | None = None,
    tags: Tags = "oc20",
    forces_key: str | None = None,
    stress_key: str | None = None,
) -> None:
    """Print what a file or folder of structures holds, with units and warnings.

    Of a folder, each file and each folder of shards in turn.

    Args:
        path: OC20 LMDB file or folder, compact store, GAME-Net's archive, or a file that
            ASE reads; or a folder of such.
        json: print one JSON object instead of text, with at least systems, atoms_total,
            with_labels, elements, energies_look_like and warnings; of a folder path, splits (such
            an object for each, by name) and others (names of other files).
        plot: write a picture (.png, .svg or .pdf) with the histogram of energies and one structure
            from top and side.
        limit: look only at the first so many structures.
        skip_bad: leave out structures that are not valid, count and list them.
        energy_key: entry of a file that ASE reads that is the energy, eV; by default y_relaxed,
            else energy.
        tags: what tags mean in a file that ASE reads: oc20 (0 subsurface, 1 surface, 2 adsorbate)
            or ase (numbers of layers from the top, 1, 2, ..., and 0 for adsorbates).
        forces_key: array of a file that ASE reads that is the forces, eV/Å; by default forces, else
            REF_forces.
        stress_key: its entry that is the stress, eV/Å^3; by default stress, else REF_stress.

    Raises:
        ValueError: naming the file, key and sid of a structure that is not valid.
        FileNotFoundError: if there is nothing at ``path``.
    """
    if plot is not None:
        from molflt.plots.figure import expect_picture

        expect_picture(plot)
    reading = Reading(energy_key, tags, forces_key, stress_key)
    if path.is_dir() and not is_one_source(path):
        if plot is not None:
            raise ValueError(f"--plot is for one file; got the folder {path}; name a file in it")
        _inspect_folder(path, json, lambda each: summarize(each, limit, skip_bad, reading))
        return
    summary, energies, shown, _ = summarize(path, limit, skip_bad, reading)
    if plot is not None:
        from molflt.plots import structure_overview

        structure_overview(energies, shown, path.name, plot)
        summary["plot"] = str(plot)
    print(dumps(summary) if json else _as_text(summary))


def _inspect_folder(path: Path, json: bool, look: Callable[[Path], Inspected]) -> None:
    found, others = sources_in(path)
    splits: dict[str, Summary] = {}
    earlier: dict[str, dict[bytes, int]] = {}
    for name, each in found.items():
        splits[name], *_, earlier[name] = look(each)
        splits[name]["warnings"] += _shared(name, earlier)
        if not json:
            print(_as_text(splits[name]), end="\n\n")
    if json:
        print(dumps({"path": str(path), "splits": splits, "others": others}))
        return
    print(
        f"{path}: {', '.join(found)}" + (f"; no structures in {', '.join(others)}" * bool(others))
    )


def _shared(name: str, structures: Mapping[str, Mapping[bytes, int]]) -> list[str]:
    """Warnings of structures of a split that are in an earlier one, too."""
    own, texts = structures[name], []
    for other, theirs in structures.items():
        both = [sid for digest, sid in own.items() if digest in theirs]
        if both and other != name:
            texts.append(
                f"structures of two splits: {len(both)} have the elements, cell and initial "
                f"positions of one in {other}, for instance sid {both[0]}"
            )
    return texts


def _as_text(summary: Summary) -> str:
    atoms = summary["atoms_per_system"]
    assert atoms is not None  # there is at least one structure
    lines = [
        summary["path"],
        f"systems     {summary['systems']}",
        f"atoms       {summary['atoms_total']} in all; per system {atoms['min']} to "
        f"{atoms['max']}, mean {atoms['mean']:.1f}",
        "elements    " + ", ".join(f"{name} {n}" for name, n in summary["elements"].items()),
        "tags        " + ", ".join(f"{name} {n}" for name, n in summary["tags"].items()),
        f"labels      {summary['with_labels']} systems have y_relaxed"
        + f", {summary['with_forces']} forces" * bool(summary["with_forces"])
        + f", {summary['with_stress']} stress" * bool(summary["with_stress"]),
    ]
    for name, values in summary["energies_eV"].items():
        lines.append(f"{name:<12}" + _range(values, "eV"))
    kind = summary["energies_look_like"]
    if summary["with_labels"]:
        said = "neither adsorption nor total energies" if kind == "unknown" else f"{kind} energies"
        lines.append(f"y_relaxed look like {said}, by their magnitude per atom")
    lines.append("displaced   " + _range(summary["displacements_A"], "Å") + " (free atoms)")
    if summary["forces_eV_per_A"] is not None:
        lines.append("forces      " + _range(summary["forces_eV_per_A"], "eV/Å") + " (magnitudes)")
    if summary["stress_eV_per_A3"] is not None:
        stress = _range(summary["stress_eV_per_A3"], "eV/Å^3", digits=5)
        lines.append(f"stress      {stress} (components)")
    if summary["verified"] is not None:
        known = (
            "fits what it holds" if summary["verified"] else "none; molflt data convert adds one"
        )
        lines.append(f"digest      {known}")
    if "plot" in summary:
        lines.append(f"picture     {summary['plot']}")
    if summary["labels_not_used"]:
        lines.append(f"not used    {', '.join(summary['labels_not_used'])}")
    lines += [f"warning: {text}" for text in summary["warnings"]]
    lines += [f"  left out {item['name']}: {item['reason']}" for item in summary["left_out"]]
    return "\n".join(lines)


def _range(values: dict[str, float] | None, unit: str, digits: int = 3) -> str:
    if values is None:
        return "unknown"
    low, high, mean, median = (
        f"{values[name]:.{digits}f}" for name in ("min", "max", "mean", "median")
    )
    return f"{low} to {high} {unit}, mean {mean}, median {median}"
