"""Write GAME-Net's FG set with relaxed positions and single-point energies of CHGNet as baseline.

    python scripts/fg_baseline.py FG_dataset_lite.tar.xz datasets/game-net/fg datasets/fg-chgnet

The baseline is E(structure) - E(slab) - E(molecule) in eV, at the positions that the archive
contains for all three after their relaxation with DFT. Energies are stored in energies.csv in the
output folder; after an interruption, the same command continues.
"""

import argparse
import csv
import io
from pathlib import Path, PurePosixPath

import torch
from ase.io.vasp import read_vasp_configuration
from chgnet.model import CHGNetCalculator
from game_net import END, _texts
from tqdm import tqdm

from molflt.data.structures import open_dataset
from molflt.data.structures.store import write_store
from molflt.data.structures.systems import read_systems
from molflt.files import add_row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("archive", "data", "out"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    table = given.out / "energies.csv"
    energy = {}
    if table.exists():
        with open(table, newline="") as file:
            energy = {row["name"]: float(row["energy_eV"]) for row in csv.DictReader(file)}
    texts = {PurePosixPath(p).stem: t for p, t in _texts(given.archive).items() if p.endswith(END)}
    calculator = CHGNetCalculator(use_device="cpu")
    for name in tqdm(sorted(texts.keys() - energy.keys()), unit=" structures"):
        atoms = read_vasp_configuration(io.StringIO(texts[name]))
        atoms.calc = calculator
        energy[name] = float(atoms.get_potential_energy())
        add_row(table, {"name": name, "energy_eV": energy[name]}, first=len(energy) == 1)
    systems = read_systems(given.data)
    for path in sorted(given.data.glob("*.safetensors")):
        records = []
        for record in open_dataset(path):
            own = systems[int(record.sid)]
            parts = energy[f"{own.metal.lower()}-0000"] + energy[own.molecule]
            baseline = torch.tensor([energy[own.name] - parts], dtype=torch.float64)
            records.append(record.update({"y_baseline": baseline, "pos": record.pos_relaxed}))
        write_store(given.out / path.name, records, source=f"{given.archive.name}, CHGNet")


if __name__ == "__main__":
    main()
