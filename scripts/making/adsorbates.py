"""Geometries of adsorbates of H, C, N and O, and the atoms through which they bind."""

from typing import NamedTuple

import numpy as np
from ase import Atoms
from ase.build import molecule
from scipy.spatial.transform import Rotation


class _Adsorbate(NamedTuple):
    """A molecule from ASE's G2 collection, or a part of it.

    Attributes:
        whole: name of the molecule in the collection.
        anchors: alternative binding sites, each given by the indices of one atom, of two atoms
            whose bond is parallel to the surface, or of three or more atoms that bind through their
            center.
        without: indices of the atoms that are removed.
    """

    whole: str
    anchors: tuple[tuple[int, ...], ...] = ((0,),)
    without: tuple[int, ...] = ()


# Systems depend on the order of the keys; a change requires a new version of the generator.
ADSORBATES: dict[str, _Adsorbate] = {
    **{name: _Adsorbate(name) for name in ("H", "C", "N", "O", "CH")},
    "CH2": _Adsorbate("CH2_s3B1d"),
    **{name: _Adsorbate(name) for name in ("CH3", "NH", "NH2", "NH3", "OH", "H2O")},
    "CO": _Adsorbate("CO", ((1,),)),
    "CHO": _Adsorbate("HCO", ((0,), (0, 1))),
    "COH": _Adsorbate("H2COH", ((0,),), (3, 4)),
    "CH2O": _Adsorbate("H2CO", ((0,), (0, 1))),
    "CHOH": _Adsorbate("H2COH", ((0,),), (4,)),
    "CH3O": _Adsorbate("CH3O", ((1,),)),
    "CH2OH": _Adsorbate("H2COH", ((0,), (0, 1))),
    "CH3OH": _Adsorbate("CH3OH", ((1,),)),
    "COOH": _Adsorbate("HCOOH", ((1,), (1, 2)), (4,)),
    "HCOO": _Adsorbate("HCOOH", ((0, 2), (2,)), (3,)),
    "C2H": _Adsorbate("CCH", ((1,), (0, 1))),
    "C2H2": _Adsorbate("C2H2", ((0, 1),)),
    "C2H3": _Adsorbate("C2H3", ((1,), (0, 1))),
    "C2H4": _Adsorbate("C2H4", ((0, 1),)),
    "C2H5": _Adsorbate("C2H5", ((1,),)),
    "CH2CO": _Adsorbate("H2CCO", ((0, 1),)),
    "CH3CO": _Adsorbate("CH3CO", ((1,), (1, 5))),
    "CN": _Adsorbate("CN", ((0,), (1,), (0, 1))),
    "HCN": _Adsorbate("HCN", ((1,), (0, 1))),
    "NO": _Adsorbate("NO"),
    "CH3NH": _Adsorbate("H3CNH2", ((1,),), (4,)),
    "CH3NH2": _Adsorbate("H3CNH2", ((1,),)),
    "OOH": _Adsorbate("H2O2", ((0,), (0, 1)), (2,)),
}

# Chains and rings of the split val_large, whose systems depend on the order.
LARGE: dict[str, _Adsorbate] = {
    "C3H4": _Adsorbate("C3H4_C3v", ((0, 1),)),
    "C3H6": _Adsorbate("C3H6_Cs", ((1, 0),)),
    "C3H8": _Adsorbate("C3H8", ((0, 1, 2),)),
    "C3H6O": _Adsorbate("CH3COCH3"),
    "C4H6": _Adsorbate("butadiene", ((0, 1, 2, 3),)),
    "C4H10": _Adsorbate("trans-butane", ((0, 1, 2, 3),)),
    "C4H4O": _Adsorbate("C4H4O", ((0, 1, 2, 3, 4), (0,))),
    "C4H5N": _Adsorbate("C4H4NH", ((1, 2, 3, 4, 5),)),
    "C5H5N": _Adsorbate("C5H5N", ((0, 1, 2, 3, 4, 5), (0,))),
    "C6H6": _Adsorbate("C6H6", ((0, 1, 2, 3, 4, 5),)),
}


def _oriented(rng: np.random.Generator, name: str, tilt: float) -> Atoms:
    """Returns an adsorbate with its anchor at the origin and its center above the anchor.

    The adsorbate is rotated by a random angle about the surface normal. It is tilted by a normally
    distributed angle with a standard deviation of `tilt` degrees.
    """
    entry = {**ADSORBATES, **LARGE}[name]
    anchor = list(entry.anchors[int(rng.integers(len(entry.anchors)))])
    atoms: Atoms = molecule(entry.whole)
    points = atoms.positions - atoms.positions[anchor].mean(axis=0)
    kept = [i for i in range(len(atoms)) if i not in entry.without]
    up = points[kept].mean(axis=0)
    if np.linalg.norm(up) < 0.05:  # symmetric: use the normal of the molecular plane
        up = np.linalg.svd(points)[2][-1]
    ends, starts = [np.array((0.0, 0.0, 1.0))], [up]
    if len(anchor) == 2:  # the bond becomes parallel to the surface
        bond = points[anchor[1]] - points[anchor[0]]
        across = up - bond * (up @ bond) / (bond @ bond)
        if np.linalg.norm(across) < 0.05:
            across = np.cross(bond, np.eye(3)[int(np.abs(bond).argmin())])
        ends, starts = [np.array((1.0, 0.0, 0.0)), ends[0]], [bond, across]
    upright, _ = Rotation.align_vectors(np.array(ends), np.array(starts))
    turn, lean, way = rng.uniform(0.0, 360.0), rng.normal(scale=tilt), rng.uniform(0.0, 360.0)
    leaning = Rotation.from_euler("zxz", [way, lean, -way], degrees=True)
    rotation = leaning * Rotation.from_euler("z", turn, degrees=True) * upright
    atoms.positions = rotation.apply(points)
    return atoms[kept]
