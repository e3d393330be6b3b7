"""Resuming is exact to the bit after kills, interruptions, full disks and diverged steps.

Some options may change, and damaged files are refused.
"""

import errno
import multiprocessing
import os
import pty
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import yaml
from data.oc20_files import Evil
from tiny_run import (
    arguments,
    assert_same_state,
    at_step,
    differences,
    error_of,
    forked,
    header,
    last_state,
    power_cut,
    resume,
    start,
    structures,
    table,
    weights,
    write_splits,
)

import molflt.files
from molflt.commands.cli import main
from molflt.lock import FolderLock
from molflt.training.checkpoint import load_run, read_checkpoint

# Dropout, averaging and redrawn features exercise every kind of state. 22 systems are 6 batches per
# epoch, so the checkpoint of step 9 falls in the middle of an epoch.
STATEFUL = [
    "--model.readout=all",  # writes no references.json
    "--model.dropout=0.2",
    "--trainer.ema_decay=0.7",
    "--task.redraw_every=5",
    "--trainer.val_every=4",
    "--trainer.checkpoint_every=3",
    "--trainer.log_every=2",
    "--task.weight_decay=0.01",
]
STEPS = 11


def begin(data, run, *more, steps=STEPS):
    return start(data, run, *STATEFUL, f"--trainer.max_steps={steps}", *more)


@pytest.fixture(scope="module")
def whole(shared_data, tmp_path_factory):
    run = tmp_path_factory.mktemp("whole") / "run"
    assert begin(shared_data, run) == 0
    return run


def assert_same_end(run, reference):
    assert_same_state(run, reference)
    for name in ("best", "last"):
        assert differences(weights(run, name), weights(reference, name)) == [], name
        assert header(run, name) == header(reference, name)
    assert timeless(run) == timeless(reference)


def timeless(run):
    """Returns the rows of metrics.csv without timings."""
    return [{**row, "atoms_per_s": ""} for row in table(run / "metrics.csv")]


def assert_resumes(run, reference):
    assert resume(run) == 0
    assert_same_end(run, reference)


def test_kill_in_the_middle_of_an_epoch(shared_data, whole, tmp_path):
    run = tmp_path / "killed"
    with at_step(10, lambda _: os.kill(os.getpid(), signal.SIGKILL)):  # after its row of metrics
        words = [*STATEFUL, f"--trainer.max_steps={STEPS}"]
        running = forked("train", *arguments(shared_data, run, *words))
    running.join(600)
    assert running.exitcode == -signal.SIGKILL and last_state(run)["global_step"] == 9
    assert_resumes(run, whole)


@pytest.mark.parametrize(
    ("method", "step", "resumes_from", "more"),
    [
        # the step after a checkpoint within an epoch, when a worker has read ahead
        ("training_step", 10, 9, ("--data.workers=1",)),
        ("validation_step", 8, 8, ()),  # during validation
        ("validation_step", 11, 9, ()),  # during the last validation
    ],
)
def test_crashes_everywhere(shared_data, whole, tmp_path, method, step, resumes_from, more):
    run = tmp_path / "run"
    with at_step(step, power_cut, method), pytest.raises(RuntimeError, match="power cut"):
        begin(shared_data, run, *more)
    assert last_state(run)["global_step"] == resumes_from
    assert_resumes(run, whole)


@pytest.mark.parametrize("decay", ["0.9", "null"])
def test_float64_resumes_to_the_bit(shared_data, tmp_path, decay):
    """Weights and averages never pass through float32."""
    run, reference = tmp_path / "run", tmp_path / "reference"
    more = ["--trainer.precision=64-true", f"--trainer.ema_decay={decay}"]
    assert begin(shared_data, reference, *more) == 0
    with at_step(10, power_cut), pytest.raises(RuntimeError, match="power cut"):
        begin(shared_data, run, *more)
    assert last_state(run)["global_step"] == 9
    assert_resumes(run, reference)


def signal_all(_):
    """Sends signals to all processes of a run, as terminals and schedulers do."""
    for worker in multiprocessing.active_children():
        twice = (signal.SIGUSR1, signal.SIGUSR1)  # the second would end the training process
        for signum in (*twice, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            subprocess.run(["kill", f"-{signum:d}", str(worker.pid)], check=True)
            time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("method", "step"), [("training_step", 7), ("validation_step", 8)])
def test_sigterm_saves_and_exits_143(shared_data, whole, tmp_path, capsys, method, step):
    run, before = tmp_path / "run", signal.getsignal(signal.SIGTERM)
    with at_step(step, signal_all, method):
        assert begin(shared_data, run, "--data.workers=1") == 143
    assert signal.getsignal(signal.SIGTERM) == before
    assert f"molflt train --resume {run}" in capsys.readouterr().err
    assert last_state(run)["global_step"] == 8
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert_resumes(run, whole)


def test_a_job_of_slurm(shared_data, tmp_path, monkeypatch):
    """Lightning would expect srun, and requeue the job after SIGUSR1."""
    for name in ("JOB_ID", "NTASKS", "PROCID", "LOCALID", "NODEID"):
        monkeypatch.setenv(f"SLURM_{name}", "2" if name == "NTASKS" else "0")
    monkeypatch.setenv("SLURM_JOB_NAME", "oc20")
    with at_step(5, lambda _: os.kill(os.getpid(), signal.SIGUSR1)):
        assert begin(shared_data, tmp_path / "run") == 128 + signal.SIGUSR1
    assert last_state(tmp_path / "run")["global_step"] == 6


def test_sigterm_before_the_first_step(shared_data, whole, tmp_path, capsys):
    with at_step(0, lambda _: os.kill(os.getpid(), signal.SIGTERM), "validation_step"):
        assert begin(shared_data, tmp_path / "run") == 143
    assert "--resume" not in capsys.readouterr().err
    assert begin(shared_data, tmp_path / "run") == 0
    assert_same_end(tmp_path / "run", whole)


@pytest.mark.skipif(os.name != "posix", reason="POSIX only")
def test_a_closed_terminal(shared_data, tmp_path):
    """The state is saved although printing fails."""
    run = tmp_path / "run"
    words = ["train", *arguments(shared_data, run, *STATEFUL, "--trainer.max_steps=100000")]
    number, terminal = pty.fork()
    if number == 0:
        try:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
            with open(1, "w") as sys.stdout, open(2, "w") as sys.stderr:
                os._exit(main(words))
        finally:
            os._exit(1)
    last, deadline = run / "checkpoints" / "last.ckpt", time.monotonic() + 600
    while not last.exists():
        assert os.waitpid(number, os.WNOHANG)[0] == 0 and time.monotonic() < deadline
        time.sleep(0.01)
    before = last_state(run)["global_step"]
    os.close(terminal)
    status = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
    assert status == 128 + signal.SIGHUP
    assert last_state(run)["global_step"] > before
    assert load_run(run, "last")[1]["trainer"]["max_steps"] == 100000


def test_the_number_of_steps_may_be_raised(shared_data, tmp_path):
    run = tmp_path / "run"
    begin(shared_data, run, steps=5)
    assert last_state(run)["global_step"] == 5
    assert resume(run, "--trainer.max_steps=7") == 0
    assert last_state(run)["global_step"] == 7
    assert [row["step"] for row in table(run / "metrics.csv", "val_mae_eV")] == ["4", "5", "7"]
    assert load_run(run)[1]["trainer"]["max_steps"] == 7
    # the schedule of 7 steps: the learning rate of the last one is 1/5 of the peak, not 0
    rates = {row["step"]: row["lr"] for row in table(run / "metrics.csv", "lr")}
    assert float(rates["7"]) == pytest.approx(3e-4 / 5)


def test_a_checkpoint_before_the_first_step_resumes(tmp_path):
    """The validation of the initial weights, which a baseline makes meaningful, is kept."""
    parts = [list(structures(8)), list(structures(8, 1, 1000))]
    for record in (*parts[0], *parts[1]):
        record.y_baseline = record.y_relaxed + 0.1
    data = write_splits(tmp_path / "data", train=parts[0], val_id=parts[1])
    words = ["--data.baseline_key=y_baseline", "--trainer.max_steps=1"]
    assert start(data, tmp_path / "whole", *words) == 0
    with at_step(0, power_cut), pytest.raises(RuntimeError, match="power cut"):
        start(data, tmp_path / "run", *words)
    assert last_state(tmp_path / "run")["global_step"] == 0
    assert_resumes(tmp_path / "run", tmp_path / "whole")


def test_resuming_a_finished_run_changes_nothing(whole):
    before = {path: path.read_bytes() for path in (whole / "checkpoints").iterdir()}
    rows = (whole / "metrics.csv").read_text()
    assert resume(whole) == 0
    assert {path: path.read_bytes() for path in (whole / "checkpoints").iterdir()} == before
    assert (whole / "metrics.csv").read_text() == rows


@pytest.mark.parametrize("full", [21, 24])
def test_full_disk_keeps_the_last_checkpoint(
    shared_data, whole, tmp_path, monkeypatch, capsys, full
):
    run = tmp_path / "run"
    real = os.fsync
    written = []

    def full_after_some(handle):
        written.append(handle)
        if len(written) > full:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    with monkeypatch.context() as patched:
        patched.setattr(molflt.files.os, "fsync", full_after_some)
        words = arguments(shared_data, run, *STATEFUL, f"--trainer.max_steps={STEPS}")
        line = error_of(capsys, "train", *words)
    assert line.startswith(str(run)) and "No space left on device" in line
    assert [path for path in run.rglob("*") if ".part" in path.name] == []
    assert_resumes(run, whole)


def test_diverging_run_keeps_the_last_checkpoint(shared_data, whole, tmp_path):
    def explode(batch):
        batch = batch.clone()
        batch.y_relaxed = batch.y_relaxed * float("inf")
        return batch

    run = tmp_path / "run"
    message = r"loss is inf at step 10 .* on sids (\d+, ){3}\d+; "
    with at_step(10, explode), pytest.raises(ValueError, match=message):
        begin(shared_data, run)
    assert last_state(run)["global_step"] == 9
    assert_resumes(run, whole)


def test_checkpoints_run_no_code(copied_run, tmp_path):
    path = copied_run / "checkpoints" / "last.ckpt"
    torch.save({"state_dict": Evil(tmp_path / "was-here")}, path)
    with pytest.raises(ValueError, match=r"last\.ckpt: rejected; .*posix\.system"):
        resume(copied_run)
    assert not (tmp_path / "was-here").exists()


def test_damaged_checkpoints_are_refused(copied_run):
    """Changes to a tensor or to the file structure are refused; padding may change."""
    path = copied_run / "checkpoints" / "last.ckpt"
    whole, sound = path.read_bytes(), read_checkpoint(path)["state_dict"]
    storage = next(t for name, t in sound.items() if name.endswith("mlp.0.weight"))
    inside = whole.index(storage.numpy().tobytes()) + 9
    count = 0
    for place in (inside, *np.random.default_rng(0).integers(len(whole), size=60)):
        content = bytearray(whole)
        content[place] ^= 1
        path.write_bytes(content)
        try:
            read_checkpoint(path)
        except ValueError as error:
            assert str(error).startswith(str(path))
            count += 1
        assert count  # the first one is inside a tensor
    assert count > 30
    for end in (0, 1, 100, 5_000, len(whole) - 71, len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match="last.ckpt"):
            read_checkpoint(path)


def test_a_checkpoint_of_an_earlier_version_with_a_digest_resumes(copied_run):
    """Version 0.1 stored the sha256 of a checkpoint in the comment of the zip archive."""
    path = copied_run / "checkpoints" / "last.ckpt"
    comment = b"sha256:" + b"0" * 64
    path.write_bytes(path.read_bytes()[:-2] + len(comment).to_bytes(2, "little") + comment)
    assert torch.load(path, weights_only=True)["global_step"] == 8
    assert main(["train", "--resume", str(copied_run), "--trainer.max_steps", "9"]) == 0


WORDS = ["--trainer.max_steps=6", "--trainer.val_every=4", "--trainer.ema_decay=0.5"]
WORDS += ["--model.dropout=0.1"]


@pytest.fixture(scope="module")
def stopped(shared_data, tmp_path_factory):
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
def short(shared_data, tmp_path_factory):
    run = tmp_path_factory.mktemp("short") / "run"
    assert start(shared_data, run, *WORDS) == 0
    return run


def test_allowed_changes_take_effect_without_changing_steps(
    shared_data, run, short, tmp_path, capsys, monkeypatch
):
    """A changed number of threads is reported."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 17)
    elsewhere, other = tmp_path / "moved", shutil.copytree(shared_data, tmp_path / "data")
    run.rename(elsewhere)
    words = [f"--data.root={other}", "--data.workers=1", "--trainer.log_every=1"]
    words += ["--trainer.checkpoint_every=2", "--trainer.accelerator=auto"]
    assert main(["train", "--resume", str(elsewhere), *words]) == 0
    assert_same_state(elsewhere, short)
    saved = yaml.safe_load((elsewhere / "config.yaml").read_text())
    assert saved["run"] == str(elsewhere) and saved["data"]["root"] == str(other)
    assert saved["data"]["workers"] == 1 and saved["trainer"]["log_every"] == 1
    assert [row["step"] for row in table(elsewhere / "metrics.csv", "lr")] == ["4", "5", "6"]
    state = last_state(elsewhere)["molflt"]
    assert state["config"] == saved and state["machine"]["threads"] == 17
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "threads" in x]
    assert line.startswith(f"{elsewhere}: ") and "17" in line


def test_a_checkpoint_without_provenance_resumes(run, short):
    """Earlier versions stored neither configuration nor fingerprints."""
    path = run / "checkpoints" / "last.ckpt"
    state = last_state(run)
    del state["molflt"]
    torch.save(state, path)
    assert main(["train", "--resume", str(run)]) == 0
    assert_same_state(run, short)


def test_missing_weights_are_written_again(short, tmp_path):
    run = shutil.copytree(short, tmp_path / "run")
    last, best = (run / "checkpoints" / f"{name}.safetensors" for name in ("last", "best"))
    expected = last.read_bytes()
    last.unlink()  # killed between the two files
    assert main(["train", "--resume", str(run)]) == 0
    assert last.read_bytes() == expected
    best.unlink()
    assert main(["train", "--resume", str(run), "--trainer.max_steps=8"]) == 0
    assert best.exists()


def test_an_ignored_hangup_stays_ignored(shared_data, tmp_path):
    """Processes under nohup ignore SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with at_step(2, lambda _: os.kill(os.getpid(), signal.SIGHUP)):
            assert start(shared_data, tmp_path / "run", *WORDS) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


# --- one process per folder -----------------------------------------------------------------------


HOLDER = """
import os, sys, time
from pathlib import Path
from molflt.lock import FolderLock
with FolderLock(Path(sys.argv[1]), "is busy").held():
    if os.fork() == 0:  # such as a worker that reads data
        print("held", flush=True)  # after the fork has closed its copy
        time.sleep(60)
        os._exit(0)
    time.sleep(60)
"""


def lock_of(folder):
    return FolderLock(folder, "is busy")


def test_a_lock_ends_with_its_process_and_not_with_its_workers(tmp_path):
    words = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as one:
        assert one.stdout.readline() == "held\n"
        lock = lock_of(tmp_path / "run")
        with pytest.raises(ValueError, match=f"process {one.pid} on "), lock.held():
            pass
        one.send_signal(signal.SIGKILL)
        one.wait(timeout=10)
        assert (tmp_path / "run" / ".lock").exists()
        with lock.held():  # the worker is still running
            os.killpg(one.pid, signal.SIGKILL)
    assert not (tmp_path / "run" / ".lock").exists()


def test_a_second_training_is_refused(shared_data, copied_run, capsys):
    before = {path: path.read_bytes() for path in copied_run.rglob("*") if path.is_file()}
    with lock_of(copied_run).held():
        for words in (["--resume", str(copied_run)], arguments(shared_data, copied_run)):
            line = error_of(capsys, "train", *words)
            assert f"{copied_run}: process {os.getpid()} on " in line
    assert {path: path.read_bytes() for path in copied_run.rglob("*") if path.is_file()} == before
