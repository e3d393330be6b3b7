"""A run that is killed, interrupted or short of disk goes on as if nothing had happened."""

import csv
import errno
import os
import signal
import subprocess
import time

import pytest
import torch
from safetensors import safe_open
from tiny_run import (
    arguments,
    command,
    config,
    differences,
    environment,
    last_state,
    write_data,
)

import molflt.files
from molflt.cli import main
from molflt.tasks.is2re import IS2RETask
from molflt.train import build_parser, load_run, train

# Dropout, averaging and redrawn features, so that every kind of state counts; 22 systems are 6
# batches an epoch, so checkpoints every 7 steps fall in the middle of one.
STATEFUL = [
    "--model.dropout=0.2",
    "--trainer.ema_decay=0.9",
    "--task.redraw_every=11",
    "--trainer.val_every=8",
    "--trainer.checkpoint_every=7",
    "--trainer.log_every=4",
    "--task.weight_decay=0.01",
]
STEPS = 30


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The run that nothing happened to."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert train(config(data, run, *STATEFUL, f"--trainer.max_steps={STEPS}")) == 0
    return run


def begin(data, run, steps=STEPS):
    return train(config(data, run, *STATEFUL, f"--trainer.max_steps={steps}"))


def resume(run, *more):
    return train(build_parser().parse_args([f"--resume={run}", *more]))


def weights(run, checkpoint):
    with safe_open(run / "checkpoints" / f"{checkpoint}.safetensors", framework="pt") as file:
        names = list(file.keys())
        return {name: file.get_tensor(name) for name in names}, file.metadata()


def validation_rows(run):
    with open(run / "metrics.csv", newline="") as file:
        return [row for row in csv.DictReader(file) if row["val_mae_eV"]]


def assert_same_end(run, reference):
    one, other = last_state(run), last_state(reference)
    for part in ("state_dict", "current_model_state", "optimizer_states", "lr_schedulers"):
        assert differences(one[part], other[part]) == [], part
    for name in ("best", "last"):
        assert differences(weights(run, name), weights(reference, name)) == [], name
    assert validation_rows(run) == validation_rows(reference)


def crash_at(monkeypatch, method, step):
    """Makes a method of the task raise once, as an unforeseen error would, at a step."""
    original = getattr(IS2RETask, method)

    def crashing(self, *args):
        if self.global_step == step and not self.trainer.sanity_checking:
            raise RuntimeError("power cut")
        return original(self, *args)

    monkeypatch.setattr(IS2RETask, method, crashing)


def test_kill_nine_in_mid_epoch_then_resume_gives_the_same_weights(data, tmp_path):
    """A real SIGKILL to a real process."""
    steps = 120
    options = [*STATEFUL, f"--trainer.max_steps={steps}"]
    reference = tmp_path / "reference"
    train(config(data, reference, *options))

    run = tmp_path / "killed"
    process = subprocess.Popen(
        command(*arguments(data, run, *options)),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    metrics = run / "metrics.csv"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") > 9):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    step = last_state(run)["global_step"]
    assert 0 < step < steps - 8
    assert main(["train", "--resume", str(run)]) == 0
    assert_same_end(run, reference)


@pytest.mark.parametrize(
    ("method", "step", "resumes_from"),
    [
        ("training_step", 17, 16),  # one step after a validation
        ("training_step", 15, 14),  # one step after a checkpoint, in mid-epoch
        ("training_step", 12, 8),
        ("training_step", 24, 24),  # in the step that follows a validation
        ("validation_step", 16, 16),  # during validation
        ("validation_step", 30, 28),  # during the last validation
    ],
)
def test_every_place_to_crash(data, whole, tmp_path, monkeypatch, method, step, resumes_from):
    with monkeypatch.context() as broken:
        crash_at(broken, method, step)
        with pytest.raises(RuntimeError, match="power cut"):
            begin(data, tmp_path / "run")
    assert last_state(tmp_path / "run")["global_step"] == resumes_from
    assert resume(tmp_path / "run") == 0
    assert_same_end(tmp_path / "run", whole)


def test_workers_that_read_ahead_do_not_shift_the_position(data, whole, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as broken:
        crash_at(broken, "training_step", 15)
        with pytest.raises(RuntimeError, match="power cut"):
            train(config(data, run, *STATEFUL, f"--trainer.max_steps={STEPS}", "--data.workers=1"))
    assert resume(run) == 0
    assert_same_end(run, whole)


@pytest.mark.parametrize(
    ("method", "step", "saved_at"),
    [("training_step", 9, 10), ("training_step", 15, 16), ("validation_step", 16, 16)],
)
def test_sigterm_saves_says_how_to_resume_and_exits_143(
    data, whole, tmp_path, monkeypatch, capsys, method, step, saved_at
):
    run = tmp_path / "run"
    original = getattr(IS2RETask, method)
    sent = []

    def signalling(self, *args):
        if self.global_step == step and not self.trainer.sanity_checking and not sent:
            sent.append(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *args)

    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patched:
        patched.setattr(IS2RETask, method, signalling)
        assert begin(data, run) == 143
    assert signal.getsignal(signal.SIGTERM) == before
    assert f"molflt train --resume {run}" in capsys.readouterr().err
    assert last_state(run)["global_step"] == saved_at
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert resume(run) == 0
    assert_same_end(run, whole)


def test_ctrl_c_in_a_terminal(data, tmp_path):
    run = tmp_path / "run"
    process = subprocess.Popen(
        command(*arguments(data, run, *STATEFUL, "--trainer.max_steps=100000")),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (run / "checkpoints" / "last.ckpt").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert f"molflt train --resume {run}" in errors
    assert "Traceback" not in errors
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert load_run(run, "last")[1]["trainer"]["max_steps"] == 100000


def test_a_second_signal_does_not_wait_for_the_step(data, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    original = IS2RETask.training_step
    before = signal.getsignal(signal.SIGINT)

    def signalling(self, batch, index):
        if self.global_step == 9:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, batch, index)

    monkeypatch.setattr(IS2RETask, "training_step", signalling)
    assert main(["train", *arguments(data, run, *STATEFUL, "--trainer.max_steps=30")]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "molflt: interrupted"
    assert last_state(run)["global_step"] == 8
    assert signal.getsignal(signal.SIGINT) == before


def test_more_steps_may_be_asked_for_and_nothing_else(data, tmp_path):
    run = tmp_path / "run"
    begin(data, run, steps=10)
    assert last_state(run)["global_step"] == 10
    for words, message in [
        (["--model.dim=32"], "model.dim is 16; got 32 for --resume; start a new run"),
        (["--seed=1"], "seed is 0; got 1"),
        (["--trainer.max_steps=9"], "max_steps is 10; got 9 .*only be raised"),
    ]:
        with pytest.raises(ValueError, match=message):
            resume(run, *words)
    assert resume(run, "--trainer.max_steps=14") == 0
    assert last_state(run)["global_step"] == 14
    assert [row["step"] for row in validation_rows(run)] == ["8", "10", "14"]
    assert load_run(run)[1]["trainer"]["max_steps"] == 14
    # the schedule is that of 14 steps: the last one is taken at 1/12 of the peak, not at 0
    with open(run / "metrics.csv", newline="") as file:
        rates = {row["step"]: row["lr"] for row in csv.DictReader(file) if row["lr"]}
    assert float(rates["14"]) == pytest.approx(3e-4 / 12)


def test_resuming_a_finished_run_changes_nothing(whole):
    before = {path: path.read_bytes() for path in (whole / "checkpoints").iterdir()}
    rows = (whole / "metrics.csv").read_text()
    assert resume(whole) == 0
    assert {path: path.read_bytes() for path in (whole / "checkpoints").iterdir()} == before
    assert (whole / "metrics.csv").read_text() == rows


def test_full_disk_keeps_the_last_good_checkpoint(data, whole, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    real = os.fsync
    written = []

    def full_after_some(handle):
        written.append(handle)
        if len(written) > 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    with monkeypatch.context() as full:
        full.setattr(molflt.files.os, "fsync", full_after_some)
        words = arguments(data, run, *STATEFUL, f"--trainer.max_steps={STEPS}")
        assert main(["train", *words]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "molflt: error" in line]
    assert len(lines) == 1
    assert "No space left on device" in lines[0] and "is kept; free some space" in lines[0]
    assert [path for path in run.rglob("*") if ".part" in path.name] == []
    assert resume(run) == 0
    assert_same_end(run, whole)


def test_diverging_run_keeps_the_last_good_checkpoint(data, whole, tmp_path, monkeypatch):
    run = tmp_path / "run"
    original = IS2RETask.training_step

    def explode(self, batch, index):
        if self.global_step == 9:
            batch = batch.clone()
            batch.y_relaxed = batch.y_relaxed * float("inf")
        return original(self, batch, index)

    with monkeypatch.context() as patched:
        patched.setattr(IS2RETask, "training_step", explode)
        message = r"loss is inf at step 9 with learning rate 0\.000\d+ on sids (\d+, ){3}\d+; "
        with pytest.raises(ValueError, match=message):
            begin(data, run)
    assert last_state(run)["global_step"] == 8
    assert resume(run) == 0
    assert_same_end(run, whole)


def test_a_gradient_that_is_not_finite_stops_before_it_spoils_the_weights(
    data, tmp_path, monkeypatch
):
    run = tmp_path / "run"
    original = IS2RETask.training_step

    def explode(self, batch, index):
        out = original(self, batch, index)
        if self.global_step == 9:
            # finite, with an infinite gradient
            weight = next(self.model.parameters())
            out["loss"] = out["loss"].detach() + (0 * weight.sum()).sqrt()
        return out

    monkeypatch.setattr(IS2RETask, "training_step", explode)
    with pytest.raises(ValueError, match=r"gradient norm is nan at step 9 .* on sids"):
        begin(data, run)
    assert all(torch.isfinite(p).all() for p in load_run(run, "last")[0].parameters())


def test_nothing_to_resume(tmp_path, data, whole):
    with pytest.raises(FileNotFoundError, match=r"config\.yaml: no such file"):
        resume(tmp_path / "absent")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text((whole / "config.yaml").read_text())
    with pytest.raises(FileNotFoundError, match=r"last\.ckpt: no such checkpoint"):
        resume(run)


def test_truncated_checkpoint_is_named(data, whole, tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text((whole / "config.yaml").read_text())
    whole_file = (whole / "checkpoints" / "last.ckpt").read_bytes()
    (run / "checkpoints" / "last.ckpt").write_bytes(whole_file[: len(whole_file) // 2])
    with pytest.raises(ValueError, match=r"last\.ckpt: not a complete checkpoint"):
        resume(run)


def test_a_checkpoint_that_runs_code_is_refused(data, whole, tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "was-here"),))

    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text((whole / "config.yaml").read_text())
    torch.save({"state_dict": Evil()}, run / "checkpoints" / "last.ckpt")
    with pytest.raises(ValueError, match=r"last\.ckpt: refused; .* it asks for posix\.mkdir"):
        resume(run)
    assert not (tmp_path / "was-here").exists()
