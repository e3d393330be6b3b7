from pathlib import Path
from typing import Any

from ase import Atoms
from ase.build import fcc111, molecule
from ase.cluster import Octahedron
from ase.constraints import FixAtoms, FixBondLengths
from ase.io import write

from molflt.adsorption import cut, placements
from molflt.pretrained.calculator import calculator_named
from refusals import Refusal, Refused, command, refused, writes


def slab(tags: int = 0, fixed: int = 0) -> Atoms:
    """Returns a slab whose upper layers have tag 1 and 2, or are fixed."""
    atoms = fcc111("Cu", (2, 2, 4), vacuum=8)
    atoms.set_tags(8 * [0] + (8 - tags) * [1] + tags * [2])
    atoms.set_constraint(FixAtoms(indices=range(16 - fixed, 16)))
    return atoms


def with_atom(depth: float, of_slab: list[int], own: int) -> Atoms:
    """Returns a slab with the tags 4 * `of_slab` and an O above it, or between its layers."""
    atoms = fcc111("Cu", (2, 2, 4), vacuum=8)
    atoms.set_tags([tag for tag in of_slab for _ in range(4)])
    return atoms + Atoms("O", [atoms.positions[-1] - [0.0, 0.0, depth]], tags=[own])


def placed(*frames: Atoms) -> Any:
    def call(folder: Path) -> None:
        write(folder / "own.extxyz", frames)
        placements(slab(), folder / "own.extxyz")

    return call


def charged(folder: Path) -> None:
    ion = slab()
    ion.info["charge"] = -1
    write(folder / "ion.extxyz", ion)


def linked(folder: Path) -> None:
    atoms = slab()
    atoms.set_constraint(FixBondLengths([(0, 1)]))
    write(folder / "linked.traj", atoms)


EMPTY = writes("own.cif", "data_own\n")
CHAIN = Atoms("CH2", [[0, 0, 0], [0, 0.6, 0.9], [0, 0.6, -0.9]], cell=[1.4, 9, 9], pbc=True)
CLUSTER = Octahedron("Cu", 2)
CLUSTER.center(vacuum=4)
CLUSTER.pbc = True
ROWS = [
    refused(lambda: cut(slab(), (1, 1, 1)), "Cu16", "crystal", "vacuum"),
    refused(lambda: cut(slab(), (0, 0, 0)), "facet", "Miller indices", "(0, 0, 0)"),
    refused(lambda: placements(CLUSTER, "CO"), "slab 0", "along axis 3 only"),
    refused(lambda: placements(slab(tags=4), "CO"), "tag 2", "clean slab"),
    refused(lambda: placements(with_atom(3, [0, 0, 1, 1], 2), "CO"), "tag 2", "clean slab"),
    refused(lambda: placements(with_atom(-1, [0, 0, 0, 0], 2), "CO"), "tag 2", "clean slab"),
    refused(lambda: placements(with_atom(-1, [4, 3, 2, 1], 0), "CO"), "tag 0", "clean slab"),
    refused(lambda: placements([slab(), slab(fixed=4)], "CO"), "slab 1", "free atoms", "fixed"),
    refused(lambda: placements(slab(), "CO", rotation=-30), "rotation", "above 0", "-30"),
    Refusal(lambda own: calculator_named("EMT"), "EMT", "module:Class", "", FileNotFoundError),
    Refusal(command("adsorb Cu CO"), "Cu", "--facet", "", Refused),
    Refusal(
        command("adsorb {folder}/ion.extxyz O --out {folder}/o.extxyz", charged),
        *("ion.extxyz 0", "charge of 0", "-1 e", Refused),
    ),
    Refusal(
        command("adsorb {folder}/ion.extxyz O --facet 1,1,1 --out {folder}/o.extxyz", charged),
        *("ion.extxyz 0", "crystal", "vacuum", Refused),
    ),
    Refusal(
        command(
            "adsorb {folder}/top.extxyz O --out {folder}/o.extxyz",
            lambda folder: write(folder / "top.extxyz", slab(fixed=4)),
        ),
        *("top.extxyz 0", "free atoms", "fixed", Refused),
    ),
    Refusal(
        command("adsorb {folder}/linked.traj O --repeat 2 1 --out {folder}/o.traj", linked),
        *("--repeat 2 1", "single atoms", "others", Refused),
    ),
    Refusal(placed(molecule("CO"), molecule("NO")), "own.extxyz", "one molecule", "2"),
    Refusal(
        lambda own: (EMPTY(own), placements(slab(), own / "own.cif")), "own.cif", "at least one"
    ),
    Refusal(placed(Atoms("XO")), "own.extxyz", "element", "X"),
    Refusal(placed(CHAIN), "own.extxyz", "molecule", "periodic images"),
    Refusal(
        command("adsorb x {folder}/m.extxyz --out {folder}/m.extxyz", writes("m.extxyz", "")),
        *("m.extxyz", "different output", "", Refused),
    ),
    Refusal(command("adsorb x.cif CO --layers=6"), "--layers", "--facet", "6", Refused),
    Refusal(command("adsorb x.cif CO --fmax=1"), "--fmax", "--relax", "1", Refused),
    Refusal(command("adsorb Cu CO --facet 1,1,1 --vacuum=0"), "vacuum", "[5, ", "0", Refused),
    Refusal(command("adsorb Cu CO --facet 1,1,1,0"), "Cu: ", "three Miller", "(0,)", Refused),
    refused(lambda: placements(slab(), "H2Se"), "H2Se", "such as H2S, H2, ", "or smiles:"),
]
