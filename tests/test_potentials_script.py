import json

import ase.io
import pytest
from script_files import load_script
from tiny_run import argon, table, write_points


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_both_models_learn_and_a_second_start_repeats_nothing(tmp_path, monkeypatch, capsys):
    script = load_script("potentials")
    points, out = write_points(tmp_path / "points"), tmp_path / "out"
    words = [str(points), "--out", str(out), "--seconds", "0.3", "--dim", "16", "--layers", "1"]
    assert script.main(words) == 0
    rows = {row["model"]: row for row in table(out / "potentials.csv")}
    assert rows.keys() == {"mean", "molflt", "schnet", "painn"}
    assert all(float(row["force_mae_meV_per_A"]) > 0 for row in rows.values())
    assert int(rows["schnet"]["steps"]) >= 1 and (out / "potentials.md").is_file()
    monkeypatch.setattr(script, "learn", None)
    assert script.main(words) == 0
    # after an interruption, the time already used counts
    monkeypatch.undo()
    before = json.loads((out / "schnet-0.json").read_text())
    (out / "schnet-0.json").unlink()
    assert script.main(words) == 0
    assert json.loads((out / "schnet-0.json").read_text())[0]["steps"] == before[0]["steps"]
    assert script.main([*words, "--lr", "0.1"]) == 2  # results with other options are not reused
    capsys.readouterr()
    ase.io.write(points / "train.extxyz", argon(6, 5))  # results for other data are not reused
    assert script.main(words) == 2
    assert "made with other digests" in capsys.readouterr().err
    rows = [{"split": "a", "model": "m", "parameters": 9, "steps": n} for n in (10, 30)]
    assert script.table(rows).splitlines()[2].startswith("| a | m | 9 | 20 |")  # a mean
