"""Pictures of structures seen from the top and from the side, and of their energies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from molflt.atoms import Tag
from molflt.plots.figure import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch_geometric.data import Data

__all__ = ["placement_views", "structure_overview", "structure_views"]


def structure_overview(
    energies: Mapping[str, np.ndarray], shown: Data, name: str, file: Path
) -> None:
    """Draws a histogram of labels, and a record from the top and from the side.

    `energies` are labels by name, (structures,), eV, NaN if missing; `name` is that of the source.
    """
    with picture(file, figsize=(13, 4.2)) as figure:
        left, top, side = figure.subplots(1, 3, width_ratios=(1.2, 1, 1))
        _histogram(left, energies)
        _view(top, shown, "top")
        _view(side, shown, "side")
        figure.suptitle(f"{name} (thick edge: adsorbate; hatched: fixed)")


def structure_views(structure: Data, file: Path) -> None:
    """Draws a record of `molflt.data.structures` from the top and from the side."""
    with picture(file, figsize=(5.8, 3.1)) as figure:
        for axes, view in zip(figure.subplots(1, 2), ("top", "side"), strict=True):
            _view(axes, structure, view)


def placement_views(structures: Mapping[str, Data], file: Path) -> None:
    """Draws records of `molflt.data.structures` by title, from the top and from the side."""
    with picture(file, figsize=(2.9 * len(structures), 5.6)) as figure:
        grid = figure.subplots(2, len(structures), squeeze=False)
        for column, (title, structure) in zip(grid.T, structures.items(), strict=True):
            for axes, view in zip(column, ("top", "side"), strict=True):
                _view(axes, structure, view)
                axes.set_title(title if view == "top" else "", fontsize=9)


def _histogram(axes: Axes, energies: Mapping[str, np.ndarray]) -> None:
    """Draws a histogram of labels, eV, over the range that contains 98 % of them."""
    finite = {name: values[np.isfinite(values)] for name, values in energies.items()}
    present = {name: values for name, values in finite.items() if len(values)}
    axes.set(xlabel="energy (eV)", ylabel="systems")
    if not present:
        axes.text(0.5, 0.5, "no labels", ha="center", transform=axes.transAxes)
        return
    everything = np.concatenate(list(present.values()))
    low, high = np.percentile(everything, (1, 99) if len(everything) > 50 else (0, 100))
    margin = max(0.05 * (high - low), 0.1)
    edges = np.linspace(low - margin, high + margin, min(41, 8 + len(everything) // 4))
    for name, values in present.items():
        outside = int(((values < edges[0]) | (values > edges[-1])).sum())
        note = f", {outside} outside" if outside else ""
        axes.hist(values, bins=edges.tolist(), alpha=0.6, label=f"{name} ({len(values)}{note})")
    axes.legend()


def _view(axes: Axes, structure: Data, view: str) -> None:
    """Draws a structure, in Å, seen along -z ("top") or +y ("side"), with the nearest atoms last.

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
        adsorbate = bool(structure.tags[atom] == Tag.ADSORBATE)
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
    axes.set(aspect="equal", xlabel=f"{'xyz'[across]} (Å)", ylabel=f"{'xyz'[up]} (Å)")
    present = " ".join(sorted({chemical_symbols[z] for z in numbers}))
    energy = float(structure.y_relaxed)
    label = "" if math.isnan(energy) else f", label {energy:.2f} eV".replace("-", "−")
    axes.set_title(f"sid {structure.sid}, {view} view{label}\n{present}", fontsize=9)
