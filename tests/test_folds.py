"""scripts/folds.py: singles and ensembles by hand, and that it repeats nothing."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from script_files import Trainings, load_script, unpack_game_net

from molflt.data.structures.systems import System, write_systems

LABELS = {1: 0.5, 2: -1.0, 3: 2.0, 4: 0.0}  # sid -> eV; 1, 2 in the first test fold
ENERGIES = {  # folder -> sid -> eV
    "test0-val1": {1: 0.7, 2: -1.1},
    "test0-val2": {1: 0.5, 2: -0.7},
    "test1-val0": {3: 2.3, 4: -0.1},
    "test1-val2": {3: 1.9, 4: 0.1},
}


class Folds(Trainings):
    """Evaluations of trainings of two folds."""

    def evaluate(self, run: Path) -> None:
        with open(run / "predictions.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["split", "sid", "energy_eV", "target_eV"])
            writer.writerow(["val_id", 9, 100.0, 0.0])
            for sid, energy in ENERGIES[run.name].items():
                writer.writerow(["test_id", sid, energy, LABELS[sid]])
        (run / "results.json").write_text("{}")


@pytest.fixture
def folds(monkeypatch, tmp_path):
    module = load_script("folds")
    monkeypatch.setattr("compare.subprocess", SimpleNamespace(run=Folds()))
    for name, own in ENERGIES.items():
        folder = tmp_path / "data" / name
        folder.mkdir(parents=True)
        (folder / "train.safetensors").touch()
        systems = [System(sid, f"s{sid}", "m", f"family{sid % 2}", "Cu") for sid in own]
        write_systems(folder, [("test_id", systems)])
    (tmp_path / "c.yaml").write_text("seed: 0\n")
    return module


@pytest.fixture
def words(tmp_path) -> list[str]:
    options = {"config": "c.yaml", "data": "data", "out": "out"}
    return [word for name, path in options.items() for word in (f"--{name}", str(tmp_path / path))]


def commands() -> list[list[str]]:
    import compare

    return compare.subprocess.run.commands


def test_single_models_and_ensembles_are_compared_with_published_ones(
    folds, words, tmp_path, capsys
):
    path = tmp_path / "published.npz"
    order = [4, 3, 2, 1]
    other = np.array([[LABELS[sid] + 0.4, LABELS[sid] - 0.2] for sid in order])
    np.savez(path, name=np.array([f"s{sid}" for sid in order]), other=other, fold=np.arange(4))
    assert folds.main([*words, "--published", str(path), "--", "--trainer.max_steps=7"]) == 0
    train = next(words for words in commands() if words[0] == "train")
    assert train[0] == "train" and "--trainer.max_steps=7" in train and "--seed=0" in train
    assert any(word.startswith("--data.root=") for word in train)
    text = capsys.readouterr().out
    assert text.startswith("4 trainings")
    assert text == (tmp_path / "out" / "folds.md").read_text()
    cells = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in text.splitlines()
        if line.startswith("|")
    }
    # single: errors .2 .1, 0 .3 | .3 .1, .1 .1; means of two: .1 .1 | .1 0
    assert cells["molflt"][:4] == ["2", "4", "0.1500", "0.1500 ± 0.0000"]
    assert cells["molflt"][4] == "0.0750" and cells["molflt"][6] == "25.0"
    assert cells["other"][2] == "0.3000" and cells["other"][4] == "0.1000"
    assert cells["family0"] == ["2", "0.050", "0.100"] and cells["family1"][1] == "0.100"
    assert len((tmp_path / "out" / "folds.csv").read_text().splitlines()) == 1 + 2 * 4
    assert (tmp_path / "out" / "folds.png").stat().st_size > 1000


def test_stopped_folds_are_resumed(folds, words, tmp_path, capsys):
    import compare

    compare.subprocess.run.broken = "evaluate " + str(tmp_path / "out" / "test0-val2")
    assert folds.main(words) == 1
    assert "3 trainings" in capsys.readouterr().out
    compare.subprocess.run.broken = ""
    commands().clear()
    assert folds.main(words) == 0
    assert [word for words in commands() for word in words[1:2] if "out" in word] == [
        str(tmp_path / "out" / "test0-val2")
    ]
    assert folds.main([*words, "--", "--model.dim=8"]) == 2
    assert "other options" in capsys.readouterr().err


def test_only_some_folders_but_of_the_same_options(folds, words, tmp_path, capsys):
    assert folds.main([*words, "--only", "test0-val1"]) == 0
    assert [word for word in commands()[0] if word.endswith("test0-val1")] and len(commands()) == 2
    commands().clear()
    assert folds.main([*words, "--only", "test0-val2", "--", "--model.dim=8"]) == 2
    assert "out/test0-val1/job.json: this run was made with other" in capsys.readouterr().err
    assert folds.main([*words, "--only", "test0-val9", "test0-val2"]) == 2
    assert "test1-val2; got test0-val9; correct it" in capsys.readouterr().err
    assert not commands()


@pytest.mark.parametrize("name", ["train.safetensors", "test_id.safetensors", "systems.csv"])
def test_energies_of_other_data_in_the_same_place_are_refused(folds, words, tmp_path, capsys, name):
    """Converted again, the same numbers of systems may mean others."""
    assert folds.main(words) == 0
    commands().clear()
    changed = tmp_path / "data" / "test0-val2" / name
    was = changed.read_text() if changed.exists() else None
    changed.write_text("sid,name,molecule,family,metal,split\n7,s,m,f,Cu,test_id\n")
    capsys.readouterr()
    for more in ([], ["--only", "test1-val0"]):  # all that is there is averaged over
        assert folds.main([*words, *more]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"test0-val2/job.json: this run was made with other content of {changed};" in line
    assert commands() == []
    changed.unlink() if was is None else changed.write_text(was)
    assert folds.main(words) == 0


def test_runs_of_earlier_versions_are_resumed(folds, words, tmp_path):
    assert folds.main([*words, "--only", "test0-val1"]) == 0
    note = tmp_path / "out" / "test0-val1" / "job.json"
    old = json.loads(note.read_text())
    del old["stores"]
    note.write_text(json.dumps(old))
    commands().clear()
    assert folds.main(words) == 0
    assert len(commands()) == 2 * 3
    assert json.loads(note.read_text()) == old  # what is not known is not made up
    assert folds.main([*words, "--", "--model.dim=8"]) == 2


def test_archived_runs_are_resumed_by_the_documented_command(folds, tmp_path, monkeypatch):
    given = unpack_game_net("folds.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    for run in (tmp_path / "runs" / "folds").iterdir():
        folder = tmp_path / "datasets" / "game-net" / "folds" / run.name
        folder.mkdir(parents=True)
        (folder / "train.safetensors").touch()
    written = []
    monkeypatch.setattr(folds, "others_of", lambda path, folder: None)
    monkeypatch.setattr(folds, "write", lambda *parts: written.append(parts))
    assert folds.main(given) == 0
    assert commands() == [] and len(written) == 1


def test_a_folder_without_folds(folds, words, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert folds.main([*words, "--data", str(tmp_path / "empty")]) == 2
    assert "expected folders testI-valJ" in capsys.readouterr().err


def test_published_energies_are_read_before_anything_is_trained(folds, words, tmp_path, capsys):
    path = tmp_path / "published.npz"
    np.savez(path, name=np.array(["s1"]), other=np.zeros(1))
    assert folds.main([*words, "--published", str(path)]) == 2
    assert "1 are missing, such as s2" in capsys.readouterr().err
    assert folds.main([*words, "--published", str(tmp_path / "absent.npz")]) == 2
    assert "absent.npz" in capsys.readouterr().err
    assert not commands()
