"""Output of a training, names of runs, and `molflt info`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import yaml
from tiny_run import (
    SMALL,
    arguments,
    error_of,
    table,
    write_data,
)

from molflt.commands.cli import main
from molflt.training.outcome import best_of
from molflt.training.parser import dated_run

STEPS = ("--trainer.max_steps=4", "--trainer.val_every=2", "--trainer.log_every=1")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"), 8, 5)


@pytest.fixture(scope="module")
def printed(data, tmp_path_factory) -> tuple[Path, str]:
    """A run and its output."""
    from contextlib import redirect_stdout

    run = tmp_path_factory.mktemp("runs") / "one"
    log = run.parent / "log"
    with open(log, "w") as file, redirect_stdout(file):
        assert main(["train", *arguments(data, run, *STEPS)]) == 0
    return run, log.read_text()


def test_logs_have_one_line_per_validation_and_a_last_one(printed) -> None:
    run, text = printed
    assert "\r" not in text and "\x1b" not in text and "%|" not in text
    lines = text.splitlines()
    rows = table(run / "metrics.csv", "val_mae_eV")
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == len(rows) == 2 and len(lines) == 4
    for line, row in zip(steps, rows, strict=True):
        assert line.startswith(f"step {row['step']} of 4: ")
        assert f"MAE {float(row['val_mae_eV']):.3f} eV" in line
    best = min(rows, key=lambda row: float(row["val_mae_eV"]))
    assert f"MAE {float(best['val_mae_eV']):.3f} eV at step {best['step']}; 4 steps" in lines[-1]
    assert lines[-1].endswith(f"molflt evaluate {run}")


def test_terminals_show_progress_of_validation(data, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "40")
    assert main(["train", *arguments(data, tmp_path / "run", *STEPS)]) == 0
    out = capsys.readouterr().out
    assert "validating 1/2:" in out and "training: " in out
    assert "x1b" not in out  # no escape sequences
    assert not any(line.startswith("step ") for line in out.splitlines())
    assert out.splitlines()[-1].endswith(f"molflt evaluate {tmp_path / 'run'}")


def test_a_shortened_warm_up_is_reported(data, tmp_path, capsys) -> None:
    words = arguments(data, tmp_path / "run", "--task.warmup_steps=5", "--trainer.max_steps=1")
    assert main(["train", *words]) == 0
    assert "task.warmup_steps=5" in capsys.readouterr().out.splitlines()[0]
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["task"]["warmup_steps"] == 0


def test_default_names_have_a_date_and_are_unique(data, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    (tmp_path / "my own.yaml").write_text(f"data: {{root: {data}}}\n")
    words = ["train", "--config", "my own.yaml", *SMALL, "--trainer.max_steps=1"]
    assert main(words) == main(words) == 0
    day = time.strftime("%Y-%m-%d")
    assert {path.name for path in Path("runs").iterdir()} == {f"{day}-my-own", f"{day}-my-own-2"}
    assert dated_run("my own") == Path("runs") / f"{day}-my-own-3"
    monkeypatch.setenv("LOCAL_RANK", "1")  # another process of this training
    assert dated_run("anything") == Path("runs") / f"{day}-my-own-3"
    monkeypatch.delenv("MOLFLT_RUN")
    assert "--run" in error_of(capsys, *words)


def test_info_describes_a_run(printed, data, capsys) -> None:
    run, _ = printed
    assert main(["info", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = best_of(run)
    assert best is not None and found["best"] == best._asdict()
    assert (found["recipe"], found["steps"], found["max_steps"]) == ("is2re", 4, 4)
    assert found["data"]["root"] == str(data) and found["model"]["dim"] == 16
    assert found["sets"]["train"]["systems"] == 8 and found["sets"]["val"]["systems"] == 5
    assert found["versions"]["molflt"] and "checkpoints/best.safetensors" in found["files"]
    from molflt.training.checkpoint import load_run

    learned = [part.numel() for part in load_run(run)[0].parameters() if part.requires_grad]
    assert found["parameters"] == sum(learned)
    assert main(["info", str(run)]) == 0
    text = capsys.readouterr().out
    for words in (f"{sum(learned):,} parameters", "4 of 4", f"{best.value:.3f} eV", "8 systems"):
        assert words in text
