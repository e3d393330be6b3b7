"""Random adsorption systems, relaxed with a potential and checked.

A system consists of a slab of a metal or an ordered alloy and an adsorbate on one of its sites. It
depends only on the calculator, the seed, the split and the index, and not on the number of workers,
on interruptions or on the size of the split.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from ase import Atoms
from ase.constraints import FixAtoms
from ase.data import covalent_radii
from making.adsorbates import ADSORBATES, LARGE, _oriented
from making.calculators import CALCULATORS, adsorption_energy, relax
from making.slabs import _FORCE_TOLERANCE, CATALYSTS, _draw_site, _draw_surface, _relaxed_slab
from scipy.linalg import block_diag
from scipy.sparse.csgraph import connected_components
from torch_geometric.data import Data

from molflt.atoms import Tag
from molflt.data.structures.records import make_record

# Held-out adsorbates resemble other adsorbates. Metals of held-out alloys occur in other alloys.
_OOD_ADSORBATES = ("CH2", "NH2", "C2H3", "CH2O", "CHOH", "HCN", "CH3CO")
_OOD_CATALYSTS = ("Pd", "Cu3Pt", "NiPt", "AgAu", "Pt3Co", "CoAl", "FePd")
_ADSORBATES = tuple(name for name in ADSORBATES if name not in _OOD_ADSORBATES)
_CATALYSTS = tuple(name for name in CATALYSTS if name not in _OOD_CATALYSTS)
# Adsorbates and catalysts of each split. The sids depend on the order, so only append.
_SPLITS = {
    "train": (_ADSORBATES, _CATALYSTS),
    "val_id": (_ADSORBATES, _CATALYSTS),
    "val_ood_ads": (_OOD_ADSORBATES, _CATALYSTS),
    "val_ood_cat": (_ADSORBATES, _OOD_CATALYSTS),
    "val_ood_both": (_OOD_ADSORBATES, _OOD_CATALYSTS),
    "val_large": (tuple(LARGE), _CATALYSTS),
}
_LARGE = "val_large"
_REPEATS = ((2, 1), (2, 2), (3, 2))  # repetitions of slabs in val_large
_SHARE = 0.5  # fraction of systems in val_large with one adsorbate from `LARGE`
_SIDS_PER_SPLIT = 10_000_000

_TILT = 15.0  # degrees, standard deviation
_JITTER = 0.2  # Å, standard deviation of x and y around the site
# Initial distance, relative to the sum of the covalent radii.
_CONTACT = (1.0, 1.2)
# The final site of a molecule depends sensitively on its initial position. To obtain the initial
# structure, the molecule is therefore relaxed on the frozen slab and then rattled.
_SETTLED = 0.1  # eV/Å
_RATTLE = 0.1  # Å, standard deviation of each coordinate of the adsorbate
_MAX_ENERGY = 10.0  # eV, relaxed
_MAX_START_ENERGY = 20.0  # eV, unrelaxed
_BOND = 1.3  # maximum bond length, relative to the sum of the covalent radii
_DESORBED = 4.0  # Å; molecules farther from the slab count as desorbed
_MAX_SHIFT = 1.0  # Å, maximum displacement of a slab atom
_REJECTIONS = ("slab", "not_converged", "energy", "bonds", "desorbed", "reconstructed")
_MAX_ATTEMPTS = 50


class _Plan(NamedTuple):
    """Settings of a data set; `references` contains pairs of an element and its energy in eV."""

    calculator: str
    seed: int
    references: tuple[tuple[str, float], ...]
    frames: bool = False


class _System(NamedTuple):
    """An accepted system.

    Attributes:
        record: structure with labels.
        names: adsorbate, catalyst, facet and site.
        frames: steps of the relaxation with total energies and forces, if they were stored.
        rejected: number of earlier draws that were rejected, by reason.
    """

    record: Data
    names: dict[str, str]
    frames: list[Atoms]
    rejected: dict[str, int]


@cache
def _catalysts(calculator: str, split: str) -> tuple[str, ...]:
    """Returns the catalysts of a split whose metals the calculator supports."""
    metals = CALCULATORS[calculator].metals
    names = _SPLITS[split][1]
    return tuple(n for n in names if metals is None or metals.issuperset(CATALYSTS[n][1]))


def _place(rng: np.random.Generator, slab: Atoms, adsorbate: Atoms, site: np.ndarray) -> Atoms:
    """Returns the slab with the adsorbate lowered onto `site` (x and y in Å) until they touch."""
    points = adsorbate.positions.copy()
    points[:, :2] += site + rng.normal(scale=_JITTER, size=2)
    radii = covalent_radii[adsorbate.numbers], covalent_radii[slab.numbers]
    contact = rng.uniform(*_CONTACT) * np.add.outer(*radii)  # [adsorbate atom, slab atom], Å
    steps = np.array([(i, j, 0) for i in range(-2, 3) for j in range(-2, 3)])
    scaled = slab.get_scaled_positions(wrap=False)
    folded = (points @ np.linalg.inv(slab.cell.array))[:, None] - scaled
    folded[..., :2] -= np.round(folded[..., :2])
    across = ((folded[:, :, None] + steps) @ slab.cell.array)[..., :2]  # [a, s, image, xy]
    squared = contact[..., None] ** 2 - (across**2).sum(-1)
    heights = slab.positions[None, :, 2, None] + np.sqrt(np.maximum(squared, 0.0))
    lift = np.where(squared > 0.0, heights, -np.inf).max(axis=(1, 2)) - points[:, 2]
    points[:, 2] += lift.max()

    lowered = adsorbate.copy()
    lowered.positions = points
    lowered.set_tags(Tag.ADSORBATE)
    system: Atoms = slab.copy()  # keeps the cell and the fixed layers
    system.extend(lowered)
    return system


def _settle(rng: np.random.Generator, system: Atoms, calculator: str) -> bool:
    """Relaxes only the adsorbate and rattles it; returns True if the relaxation converged."""
    mine = system.get_tags() == Tag.ADSORBATE
    constraints = system.constraints
    system.set_constraint(FixAtoms(mask=~mine))
    done = relax(system, calculator, _SETTLED)
    system.set_constraint(constraints)
    system.positions[mine] += rng.normal(scale=_RATTLE, size=(int(mine.sum()), 3))
    return done.converged


def _bonds(adsorbate: Atoms) -> np.ndarray:
    """Returns a boolean matrix (atoms, atoms) of bonds, including bonds to periodic images."""
    radii = covalent_radii[adsorbate.numbers]
    distances = adsorbate.get_all_distances(mic=bool(adsorbate.pbc.any()))
    return distances < _BOND * np.add.outer(radii, radii)


def _rejection(
    start: Atoms, relaxed: Atoms, bonds: np.ndarray, energies: tuple[float, float]
) -> str | None:
    """Returns the reason for rejecting a relaxation, or None if it is accepted.

    `bonds` contains the expected bonds. `energies` are the adsorption energies before and after
    the relaxation, in eV per adsorbate.
    """
    before, after = energies
    slab = len(relaxed) - len(bonds)
    if not (abs(after) <= _MAX_ENERGY and abs(before) <= _MAX_START_ENERGY):  # also true for NaN
        return "energy"
    if (_bonds(relaxed[slab:]) != bonds).any():
        return "bonds"
    heights = relaxed.get_all_distances(mic=True)[slab:, :slab].min(axis=1)
    molecule = connected_components(bonds)[1]
    if any(heights[molecule == i].min() > _DESORBED for i in set(molecule)):
        return "desorbed"
    if np.linalg.norm(relaxed.positions[:slab] - start.positions[:slab], axis=1).max() > _MAX_SHIFT:
        return "reconstructed"
    return None


def _attempt(rng: np.random.Generator, plan: _Plan, split: str, sid: int) -> _System | str:
    """Draws a system and returns it or the reason for its rejection."""
    known, catalysts = _SPLITS[split][0], _catalysts(plan.calculator, split)
    names = [known[int(rng.integers(len(known)))]]
    surface = _draw_surface(rng, catalysts[int(rng.integers(len(catalysts)))])
    clean = _relaxed_slab(plan.calculator, surface)
    if clean is None:
        return "slab"
    slab, slab_energy = clean
    site, place = _draw_site(rng, slab)
    places = [place]
    if split == _LARGE:
        n, m = _REPEATS[int(rng.integers(len(_REPEATS)))]
        if rng.random() >= _SHARE:  # small adsorbates on the same site of different cells
            names = [str(one) for one in rng.choice(_ADSORBATES, int(rng.integers(2, n * m + 1)))]
        cells = rng.permutation([(i, j) for i in range(n) for j in range(m)])[: len(names)]
        places = [place + cell @ slab.cell.array[:2, :2] for cell in cells]
        slab, slab_energy = slab.repeat((n, m, 1)), slab_energy * n * m
    adsorbates = [_oriented(rng, one, _TILT) for one in names]
    system = slab
    for adsorbate, there in zip(adsorbates, places, strict=True):
        system = _place(rng, system, adsorbate, there)
    if not _settle(rng, system, plan.calculator):
        return "not_converged"
    bonds = _bonds(system[len(slab) :])
    intact = CALCULATORS[plan.calculator].intact
    if intact and (bonds != block_diag(*map(_bonds, adsorbates))).any():
        return "bonds"
    start = system.copy()
    done = relax(system, plan.calculator, _FORCE_TOLERANCE, frames=plan.frames)
    if not done.converged:
        return "not_converged"
    symbols = system.symbols[len(slab) :]
    y_init, y_relaxed = (
        adsorption_energy(energy, slab_energy, symbols, dict(plan.references))
        for energy in (done.before, done.after)
    )
    each = (y_init / len(names), y_relaxed / len(names))
    reason = _rejection(start, system, bonds, each)
    if reason is not None:
        return reason
    fixed = np.zeros(len(system), dtype=bool)
    fixed[system.constraints[0].index] = True
    record = make_record(
        pos=start.positions,
        pos_relaxed=system.positions,
        atomic_numbers=system.numbers,
        tags=system.get_tags(),
        fixed=fixed,
        cell=system.cell.array,
        pbc=np.ones(3, dtype=bool),
        sid=sid,
        y_init=y_init,
        y_relaxed=y_relaxed,
    )
    catalyst, facet = surface.catalyst, surface.name
    words = {"adsorbate": " ".join(names), "catalyst": catalyst, "facet": facet, "site": site}
    return _System(record, words, done.frames, {})


def _relax_system(plan: _Plan, split: str, index: int) -> _System:
    """Draws and relaxes the system with the given split and index.

    A draw is rejected and replaced by the next draw for these reasons:
        slab: the clean slab reconstructs or does not converge.
        not_converged: a relaxation takes more than 300 BFGS steps.
        energy: |y_relaxed| > 10 eV or |y_init| > 20 eV per adsorbate.
        bonds: the adsorbate breaks or forms a bond; with EMT, only after it has settled.
        desorbed: the adsorbate is more than 4 Å from the slab.
        reconstructed: an atom of the slab moves by more than 1 Å.
    """
    number = list(_SPLITS).index(split)
    rejected = dict.fromkeys(_REJECTIONS, 0)
    for attempt in range(_MAX_ATTEMPTS):
        stream = np.random.SeedSequence(plan.seed, spawn_key=(number, index, attempt))
        rng, sid = np.random.default_rng(stream), number * _SIDS_PER_SPLIT + index
        result = _attempt(rng, plan, split, sid)
        if isinstance(result, _System):
            return result._replace(rejected=rejected)
        rejected[result] += 1
    raise ValueError(
        f"split {split}, system {index}: all {_MAX_ATTEMPTS} draws were rejected ({rejected}); try "
        "a different --seed"
    )
