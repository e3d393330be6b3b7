"""scripts/conversion.py on language models: polynomials stay close, and others are refused."""

from __future__ import annotations

from pathlib import Path

from recipe_runs import words_of
from script_files import load_script

from molflt.commands.cli import main


def test_normalized_softmax_as_polynomial(tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    words = ["--trainer.max_steps=80", "--model.mixing=softmax", "--model.normalize_qk=true"]
    given = ["--model.num_features=8", "--model.position=spectral"]
    assert main([word for word in words_of("language", run, *words) if word not in given]) == 0
    script = load_script("conversion")
    capsys.readouterr()
    assert script.main([str(run), "--features", "4", "--draws", "2", "--polynomial"]) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if "|" in line][2:]
    found = {row[1].strip(): float(row[2].split("±")[0]) for row in rows}
    trained = found.pop("softmax, as trained")
    assert set(found) == {"4 features", "polynomial of degree 2", "polynomial of degree 3"}
    assert abs(found["polynomial of degree 3"] / trained - 1) < 0.01
    assert all(value > 0 for value in found.values())
    assert script.main([str(run), "--beam", "3"]) == 2
    assert "beam" in capsys.readouterr().err
