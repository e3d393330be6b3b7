"""The shipped sample against an independent calculation."""

import csv
import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.build import molecule
from ase.calculators.emt import EMT
from ase.optimize import BFGS

from molflt.data.structures.splits import VAL_SPLITS
from molflt.data.structures.store import StructureStore

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "datasets" / "emt-sample"
SPLITS = ("train", *VAL_SPLITS)


def adsorbate_name(record) -> str:
    return Atoms(record.atomic_numbers[record.tags == 2].numpy()).get_chemical_formula()


def metals(record) -> tuple[str, ...]:
    return tuple(sorted(set(Atoms(record.atomic_numbers[record.tags != 2].numpy()).symbols)))


@pytest.fixture(scope="module")
def sample() -> dict[str, list]:
    stores = {s: StructureStore(SAMPLE / f"{s}.safetensors") for s in SPLITS}
    return {split: [store[i] for i in range(len(store))] for split, store in stores.items()}


def test_sample_splits_hold_out_what_they_say(sample) -> None:
    assert {s: len(r) for s, r in sample.items()} == dict.fromkeys(sample, 250) | {"train": 2000}
    adsorbates = {split: {adsorbate_name(r) for r in records} for split, records in sample.items()}
    catalysts = {split: {metals(r) for r in records} for split, records in sample.items()}
    assert len(adsorbates["train"]) == 14 and len(catalysts["train"]) == 21
    for split in ("val_ood_ads", "val_ood_both"):
        assert len(adsorbates[split]) == 4 and not adsorbates[split] & adsorbates["train"]
    for split in ("val_ood_cat", "val_ood_both"):
        assert len(catalysts[split]) == 7 and not catalysts[split] & catalysts["train"]
    for split in ("val_id", "val_ood_cat"):
        assert adsorbates[split] <= adsorbates["train"]
    for split in ("val_id", "val_ood_ads"):
        assert catalysts[split] <= catalysts["train"]
    sids = [r.sid for records in sample.values() for r in records]
    assert len(set(sids)) == len(sids) == 3000
    starts = {r.pos.numpy().tobytes() for records in sample.values() for r in records}
    assert len(starts) == 3000, "no system occurs twice"


def test_sample_records_are_sound(sample) -> None:
    for record in (r for records in sample.values() for r in records):
        assert bool(record.pbc.all()) and record.natoms <= 45
        assert set(record.tags.tolist()) == {0, 1, 2}
        assert bool(record.fixed.any()) and not bool(record.fixed[record.tags > 0].any())
        moved = (record.pos_relaxed - record.pos).norm(dim=1)
        assert float(moved[record.fixed].max()) == 0.0
        assert float(moved.max()) < 10.0
        assert abs(float(record.y_relaxed)) <= 10.0 and float(record.y_init) <= 20.0
        assert float(record.y_relaxed) <= float(record.y_init) + 1e-6


@pytest.mark.parametrize("split", SPLITS)
def test_sample_energies_follow_from_the_stored_positions(sample, split: str) -> None:
    for record in sample[split][::50]:
        numbers, mine = record.atomic_numbers.numpy(), record.tags.numpy() == 2
        cell = record.cell[0].numpy().astype(float)

        slab = Atoms(numbers[~mine], record.pos.numpy()[~mine], cell=cell, pbc=True)
        slab.calc = EMT()
        free = ~record.fixed.numpy()[~mine]
        assert np.linalg.norm(slab.get_forces()[free], axis=1).max() < 0.051, "slab is relaxed"
        name = adsorbate_name(record)
        names = {"CH2": "CH2_s3B1d", "CHN": "HCN", "H2N": "NH2", "H3N": "NH3", "HO": "OH"}
        gas = molecule(names.get(name, name))
        gas.calc = EMT()
        BFGS(gas, logfile=None, maxstep=0.1).run(fmax=0.05)
        reference = slab.get_potential_energy() + gas.get_potential_energy()
        for positions, label in (
            (record.pos, record.y_init),
            (record.pos_relaxed, record.y_relaxed),
        ):
            system = Atoms(numbers, positions.numpy(), cell=cell, pbc=True)
            system.calc = EMT()
            found = system.get_potential_energy() - reference
            assert found == pytest.approx(float(label), abs=1e-3)


def test_card_has_the_checksums_and_the_size_is_kept() -> None:
    card = (SAMPLE / "README.md").read_text(encoding="utf-8")
    files = {p.name: p for p in SAMPLE.glob("*.safetensors")}
    listed = dict(re.findall(r"\| `([a-z_]+\.safetensors)` \|.*\| `([0-9a-f]{64})` \|", card))
    assert listed == {n: hashlib.sha256(p.read_bytes()).hexdigest() for n, p in files.items()}
    assert sum(p.stat().st_size for p in SAMPLE.iterdir()) <= 4_000_000


def test_the_chgnet_sample_is_what_its_settings_and_names_say() -> None:
    """Sizes, held-out groups, checksums on the card, and labels against the references."""
    folder = ROOT / "datasets" / "chgnet-sample"
    made = json.loads((folder / "made.json").read_text())
    with (folder / "systems.csv").open(newline="") as file:
        names = {int(row["sid"]): row for row in csv.DictReader(file)}
    card = (folder / "README.md").read_text()
    seen: dict[str, set[tuple[str, str]]] = {}
    for split in SPLITS:
        path = folder / f"{split}.safetensors"
        store = StructureStore(path)
        assert len(store) == made["train" if split == "train" else "val"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() in card
        for record in store:
            row = names.pop(record.sid)
            assert row["split"] == split and record.natoms <= 30
            assert adsorbate_name(record) == Atoms(row["adsorbate"]).get_chemical_formula()
            assert -10.0 <= float(record.y_relaxed) <= float(record.y_init) + 1e-6
            seen.setdefault(split, set()).add((row["adsorbate"], row["catalyst"]))
    assert not names
    adsorbates, catalysts = ({s: {p[i] for p in seen[s]} for s in SPLITS} for i in (0, 1))
    for split in VAL_SPLITS:
        new = split in ("val_ood_ads", "val_ood_both"), split in ("val_ood_cat", "val_ood_both")
        assert (not adsorbates[split] & adsorbates["train"]) == new[0]
        assert (not catalysts[split] & catalysts["train"]) == new[1]
