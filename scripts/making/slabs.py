"""Slabs of 16 atoms of metals and ordered alloys (four layers; (211): eight), and their sites."""

from functools import cache
from typing import NamedTuple

import numpy as np
from ase import Atoms
from ase.build import bulk, make_supercell
from ase.build import surface as cut
from ase.constraints import FixAtoms
from ase.filters import FrechetCellFilter
from ase.optimize import BFGS
from making.calculators import CALCULATORS, VACUUM, relax
from scipy.spatial import Voronoi

from molflt.atoms import Tag

_FORCE_TOLERANCE = 0.05  # eV/Å
_MAX_SHIFT = 1.0  # Å, maximum displacement of an atom in the relaxation of a clean slab

# Lattice and metals. In L1_2, the first metal occupies three of four sites. Systems depend on the
# order; a change requires a new version of the generator.
CATALYSTS: dict[str, tuple[str, tuple[str, ...]]] = {
    **{
        metal: ("fcc", (metal,)) for metal in ("Ag", "Al", "Au", "Cu", "Ir", "Ni", "Pd", "Pt", "Rh")
    },
    **{m: ("hcp", (m,)) for m in ("Co", "Os", "Re", "Ru")},
    **{m: ("bcc", (m,)) for m in ("Fe", "Mo", "W")},
    **{
        f"{one}3{other}": ("L1_2", (one, other))
        for one, other in (
            *(("Cu", "Au"), ("Au", "Cu"), ("Cu", "Pt"), ("Cu", "Pd"), ("Ag", "Pd")),
            *(("Ni", "Al"), ("Ni", "Pt"), ("Pt", "Ni"), ("Pt", "Co"), ("Pt", "Fe"), ("Pd", "Fe")),
        )
    },
    **{
        f"{one}{other}": ("L1_0", (one, other))
        for one, other in (
            *(("Cu", "Au"), ("Ag", "Au"), ("Ag", "Pd"), ("Ni", "Pt")),
            *(("Fe", "Pt"), ("Co", "Pt"), ("Fe", "Pd")),
        )
    },
    **{
        f"{one}{other}": ("B2", (one, other))
        for one, other in (("Ni", "Al"), ("Co", "Al"), ("Fe", "Al"), ("Cu", "Pd"))
    },
}


class _Facet(NamedTuple):
    """A surface cut from the relaxed unit cell.

    Attributes:
        name: Miller indices as text.
        indices: Miller indices.
        layers: number of cells along the normal.
        repeat: numbers of repetitions along the two in-plane vectors.
        rotated: True if the unit cell is first replaced by a cell with the vectors (1, 1, 0),
            (-1, 1, 0) and (0, 0, 1), in units of the lattice vectors.
    """

    name: str
    indices: tuple[int, int, int]
    layers: int
    repeat: tuple[int, int] = (1, 1)
    rotated: bool = False


_FCC = (
    _Facet("111", (1, 1, 1), 4),
    _Facet("100", (0, 0, 1), 2, rotated=True),
    _Facet("110", (1, 1, 0), 2, (1, 2)),
    _Facet("211", (2, 1, 1), 4),
)
_BCC = (_Facet("110", (1, 1, 0), 4, (1, 2)), _Facet("100", (0, 0, 1), 2, (2, 2)))
_FACETS = {
    "fcc": _FCC,
    "L1_2": _FCC,
    "L1_0": _FCC,
    "hcp": (_Facet("0001", (0, 0, 1), 2, (2, 2)),),
    "bcc": _BCC,
    "B2": _BCC,
}


class _Surface(NamedTuple):
    """A clean surface; `upside_down` exposes the other termination of an alloy."""

    catalyst: str
    facet: _Facet
    upside_down: bool

    @property
    def name(self) -> str:
        return f"{self.facet.name}{'b' if self.upside_down else ''}"


def _draw_surface(rng: np.random.Generator, catalyst: str) -> _Surface:
    lattice, metals = CATALYSTS[catalyst]
    facets = _FACETS[lattice]
    facet = facets[int(rng.integers(len(facets)))]
    return _Surface(catalyst, facet, bool(rng.integers(2)) and len(metals) > 1)


def _unrelaxed_cell(catalyst: str) -> Atoms:
    """Returns a unit cell; its volume is the sum of the volumes of its atoms in pure metals."""
    lattice, metals = CATALYSTS[catalyst]
    if len(metals) == 1:
        return bulk(metals[0], cubic=True) if lattice != "hcp" else bulk(metals[0])
    one, other = metals
    symbols, places = {
        "L1_2": ([other, one, one, one], [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)]),
        "L1_0": ([one, other, other, one], [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)]),
        "B2": ([one, other], [(0, 0, 0), (1, 1, 1)]),
    }[lattice]
    volume = sum(bulk(symbol).get_volume() / len(bulk(symbol)) for symbol in symbols)
    halves = np.array(places) / 2
    return Atoms(symbols, scaled_positions=halves, cell=[volume ** (1 / 3)] * 3, pbc=True)


@cache
def _unit_cell(potential: str, catalyst: str) -> Atoms:
    """Returns the unit cell, relaxed with the potential."""
    cell = _unrelaxed_cell(catalyst)
    cell.calc = CALCULATORS[potential].build()
    optimizer = BFGS(FrechetCellFilter(cell), logfile=None)
    if not optimizer.run(fmax=0.01, steps=200):
        raise ValueError(f"calculator {potential}: {catalyst} did not relax to 0.01 eV/Å")
    cell.calc = None
    return cell


def _cut(cell: Atoms, surface: _Surface) -> Atoms:
    """Returns an unrelaxed slab with tag 1 in the top quarter, 0 below, and a fixed lower half."""
    facet = surface.facet
    if facet.rotated:
        cell = make_supercell(cell, [[1, 1, 0], [-1, 1, 0], [0, 0, 1]])
    cell = cell.copy()
    cell.positions += 0.1 * cell.cell.array.sum(axis=0) / 4  # avoids atoms on a layer boundary
    slab = cut(cell, facet.indices, facet.layers, vacuum=VACUUM, periodic=True)
    slab = slab.repeat((*facet.repeat, 1))
    if surface.upside_down:
        slab.positions *= -1  # the lattice is symmetric under inversion
        slab.center(vacuum=VACUUM, axis=2)
    slab = slab[np.argsort(slab.positions[:, 2].round(3), kind="stable")]
    slab.wrap(pbc=(True, True, False))
    count = len(slab)
    top = np.arange(count) >= count - count // 4
    slab.set_tags(np.where(top, Tag.SURFACE, Tag.SUBSURFACE))
    slab.set_constraint(FixAtoms(indices=range(count // 2)))
    return slab


@cache
def _relaxed_slab(potential: str, surface: _Surface) -> tuple[Atoms, float] | None:
    """Returns a relaxed clean slab and its energy in eV, or None if the slab is rejected.

    It is rejected if the relaxation does not converge or moves an atom by more than 1 Å. Callers
    must not change the slab, because it is cached.
    """
    slab = _cut(_unit_cell(potential, surface.catalyst), surface)
    start = slab.positions.copy()
    done = relax(slab, potential, _FORCE_TOLERANCE)
    moved = np.linalg.norm(slab.positions - start, axis=1).max()
    return (slab, done.after) if done.converged and moved <= _MAX_SHIFT else None


def _draw_site(rng: np.random.Generator, slab: Atoms) -> tuple[str, np.ndarray]:
    """Draws the kind of a site and its in-plane position in Å.

    Sites are surface atoms (ontop), midpoints of neighbors (bridge) and corners of Voronoi cells
    (hollow). All three kinds are equally probable.
    """
    top = slab.positions[slab.get_tags() == Tag.SURFACE][:, :2]
    lattice = slab.cell.array[:2, :2]
    shifts = np.array([(i, j) for i in range(-2, 3) for j in range(-2, 3)]) @ lattice
    tiled = (top[:, None] + shifts).reshape(-1, 2)
    kind = ("ontop", "bridge", "hollow")[int(rng.integers(3))]
    if kind == "ontop":
        sites = top
    else:
        cells = Voronoi(tiled)
        pairs = tiled[cells.ridge_points]
        lengths = np.linalg.norm(pairs[:, 0] - pairs[:, 1], axis=1)
        near = pairs[lengths <= 1.2 * lengths.min()].mean(axis=1)
        sites = near if kind == "bridge" else cells.vertices
        places = sites @ np.linalg.inv(lattice)
        sites = sites[((places >= 0.0) & (places < 1.0)).all(axis=1)]
    return kind, sites[int(rng.integers(len(sites)))]
