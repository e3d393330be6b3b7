"""What a source of structures holds: counts, elements, tags, energies, displacements, warnings."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch_geometric.data import Data

from molflt.data.convert import records_with_unwrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_structure", "energy_histogram", "inspect", "summarize"]

_TAGS = {0: "subsurface", 1: "surface", 2: "adsorbate"}
# OC20 keeps adsorption energies within 10 eV of zero after relaxation; an initial structure may be
# strained, but hundreds of eV are a failed calculation or a total energy.
_ABSURD = {"y_relaxed": 20.0, "y_init": 100.0}  # eV


def inspect(
    path: Path,
    json: bool = False,
    plot: Path | None = None,
    limit: int | None = None,
    skip_bad: bool = False,
) -> None:
    """Print what a file or folder of structures holds, with units and warnings.

    Args:
        path: OC20 LMDB file or folder, compact store, or a file that ASE reads.
        json: print one JSON object instead of text, with at least systems, atoms_total,
            with_labels, elements and warnings.
        plot: write a PNG with the histogram of energies and one structure from top and side.
        limit: look only at the first so many structures.
        skip_bad: leave out structures that are not valid, count and list them.

    Raises:
        ValueError: naming the file, key and sid of a structure that is not valid.
        FileNotFoundError: if there is nothing at ``path``.
    """
    if plot is not None and plot.suffix != ".png":
        raise ValueError(f"plot: expected a file ending in .png; got {plot}")
    summary, energies, shown = summarize(path, limit=limit, skip_bad=skip_bad)
    if plot is not None:
        _write_picture(plot, path, energies, shown)
        summary["plot"] = str(plot)
    if json:
        from json import dumps

        print(dumps(summary))
    else:
        print(_as_text(summary))


def summarize(
    path: Path, limit: int | None = None, skip_bad: bool = False
) -> tuple[dict[str, Any], dict[str, np.ndarray], Data]:
    """One pass over a source.

    Returns:
        The summary as plain numbers and strings; the labels that are present, eV, by name; and
        one structure of typical size to draw.
    """
    bad: list[tuple[str, str]] = []
    counts: list[int] = []
    sids: list[int] = []
    elements: Counter[int] = Counter()
    tags: Counter[int] = Counter()
    labels: dict[str, list[float]] = {"y_init": [], "y_relaxed": []}
    displacements: list[np.ndarray] = []
    untagged = moved_atoms = relaxed_systems = 0
    shown: Data | None = None
    for record, moved in records_with_unwrapped(path, limit, skip_bad, bad):
        counts.append(record.natoms)
        sids.append(record.sid)
        elements.update(record.atomic_numbers.tolist())
        tags.update(record.tags.tolist())
        untagged += not record.tags.any()
        moved_atoms += moved
        for name, values in labels.items():
            values.append(float(record[name]))
        if not torch.isnan(record.pos_relaxed).any():
            relaxed_systems += 1
            free = (record.pos_relaxed - record.pos)[~record.fixed]
            displacements.append(free.norm(dim=1).numpy())
        if shown is None or (len(counts) <= 100 and record.natoms < shown.natoms):
            shown = record  # small structures are the ones a picture can show
    assert shown is not None  # records_with_unwrapped raises when there are none
    energies = {name: np.array(values) for name, values in labels.items()}
    free_displacements = np.concatenate(displacements) if displacements else np.array([])
    from ase.data import chemical_symbols

    summary = {
        "path": str(path),
        "systems": len(counts),
        "atoms_total": sum(counts),
        "atoms_per_system": _statistics(np.array(counts), whole=True),
        "with_labels": int(np.isfinite(energies["y_relaxed"]).sum()),
        "with_relaxed_positions": relaxed_systems,
        "elements": {chemical_symbols[z]: n for z, n in sorted(elements.items())},
        "tags": {_TAGS[tag]: tags[tag] for tag in _TAGS},
        "energies_eV": {name: _statistics(values) for name, values in energies.items()},
        "displacements_A": _statistics(free_displacements),
        "unwrapped_atoms": moved_atoms,
        "left_out": [{"name": name, "reason": reason} for name, reason in bad],
    }
    summary["warnings"] = _warnings(summary, energies, sids, untagged, len(free_displacements))
    present = {name: values[np.isfinite(values)] for name, values in energies.items()}
    return summary, present, shown


def _statistics(values: np.ndarray, whole: bool = False) -> dict[str, float] | None:
    """Count, min, mean, median and max of the finite values; None if there are none."""
    finite = values[np.isfinite(values)]
    if len(finite) == 0:
        return None
    ends = (finite.min(), finite.max())
    low, high = (int(ends[0]), int(ends[1])) if whole else (float(ends[0]), float(ends[1]))
    return {
        "count": len(finite),
        "min": low,
        "mean": float(finite.mean()),
        "median": float(np.median(finite)),
        "max": high,
    }


def _warnings(
    summary: dict[str, Any],
    energies: dict[str, np.ndarray],
    sids: list[int],
    untagged: int,
    free_atoms: int,
) -> list[str]:
    systems = summary["systems"]
    found = []
    if untagged:
        found.append(
            f"no tags: {untagged} of {systems} systems have only tag 0, so surface and adsorbate "
            "are unknown"
        )
    unlabeled = systems - summary["with_labels"]
    if unlabeled:
        found.append(f"no labels: {unlabeled} of {systems} systems have no y_relaxed")
    without = systems - summary["with_relaxed_positions"]
    if without:
        found.append(f"no relaxed positions: {without} of {systems} systems have no pos_relaxed")
    for name, bound in _ABSURD.items():
        where = np.flatnonzero(np.abs(energies[name]) > bound)
        if len(where):
            first = where[0]
            found.append(
                f"absurd labels: |{name}| > {bound:g} eV in {len(where)} systems, for instance sid "
                f"{sids[first]} with {energies[name][first]:.3f} eV; expected adsorption energies"
            )
    if summary["unwrapped_atoms"]:
        found.append(
            "wrapped relaxed positions: unwrapped "
            f"{summary['unwrapped_atoms']} of {free_atoms} free atoms"
        )
    repeated = systems - len(set(sids))
    if repeated:
        found.append(f"repeated sids: {repeated} systems have the sid of an earlier one")
    if summary["left_out"]:
        found.append(f"left out: {len(summary['left_out'])} structures are not valid")
    return found


def _as_text(summary: dict[str, Any]) -> str:
    atoms, tags = summary["atoms_per_system"], summary["tags"]
    lines = [
        summary["path"],
        f"systems     {summary['systems']}",
        f"atoms       {summary['atoms_total']} in all; per system {atoms['min']} to "
        f"{atoms['max']}, mean {atoms['mean']:.1f}",
        "elements    " + ", ".join(f"{name} {n}" for name, n in summary["elements"].items()),
        "tags        " + ", ".join(f"{name} {n}" for name, n in tags.items()),
        f"labels      {summary['with_labels']} systems have y_relaxed",
    ]
    for name, values in summary["energies_eV"].items():
        lines.append(f"{name:<12}" + _range(values, "eV"))
    lines.append("displaced   " + _range(summary["displacements_A"], "Å") + " (free atoms)")
    if "plot" in summary:
        lines.append(f"picture     {summary['plot']}")
    lines += [f"warning: {text}" for text in summary["warnings"]]
    lines += [f"  left out {item['name']}: {item['reason']}" for item in summary["left_out"]]
    return "\n".join(lines)


def _range(values: dict[str, float] | None, unit: str) -> str:
    if values is None:
        return "unknown"
    return (
        f"{values['min']:.3f} to {values['max']:.3f} {unit}, mean {values['mean']:.3f}, "
        f"median {values['median']:.3f}"
    )


def _write_picture(
    file: Path, source: Path, energies: dict[str, np.ndarray], structure: Data
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    left, top, side = figure.subplots(1, 3, width_ratios=(1.2, 1, 1))
    energy_histogram(left, energies)
    draw_structure(top, structure, "top")
    draw_structure(side, structure, "side")
    figure.suptitle(f"{source.name} (thick edge: adsorbate; hatched: fixed)")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


def energy_histogram(axes: Axes, energies: dict[str, np.ndarray]) -> None:
    """Histogram of labels, eV, over the range that holds 98 % of them."""
    present = {name: values for name, values in energies.items() if len(values)}
    axes.set_xlabel("energy (eV)")
    axes.set_ylabel("systems")
    if not present:
        axes.text(0.5, 0.5, "no labels", ha="center", transform=axes.transAxes)
        return
    everything = np.concatenate(list(present.values()))
    low, high = np.percentile(everything, (1, 99)) if len(everything) > 50 else (
        everything.min(), everything.max()
    )  # fmt: skip
    margin = max(0.05 * (high - low), 0.1)
    edges = np.linspace(low - margin, high + margin, min(41, 8 + len(everything) // 4))
    for name, values in present.items():
        outside = int(((values < edges[0]) | (values > edges[-1])).sum())
        note = f", {outside} outside" if outside else ""
        axes.hist(values, bins=edges.tolist(), alpha=0.6, label=f"{name} ({len(values)}{note})")
    axes.legend()


def draw_structure(axes: Axes, structure: Data, view: str) -> None:
    """Draw one structure seen along -z ("top") or along +y ("side"), nearest atoms last, in Å.

    Adsorbate atoms have a thick black edge; fixed atoms are hatched; the cell is dashed.
    """
    from ase.data import chemical_symbols, covalent_radii
    from ase.data.colors import jmol_colors
    from matplotlib.patches import Circle

    across, up = {"top": (0, 1), "side": (0, 2)}[view]
    pos = structure.pos.double().numpy()
    depth = pos[:, 2] if view == "top" else -pos[:, 1]
    numbers = structure.atomic_numbers.numpy()
    for atom in np.argsort(depth):
        adsorbate = bool(structure.tags[atom] == 2)
        axes.add_patch(
            Circle(
                (pos[atom, across], pos[atom, up]),
                0.9 * covalent_radii[numbers[atom]],
                facecolor=jmol_colors[numbers[atom]],
                edgecolor="black" if adsorbate else "0.35",
                linewidth=2.0 if adsorbate else 0.6,
                hatch="///" if structure.fixed[atom] else None,
            )
        )
    a, b, c = structure.cell[0].double().numpy()
    outline = (np.zeros(3), a, a + b, b) if view == "top" else (np.zeros(3), a, a + c, c)
    corners = np.array([*outline, outline[0]])
    axes.plot(corners[:, across], corners[:, up], "--", color="0.5", linewidth=0.8)
    radius = float(covalent_radii[numbers].max())
    for axis, limits in ((across, axes.set_xlim), (up, axes.set_ylim)):
        limits(pos[:, axis].min() - 1.5 * radius, pos[:, axis].max() + 1.5 * radius)
    axes.set_aspect("equal")
    axes.set_xlabel(f"{'xyz'[across]} (Å)")
    axes.set_ylabel(f"{'xyz'[up]} (Å)")
    present = "".join(sorted({chemical_symbols[z] + " " for z in numbers})).strip()
    energy = float(structure.y_relaxed)
    label = "" if math.isnan(energy) else f", {energy:.2f} eV"
    axes.set_title(f"sid {structure.sid}, {view} view{label}\n{present}", fontsize=9)
