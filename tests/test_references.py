import json
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.io import write
from safetensors.torch import load_file, save_file
from tiny_run import (
    arguments,
    error_of,
    logged,
    printed,
    start,
    structures,
    table,
    train_potential,
    write_points,
    write_splits,
)

from molflt.commands.cli import main
from molflt.data.structures.store import StructureStore, write_store
from molflt.training.checkpoint import load_run

pytestmark = pytest.mark.usefixtures("undrawn")
ENERGIES = {1: -13.6, 8: -2041.5, 29: -45000.125, 78: -91000.75}  # eV, with all electrons
ALL = "--model.readout=all"


def totals(count: int, seed: int = 0, first_sid: int = 0):
    for record in structures(count, seed, first_sid):
        record.y_relaxed += sum(ENERGIES[int(z)] for z in record.atomic_numbers)
        yield record


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    splits = {"train": totals(40), "val_id": totals(16, 1, 1000)}  # in larger ones, atoms coincide
    return write_splits(tmp_path_factory.mktemp("data"), **splits)


@pytest.fixture(scope="module")
def run(data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = ["--trainer.max_steps=40", "--trainer.val_every=20", "--task.lr=1e-2"]
    words += ["--task.references=fit", "--trainer.ema_decay=0.5"]
    assert start(data, folder, *words, ALL) == 0
    return folder


def test_the_run_keeps_its_references(data, run) -> None:
    assert logged(run, "val_mae_eV")[-1] < 1.0  # energies reach 4e5 eV
    kept = json.loads((run / "references.json").read_text())
    assert kept.keys() == {"H", "O", "Cu", "Pt"}
    for name in ("best", "last"):
        model, config = load_run(run, name)
        assert config["task"]["references"] == "fit"
        own = model.element_energies
        assert own.dtype == torch.float64 and torch.count_nonzero(own) == 4
        assert [float(own[z]) for z in (1, 8, 29, 78)] == list(kept.values())
    weights = load_file(run / "checkpoints" / "last.safetensors")
    del weights["element_energies"]  # as of earlier versions
    save_file(weights, run / "old.safetensors")
    assert not load_run(run, str(run / "old.safetensors"))[0].element_energies.any()
    for number, energy in ENERGIES.items():
        assert float(own[number]) == pytest.approx(energy, abs=1.0)
    store = StructureStore(data / "train.safetensors")
    left = store.y_relaxed - store.compositions(np.arange(40)) @ own.numpy()
    assert float(model.energy_mean) == pytest.approx(left.mean(), abs=1e-7)
    assert float(model.energy_std) == pytest.approx(left.std(), rel=1e-7)


def test_predict_and_evaluate_give_total_energies(data, run, tmp_path, capsys) -> None:
    out = tmp_path / "out.csv"
    told = printed(capsys, "predict", run, data / "val_id.safetensors", "--out", out).err
    assert all("outside the training data" in line for line in told.splitlines())
    labels = StructureStore(data / "val_id.safetensors").y_relaxed
    errors = [float(row["energy_eV"]) for row in table(out)] - labels
    best = min(logged(run, "val_mae_eV"))
    assert np.abs(errors).mean() == pytest.approx(best, rel=1e-4)
    assert main(["evaluate", str(run), "--splits", "val_id", "--out", str(tmp_path / "e")]) == 0
    rows = table(tmp_path / "e" / "predictions.csv")
    mae = np.mean([abs(float(row["error_eV"])) for row in rows])
    assert mae == pytest.approx(best, rel=1e-4)


def test_members_of_one_kind_of_totals_make_an_ensemble(data, run, tmp_path, capsys) -> None:
    """Energies without references agree between levels of theory; total energies do not."""
    other = tmp_path / "other"
    for split, count in (("train", 48), ("val_id", 16)):
        records = list(totals(count))
        for record in records:
            record.y_relaxed += 2.0 * record.natoms
        write_store(other / f"{split}.safetensors", records)
    shifted, again = tmp_path / "shifted", tmp_path / "again"
    words = ("--task.references=fit", "--trainer.max_steps=2", "--data.allow_duplicates=true", ALL)
    assert start(other, shifted, *words) == 0
    assert start(data, again, *words, "--seed=1") == 0
    command = ["evaluate", str(run), "--splits", "val_id", "--out", str(tmp_path / "e")]
    command += ["--device=cpu", "--also"]
    line = error_of(capsys, *command, str(shifted))
    assert line.startswith(f"{shifted}: for the structures of {data}")
    away = float(line.partition(" by ")[2].split()[0])
    assert away == pytest.approx(2.0 * 11, abs=4) and f"from those of {run} by" in line
    assert not (tmp_path / "e").exists()
    assert main([*command, str(again)]) == 0
    file = str(data / "val_id.safetensors")
    told = printed(capsys, "predict", run, file, "--also", shifted, status=2).err
    assert "train all members on the same kind of energy" in told
    atoms = Atoms("Cu3N", positions=np.eye(4, 3) * 2.5, cell=[8, 8, 20], pbc=True)
    atoms.set_tags([1, 1, 1, 2])
    write(tmp_path / "in.extxyz", atoms)
    said = printed(capsys, "predict", run, tmp_path / "in.extxyz", "--also", again).err
    assert said.count("in.extxyz: no reference energy of N, which the training split") == 1


def test_total_energies_require_references(data, tmp_path, capsys) -> None:
    line = error_of(capsys, "train", *arguments(data, tmp_path / "run", ALL))
    assert f"{data / 'train.safetensors'}: y_relaxed looks like total energies" in line
    assert "check the unit" in line
    assert "--task.references fit" in line and "--task.references none" in line
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_given_references_are_stored_in_the_run(tmp_path) -> None:
    (tmp_path / "own.yaml").write_text("Ar: -3.25")
    points, run = write_points(tmp_path / "points"), tmp_path / "run"
    words = [f"--task.references={tmp_path / 'own.yaml'}", "--data.batch_size=3"]
    train_potential(points, run, *words, "--trainer.max_steps=1", "--task.warmup_steps=0")
    (tmp_path / "own.yaml").unlink()
    assert json.loads((run / "references.json").read_text()) == {"Ar": -3.25}
    kept = load_run(run, "best", "cpu")[0].get_buffer("element_energies")
    assert np.flatnonzero(kept).tolist() == [18] and float(kept[18]) == -3.25
    file = str(points / "val_id.extxyz")
    assert main(["predict", str(run), file, "--out", str(tmp_path / "e.csv")]) == 0


DESCRIBED = ("--trainer.max_steps=2", "--trainer.val_every=2", "--model.descriptors=true", ALL)


@pytest.fixture(scope="module")
def helium(tmp_path_factory) -> Path:
    others = list(structures(8, 3, 200))
    others[-2].atomic_numbers[-1] = 2
    splits = {"train": structures(12), "val_id": structures(8, 1, 100), "val_ood_ads": others}
    return write_splits(tmp_path_factory.mktemp("data"), **splits)


def test_training_is_refused_before_its_first_step(helium, tmp_path, capsys) -> None:
    """Only the validation split contains the element."""
    split = ("--data.val_split=val_ood_ads", "--data.skip_bad=true")
    words = ["train", *arguments(helium, tmp_path / "run", *DESCRIBED, *split)]
    said = error_of(capsys, *words)
    assert "val_ood_ads.safetensors: sid 206: " in said and "He" in said
    assert not (tmp_path / "run").exists()


def test_predictions_name_or_skip_undescribed_structures(helium, tmp_path, capsys) -> None:
    run = tmp_path / "described"
    assert start(helium, run, *DESCRIBED) == 0
    file, out = helium / "val_ood_ads.safetensors", tmp_path / "energies.csv"
    words = ["predict", str(run), str(file), "--out", str(out), "--device", "cpu"]
    assert "sid 206: " in error_of(capsys, *words)
    assert not out.exists()
    assert "sid 206: " in printed(capsys, *words, "--skip_bad").err
    rows = table(out)
    assert [int(row["sid"]) for row in rows] == [200, 201, 202, 203, 204, 205, 207]
    assert [int(row["index"]) for row in rows] == [0, 1, 2, 3, 4, 5, 7]
