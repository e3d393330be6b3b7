"""One adsorption system of ASE's effective-medium potential: drawn, relaxed, checked.

Every system is a real relaxation that anyone can repeat: an fcc slab of one or two metals, one
adsorbate at a random place and orientation, and ASE's EMT calculator (Jacobsen, Stoltze and
Norskov, Surf. Sci. 366, 394, 1996). EMT is not density-functional theory, and its parameters for
H, C, N and O are rough: energies made here compare models with each other and with nothing else.

A system depends on (seed, split, index) and on nothing else, so the number of workers, an
interruption or a larger ``train`` leave the systems of a split as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from molflt.atoms import Tag

if TYPE_CHECKING:
    from ase import Atoms

_METALS = ("Ag", "Al", "Au", "Cu", "Ni", "Pd", "Pt")
_ADSORBATES = (
    *("C", "C2H4", "CH", "CH2", "CH3", "CH4", "CO"),
    *("H", "H2O", "N", "NH3", "NO", "O", "OH"),
)
_OOD_ADSORBATES = ("CO2", "HCN", "N2", "NH2")
_OOD_CATALYSTS = (
    ("Pd",),
    ("Ag", "Au"),
    ("Ag", "Pt"),
    ("Al", "Cu"),
    ("Au", "Ni"),
    ("Cu", "Pd"),
    ("Ni", "Pt"),
)
_CATALYSTS = tuple(
    metals
    for size in (1, 2)
    for metals in combinations(_METALS, size)
    if metals not in _OOD_CATALYSTS
)
# Per split: the adsorbates and the catalysts it draws from. The order fixes sids: append only.
_SPLITS = {
    "train": (_ADSORBATES, _CATALYSTS),
    "val_id": (_ADSORBATES, _CATALYSTS),
    "val_ood_ads": (_OOD_ADSORBATES, _CATALYSTS),
    "val_ood_cat": (_ADSORBATES, _OOD_CATALYSTS),
    "val_ood_both": (_OOD_ADSORBATES, _OOD_CATALYSTS),
}
_SIDS_PER_SPLIT = 10_000_000

# p(nx x ny) cells and how often each is drawn: 24 atoms a system on average.
_CELLS = ((1, 2), (2, 2), (2, 3), (3, 3))
_CELL_WEIGHTS = (0.10, 0.25, 0.30, 0.35)
_VACUUM = 8.0  # Å on each side of the slab; EMT's neighbour search ends below 6 Å
_FORCE_TOLERANCE = 0.05  # eV/Å
_MAX_STEPS = 300
_MAX_STEP = 0.1  # Å; BFGS, as LBFGS climbs where EMT is not convex: 22 of 30 trials converged
# Distance at the start, in units of the sum of the covalent radii. From close by (1.0), every
# molecule falls into the same wells and its name alone gives the energy; from far away (2.2) most
# stay unbound. The range makes energies a question of geometry.
_CONTACT = (1.0, 2.2)
# Where a molecule comes apart depends on fine details of its start: from 1.6, shifts of 0.03 Å
# changed one energy in six by more than 0.1 eV. So the initial structure is taken after the
# molecule has settled on the frozen slab, and is then rattled.
_SETTLED = 0.1  # eV/Å
_RATTLE = 0.1  # Å, standard deviation of each coordinate of the adsorbate
_MAX_ENERGY = 10.0  # eV, relaxed
_MAX_START_ENERGY = 20.0  # eV, unrelaxed
_BOND = 1.3  # a bond: closer than this times the sum of the covalent radii
_SCATTERED = 5.0  # Å between two atoms that were bonded in the gas phase
_DESORBED = 6.0  # Å between the adsorbate and the nearest atom of the slab: beyond EMT's reach
_MAX_SHIFT = 2.0  # Å, largest displacement of an atom of the slab
_REJECTIONS = ("not_converged", "energy", "scattered", "desorbed", "reconstructed")
_MAX_ATTEMPTS = 50


class _System(NamedTuple):
    """One accepted relaxation.

    Attributes:
        fields: keyword arguments of :func:`molflt.data.structures.records.make_record`.
        rejected: how many draws were refused before this one, per reason.
    """

    fields: dict[str, np.ndarray | float]
    rejected: dict[str, int]


def _relax(atoms: Atoms, tolerance: float = _FORCE_TOLERANCE) -> tuple[float, float, bool]:
    """Relax in place; returns energy before and after in eV, and whether it converged."""
    from ase.calculators.emt import EMT
    from ase.optimize import BFGS

    atoms.calc = EMT()
    start = float(atoms.get_potential_energy())
    optimizer = BFGS(atoms, logfile=None, maxstep=_MAX_STEP)
    converged = bool(optimizer.run(fmax=tolerance, steps=_MAX_STEPS))
    return start, float(atoms.get_potential_energy()), converged


@cache
def _gas_phase(name: str) -> tuple[Atoms, float]:
    """Relaxed adsorbate alone in vacuum and its energy in eV."""
    from ase.build import molecule

    atoms = molecule("CH2_s3B1d" if name == "CH2" else name)
    _, energy, converged = _relax(atoms)
    if not converged:
        raise ValueError(f"the gas-phase adsorbate {name} did not relax with EMT: leave it out")
    return atoms, energy


def _lattice_constant(symbol: str) -> float:
    """Experimental lattice constant of an fcc metal, Å."""
    from ase.data import atomic_numbers, reference_states

    return cast(dict[str, float], reference_states[atomic_numbers[symbol]])["a"]


def _draw_slab(rng: np.random.Generator, metals: tuple[str, ...], single_atom: bool) -> Atoms:
    """Unrelaxed slab; its tags are OC20's (1 = top layer, 0 = below), two lowest layers fixed."""
    from ase.build import fcc100, fcc110, fcc111
    from ase.constraints import FixAtoms

    # In p(1x2) the repeats are 2.5 Å apart: a molecule would overlap with its own image.
    first = 0 if single_atom else 1
    weights = np.array(_CELL_WEIGHTS[first:])
    nx, ny = _CELLS[first + int(rng.choice(len(weights), p=weights / weights.sum()))]
    layers = int(rng.integers(3, 5))
    facets: tuple[Callable[..., Atoms], ...] = (fcc111, fcc100, fcc110)
    facet = facets[int(rng.integers(3))]
    sites = nx * ny * layers
    symbols = np.full(sites, metals[0])
    if len(metals) == 2:
        count = min(max(round(rng.uniform(0.2, 0.8) * sites), 1), sites - 1)
        symbols[rng.permutation(sites)[:count]] = metals[1]
    # Vegard's law on the experimental lattice constants.
    lattice = float(np.mean([_lattice_constant(symbol) for symbol in symbols]))
    slab = facet(metals[0], size=(nx, ny, layers), a=lattice, vacuum=_VACUUM, periodic=True)
    slab.set_chemical_symbols(symbols.tolist())
    layer = slab.get_tags()  # ASE counts from the top, starting at 1
    slab.set_tags(np.where(layer == 1, Tag.SURFACE, Tag.SUBSURFACE))
    slab.set_constraint(FixAtoms(mask=layer > layers - 2))
    return slab


def _place(rng: np.random.Generator, slab: Atoms, molecule: Atoms) -> Atoms:
    """Slab plus the adsorbate, turned at random and lowered to first contact at a random place."""
    from ase.data import covalent_radii
    from scipy.spatial.transform import Rotation

    rotation = Rotation.from_quat(rng.normal(size=4))  # uniform on the sphere of quaternions
    points = rotation.apply(molecule.positions - molecule.positions[0])
    points += rng.random(2) @ slab.cell.array[:2]
    scale = rng.uniform(*_CONTACT)
    contact = scale * np.add.outer(
        covalent_radii[molecule.numbers], covalent_radii[slab.numbers]
    )  # [adsorbate atom, slab atom], Å
    steps = np.array([(i, j, 0) for i in range(-2, 3) for j in range(-2, 3)])
    folded = (points @ np.linalg.inv(slab.cell.array))[:, None] - slab.get_scaled_positions(
        wrap=False
    )
    folded[..., :2] -= np.round(folded[..., :2])
    across = ((folded[:, :, None] + steps) @ slab.cell.array)[..., :2]  # [a, s, image, xy]
    squared = contact[..., None] ** 2 - (across**2).sum(-1)
    heights = slab.positions[None, :, 2, None] + np.sqrt(np.maximum(squared, 0.0))
    lift = np.where(squared > 0.0, heights, -np.inf).max(axis=(1, 2)) - points[:, 2]
    points[:, 2] += lift.max()

    adsorbate = molecule.copy()
    adsorbate.positions = points
    adsorbate.set_tags(Tag.ADSORBATE)
    system: Atoms = slab.copy()  # keeps cell, periodicity and the fixed layers
    system.extend(adsorbate)
    return system


def _settle(rng: np.random.Generator, system: Atoms) -> bool:
    """Relax the adsorbate alone, then rattle it; returns whether it converged."""
    from ase.constraints import FixAtoms

    mine = system.get_tags() == Tag.ADSORBATE
    constraints = system.constraints
    system.set_constraint(FixAtoms(mask=~mine))
    _, _, converged = _relax(system, _SETTLED)
    system.set_constraint(constraints)
    system.positions[mine] += rng.normal(scale=_RATTLE, size=(int(mine.sum()), 3))
    return converged


def _rejection(
    start: np.ndarray, relaxed: Atoms, molecule: Atoms, energies: tuple[float, float], slab: int
) -> str | None:
    """Why this relaxation is drawn again, or None. ``start`` is (atoms, 3) in Å."""
    from ase.data import covalent_radii

    before, after = energies
    if not (abs(after) <= _MAX_ENERGY and abs(before) <= _MAX_START_ENERGY):  # also catches NaN
        return "energy"
    gas = molecule.get_all_distances()
    radii = covalent_radii[molecule.numbers]
    bonded = (gas > 0.0) & (gas < _BOND * np.add.outer(radii, radii))
    inside = relaxed[slab:].get_all_distances()
    if (inside[bonded] > _SCATTERED).any():
        return "scattered"
    if relaxed.get_all_distances(mic=True)[slab:, :slab].min() > _DESORBED:
        return "desorbed"
    if np.linalg.norm(relaxed.positions[:slab] - start[:slab], axis=1).max() > _MAX_SHIFT:
        return "reconstructed"
    return None


def _attempt(rng: np.random.Generator, split: str, sid: int) -> dict[str, np.ndarray | float] | str:
    """One draw: the record's fields, or the name of the rule that refused it."""
    adsorbates, catalysts = _SPLITS[split]
    molecule, gas_energy = _gas_phase(adsorbates[int(rng.integers(len(adsorbates)))])
    metals = catalysts[int(rng.integers(len(catalysts)))]
    slab = _draw_slab(rng, metals, single_atom=len(molecule) == 1)
    _, slab_energy, converged = _relax(slab)
    if not converged:
        return "not_converged"
    system = _place(rng, slab, molecule)
    if not _settle(rng, system):
        return "not_converged"
    start = system.positions.copy()
    before, after, converged = _relax(system)
    if not converged:
        return "not_converged"
    y_init, y_relaxed = (energy - slab_energy - gas_energy for energy in (before, after))
    reason = _rejection(start, system, molecule, (y_init, y_relaxed), len(slab))
    if reason is not None:
        return reason
    fixed = np.zeros(len(system), dtype=bool)
    fixed[system.constraints[0].index] = True
    return {
        "pos": start.astype(np.float32),
        "pos_relaxed": system.positions.astype(np.float32),
        "atomic_numbers": system.numbers.astype(np.int64),
        "tags": system.get_tags().astype(np.int64),
        "fixed": fixed,
        "cell": system.cell.array.astype(np.float32).reshape(1, 3, 3),
        "pbc": np.ones((1, 3), dtype=bool),
        "sid": sid,
        "y_init": y_init,
        "y_relaxed": y_relaxed,
    }


def _relax_system(seed: int, split: str, index: int) -> _System:
    """Draw and relax one system.

    A draw is refused, and the next one of the same (seed, split, index) taken, when the slab or
    the system needs more than 300 BFGS steps to reach 0.05 eV/Å, when |y_relaxed| > 10 eV or
    |y_init| > 20 eV, when two bonded atoms of the adsorbate end more than 5 Å apart, when the
    adsorbate ends more than 6 Å from the slab, or when an atom of the slab moves by more than
    2 Å. Dissociation as such is kept: with EMT most molecules come apart on most surfaces.

    Args:
        seed: seed of the whole data set, 0 or larger.
        split: a key of ``SPLITS``.
        index: number of the system in its split, from 0.

    Returns:
        The system and the number of refused draws per reason.

    Raises:
        ValueError: 50 draws in a row were refused.
    """
    number = list(_SPLITS).index(split)
    rejected = dict.fromkeys(_REJECTIONS, 0)
    for attempt in range(_MAX_ATTEMPTS):
        stream = np.random.SeedSequence(seed, spawn_key=(number, index, attempt))
        result = _attempt(np.random.default_rng(stream), split, number * _SIDS_PER_SPLIT + index)
        if not isinstance(result, str):
            return _System(result, rejected)
        rejected[result] += 1
    raise ValueError(
        f"split {split}, system {index}: {_MAX_ATTEMPTS} draws in a row were refused "
        f"({rejected}); try another --seed"
    )
