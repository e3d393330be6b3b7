import multiprocessing
import pickle
import shutil
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import fcc111
from ase.calculators.emt import EMT
from ase.constraints import FixAtoms
from ase.io import read, write
from tiny_run import (
    argon,
    arguments,
    at_step,
    error_of,
    on_slab,
    power_cut,
    printed,
    start,
    structures,
    table,
)

import molflt
from molflt.commands import baseline
from molflt.commands.cli import main
from molflt.commands.inspect import summarize
from molflt.data.structures import open_dataset
from molflt.data.structures.base import Reading, to_atoms
from molflt.data.structures.datamodule import IS2REData
from molflt.data.structures.domain import domain_of
from molflt.data.structures.store import BASELINE, write_store
from molflt.evaluation.ensemble import load_ensemble
from molflt.graph import EnergyRegressor
from molflt.lock import FolderLock

pytestmark = pytest.mark.usefixtures("undrawn")
OFFSET = 0.1  # label minus baseline, eV per adsorbate atom


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Returns a folder of two splits of random labels; baselines are lower by `OFFSET` per atom."""
    root, draw = tmp_path_factory.mktemp("baseline"), np.random.default_rng(0)
    for split, first in (("train", 0), ("val_id", 100)):
        frames = []
        for record in structures(8, first, first):
            energy, atoms = draw.uniform(-3, 3), to_atoms(record)
            offset = OFFSET * (record.tags == 2).sum().item() + 1e-3 * draw.normal()
            atoms.info |= {"y_relaxed": energy, "mlip": energy - offset}
            frames.append(atoms)
        write(root / f"{split}.extxyz", frames)
    return root


@pytest.fixture(scope="module")
def run(files):
    steps = ("--trainer.max_steps=2", "--task.warmup_steps=1")
    assert start(files, files / "run", *steps, "--data.baseline_key=mlip") == 0
    return files / "run"


def energies(run, structures):
    return np.array([one.energy for one in molflt.load(run).predict(structures)])


def left(file):
    """Returns labels minus baselines, eV."""
    infos = [atoms.info for atoms in read(file, ":")]
    return np.array([info["y_relaxed"] - info["mlip"] for info in infos])


def test_baseline_of_another_calculator_is_reported(files, tmp_path, capsys):
    """The calculator and its options are in the header, also after a conversion."""
    for made in ("EMT, 0 steps", "EMT, 9 steps"):
        path = tmp_path / made / "train.safetensors"
        records = open_dataset(files / "train.extxyz", reading=Reading(baseline_key="mlip"))
        write_store(tmp_path / "whole.safetensors", records, source=f"file{BASELINE}{made}")
        assert main(["data", "convert", str(tmp_path / "whole.safetensors"), str(path)]) == 0
    data = (path, "--data.val_fraction=0.5", "--data.baseline_key=y_baseline")
    assert start(data[0], tmp_path / "run", *data[1:], "--trainer.max_steps=2") == 0
    capsys.readouterr()
    for made in ("EMT, 9 steps", "EMT, 0 steps"):
        energies(tmp_path / "run", tmp_path / made / "train.safetensors")
        assert ("EMT, 9 steps" in capsys.readouterr().err) == (made == "EMT, 0 steps")
    paths = [tmp_path / "EMT, 0 steps" / "train.safetensors", path]
    (tmp_path / "splits").mkdir()
    for split, file in zip(("train", "val_id"), paths, strict=True):
        shutil.copy(file, tmp_path / "splits" / f"{split}.safetensors")
    joined = tmp_path / "joined.safetensors"
    assert main(["data", "convert", *map(str, paths), str(joined)]) == 0
    for root in (tmp_path / "splits", joined):
        mixed = IS2REData(root, baseline_key="y_baseline", allow_duplicates=True)
        with pytest.warns(match="EMT, 0 steps; EMT, 9 steps"):
            mixed.files()
    other = shutil.copytree(tmp_path / "run", tmp_path / "other")  # member with another baseline
    domain = (other / "domain.json").read_text()
    (other / "domain.json").write_text(domain.replace("EMT, 9 steps", "EMT, 0 steps"))
    both = domain_of([tmp_path / "run", other])  # matches neither baseline alone
    assert both is not None and both.baseline == "EMT, 9 steps; EMT, 0 steps"


def test_model_adds_baseline_to_what_it_learned(files, run):
    """References are fitted to the differences from the baseline, so two steps are enough."""
    frames = read(files / "val_id.extxyz", ":")
    labels = np.array([atoms.info["y_relaxed"] for atoms in frames])
    assert np.abs(energies(run, files / "val_id.extxyz") - labels).max() < 0.02
    other = [atoms.copy() for atoms in frames]
    for atoms in other:
        atoms.info["mlip"] += 7.0
    moved = energies(run, other) - energies(run, frames)
    np.testing.assert_allclose(moved, 7.0, atol=1e-6)


def test_best_weights_are_never_worse_than_baseline_and_references(files, tmp_path):
    """Only labels of the training set are far from the baseline."""
    shutil.copy(files / "val_id.extxyz", tmp_path)
    frames = [*read(files / "train.extxyz", ":"), *read(files / "train.extxyz", ":")]
    for number, atoms in enumerate(frames):
        atoms.info["sid"] = number
        atoms.info["y_relaxed"] += 1 if number < len(frames) / 2 else -1
    write(tmp_path / "train.extxyz", frames)
    steps = ("--trainer.max_steps=4", "--trainer.val_every=2", "--task.warmup_steps=0")
    more = ("--task.lr=0.1", "--data.baseline_key=mlip", "--data.allow_duplicates=true")
    assert start(tmp_path, tmp_path / "run", *steps, *more) == 0
    rows = table(tmp_path / "run" / "metrics.csv")
    errors = {int(row["step"]): float(row["val_mae_eV"]) for row in rows if row["val_mae_eV"]}
    assert errors.pop(0) < 0.02 and min(errors.values()) > 0.1
    labels = [atoms.info["y_relaxed"] for atoms in read(tmp_path / "val_id.extxyz", ":")]
    assert np.abs(energies(tmp_path / "run", tmp_path / "val_id.extxyz") - labels).max() < 0.02
    elements = molflt.load(tmp_path / "run").model.trained_elements
    assert elements.nonzero().flatten().tolist() == [1, 8, 29, 78]


def test_store_keeps_baseline(files, run, tmp_path):
    stores = tmp_path / "stores"
    source, store = files / "val_id.extxyz", stores / "val_id.safetensors"
    assert main(["data", "convert", *map(str, (source, store)), "--baseline_key", "mlip"]) == 0
    expected = energies(run, files / "val_id.extxyz")
    np.testing.assert_allclose(energies(run, store), expected, atol=1e-9)
    np.testing.assert_allclose(energies(run, [source, store]), [*expected] * 2, atol=1e-6)
    shutil.copy(store, stores / "train.safetensors")
    steps = ("--trainer.max_steps=1", "--data.allow_duplicates=true", "--task.warmup_steps=0")
    assert start(stores, tmp_path / "run", *steps, "--data.baseline_key=y_baseline") == 0
    found = energies(tmp_path / "run", store)
    assert np.abs(found - [float(one.y_relaxed) for one in open_dataset(store)]).max() < 0.02


def test_exported_model_and_evaluation_use_baseline(files, run, tmp_path):
    assert main(["export", str(run), str(tmp_path / "model"), "--about", "random slabs"]) == 0
    expected = energies(run, files / "val_id.extxyz")
    assert list(energies(tmp_path / "model", files / "val_id.extxyz")) == list(expected)
    assert main(["evaluate", str(run), "--splits", "val_id"]) == 0
    results = molflt.load(run).trained.results["val_id"]
    assert results["mae_eV"] < 0.02
    train, val = (left(files / f"{split}.extxyz") for split in ("train", "val_id"))
    constant = np.abs(val - np.median(train)).mean()  # the error of the best constant difference
    assert results["baseline_mae_eV"] == pytest.approx(constant, abs=1e-9)


def test_ensemble_may_mix_models_with_and_without_baseline(files, run, tmp_path, capsys):
    other, path = tmp_path / "other", files / "val_id.extxyz"
    steps = ("--trainer.max_steps=2", "--task.warmup_steps=1")
    assert start(files, other, *steps) == 0
    both = molflt.load(run, also=[other]).predict(path)
    mean = (energies(run, path) + energies(other, path)) / 2
    np.testing.assert_allclose([one.energy for one in both], mean, atol=1e-6)
    swapped = molflt.load(other, also=[run])
    np.testing.assert_allclose([one.energy for one in swapped.predict(path)], mean, atol=1e-6)
    assert main(["evaluate", str(other), "--splits", "val_id", "--also", str(run)]) == 0
    rows = table(other / "ensemble" / "predictions.csv")
    np.testing.assert_allclose([float(row["energy_eV"]) for row in rows], mean, atol=1e-5)
    frames = read(path, ":")
    for atoms in frames:
        atoms.info["mlip"] -= 3.0  # 2 standard deviations, as for new metals
    molflt.load(run, also=[other]).predict(frames)
    for atoms in frames:
        atoms.info["mlip"] -= 1e3  # total energies
    write(tmp_path / "totals.extxyz", frames)
    words = ("predict", str(run), str(tmp_path / "totals.extxyz"), "--also", str(other))
    assert "baseline differ" in printed(capsys, *words, status=2).err


def test_ensemble_of_different_baselines_is_refused(files, run, tmp_path):
    other, path = Path(shutil.copytree(run, tmp_path / "other")), tmp_path / "other/config.yaml"
    path.write_text(path.read_text().replace("baseline_key: mlip", "baseline_key: dftb"))
    for runs in ((run, other), (other, run)):
        with pytest.raises(ValueError, match="data.baseline_key .* expected"):
            load_ensemble(runs)


def test_missing_baseline_is_refused(files, run, tmp_path, capsys):
    frames = read(files / "val_id.extxyz", ":")
    del frames[3].info["mlip"]
    with pytest.raises(ValueError, match="baseline"):
        molflt.load(run).predict(frames)
    shutil.copy(files / "train.extxyz", tmp_path)
    write(tmp_path / "val_id.extxyz", frames)
    text = error_of(
        capsys, "train", *arguments(tmp_path, tmp_path / "run", "--data.baseline_key=mlip")
    )
    assert all(word in text for word in ("val_id.extxyz", "baseline_key=mlip", "sid 103"))


def test_unused_baseline_is_named(files, tmp_path):
    for split in ("train", "val_id"):
        frames = read(files / f"{split}.extxyz", ":")
        for atoms in frames:
            atoms.info["y_baseline"] = atoms.info.pop("mlip")
        write(tmp_path / f"{split}.extxyz", frames)
    with pytest.warns(UserWarning, match="unused labels: y_baseline"):
        IS2REData(tmp_path).setup()


def test_baseline_has_no_part_in_other_models(files):
    model = EnergyRegressor(dim=16, heads=2, layers=1, ffn_dim=16, num_features=8).eval()
    record = open_dataset(files / "train.extxyz")[0]
    energy = model(record)["energy"]
    record.y_baseline = torch.tensor([5.0])
    assert torch.equal(model(record)["energy"], energy)
    model.adds_baseline.fill_(True)
    assert torch.equal(model(record)["energy"], energy + 5.0)
    assert "adsorbate_energy" not in model(record)


@pytest.fixture(scope="module")
def oxygen(tmp_path_factory):
    """Returns a file of three structures: O at two places on a copper slab, and the slab."""
    frames = [on_slab(), on_slab(), on_slab()]
    frames[0].positions[-1] += (0.2, 0.1, 0.3)
    del frames[2][-1]
    for number, atoms in enumerate(frames):
        atoms.info |= {"sid": number, "y_relaxed": -1.0 - number}
    path = tmp_path_factory.mktemp("oxygen") / "oxygen.extxyz"
    write(path, frames)
    return path


def computed(source, out, *more, calculator="ase.calculators.emt:EMT"):
    words = ["data", "baseline", str(source), str(out), f"--calculator={calculator}"]
    assert main([*words, *more]) == 0
    return open_dataset(out).y_baseline


def test_command_computes_energy_relative_to_slab_and_adsorbate(oxygen, tmp_path):
    def energy(atoms):
        atoms.calc = EMT()
        return atoms.get_potential_energy()

    frames = read(oxygen, ":")
    expected = [energy(one.copy()) - energy(one[:12]) - energy(one[12:]) for one in frames[:2]]
    found = computed(oxygen, tmp_path / "out.safetensors")
    np.testing.assert_allclose(found, [*expected, 0.0], atol=1e-4)  # the last is the clean slab
    stored = open_dataset(tmp_path / "out.safetensors")
    assert stored.y_relaxed.tolist() == [-1, -2, -3]
    write_store(tmp_path / "gaps.safetensors", open_dataset(oxygen), quantity="gap")
    computed(tmp_path / "gaps.safetensors", tmp_path / "both.safetensors")
    assert open_dataset(tmp_path / "both.safetensors").quantity == "gap"
    seen = summarize(tmp_path / "out.safetensors").summary["energies_eV"]
    assert seen["y_baseline"]["min"] == found.min()
    relaxed = computed(oxygen, tmp_path / "relaxed.safetensors", "--relax_steps=30")
    rows = table(tmp_path / "relaxed.csv")
    assert rows[0]["slab_eV"] == rows[1]["slab_eV"]
    assert (relaxed[:2] < found[:2]).all()
    kept = computed(oxygen, tmp_path / "kept.safetensors", "--subtract_adsorbate=false")
    np.testing.assert_allclose(kept[:2], found[:2] + energy(frames[0][12:]), atol=1e-4)
    assert table(tmp_path / "kept.csv")[0]["adsorbate_eV"] == "" and kept[2] == found[2]


def forked(workers, spawn, initializer, initargs):
    """Starts copies of this process, because new processes import everything again."""
    assert spawn.get_start_method() == "spawn"
    received = pickle.loads(pickle.dumps(initargs))  # as a new process receives them
    return ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), initializer, received)


def test_untagged_structures_have_total_energies(oxygen, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(baseline, "ProcessPoolExecutor", forked)
    atoms = read(oxygen, 0)
    atoms.set_tags(0)
    write(tmp_path / "untagged.extxyz", atoms)
    atoms.calc = EMT()
    total = computed(tmp_path / "untagged.extxyz", tmp_path / "total.safetensors", "--workers=2")
    np.testing.assert_allclose(total, atoms.get_potential_energy(), atol=1e-4)
    assert "total energies: 1;" in capsys.readouterr().out


def test_command_continues_from_its_table(oxygen, tmp_path, capsys):
    out, kept = tmp_path / "out.safetensors", tmp_path / "out.csv"
    whole = computed(oxygen, out)
    header, row, *_ = kept.read_text().splitlines(keepends=True)
    kept.write_text(header + row.replace(row.split(",")[6], "7.5"))  # a kept row is not recomputed
    np.testing.assert_allclose(computed(oxygen, out), [7.5, *whole[1:]])
    words = ["data", "baseline", str(oxygen), str(out), "--calculator", "ase.calculators.emt:EMT"]
    assert "30 steps" in error_of(capsys, *words, "--relax_steps=30")
    with FolderLock(tmp_path, "", ".lock.out.safetensors").held():
        assert "is computing out.safetensors" in error_of(capsys, *words)
    moved = read(oxygen, ":")
    moved[1].positions[-1, 2] += 0.5
    write(other := oxygen.with_name("other.extxyz"), moved)
    assert "a different structure 1" in error_of(capsys, *words[:2], str(other), *words[3:])
    for content in (b"a,b\n1,2\n", b"\xe4\n"):
        kept.write_bytes(content)
        assert "not a table from this command" in error_of(capsys, *words)
    for more in ("--fmax=1", "--device=cpu", "--workers=0"):
        assert more.strip("-").partition("=")[0] in error_of(capsys, *words, more)


def test_structures_that_fail_have_no_baseline_and_are_tried_again(oxygen, tmp_path, capsys):
    frames = read(oxygen, ":")
    frames[0].symbols[0] = "Fe"  # EMT has no parameters for it
    write(tmp_path / "iron.extxyz", frames)
    found = computed(tmp_path / "iron.extxyz", tmp_path / "out.safetensors")
    assert np.isfinite(found).tolist() == [False, True, True]
    told = capsys.readouterr()
    assert "1 structure, such as sid 0" in told.err and "Fe" in told.err
    assert "total energies" not in told.out
    (tmp_path / "out.csv").write_text((tmp_path / "out.csv").read_text() + "7,0,half a r")
    again = computed(tmp_path / "iron.extxyz", tmp_path / "out.safetensors")
    np.testing.assert_array_equal(again, found)


class InMainThread(EMT):
    """EMT that, like calculators with signal handlers, works only in the main thread."""

    def calculate(self, *given, **more):
        assert threading.current_thread() is threading.main_thread()
        super().calculate(*given, **more)


def test_one_worker_computes_in_the_main_thread(oxygen, tmp_path):
    found = computed(oxygen, tmp_path / "out.safetensors", calculator=f"{__name__}:InMainThread")
    assert np.isfinite(found).all()
    assert "InMainThread" in table(tmp_path / "out.csv")[0]["calculator"]


def test_relaxations_that_fail_give_no_baseline(monkeypatch):
    slab = fcc111("Cu", (2, 2, 3), vacuum=8.0, periodic=True)
    slab.rattle(0.1, seed=0)
    third = [DEFAULT, DEFAULT, ValueError("no convergence")]
    fails = EMT()
    fails.calculate = Mock(wraps=fails.calculate, side_effect=third)
    for made, finite in ((EMT(), True), (fails, False)):
        monkeypatch.setitem(baseline._cache, "calculator", made)
        energy, why = baseline._energy(slab.copy(), 0.001, 10)
        assert np.isfinite(energy) == finite and (finite or "no convergence" in why)


def test_slabs_with_other_fixed_atoms_are_not_shared(oxygen, tmp_path):
    free, fixed = read(oxygen, ":2")
    fixed.set_constraint(FixAtoms(range(12)))
    found = []
    for frames in ([free, fixed], [fixed]):
        write(source := tmp_path / f"{len(frames)}.extxyz", frames)
        found.append(computed(source, source.with_suffix(".safetensors"), "--relax_steps=20")[-1])
    assert found[0] == pytest.approx(found[1], abs=1e-6)


def test_run_that_loses_power_before_its_first_checkpoint_starts_again(files, tmp_path):
    words = (files, tmp_path / "run", "--trainer.max_steps=2", "--data.baseline_key=mlip")
    with at_step(0, power_cut), pytest.raises(RuntimeError, match="power cut"):
        start(*words)
    assert start(*words) == 0


def test_command_accepts_trained_potentials(potential_run, tmp_path):
    source, calculator = tmp_path / "argon.extxyz", molflt.Calculator(potential_run)
    frames = [Atoms(one.numbers, one.positions, cell=one.cell, pbc=one.pbc) for one in argon(2, 5)]
    write(source, frames)
    found = computed(source, tmp_path / "out.safetensors", calculator=potential_run)
    expected = [calculator.get_potential_energy(atoms) for atoms in frames]
    np.testing.assert_allclose(found, expected, atol=1e-4)
