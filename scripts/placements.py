"""Test how often a model finds the best of many placements of an adsorbate.

    python scripts/placements.py relax datasets/chgnet-sample runs/placements
    molflt predict runs/demo runs/placements/placements.extxyz --out runs/placements/demo.csv
    python scripts/placements.py rank runs/placements runs/placements/*.csv

`relax` takes slab-adsorbate pairs from the held-out splits of a folder written by
scripts/make_data.py, places each adsorbate on its slab in the same way as `molflt adsorb`, and
relaxes random placements. Those that do not converge, react, desorb or change the slab are omitted.
The others are written to placements.extxyz, unrelaxed, with the number of their pair (pair) and the
adsorption energies before (y_init) and after the relaxation (y_relaxed), in eV. An interrupted run
continues with the first unfinished pair.

`rank` prints how often the first and the best of the first five placements are within 0.1 eV of the
best of all placements, and the mean excess energy of the first, if placements are sorted by the
energies in each table of predictions, by their unrelaxed energies, or at random.
"""

import argparse
import csv
import json
import time
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
from ase import Atoms
from kit.rows import markdown
from kit.runs import digest, prepare
from kit.words import described, guarded
from making.calculators import adsorption_energy, relax
from making.systems import _bonds, _rejection
from tqdm import tqdm

from molflt.adsorption import placements
from molflt.data.structures import open_dataset
from molflt.data.structures.sources import VAL_SPLITS
from molflt.files import atomically

TOLERANCE, STEPS = 0.05, 200  # eV/Å
SELECTED, NEAR = (1, 5), 0.1  # numbers of placements; tolerance of the best energy in eV


def pairs(data: Path, count: int, seed: int) -> list[Atoms]:
    """Draws `count` random systems with several adsorbate atoms, alternating between the splits."""
    rng, found = np.random.default_rng(seed), []
    for split in VAL_SPLITS:
        dataset = open_dataset(data / f"{split}.safetensors")
        own = [dataset.to_atoms(i) for i in rng.permutation(len(dataset))]
        found.append([atoms for atoms in own if (atoms.get_tags() == 2).sum() > 1])
    return [atoms for together in zip(*found, strict=False) for atoms in together][:count]


def relaxed(system: Atoms, number: int, count: int, made: dict[str, Any]) -> list[Atoms]:
    """Returns random placements of a pair that converge and pass the checks of `_rejection`.

    The structures are unrelaxed. Their `info` contains the adsorption energies before and after the
    relaxation, in eV.
    """
    adsorbed = system.get_tags() == 2
    slab, own = system[~adsorbed], Atoms(system[adsorbed].symbols, system.positions[adsorbed])
    everything = placements(slab, own)
    chosen = np.random.default_rng(number).permutation(len(everything))[:count]
    clean = relax(slab.copy(), made["calculator"], TOLERANCE, STEPS).after
    kept = []
    for i in tqdm(sorted(chosen), desc=f"pair {number}", leave=False):
        start, atoms = everything[i], everything[i].copy()
        done = relax(atoms, made["calculator"], TOLERANCE, STEPS)
        energies = [
            adsorption_energy(one, clean, own.symbols, made["references_eV"])
            for one in (done.before, done.after)
        ]
        if done.converged and _rejection(start, atoms, _bonds(own), (0.0, energies[1])) is None:
            start.info |= {"pair": number, "y_init": energies[0], "y_relaxed": energies[1]}
            kept.append(start)
    return kept


def relax_all(options: argparse.Namespace) -> None:
    """Writes a file for each pair, and placements.extxyz after all pairs are finished."""
    made = json.loads((options.data / "made.json").read_text())
    job = {name: getattr(options, name) for name in ("placements", "seed")}
    prepare(options.out, {**job, "made": digest(options.data / "made.json")})
    files = []
    for number, system in enumerate(pairs(options.data, options.pairs, options.seed)):
        files.append(options.out / f"pair{number}.extxyz")
        if not files[-1].exists():
            start = time.process_time()
            kept = relaxed(system, number, options.placements, made)
            with atomically(files[-1]) as part:
                ase.io.write(part, kept, "extxyz")
            seconds = time.process_time() - start
            print(f"pair {number}: {system.symbols}, {len(kept)} placements, {seconds:.0f} s")
    filled = [file for file in files if file.stat().st_size]  # all placements may be removed
    whole = [atoms for file in filled for atoms in ase.io.read(file, ":")]
    ase.io.write(options.out / "placements.extxyz", whole)


def quality(pair: np.ndarray, energy: np.ndarray, score: np.ndarray) -> np.ndarray:
    """Returns how well the lowest energy of each pair is found if placements are sorted by a score.

    The result contains the fractions of pairs for which the first, and one of the first five, are
    within 0.1 eV of the lowest energy, and the mean excess energy of the first, in eV.
    """
    found = []
    for one in np.unique(pair):
        excess = energy[pair == one] - energy[pair == one].min()
        ranked = excess[np.argsort(score[pair == one], kind="stable")]
        found.append([*(ranked[:count].min() <= NEAR for count in SELECTED), ranked[0]])
    return np.mean(found, axis=0)


def rank(options: argparse.Namespace) -> None:
    """Prints a table that compares the methods of selecting placements."""
    whole = ase.io.read(options.out / "placements.extxyz", ":")
    pair, start, energy = (
        np.array([atoms.info[key] for atoms in whole]) for key in ("pair", "y_init", "y_relaxed")
    )
    rng = np.random.default_rng(0)
    draws = [quality(pair, energy, rng.random(len(pair))) for _ in range(200)]
    found = {"random": np.mean(draws, axis=0), "unrelaxed": quality(pair, energy, start)}
    for table in options.tables:
        with table.open(newline="") as file:
            energies = [float(row["energy_eV"]) for row in csv.DictReader(file)]
        if len(energies) != len(whole):
            raise ValueError(f"{table}: expected {len(whole)} energies; got {len(energies)}")
        found[table.stem] = quality(pair, energy, np.array(energies))
    print(f"{len(np.unique(pair))} pairs, {len(pair)} placements")
    heads = ("sorted by", "first within 0.1 eV", "one of five within 0.1 eV", "excess of first, eV")
    lines = [(name, *(f"{x:.2f}" for x in numbers)) for name, numbers in found.items()]
    print(markdown(heads, lines))


@guarded
def main(words: list[str] | None = None) -> None:
    parser = described(__doc__)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("relax")
    one.add_argument("data", type=Path)
    one.add_argument("--pairs", type=int, default=40)
    one.add_argument("--placements", type=int, default=40)
    one.add_argument("--seed", type=int, default=0)
    other = commands.add_parser("rank")
    for command, run in ((one, relax_all), (other, rank)):
        command.add_argument("out", type=Path)
        command.set_defaults(run=run)
    other.add_argument("tables", nargs="+", type=Path)
    options = parser.parse_args(words)
    options.run(options)


if __name__ == "__main__":
    raise SystemExit(main())
