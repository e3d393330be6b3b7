"""The EMT generator on small runs, and the shipped sample against an independent calculation."""

import hashlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.build import fcc111, molecule
from ase.calculators.emt import EMT
from ase.data import covalent_radii
from ase.optimize import BFGS

from molflt.data.structures import emt, emt_systems
from molflt.data.structures.emt import make_emt
from molflt.data.structures.store import StructureStore

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "datasets" / "emt-sample"
SMALL = {"train": 6, "val": 1, "seed": 7}
RUN = f"""
from pathlib import Path
import signal, sys
from molflt.data.structures import emt
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where tests run in the background
emt._SYSTEMS_PER_PART = 2
if __name__ == "__main__":
    emt.make_emt(Path(sys.argv[1]), **{SMALL}, workers=2)
"""


def contents(directory: Path) -> dict[str, bytes]:
    """Everything of a finished run but the key order of the stores' headers, which is random."""
    found = {"emt.json": (directory / "emt.json").read_bytes()}
    for split in emt_systems._SPLITS:
        raw = (directory / f"{split}.safetensors").read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        found[split] = raw[8 + length :]
        header = json.loads(raw[8 : 8 + length])
        found[f"{split} header"] = json.dumps(header, sort_keys=True).encode()
    return found


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    directory = tmp_path_factory.mktemp("emt") / "one"
    make_emt(directory, **SMALL, workers=1)
    assert sorted(p.name for p in directory.iterdir()) == sorted(
        ["emt.json", *(f"{split}.safetensors" for split in emt_systems._SPLITS)]
    )
    return contents(directory)


def test_two_workers_give_the_bytes_of_one_and_another_seed_others(
    tmp_path: Path, one_worker: dict[str, bytes]
) -> None:
    make_emt(tmp_path / "two", **SMALL, workers=2)
    assert contents(tmp_path / "two") == one_worker
    make_emt(tmp_path / "other", train=1, val=1, seed=8, workers=1)
    assert contents(tmp_path / "other")["val_id"] not in one_worker["val_id"]
    first = StructureStore(tmp_path / "other" / "train.safetensors")[0].pos.numpy()
    assert first.tobytes() not in one_worker["train"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_interrupted_run_continues(
    tmp_path: Path, one_worker: dict[str, bytes], monkeypatch, how: signal.Signals
) -> None:
    script = tmp_path / "run.py"
    script.write_text(RUN)
    directory = tmp_path / "data"
    process = subprocess.Popen(
        [sys.executable, str(script), str(directory)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    first = directory / emt._PARTS / "train-0000000.safetensors"
    deadline = time.monotonic() + 120
    while not first.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    workers = _children(process.pid)
    process.send_signal(how)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert first.exists() and not (directory / "train.safetensors").exists()
    if how == signal.SIGINT:
        assert "the same command continues" in output
    while any(_alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in workers), "a killed run leaves no process behind"

    relaxed: list[tuple[int, str, int]] = []
    relax_all = emt._relax_all

    def spy(tasks, workers):
        relaxed.extend(tasks)
        return relax_all(tasks, workers)

    monkeypatch.setattr(emt, "_SYSTEMS_PER_PART", 2)
    monkeypatch.setattr(emt, "_relax_all", spy)
    make_emt(directory, **SMALL, workers=2)
    assert contents(directory) == one_worker
    assert 0 < len(relaxed) <= 6 + 4 - 2
    assert (7, "train", 0) not in relaxed and (7, "train", 1) not in relaxed


def _children(pid: int) -> list[int]:
    with suppress(OSError):  # not Linux
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def test_damaged_part_is_made_again(
    tmp_path: Path, one_worker: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    part = emt._Part("train", 0, 6).path(tmp_path)
    part.parent.mkdir(parents=True)
    part.write_bytes(b"\x40\x00\x00")
    make_emt(tmp_path, **SMALL, workers=2)
    assert contents(tmp_path) == one_worker
    before = (tmp_path / "train.safetensors").stat().st_mtime_ns

    def no_work(tasks, workers):
        raise AssertionError(f"a finished run relaxes nothing; got {tasks}")

    monkeypatch.setattr(emt, "_relax_all", no_work)
    make_emt(tmp_path, **SMALL, workers=2)
    assert (tmp_path / "train.safetensors").stat().st_mtime_ns == before


def test_other_settings_are_refused(tmp_path: Path) -> None:
    settings = {"generator": emt._GENERATOR_VERSION, "seed": 0, "train": 5, "val": 2}
    (tmp_path / "emt.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"other settings: seed 0 \(now 1\), train 5 \(now 6\);"):
        make_emt(tmp_path, train=6, val=2, seed=1)
    (tmp_path / "emt.json").write_text("[]")
    with pytest.raises(ValueError, match=r"emt\.json: not the settings of a make-emt run"):
        make_emt(tmp_path, train=6, val=2)
    (tmp_path / "emt.json").unlink()
    (tmp_path / "val_id.safetensors").write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"val_id\.safetensors: already there, and not"):
        make_emt(tmp_path, train=6, val=2)
    assert (tmp_path / "val_id.safetensors").read_bytes() == b"mine"


@pytest.mark.parametrize(
    "wrong", [{"train": 0}, {"val": -1}, {"seed": -1}, {"workers": 0}, {"train": 10**7 + 1}]
)
def test_numbers_out_of_range_are_refused(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"at (least|most) \d+.*; got -?\d+"):
        make_emt(tmp_path / "data", **wrong)
    assert not (tmp_path / "data").exists()


def test_endless_refusal_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emt_systems, "_MAX_ENERGY", 0.0)
    monkeypatch.setattr(emt_systems, "_MAX_ATTEMPTS", 3)
    with pytest.raises(ValueError, match="split val_id, system 3: 3 draws in a row were refused"):
        emt_systems._relax_system(0, "val_id", 3)


@pytest.mark.parametrize("name", ["H", "CO", "C2H4"])
def test_adsorbate_is_lowered_to_first_contact(name: str) -> None:
    gas = molecule(name)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        slab = emt_systems._draw_slab(rng, ("Cu", "Pt"), single_atom=len(gas) == 1)
        assert set(slab.symbols) == {"Cu", "Pt"}
        system = emt_systems._place(rng, slab, gas)
        n = len(slab)
        distances = system.get_all_distances(mic=True)
        shape = gas.get_all_distances()
        inside = system[n:].get_all_distances()
        np.testing.assert_allclose(inside, shape, atol=1e-9)
        radii = covalent_radii[system.numbers]
        ratio = (distances / np.add.outer(radii, radii))[n:, :n].min()
        low, high = emt_systems._CONTACT
        assert low - 1e-6 <= ratio <= high + 1e-6
        top = system.cell[2, 2] + emt_systems._VACUUM
        assert system.positions[n:, 2].max() < top - 6.0  # no image in reach


def test_adsorbate_settles_on_a_frozen_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    slab = emt_systems._draw_slab(rng, ("Ni",), single_atom=False)
    system = emt_systems._place(rng, slab, molecule("OH"))
    placed, fixed = system.positions.copy(), system.constraints[0].index.copy()
    monkeypatch.setattr(emt_systems, "_RATTLE", 0.0)
    assert emt_systems._settle(rng, system)
    np.testing.assert_array_equal(system.positions[:-2], placed[:-2])
    np.testing.assert_array_equal(system.constraints[0].index, fixed)
    system.calc = EMT()
    forces = system.get_forces(apply_constraint=False)
    assert np.linalg.norm(forces[-2:], axis=1).max() <= emt_systems._SETTLED + 1e-9

    settled = system.positions.copy()
    monkeypatch.setattr(emt_systems, "_RATTLE", 0.1)
    assert emt_systems._settle(rng, system)
    shift = system.positions - settled
    assert not shift[:-2].any() and 0.01 < np.abs(shift[-2:]).max() < 0.6


def test_every_rule_of_refusal() -> None:
    gas = molecule("CO")
    slab = fcc111("Cu", (2, 2, 3), vacuum=8.0, periodic=True)
    adsorbate = gas.copy()
    adsorbate.positions += slab.positions[-1] + (0.0, 0.0, 2.0) - gas.positions[1]
    system = slab + adsorbate
    n, fine = len(slab), (1.0, -1.0)
    start = system.positions.copy()

    def reason(change: dict[int, tuple[float, ...]], energies=fine) -> object:
        moved: Atoms = system.copy()
        for atom, shift in change.items():
            moved.positions[atom] += shift
        return emt_systems._rejection(start, moved, gas, energies, n)

    assert reason({}) is None
    assert reason({}, (25.0, -1.0)) == reason({}, (1.0, float("nan"))) == "energy"
    up = (0.0, 0.0, 5.0)
    assert reason({n: up, n + 1: up}) == "desorbed"
    assert reason({n: (0.0, 0.0, 4.5)}) == "scattered"
    assert reason({0: (0.0, 0.0, 2.1)}) == "reconstructed"


def adsorbate_name(record) -> str:
    return Atoms(record.atomic_numbers[record.tags == 2].numpy()).get_chemical_formula()


def metals(record) -> tuple[str, ...]:
    return tuple(sorted(set(Atoms(record.atomic_numbers[record.tags != 2].numpy()).symbols)))


@pytest.fixture(scope="module")
def sample() -> dict[str, list]:
    stores = {s: StructureStore(SAMPLE / f"{s}.safetensors") for s in emt_systems._SPLITS}
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


@pytest.mark.parametrize("split", list(emt_systems._SPLITS))
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


@pytest.mark.parametrize(("split", "index"), [("train", 0), ("val_ood_both", 3)])
def test_sample_can_be_made_again(sample, split: str, index: int) -> None:
    stored, again = sample[split][index], emt_systems._relax_system(0, split, index).fields
    assert stored.sid == again["sid"]
    assert stored.atomic_numbers.tolist() == again["atomic_numbers"].tolist()
    # Other processors and versions round differently, which a relaxation amplifies a little.
    np.testing.assert_allclose(stored.pos.numpy(), again["pos"], atol=1e-3)
    assert float(stored.y_relaxed) == pytest.approx(again["y_relaxed"], abs=1e-2)


def test_card_has_the_checksums_and_the_size_is_kept() -> None:
    card = (SAMPLE / "README.md").read_text(encoding="utf-8")
    files = {p.name: p for p in SAMPLE.glob("*.safetensors")}
    listed = dict(re.findall(r"\| `([a-z_]+\.safetensors)` \|.*\| `([0-9a-f]{64})` \|", card))
    assert listed == {n: hashlib.sha256(p.read_bytes()).hexdigest() for n, p in files.items()}
    assert sum(p.stat().st_size for p in SAMPLE.iterdir()) <= 4_000_000
