"""Epochs instead of steps: number of steps, schedule, and resuming."""

from __future__ import annotations

import pytest
import yaml
from tiny_run import (
    arguments,
    assert_same_state,
    at_step,
    error_of,
    last_state,
    logged,
    power_cut,
    start,
)

from molflt.commands.cli import main
from molflt.training.loop import _LightningTask


@pytest.fixture(scope="module")
def two(shared_data, tmp_path_factory):
    """Two epochs of 22 structures: 6 batches of 4 each, the last of 2."""
    run = tmp_path_factory.mktemp("two") / "run"
    assert main(["train", *arguments(shared_data, run, "--trainer.max_epochs=2", *OFTEN)]) == 0
    return run


OFTEN = ["--trainer.val_every=5", "--trainer.log_every=1", "--trainer.checkpoint_every=3"]
OFTEN += ["--task.warmup_steps=7"]  # longer than one epoch


def trainer(run):
    return yaml.safe_load((run / "config.yaml").read_text())["trainer"]


def test_epochs_equal_steps(two, shared_data, tmp_path):
    """Warm-up, schedule and weights agree."""
    assert (trainer(two)["max_epochs"], trainer(two)["max_steps"]) == (2, 12)
    start(shared_data, tmp_path / "steps", "--trainer.max_steps=12", *OFTEN)
    assert_same_state(two, tmp_path / "steps")
    assert logged(two, "lr") == logged(tmp_path / "steps", "lr") and len(logged(two, "lr")) == 12


def test_an_interrupted_run_of_epochs_resumes_to_the_bit(two, shared_data, tmp_path, capsys):
    run = tmp_path / "run"
    with at_step(8, power_cut):
        main(["train", *arguments(shared_data, run, "--trainer.max_epochs=2", *OFTEN)])
    assert last_state(run)["global_step"] == 6
    assert main(["train", f"--resume={run}"]) == 0
    assert_same_state(run, two)
    line = error_of(capsys, "train", f"--resume={run}", "--trainer.max_epochs=1")
    assert "trainer.max_epochs=1" in line and "got 6" in line
    assert main(["train", f"--resume={run}", "--trainer.max_epochs=3"]) == 0
    assert (trainer(run)["max_epochs"], trainer(run)["max_steps"]) == (3, 18)
    assert main(["train", f"--resume={run}", "--trainer.max_steps=19"]) == 0
    assert (trainer(run)["max_epochs"], trainer(run)["max_steps"]) == (None, 19)


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (["--trainer.accumulate=4"], 2),  # 1.5 steps
        (["--data.max_atoms=40"], None),  # batches differ from epoch to epoch
        (["--data.batch_size=100"], 1),
    ],
)
def test_an_epoch_covers_all_structures(shared_data, tmp_path, words, steps):
    seen: list[int] = []
    original = _LightningTask.training_step

    def noted(self, batch, place):
        seen.extend(batch.sid.tolist())
        return original(self, batch, place)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_LightningTask, "training_step", noted)
        words = arguments(shared_data, tmp_path / "run", *words, "--trainer.max_epochs=1")
        assert main(["train", *words]) == 0
    assert set(seen) == set(range(22)) and len(seen) < 33
    assert steps is None or trainer(tmp_path / "run")["max_steps"] == steps


def test_epochs_on_the_command_line_replace_steps(shared_data, tmp_path):
    (tmp_path / "steps.yaml").write_text("trainer: {max_steps: 7}")
    words = ["--config", str(tmp_path / "steps.yaml"), "--trainer.max_epochs=1"]
    words += ["--task.schedule=constant", "--task.lr=1e-3", "--trainer.log_every=1"]
    assert start(shared_data, tmp_path / "run", *words) == 0
    assert trainer(tmp_path / "run")["max_steps"] == 6
    assert logged(tmp_path / "run", "lr") == pytest.approx([5e-4, *[1e-3] * 5])
