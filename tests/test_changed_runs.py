"""Changes between starting and resuming a run that are allowed, and their effect."""

import os
import shutil
import signal

import pytest
import torch
import yaml
from tiny_run import arguments, assert_same_state, at_step, error_of, last_state, start, table

from molflt.commands.cli import main

WORDS = ["--trainer.max_steps=6", "--trainer.val_every=4", "--trainer.ema_decay=0.5"]
WORDS += ["--model.dropout=0.1"]


@pytest.fixture(scope="module")
def stopped(shared_data, tmp_path_factory):
    """A run stopped at step 3 of 6."""
    run = tmp_path_factory.mktemp("runs") / "run"
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    try:
        with at_step(2, lambda _: os.kill(os.getpid(), signal.SIGHUP)):  # a closed terminal
            assert start(shared_data, run, *WORDS) == 128 + signal.SIGHUP
    finally:
        signal.signal(signal.SIGHUP, before)
    assert last_state(run)["global_step"] == 3
    return run


@pytest.fixture
def run(stopped, tmp_path):
    return shutil.copytree(stopped, tmp_path / "run")


@pytest.fixture(scope="module")
def whole(shared_data, tmp_path_factory):
    run = tmp_path_factory.mktemp("whole") / "run"
    assert start(shared_data, run, *WORDS) == 0
    return run


def assert_same_end(run, whole):
    assert_same_state(run, whole)
    for name in ("best", "last"):
        left, right = (each / "checkpoints" / f"{name}.safetensors" for each in (run, whole))
        assert left.read_bytes() == right.read_bytes()


def test_allowed_changes_take_effect_without_changing_steps(shared_data, run, whole, tmp_path):
    elsewhere, other = tmp_path / "moved", shutil.copytree(shared_data, tmp_path / "data")
    run.rename(elsewhere)
    words = [f"--data.root={other}", "--data.workers=1", "--trainer.log_every=1"]
    words += ["--trainer.checkpoint_every=2", "--trainer.accelerator=auto"]
    assert main(["train", "--resume", str(elsewhere), *words]) == 0
    assert_same_end(elsewhere, whole)
    saved = yaml.safe_load((elsewhere / "config.yaml").read_text())
    assert saved["run"] == str(elsewhere) and saved["data"]["root"] == str(other)
    assert saved["data"]["workers"] == 1 and saved["trainer"]["log_every"] == 1
    assert [row["step"] for row in table(elsewhere / "metrics.csv", "lr")] == ["4", "5", "6"]
    assert last_state(elsewhere)["molflt"]["config"] == saved


def test_another_number_of_threads_is_reported(run, capsys, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 17)
    assert main(["train", "--resume", str(run)]) == 0
    assert last_state(run)["molflt"]["machine"]["threads"] == 17
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "threads" in x]
    assert line.startswith(f"{run}: ") and "17" in line


def test_a_checkpoint_without_provenance_resumes(run, whole):
    """Earlier versions stored neither configuration nor fingerprints."""
    path = run / "checkpoints" / "last.ckpt"
    state = last_state(run)
    del state["molflt"]
    torch.save(state, path)
    assert main(["train", "--resume", str(run)]) == 0
    assert_same_end(run, whole)


def test_missing_last_weights_are_written_again(whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    path = run / "checkpoints" / "last.safetensors"
    expected = path.read_bytes()
    path.unlink()  # killed between the two files
    assert main(["train", "--resume", str(run)]) == 0
    assert path.read_bytes() == expected


def test_removed_best_weights_are_found_again(whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    (run / "checkpoints" / "best.safetensors").unlink()
    assert main(["train", "--resume", str(run), "--trainer.max_steps=8"]) == 0
    assert (run / "checkpoints" / "best.safetensors").exists()


def test_removing_the_folder_ends_a_training(shared_data, tmp_path, capsys):
    run = tmp_path / "run"
    with at_step(4, lambda _: shutil.rmtree(run)):
        line = error_of(capsys, "train", *arguments(shared_data, run, *WORDS))
    assert line.startswith(f"{run}: ") and "removed" in line
    assert not run.exists()


def test_an_ignored_hangup_stays_ignored(shared_data, tmp_path):
    """nohup ignores it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with at_step(2, lambda _: os.kill(os.getpid(), signal.SIGHUP)):
            assert start(shared_data, tmp_path / "run", *WORDS) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
