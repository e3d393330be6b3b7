import csv
from pathlib import Path

import numpy as np
import pytest
from script_files import Trainings, cells, load_script

from molflt.data.structures.systems import System, write_systems

FOLDS = load_script("folds")
LABELS = {1: 0.5, 2: -1.0, 3: 2.0, 4: 0.0}  # sid -> eV; 1, 2 in the first test fold
ENERGIES = {  # folder -> sid -> eV
    "test0-val1": {1: 0.7, 2: -1.1},
    "test0-val2": {1: 0.5, 2: -0.7},
    "test1-val0": {3: 2.3, 4: -0.1},
    "test1-val2": {3: 1.9, 4: 0.1},
}


class Folds(Trainings):
    def evaluate(self, run: Path) -> None:
        with open(run / "predictions.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["split", "sid", "energy_eV", "target_eV"])
            writer.writerow(["val_id", 9, 100.0, 0.0])
            for sid, energy in ENERGIES[run.name].items():
                writer.writerow(["test_id", sid, energy, LABELS[sid]])
        (run / "results.json").write_text("{}")


@pytest.fixture
def trainings(monkeypatch, tmp_path) -> Trainings:
    for name, own in ENERGIES.items():
        folder = tmp_path / "data" / name
        folder.mkdir(parents=True)
        (folder / "train.safetensors").touch()
        systems = [System(sid, f"s{sid}", "m", f"family{sid % 2}", "Cu") for sid in own]
        write_systems(folder, [("test_id", systems)])
    (tmp_path / "c.yaml").write_text("seed: 0\n")
    return Folds().replace(monkeypatch)


@pytest.fixture
def words(tmp_path) -> list[str]:
    options = {"config": "c.yaml", "data": "data", "out": "out"}
    return [word for name, path in options.items() for word in (f"--{name}", str(tmp_path / path))]


def test_single_models_and_ensembles_beside_published_ones(trainings, words, tmp_path, capsys):
    path = tmp_path / "published.npz"
    order = [4, 3, 2, 1]
    other = np.array([[LABELS[sid] + 0.4, LABELS[sid] - 0.2] for sid in order])
    np.savez(path, name=np.array([f"s{sid}" for sid in order]), other=other, fold=np.arange(4))
    assert FOLDS.main([*words, "--published", str(path), "--", "--trainer.max_steps=7"]) == 0
    train = next(words for words in trainings.commands if words[0] == "train")
    assert train[0] == "train" and "--trainer.max_steps=7" in train and "--seed=0" in train
    assert any(word.startswith("--data.root=") for word in train)
    text = capsys.readouterr().out
    assert text.startswith("4 training runs")
    assert text == (tmp_path / "out" / "folds.md").read_text()
    found = cells(text)
    # single: errors .2 .1, 0 .3 | .3 .1, .1 .1; means of two: .1 .1 | .1 0
    assert found["molflt"][:4] == ["2", "4", "0.1500", "0.1500 ± 0.0000"]
    assert found["molflt"][4] == "0.0750" and found["molflt"][6] == "25.0"
    assert found["other"][2] == "0.3000" and found["other"][4] == "0.1000"
    assert found["family0"] == ["2", "0.050", "0.100"] and found["family1"][1] == "0.100"
    assert len((tmp_path / "out" / "folds.csv").read_text().splitlines()) == 1 + 2 * 4
    assert (tmp_path / "out" / "folds.png").stat().st_size > 1000
