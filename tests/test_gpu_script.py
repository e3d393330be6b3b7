"""scripts/gpu.py at tiny sizes on the CPU."""

import json

import pytest
from script_files import load_script


def test_numbers_resume_and_costs_are_written(tmp_path, capsys):
    assert load_script("gpu").main(["--device", "cpu", "--tiny", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    differences = [row["difference"] for row in found["numbers"]]
    exact = [row["difference"] for row in found["numbers"] if row["precision"] == "float64"]
    assert max(differences) > 0 and max(exact) == 0, "float64 on the CPU is its own reference"
    assert found["resume"]["difference"] == 0
    assert all(row["ms"] > 0 for row in found["costs"] if "note" not in row)
    assert (tmp_path / "gpu.md").read_text() in capsys.readouterr().out


def test_a_wrong_number_ends_with_status_1(tmp_path, monkeypatch, capsys):
    script = load_script("gpu")
    wrong = {"case": "additive", "difference": float("nan")}
    rows = [{**wrong, "precision": kind} for kind in script.BOUNDS]
    monkeypatch.setattr(script, "numbers", lambda *_: rows)
    monkeypatch.setattr(script, "resume", lambda *_: {"difference": 0.0})
    monkeypatch.setattr(script, "costs", lambda *_: [])
    assert script.main(["--device", "cpu", "--out", str(tmp_path)]) == 1
    assert "additive" in capsys.readouterr().err


def test_a_folder_of_an_earlier_start_is_refused_first(tmp_path, monkeypatch, capsys):
    script = load_script("gpu")
    (tmp_path / "gpu.json").write_text("{}")
    monkeypatch.setattr(script, "numbers", lambda *_: pytest.fail("computed before the refusal"))
    with pytest.raises(SystemExit):
        script.main(["--device", "cpu", "--tiny", "--out", str(tmp_path)])
    assert str(tmp_path) in capsys.readouterr().err
