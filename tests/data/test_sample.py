"""The shipped sample against its names, its settings and its potential."""

import csv
import json
from pathlib import Path

import pytest
from ase import Atoms
from script_files import load_script

from molflt.data.structures.splits import VAL_SPLITS
from molflt.data.structures.store import StructureStore

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "datasets" / "chgnet-sample"
SPLITS = ("train", *VAL_SPLITS)


def adsorbate_name(record) -> str:
    return Atoms(record.atomic_numbers[record.tags == 2].numpy()).get_chemical_formula()


@pytest.fixture(scope="module")
def sample() -> dict[str, list]:
    stores = {s: StructureStore(SAMPLE / f"{s}.safetensors") for s in SPLITS}
    return {split: [store[i] for i in range(len(store))] for split, store in stores.items()}


@pytest.fixture(scope="module")
def named() -> dict[int, dict[str, str]]:
    with (SAMPLE / "systems.csv").open(newline="") as file:
        return {int(row["sid"]): row for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def made() -> dict:
    return json.loads((SAMPLE / "made.json").read_text())


def test_splits_have_their_sizes_and_every_system_its_name_once(sample, named, made) -> None:
    assert {s: len(r) for s, r in sample.items()} == {
        s: made["train" if s == "train" else "val"] for s in SPLITS
    }
    left = dict(named)
    for split, records in sample.items():
        for record in records:
            row = left.pop(record.sid)
            assert row["split"] == split
            assert adsorbate_name(record) == Atoms(row["adsorbate"]).get_chemical_formula()
    assert not left
    starts = {r.pos.numpy().tobytes() for records in sample.values() for r in records}
    assert len(starts) == len(named), "no system occurs twice"


def test_energies_follow_from_the_stored_positions(sample, made) -> None:
    """The slab as it is stored, with each label's positions, against the written references."""
    potential = pytest.importorskip("chgnet.model", reason="molflt[chgnet] is not installed")
    calculator = potential.CHGNetCalculator(use_device="cpu", verbose=False)
    for record in (sample[split][3] for split in SPLITS):
        numbers, mine = record.atomic_numbers.numpy(), record.tags.numpy() == 2
        cell = record.cell[0].numpy().astype(float)

        def energy(positions, kept=slice(None), numbers=numbers, cell=cell) -> float:
            atoms = Atoms(numbers[kept], positions.numpy()[kept], cell=cell, pbc=True)
            atoms.calc = calculator
            return float(atoms.get_potential_energy())

        gas = sum(made["references_eV"][symbol] for symbol in Atoms(numbers[mine]).symbols)
        reference = energy(record.pos, ~mine) + gas
        for positions, label in (
            (record.pos, record.y_init),
            (record.pos_relaxed, record.y_relaxed),
        ):
            assert energy(positions) - reference == pytest.approx(float(label), abs=2e-3)


def test_the_card_matches_the_files(monkeypatch) -> None:
    card = load_script("card")
    monkeypatch.chdir(ROOT)
    expected = card.CARD.format_map(card.facts(Path("datasets/chgnet-sample")))
    assert (SAMPLE / "README.md").read_text(encoding="utf-8") == expected
    assert sum(p.stat().st_size for p in SAMPLE.iterdir()) <= 5_000_000
