"""Make structures with coverages of up to one monolayer, relaxed with CHGNet.

    python scripts/coverage.py runs/coverage
    molflt train --config few-labels --data.root runs/coverage --run runs/cover \
        --model.readout contact --task.references none --task.lr 1e-3 \
        --trainer.max_steps 1000 --trainer.val_every 500

The structures are H, C, N, O, CO, OH and NO on (111) surfaces of ten metals, four layers thick. In
train.extxyz, fcc, hcp or top sites of 2 x 2 and 3 x 2 cells are occupied, up to half a monolayer.
In val_id.extxyz, 3 and 4 of the 4 fcc sites of a 2 x 2 cell are occupied. Energies are relative to
the clean slab and to H2, N2, O2, CO, NO, H2O - H2 / 2 (OH) and CH4 - 2 H2 (C). An interrupted run
continues. At the end, the script prints the mean absolute errors of two estimates, which are fitted
to the training set for each metal and adsorbate: a sum of site energies, and a sum of site energies
and pair energies of neighbors.
"""

import random
from collections import defaultdict
from pathlib import Path

import ase.io
import numpy as np
from ase import Atoms
from ase.build import fcc111, molecule
from ase.constraints import FixAtoms
from ase.neighborlist import neighbor_list
from ase.optimize import LBFGS
from jsonargparse import auto_cli
from making.calculators import CALCULATORS
from tqdm import tqdm

LATTICE = {"Cu": 3.61, "Ag": 4.09, "Au": 4.08, "Ni": 3.52, "Pd": 3.89, "Pt": 3.92, "Rh": 3.80}
LATTICE |= {"Ir": 3.84, "Co": 3.54, "Ru": 3.81}  # Å
HEIGHTS = {"H": 1.0, "C": 1.1, "N": 1.15, "O": 1.2, "CO": 1.35, "OH": 1.4, "NO": 1.3}  # Å
SECOND = {"CO": (0, 0, 1.17), "OH": (0.3, 0, 0.93), "NO": (0, 0, 1.2)}  # Å, second atom
CELLS = (((2, 2), 1), ((2, 2), 2), ((3, 2), 1), ((3, 2), 2), ((3, 2), 3))  # adsorbates
CHGNET = CALCULATORS["chgnet"].build()
FORCE = 0.05, 0.15  # eV/Å, at convergence, and largest accepted


def relaxed(atoms: Atoms) -> float:
    atoms.calc = CHGNET
    LBFGS(atoms, logfile=None).run(fmax=FORCE[0], steps=80)
    return float(atoms.get_potential_energy())


def clean(metal: str, cell: tuple[int, int]) -> Atoms:
    slab = fcc111(metal, (*cell, 4), a=LATTICE[metal], vacuum=8.0, periodic=True)
    slab.set_constraint(FixAtoms(mask=slab.get_tags() > 2))
    return slab


def references() -> dict[str, float]:
    found = {}
    for name in ("H2", "O2", "N2", "CO", "NO", "H2O", "CH4"):
        atoms = molecule(name)
        atoms.center(vacuum=6)
        atoms.pbc = True
        found[name] = relaxed(atoms)
    half = {name[0]: found[name] / 2 for name in ("H2", "O2", "N2")}
    more = {"OH": found["H2O"] - half["H"], "C": found["CH4"] - 4 * half["H"]}
    return {**half, **more, "CO": found["CO"], "NO": found["NO"]}


def covered(slab: Atoms, cell: tuple[int, int], name: str, site: str, places: list[int]) -> Atoms:
    atoms, top = slab.copy(), slab.positions[slab.get_tags() == 1]
    step = (slab.cell[0] / cell[0] + slab.cell[1] / cell[1]) / 3
    shift = {"fcc": 1, "hcp": 2, "top": 0}[site] * step[:2]
    height = HEIGHTS[name] + 0.5 * (site == "top" and name != "OH")
    atoms.set_tags((slab.get_tags() <= 2).astype(int))
    for place in places:
        first = np.array([*(top[place, :2] + shift), top[:, 2].max() + height])
        both = [first, first + SECOND[name]] if name in SECOND else [first]
        atoms += Atoms(name, both, tags=[2] * len(both))
    return atoms


def jobs() -> list[tuple[str, str, tuple[int, int], int, str, str]]:
    rng, found = random.Random(0), []
    for metal in LATTICE:
        for name in HEIGHTS:
            sites = ["fcc", "hcp", *(["top"] if name in SECOND else [])]
            own = [(cell, count, rng.choice(sites)) for cell, count in CELLS] + [((2, 2), 1, "fcc")]
            found += [(metal, name, *one, "train") for one in dict.fromkeys(own)]
            found += [(metal, name, (2, 2), count, "fcc", "val_id") for count in (3, 4)]
    rng.shuffle(found)
    return found


def make(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    known, slabs, frames = references(), dict[object, float](), []
    for number, (metal, name, cell, count, site, split) in enumerate(tqdm(jobs())):
        file = directory / f"{number}.extxyz"
        if not file.exists():
            slab = clean(metal, cell)
            places = random.Random(number).sample(range(cell[0] * cell[1]), count)
            start = covered(slab, cell, name, site, places)
            if (metal, cell) not in slabs:
                slabs[metal, cell] = relaxed(slab)
            atoms = start.copy()
            energy = relaxed(atoms) - slabs[metal, cell] - count * known[name]
            start.info = {"sid": number, "y_relaxed": energy, "count": count, "site": site}
            start.info |= {"kind": f"{metal} {name}", "split": split}
            start.info["force"] = float(np.abs(atoms.get_forces()).max())
            ase.io.write(file, start)
        frames.append(ase.io.read(file))
    frames = [atoms for atoms in frames if atoms.info["force"] <= FORCE[1]]
    for split in ("train", "val_id"):
        own = [atoms for atoms in frames if atoms.info["split"] == split]
        ase.io.write(directory / f"{split}.extxyz", own)
        print(f"{split}: {len(own)} structures")
    estimates(frames)


def terms(atoms: Atoms, pairs: bool) -> list[float]:
    """Returns the adsorbates on each kind of site, and pairs of first and second neighbors."""
    count, site = atoms.info["count"], atoms.info["site"]
    anchors = atoms[atoms.get_tags() == 2][:: 2 if atoms.info["kind"].split()[1] in SECOND else 1]
    near = atoms.get_distance(0, 1)  # Å, between neighbors in the surface
    far = neighbor_list("d", anchors, 2.1 * near) / near
    numbers = [(far < 1.2).sum() / 2, 0.3 * ((far > 1.2) & (far < 1.85)).sum() / 2]
    return [count * (site == one) for one in ("fcc", "hcp", "top")] + numbers * pairs


def estimates(frames: list[Atoms]) -> None:
    kinds = defaultdict(list)
    for atoms in frames:
        kinds[atoms.info["kind"]].append(atoms)
    for pairs in (False, True):
        errors = []
        for own in kinds.values():
            train = [atoms for atoms in own if atoms.info["split"] == "train"]
            matrix = np.array([terms(atoms, pairs) for atoms in train])
            labels = np.array([atoms.info["y_relaxed"] for atoms in train])
            square = matrix.T @ matrix + 1e-2 * np.eye(matrix.shape[1])
            weights = np.linalg.solve(square, matrix.T @ labels)
            for atoms in (one for one in own if one.info["split"] != "train"):
                error = np.dot(terms(atoms, pairs), weights) - atoms.info["y_relaxed"]
                errors.append([abs(error), abs(error) / atoms.info["count"]])
        what = "sites and pairs" if pairs else "sites"
        found = "{:.3f} eV, {:.3f} eV per adsorbate".format(*np.mean(errors, axis=0))
        print(f"{what}: {found}, {len(errors)} structures")


if __name__ == "__main__":
    auto_cli(make)
