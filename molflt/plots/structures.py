"""Figures of structures, viewed from the top and from the side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from molflt.atoms import Tag
from molflt.plots.figure import panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch_geometric.data import Data


def structure_views(structures: Mapping[str, Data], file: Path) -> None:
    """Draws records of `molflt.data.structures` from the top and the side; the keys are titles.

    The views of a single structure are next to each other.
    """
    count = len(structures)
    with panels(file, 2 * count, max(2, count), (2.9, 3.1)) as (_, all_axes):
        for column, (title, structure) in enumerate(structures.items()):
            for view, axes in zip(("top", "side"), all_axes[column::count], strict=True):
                _view(axes, structure, view)
                axes.set_title(title if view == "top" else "", fontsize=9)


def _view(axes: Axes, structure: Data, view: str) -> None:
    """Draws a structure and its cell in Å, viewed along -z ("top") or +y ("side")."""
    from ase.data import covalent_radii
    from ase.data.colors import jmol_colors
    from matplotlib.patches import Circle

    up = {"top": 1, "side": 2}[view]
    pos = structure.pos.double().numpy()
    depth = pos[:, 2] if view == "top" else -pos[:, 1]
    numbers = structure.atomic_numbers.numpy()
    for atom in np.argsort(depth):  # the nearest atoms last
        adsorbate = bool(structure.tags[atom] == Tag.ADSORBATE)
        axes.add_patch(
            Circle(
                (pos[atom, 0], pos[atom, up]),
                0.9 * covalent_radii[numbers[atom]],
                facecolor=jmol_colors[numbers[atom]],
                edgecolor="black" if adsorbate else "0.35",
                linewidth=2.0 if adsorbate else 0.6,
                hatch="///" if structure.fixed[atom] else None,
            )
        )
    cell = structure.cell[0].double().numpy()
    a, b = cell[0], cell[up]
    corners = np.array([0 * a, a, a + b, b, 0 * a])
    axes.plot(corners[:, 0], corners[:, up], "--", color="0.5", linewidth=0.8)
    radius = float(covalent_radii[numbers].max())
    for axis, limits in ((0, axes.set_xlim), (up, axes.set_ylim)):
        limits(pos[:, axis].min() - 1.5 * radius, pos[:, axis].max() + 1.5 * radius)
    axes.set(aspect="equal", xlabel="x (Å)", ylabel=f"{'xyz'[up]} (Å)")
