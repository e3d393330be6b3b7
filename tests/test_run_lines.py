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
    differences,
    error_of,
    last_state,
    table,
    write_data,
)

from molflt.commands.cli import main
from molflt.commands.train import _fit_warmup
from molflt.training.outcome import best_of, duration
from molflt.training.parser import dated_run
from molflt.training.sources import find

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


@pytest.mark.parametrize(("steps", "warmup", "kept"), [(2, 100, 0), (20, 20, 2), (101, 100, 100)])
def test_the_warm_up_is_shortened_to_fit(steps, warmup, kept) -> None:
    task: dict[str, object] = {"warmup_steps": warmup}
    assert (_fit_warmup(task, steps) is None) == (warmup == kept)
    assert task["warmup_steps"] == kept


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


def test_durations() -> None:
    said = [duration(seconds) for seconds in (0.2, 59.4, 60, 252, 3600, 7501)]
    assert said == ["0 s", "59 s", "1 min 00 s", "4 min 12 s", "1 h 00 min", "2 h 05 min"]


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


def test_info_of_an_incomplete_run(printed, tmp_path, capsys) -> None:
    run, _ = printed
    assert "training run" in error_of(capsys, "info", str(tmp_path))
    (tmp_path / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    assert main(["info", str(tmp_path)]) == 0
    assert "no validation yet" in capsys.readouterr().out
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best.safetensors").write_bytes(b"\x08")
    assert "best.safetensors" in error_of(capsys, "info", str(tmp_path))
    (tmp_path / "checkpoints" / "best.safetensors").unlink()
    (tmp_path / "versions.json").write_text("[" * 5000)
    assert "versions.json" in error_of(capsys, "info", str(tmp_path))


def test_messages_about_files_of_a_run_name_the_run(printed, capsys) -> None:
    run, _ = printed
    for name in ("config.yaml", "checkpoints/best.safetensors", "checkpoints"):
        assert error_of(capsys, "evaluate", str(run / name)).endswith(f"; give {run}")
    assert find(run / "config.yaml") == run


def test_equal_seeds_give_equal_results(data, tmp_path) -> None:
    words = ["--trainer.max_steps=3", "--model.dropout=0.2"]
    for name, seed in (("one", 3), ("again", 3), ("other", 4)):
        assert main(["train", *arguments(data, tmp_path / name, *words, f"--seed={seed}")]) == 0
    one, again, other = (last_state(tmp_path / name) for name in ("one", "again", "other"))
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert differences(one[part], again[part]) == [], part
    assert differences(one["state_dict"], other["state_dict"])
