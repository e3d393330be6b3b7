"""Changes between starting and resuming a run that are allowed, and their effect."""

import os
import shutil
import signal

import pytest
import torch
import yaml
from tiny_run import (
    arguments,
    differences,
    error_of,
    last_state,
    start,
    structures,
    table,
)

from molflt.commands.cli import main
from molflt.data.structures.store import write_store
from molflt.training.loop import _LightningTask

WORDS = ["--trainer.max_steps=6", "--trainer.val_every=4", "--trainer.ema_decay=0.5"]
WORDS += ["--model.dropout=0.1"]


@pytest.fixture(scope="module")
def stopped(shared_data, tmp_path_factory):
    """A run stopped at step 3 of 6."""
    run = tmp_path_factory.mktemp("runs") / "run"
    original = _LightningTask.training_step

    def stop(self, batch, index):
        if self.global_step == 2:
            os.kill(os.getpid(), signal.SIGHUP)  # as a closed terminal does
        return original(self, batch, index)

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(_LightningTask, "training_step", stop)
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
    one, other = last_state(run), last_state(whole)
    for part in ("state_dict", "current_model_state", "optimizer_states", "lr_schedulers"):
        assert differences(one[part], other[part]) == [], part
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


def test_removing_the_folder_ends_a_training(shared_data, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    original = _LightningTask.training_step

    def remove(self, batch, index):
        if self.global_step == 4:
            shutil.rmtree(run)
        return original(self, batch, index)

    monkeypatch.setattr(_LightningTask, "training_step", remove)
    line = error_of(capsys, "train", *arguments(shared_data, run, *WORDS))
    assert line.startswith(f"{run}: ") and "removed" in line
    assert not run.exists()


def test_an_ignored_hangup_stays_ignored(shared_data, tmp_path, monkeypatch):
    """nohup ignores it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    original = _LightningTask.training_step

    def hang_up(self, batch, index):
        os.kill(os.getpid(), signal.SIGHUP)
        return original(self, batch, index)

    monkeypatch.setattr(_LightningTask, "training_step", hang_up)
    try:
        assert start(shared_data, tmp_path / "run", *WORDS) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_warnings_are_single_lines(tmp_path, capsys):
    records = list(structures(13))
    for record in records:
        record.tags[:] = 0
    write_store(tmp_path / "train.safetensors", records)
    write_store(tmp_path / "val_id.safetensors", records)
    words = [*WORDS, "--data.allow_duplicates=true", "--model.readout=all"]
    assert main(["train", *arguments(tmp_path, tmp_path / "run", *words)]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "arning" in line]
    (line,) = [line for line in lines if "tag > 0" in line]
    assert line.startswith("molflt: warning: ") and "forward_call" not in " ".join(lines)
