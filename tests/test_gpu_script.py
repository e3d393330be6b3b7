import importlib.util
import json

import pytest
from script_files import load_script


def test_numbers_and_resume_are_written_and_not_replaced(tmp_path, monkeypatch, capsys):
    script, words = load_script("gpu"), ["--device", "cpu", "--tiny", "--out", str(tmp_path)]
    monkeypatch.setattr(script, "without_kernels", lambda: "no GPU")
    assert script.main(words) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    differences = [row["difference"] for row in found["numbers"]]
    exact = [row["difference"] for row in found["numbers"] if row["precision"] == "float64"]
    assert max(differences) > 0 and max(exact) == 0, "float64 on the CPU is its own reference"
    assert found["resume"] == 0
    assert (tmp_path / "gpu.md").read_text() in capsys.readouterr().out
    with pytest.raises(SystemExit):
        script.main(words)
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_kernels_in_the_interpreter(monkeypatch):
    script = load_script("gpu")
    monkeypatch.setattr(script, "GRAPHS", (5, 1))
    few = {**script.LAYERS["triton"], "position_options": {"num_nodes": 2}}
    monkeypatch.setattr(script, "LAYERS", {"triton": few})
    monkeypatch.setattr(script, "MODELS", {})
    rows = list(script.numbers("cpu", tiny=False))
    assert len(rows) == len(script.BOUNDS)
    assert all(0 < row["difference"] < script.BOUNDS[row["precision"]] for row in rows)
    costs = list(script.kernels("cpu", tiny=True))
    assert {(row["mixing"], row["backward"]) for row in costs} >= {("triton", True), ("auto", True)}
    found = {"numbers": rows, "kernels": costs, "resume": 0.0}
    found |= {"device": "CPU", "torch": "", "molflt": "", "without_kernels": ""}
    assert "| triton |" in script.page(found)


def test_a_wrong_number_ends_with_status_1(tmp_path, monkeypatch, capsys):
    script = load_script("gpu")
    monkeypatch.setattr(script, "without_kernels", lambda: "no GPU")
    wrong = {"case": "additive", "difference": float("nan")}
    rows = [{**wrong, "precision": kind} for kind in script.BOUNDS]
    monkeypatch.setattr(script, "numbers", lambda *_: rows)
    monkeypatch.setattr(script, "resume", lambda *_: 0.0)
    assert script.main(["--device", "cpu", "--out", str(tmp_path)]) == 1
    assert "additive" in capsys.readouterr().err
