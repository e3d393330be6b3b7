"""Elements without descriptors: refused in training, left out of predictions."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from tiny_run import arguments, error_of, start, structures
from torch_geometric.data import Batch

from molflt.commands.cli import main
from molflt.data.structures.store import write_store
from molflt.graph import EnergyRegressor
from molflt.graph.computation import EnergyInputs
from molflt.graph.heads import undescribed

STEPS = ("--trainer.max_steps=2", "--trainer.val_every=2", "--trainer.checkpoint_every=2")
DESCRIBED = (*STEPS, "--model.descriptors=true")


def with_helium(count: int, sid: int) -> list:
    """Returns structures; the second last one contains helium."""
    made = list(structures(count, 3, sid))
    made[-2].atomic_numbers[-1] = 2
    return made


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data")
    write_store(root / "train.safetensors", structures(12, 0, 0))
    write_store(root / "val_id.safetensors", structures(8, 1, 100))
    write_store(root / "val_ood_ads.safetensors", with_helium(8, 200))
    return root


@pytest.fixture(scope="module")
def run(data, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "described"
    assert start(data, run, *DESCRIBED) == 0
    return run


def test_training_is_refused_before_its_first_step(data, tmp_path, capsys) -> None:
    """The element is only in the validation split; a model without descriptors accepts it."""
    split = ("--data.val_split=val_ood_ads", "--data.skip_bad=true")
    words = ["train", *arguments(data, tmp_path / "run", *DESCRIBED, *split)]
    said = error_of(capsys, *words)
    assert "val_ood_ads.safetensors: sid 206: " in said and "He" in said
    assert not (tmp_path / "run").exists()
    assert start(data, tmp_path / "free", *STEPS, *split) == 0


def test_predictions_name_or_skip_undescribed_structures(run, data, tmp_path, capsys) -> None:
    file, out = data / "val_ood_ads.safetensors", tmp_path / "energies.csv"
    words = ["predict", str(run), str(file), "--out", str(out), "--device", "cpu"]
    assert "sid 206: " in error_of(capsys, *words)
    assert not out.exists()
    assert main([*words, "--skip_bad"]) == 0
    assert "sid 206: " in capsys.readouterr().err
    with open(out, newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [int(row["sid"]) for row in rows] == [200, 201, 202, 203, 204, 205, 207]
    assert [int(row["index"]) for row in rows] == [0, 1, 2, 3, 4, 5, 7]


def test_inputs_of_machine_code_are_checked() -> None:
    model = EnergyRegressor(16, 2, layers=1, descriptors=True)
    assert {2, 10, 18, 104, 118} <= undescribed(model) and 29 not in undescribed(model)
    assert not undescribed(EnergyRegressor(16, 2, layers=1))
    batch = Batch.from_data_list(with_helium(4, 0))
    with pytest.raises(ValueError, match="descriptors.* 2"):
        EnergyInputs.of(model, batch)
    batch.atomic_numbers = torch.where(batch.atomic_numbers == 2, 1, batch.atomic_numbers)
    EnergyInputs.of(model, batch)
