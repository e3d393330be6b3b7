import json
from pathlib import Path

import pytest
from script_files import Trainings, load_script
from tiny_run import table


class Evaluated(Trainings):
    """Writes a final loss and a curve for each run; seed 1 of lstm has diverged."""

    def evaluate(self, run: Path) -> None:
        diverged = run == run.parent / "seed1" and run.parent.name == "lstm"
        end = None if diverged else 10.0 ** -int(run.name[-1])
        (run / "results.json").write_text(json.dumps({"factorization": {"final_loss": end}}))
        rows = [f"factorization,run,,0,{step},{2 - step / 9}" for step in (0.5, 2.5, 4.5)]
        (run / "curves.csv").write_text("\n".join(["task,optimizer,tuned,repeat,step,loss", *rows]))


def test_the_table_and_a_second_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, trainings = load_script("optimizers"), Evaluated().replace(monkeypatch)
    words = ["--out", str(tmp_path), "--memories", "flt", "lstm", "--seeds", "0", "1"]
    words += ["--tasks", "factorization", "--steps", "6", "--repeats", "2"]
    assert script.main(words) == 0
    evaluated = [own for own in trainings.commands if own[0] == "evaluate"]
    assert len(evaluated) == 4 and evaluated[0][2:] == [
        *("--steps", "6", "--repeats", "2", "--rates=[]", "--tasks", "factorization")
    ]
    text = (tmp_path / "optimizers.md").read_text()
    assert "| flt | 2 | 0.3162 ± 0.71 |" in text and "| lstm | 2 | diverged |" in text
    assert "| Adam, tuned | 1 | " in text and (tmp_path / "optimizers.png").is_file()
    rows = table(tmp_path / "optimizers.csv")
    adam = [row for row in rows if row["optimizer"] == "Adam, tuned"]
    assert len(adam) == 2 * 6 and len(rows) == len(adam) + 4 * 3
    trainings.commands.clear()
    monkeypatch.setattr(script, "tuned_adam", None)
    assert script.main(words) == 0 and not trainings.commands
    assert script.main([*words, "--repeats", "3"]) == 2  # existing results have other options
