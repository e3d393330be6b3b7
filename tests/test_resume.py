"""A run that is killed, interrupted or short of disk goes on as if nothing had happened."""

import errno
import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny_run import arguments, differences, error_of, last_state, process, start, table, write_data

import molflt.files
from molflt.commands.cli import main
from molflt.commands.train import build_parser, train
from molflt.tasks.is2re import IS2RETask
from molflt.training.checkpoint import load_run
from molflt.training.loop import _LightningTask

# Dropout, averaging and redrawn features, so that every kind of state counts; 22 systems are 6
# batches an epoch, so checkpoints every 7 steps fall in the middle of one.
STATEFUL = [
    "--model.readout=all",  # writes no references.json
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


def begin(data, run, *more, steps=STEPS):
    return start(data, run, *STATEFUL, f"--trainer.max_steps={steps}", *more)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The run that nothing happened to."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert begin(data, run) == 0
    return run


def resume(run, *more):
    return train(**build_parser().parse_args([f"--resume={run}", *more]).as_dict())


def weights(run, checkpoint):
    with safe_open(run / "checkpoints" / f"{checkpoint}.safetensors", framework="pt") as file:
        names = list(file.keys())
        return {name: file.get_tensor(name) for name in names}, file.metadata()


def validation_rows(run):
    return table(run / "metrics.csv", "val_mae_eV")


def assert_same_end(run, reference):
    one, other = last_state(run), last_state(reference)
    assert one.keys() == other.keys()  # without averages, there are no current ones
    for part in ("state_dict", "current_model_state", "optimizer_states", "lr_schedulers"):
        assert differences(one.get(part), other.get(part)) == [], part
    for name in ("best", "last"):
        assert differences(weights(run, name), weights(reference, name)) == [], name
    assert timeless(run) == timeless(reference)


def timeless(run):
    """The rows of metrics.csv without what depends on the clock."""
    return [{**row, "atoms_per_s": ""} for row in table(run / "metrics.csv")]


def assert_resumes(run, reference):
    assert resume(run) == 0
    assert_same_end(run, reference)


@contextmanager
def at_step(method, step, act):
    """Something happens, once, before a step; what it returns takes the place of the batch."""
    original, done = getattr(_LightningTask, method), []

    def changed(self, batch, *more):
        if self.global_step == step and not self.trainer.sanity_checking and not done:
            done.append(step)
            batch = act(batch) or batch
        return original(self, batch, *more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_LightningTask, method, changed)
        yield


def stop(words, ready, signum):
    """Sends a signal to a training process once something is there; its status and stderr."""
    running, deadline = process(*words), time.monotonic() + 600
    while not ready():
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    running.send_signal(signum)
    _, errors = running.communicate(timeout=600)
    return running.returncode, errors


def test_kill_nine_in_mid_epoch_then_resume_gives_the_same_weights(data, tmp_path):
    reference, run, steps = tmp_path / "reference", tmp_path / "killed", 120
    begin(data, reference, steps=steps)
    words = arguments(data, run, *STATEFUL, f"--trainer.max_steps={steps}")
    metrics = run / "metrics.csv"
    ready = lambda: metrics.exists() and metrics.read_text().count("\n") > 9  # noqa: E731
    assert stop(words, ready, signal.SIGKILL)[0] == -signal.SIGKILL
    assert 0 < last_state(run)["global_step"] < steps - 8
    assert_resumes(run, reference)


def power_cut(_):
    raise RuntimeError("power cut")


@pytest.mark.parametrize(
    ("method", "step", "resumes_from", "more"),
    [
        ("training_step", 17, 16, ()),  # one step after a validation
        ("training_step", 15, 14, ()),  # one step after a checkpoint, in mid-epoch
        ("training_step", 15, 14, ("--data.workers=1",)),  # a worker has read ahead
        ("training_step", 12, 8, ()),
        ("training_step", 24, 24, ()),  # in the step that follows a validation
        ("validation_step", 16, 16, ()),  # during validation
        ("validation_step", 30, 28, ()),  # during the last validation
    ],
)
def test_every_place_to_crash(data, whole, tmp_path, method, step, resumes_from, more):
    run = tmp_path / "run"
    with at_step(method, step, power_cut), pytest.raises(RuntimeError, match="power cut"):
        begin(data, run, *more)
    assert last_state(run)["global_step"] == resumes_from
    assert_resumes(run, whole)


@pytest.mark.parametrize("decay", ["0.9", "null"])
def test_float64_resumes_to_the_bit(data, tmp_path, decay):
    """Neither weights nor their averages pass through float32."""
    run, reference = tmp_path / "run", tmp_path / "reference"
    more = ["--trainer.precision=64-true", f"--trainer.ema_decay={decay}"]
    assert begin(data, reference, *more, steps=17) == 0
    with at_step("training_step", 15, power_cut), pytest.raises(RuntimeError, match="power cut"):
        begin(data, run, *more, steps=17)
    assert last_state(run)["global_step"] == 14
    assert_resumes(run, reference)


@pytest.mark.parametrize(
    ("method", "step", "saved_at"),
    [("training_step", 9, 10), ("training_step", 15, 16), ("validation_step", 16, 16)],
)
def test_sigterm_saves_says_how_to_resume_and_exits_143(
    data, whole, tmp_path, capsys, method, step, saved_at
):
    run, before = tmp_path / "run", signal.getsignal(signal.SIGTERM)
    with at_step(method, step, lambda _: os.kill(os.getpid(), signal.SIGTERM)):
        assert begin(data, run) == 143
    assert signal.getsignal(signal.SIGTERM) == before
    assert f"molflt train --resume {run}" in capsys.readouterr().err
    assert last_state(run)["global_step"] == saved_at
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert_resumes(run, whole)


def test_ctrl_c_in_a_terminal(data, tmp_path):
    run = tmp_path / "run"
    words = arguments(data, run, *STATEFUL, "--trainer.max_steps=100000")
    status, errors = stop(words, (run / "checkpoints" / "last.ckpt").exists, signal.SIGINT)
    assert status == 130
    assert f"molflt train --resume {run}" in errors and "Traceback" not in errors
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert load_run(run, "last")[1]["trainer"]["max_steps"] == 100000


@pytest.mark.skipif(os.name != "posix", reason="terminals of POSIX")
def test_a_terminal_that_is_closed(data, tmp_path):
    """The state is saved, although nothing can be printed any more."""
    run, (ours, theirs) = tmp_path / "run", pty.openpty()
    words = arguments(data, run, *STATEFUL, "--trainer.max_steps=100000")
    code = "import fcntl, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    code += "signal.signal(signal.SIGHUP, signal.SIG_DFL); "  # under nohup it is ignored
    code += "from molflt.commands.cli import main; sys.exit(main(sys.argv[1:]))"
    running = subprocess.Popen(
        [sys.executable, "-c", code, "train", *words],
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    os.close(theirs)
    last, deadline = run / "checkpoints" / "last.ckpt", time.monotonic() + 600
    while not last.exists():
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    before = last_state(run)["global_step"]
    os.close(ours)
    assert running.wait(timeout=600) == 128 + signal.SIGHUP
    assert last_state(run)["global_step"] > before
    assert load_run(run, "last")[1]["trainer"]["max_steps"] == 100000


def test_a_second_signal_does_not_wait_for_the_step(data, tmp_path, capsys):
    run, before = tmp_path / "run", signal.getsignal(signal.SIGINT)

    def twice(_):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with at_step("training_step", 9, twice):
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
    rates = {row["step"]: row["lr"] for row in table(run / "metrics.csv", "lr")}
    assert float(rates["14"]) == pytest.approx(3e-4 / 12)


def test_the_name_of_a_run_is_no_pattern(data, tmp_path):
    for name, every in (("a[1]", 3), ("a1", 5)):
        words = ["--trainer.max_steps=2", f"--trainer.log_every={every}"]
        assert start(data, tmp_path / name, *words) == 0
    assert resume(tmp_path / "a[1]", "--trainer.max_steps=3") == 0
    assert load_run(tmp_path / "a[1]")[1]["trainer"]["log_every"] == 3


def test_the_name_of_a_run_is_no_home(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Path("~", "run")  # in a folder of that name, which no shell has made another of
    assert start(data, run, "--trainer.max_steps=2", "--trainer.log_every=3") == 0
    assert resume(run, "--trainer.max_steps=3") == 0
    assert load_run(run)[1]["trainer"]["log_every"] == 3


def test_commands_to_go_on_are_quoted(data, tmp_path, capsys):
    run = tmp_path / "my run"
    words = arguments(data, run, "--trainer.max_steps=9")
    with at_step("training_step", 2, lambda _: os.kill(os.getpid(), signal.SIGTERM)):
        assert main(["train", *words]) == 143
    assert f"molflt train --resume '{run}'\n" in capsys.readouterr().err
    assert f"resume it with --resume '{run}', or choose" in error_of(capsys, "train", *words)


def test_resuming_a_finished_run_changes_nothing(whole):
    before = {path: path.read_bytes() for path in (whole / "checkpoints").iterdir()}
    rows = (whole / "metrics.csv").read_text()
    assert resume(whole) == 0
    assert {path: path.read_bytes() for path in (whole / "checkpoints").iterdir()} == before
    assert (whole / "metrics.csv").read_text() == rows


@pytest.mark.parametrize("full", [22, 23, 24, 27])
def test_full_disk_keeps_the_last_good_checkpoint(data, whole, tmp_path, monkeypatch, capsys, full):
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
        words = arguments(data, run, *STATEFUL, f"--trainer.max_steps={STEPS}")
        line = error_of(capsys, "train", *words)
    assert line.startswith(str(run)) and "(No space left on device)" in line
    assert "is kept; free some space, then try again" in line
    assert [path for path in run.rglob("*") if ".part" in path.name] == []
    assert_resumes(run, whole)


def test_diverging_run_keeps_the_last_good_checkpoint(data, whole, tmp_path):
    def explode(batch):
        batch = batch.clone()
        batch.y_relaxed = batch.y_relaxed * float("inf")
        return batch

    run = tmp_path / "run"
    message = r"loss is inf at step 9 with learning rate 0\.000\d+ on sids (\d+, ){3}\d+; "
    with at_step("training_step", 9, explode), pytest.raises(ValueError, match=message):
        begin(data, run)
    assert last_state(run)["global_step"] == 8
    assert_resumes(run, whole)


def test_a_gradient_that_is_not_finite_stops_before_it_spoils_the_weights(
    data, tmp_path, monkeypatch
):
    run = tmp_path / "run"
    original = _LightningTask.training_step

    def explode(self, batch, index):
        out = original(self, batch, index)
        if self.global_step == 9:
            # finite, with an infinite gradient
            weight = next(self.model.parameters())
            out["loss"] = out["loss"].detach() + (0 * weight.sum()).sqrt()
        return out

    monkeypatch.setattr(_LightningTask, "training_step", explode)
    with pytest.raises(ValueError, match=r"gradient norm is nan at step 9 .* on sids"):
        begin(data, run)
    assert all(torch.isfinite(p).all() for p in load_run(run, "last")[0].parameters())


@pytest.mark.parametrize(("value", "what"), [(float("inf"), "loss"), (None, "gradient norm")])
def test_the_structure_that_diverges_is_named_alone(data, tmp_path, value, what):
    """One of the first of two batches of a step."""
    bad: list[int] = []
    original = IS2RETask.loss

    def loss(self, batch, progress):
        total, sums = original(self, batch, progress)
        if not bad:
            bad.append(int(batch.sid[2]))
        if bad[0] in batch.sid.tolist():
            slope = (0 * next(self.model.parameters()).sum()).sqrt()  # 0, but infinite
            total = total * value if value else total + slope
        return total, sums

    words = ["--trainer.accumulate=2", "--trainer.max_steps=3", "--trainer.num_sanity=0"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(IS2RETask, "loss", loss)
        with pytest.raises(ValueError, match=what) as caught:
            start(data, tmp_path / "run", *words)
    assert f" on sids {bad[0]}; expected" in str(caught.value)


def test_what_killed_processes_had_begun_to_write_is_removed(data, tmp_path):
    run, ended = tmp_path / "run", subprocess.Popen(["true"])
    ended.wait()
    (run / "checkpoints").mkdir(parents=True)
    left = [f".curve.png.{ended.pid}.part", f"checkpoints/.last.ckpt.{ended.pid}.part"]
    kept = [".mine.part", f".report.html.{os.getppid()}.part"]  # of a process that is alive
    for name in (*left, *kept):
        (run / name).touch()
    assert start(data, run, "--trainer.max_steps=1") == 0
    assert [name for name in (*left, *kept) if (run / name).exists()] == kept


class Evil:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_what_cannot_be_resumed_is_named_and_runs_no_code(whole, tmp_path):
    def refuses(error, message):
        with pytest.raises(error, match=message):
            resume(run)

    run = tmp_path / "run"
    refuses(FileNotFoundError, r"config\.yaml: no such file")
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_bytes((whole / "config.yaml").read_bytes())
    refuses(FileNotFoundError, r"last\.ckpt: no such checkpoint")
    content = (whole / "checkpoints" / "last.ckpt").read_bytes()
    (run / "checkpoints" / "last.ckpt").write_bytes(content[: len(content) // 2])
    refuses(ValueError, r"last\.ckpt: not a complete checkpoint")
    torch.save({"state_dict": Evil(tmp_path / "was-here")}, run / "checkpoints" / "last.ckpt")
    refuses(ValueError, r"last\.ckpt: refused; .* it asks for posix\.mkdir")
    assert not (tmp_path / "was-here").exists()
