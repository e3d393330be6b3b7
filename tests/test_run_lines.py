"""What is seen of a training, before, while and after it runs, and `molflt info`."""

from __future__ import annotations

import json
import re
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
from molflt.training.outcome import best_of, duration
from molflt.training.run_name import dated_run
from molflt.training.sources import find

STEPS = ("--trainer.max_steps=4", "--trainer.val_every=2", "--trainer.log_every=1")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"), 8, 5)


@pytest.fixture(scope="module")
def printed(data, tmp_path_factory) -> tuple[Path, str]:
    """A run, and what it printed to a file."""
    from contextlib import redirect_stdout

    run = tmp_path_factory.mktemp("runs") / "one"
    log = run.parent / "log"
    with open(log, "w") as file, redirect_stdout(file):
        assert main(["train", *arguments(data, run, *STEPS)]) == 0
    return run, log.read_text()


def test_a_log_has_a_line_per_validation_and_one_at_the_end(printed) -> None:
    run, text = printed
    assert "\r" not in text and "\x1b" not in text and "%|" not in text
    lines = text.splitlines()
    rows = table(run / "metrics.csv", "val_mae_eV")
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == len(rows) == 2 and len(lines) == 4
    for line, row in zip(steps, rows, strict=True):
        value = float(row["val_mae_eV"])
        start = f"step {row['step']} of 4: validation MAE {value:.3f} eV, EwT "
        assert line.startswith(start) and re.search(r"; loss \S+, atoms/s \d+, \d+ s$", line)
    best = min(rows, key=lambda row: float(row["val_mae_eV"]))
    assert re.fullmatch(
        rf"{run}: best validation MAE {float(best['val_mae_eV']):.3f} eV at step {best['step']}; "
        rf"4 steps, \d+ s; next: molflt evaluate {run}",
        lines[-1],
    )


def test_a_terminal_sees_validation_advance(data, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "40")
    assert main(["train", *arguments(data, tmp_path / "run", *STEPS)]) == 0
    out = capsys.readouterr().out
    assert "validating 1/2:" in out and "training: " in out and "trying validation: " in out
    assert "x1b" not in out  # nothing that the terminal is not allowed to obey
    assert not any(line.startswith("step ") for line in out.splitlines())
    assert out.splitlines()[-1].endswith(f"next: molflt evaluate {tmp_path / 'run'}")


@pytest.mark.parametrize(("steps", "warmup", "kept"), [(1, 5, 0), (2, 100, 0), (20, 20, 2)])
def test_the_warm_up_fits_into_the_steps(steps, warmup, kept, data, tmp_path, capsys) -> None:
    from molflt.commands.train import _fit_warmup

    task: dict[str, object] = {"warmup_steps": warmup}
    line = _fit_warmup(task, steps)
    assert task["warmup_steps"] == kept and line is not None
    assert f"task.warmup_steps={warmup} does not fit into trainer.max_steps={steps}" in line
    if steps > 2:
        return
    words = arguments(data, tmp_path / "run", f"--task.warmup_steps={warmup}")
    assert main(["train", *words, f"--trainer.max_steps={steps}"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == line
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["task"]["warmup_steps"] == kept


def test_a_warm_up_that_fits_is_left_alone() -> None:
    from molflt.commands.train import _fit_warmup

    task: dict[str, object] = {"warmup_steps": 100}
    assert _fit_warmup(task, 101) is None and task["warmup_steps"] == 100


def test_runs_are_dated_and_never_the_same(data, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    (tmp_path / "my own.yaml").write_text(f"data: {{root: {data}}}\n")
    words = ["train", "--config", "my own.yaml", *SMALL, "--trainer.max_steps=1"]
    assert main(words) == main(words) == 0
    day = time.strftime("%Y-%m-%d")
    assert {path.name for path in Path("runs").iterdir()} == {f"{day}-my-own", f"{day}-my-own-2"}
    assert dated_run("my own") == Path("runs") / f"{day}-my-own-3"
    monkeypatch.setenv("LOCAL_RANK", "1")  # a process that the first one has started
    assert dated_run("anything") == Path("runs") / f"{day}-my-own-3"
    monkeypatch.delenv("MOLFLT_RUN")
    assert "expected a folder, the same for all processes" in error_of(capsys, *words)


def test_durations() -> None:
    said = [duration(seconds) for seconds in (0.2, 59.4, 60, 252, 3600, 7501)]
    assert said == ["0 s", "59 s", "1 min 00 s", "4 min 12 s", "1 h 00 min", "2 h 05 min"]


def test_info_says_what_a_run_is(printed, data, capsys) -> None:
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
    for words in (
        f"{sum(learned):,} parameters: dim 16",
        "steps     4 of 4",
        f"best      validation MAE {best.value:.3f} eV at step {best.step}",
        "sets      train 8 systems",
    ):
        assert words in text


def test_info_of_what_is_no_whole_run(printed, tmp_path, capsys) -> None:
    run, _ = printed
    assert "expected the folder of a training run" in error_of(capsys, "info", str(tmp_path))
    (tmp_path / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    assert main(["info", str(tmp_path)]) == 0
    assert "no validation yet" in capsys.readouterr().out
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best.safetensors").write_bytes(b"\x08")
    line = error_of(capsys, "info", str(tmp_path))
    assert "best.safetensors: not a complete safetensors file" in line
    (tmp_path / "checkpoints" / "best.safetensors").unlink()
    (tmp_path / "versions.json").write_text("[" * 5000)
    assert "versions.json: expected JSON" in error_of(capsys, "info", str(tmp_path))


def test_a_file_of_a_run_leads_to_the_run(printed, capsys) -> None:
    run, _ = printed
    for name in ("config.yaml", "checkpoints/best.safetensors", "checkpoints"):
        assert error_of(capsys, "evaluate", str(run / name)).endswith(f"; give {run}")
    assert find(run / "config.yaml") == run


def test_a_seed_gives_one_result(data, tmp_path) -> None:
    words = ["--trainer.max_steps=3", "--model.dropout=0.2"]
    for name, seed in (("one", 3), ("again", 3), ("other", 4)):
        assert main(["train", *arguments(data, tmp_path / name, *words, f"--seed={seed}")]) == 0
    one, again, other = (last_state(tmp_path / name) for name in ("one", "again", "other"))
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert differences(one[part], again[part]) == [], part
    assert differences(one["state_dict"], other["state_dict"])
