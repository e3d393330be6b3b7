"""Epochs in place of steps: how many steps they are, that one of the two decides, and resuming."""

from __future__ import annotations

import pytest
import yaml
from tiny_run import arguments, differences, error_of, last_state, logged, write_data

from molflt.commands.cli import main
from molflt.training.loop import _LightningTask


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """22 structures: 6 batches of 4, the last of 2."""
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def two(data, tmp_path_factory):
    run = tmp_path_factory.mktemp("two") / "run"
    assert main(["train", *arguments(data, run, "--trainer.max_epochs=2", *OFTEN)]) == 0
    return run


OFTEN = ["--trainer.val_every=5", "--trainer.log_every=1", "--trainer.checkpoint_every=3"]
OFTEN += ["--task.warmup_steps=7"]  # longer than one epoch


def trainer(run):
    return yaml.safe_load((run / "config.yaml").read_text())["trainer"]


def test_epochs_are_steps(two, data, tmp_path):
    """Warm-up, schedule and weights are those of as many steps."""
    assert (trainer(two)["max_epochs"], trainer(two)["max_steps"]) == (2, 12)
    assert (
        main(["train", *arguments(data, tmp_path / "steps", "--trainer.max_steps=12", *OFTEN)]) == 0
    )
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert differences(last_state(two)[part], last_state(tmp_path / "steps")[part]) == []
    assert logged(two, "lr") == logged(tmp_path / "steps", "lr") and len(logged(two, "lr")) == 12


def test_an_interrupted_run_of_epochs_resumes_to_the_bit(two, data, tmp_path, capsys):
    original = _LightningTask.training_step

    def power_cut(self, batch, place):
        if self.global_step == 8:
            raise RuntimeError("power cut")
        return original(self, batch, place)

    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_LightningTask, "training_step", power_cut)
        main(["train", *arguments(data, run, "--trainer.max_epochs=2", *OFTEN)])
    assert last_state(run)["global_step"] == 6
    assert main(["train", f"--resume={run}"]) == 0
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert differences(last_state(run)[part], last_state(two)[part]) == []
    capsys.readouterr()
    assert main(["train", f"--resume={run}"]) == 0
    said = capsys.readouterr().out
    assert "finished" in said and "--trainer.max_epochs" in said
    line = error_of(capsys, "train", f"--resume={run}", "--trainer.max_epochs=1")
    assert "trainer.max_epochs=1" in line and "got 6" in line and "12 steps are done" in line
    assert main(["train", f"--resume={run}", "--trainer.max_epochs=3"]) == 0
    assert (trainer(run)["max_epochs"], trainer(run)["max_steps"]) == (3, 18)
    assert main(["train", f"--resume={run}", "--trainer.max_steps=19"]) == 0
    assert (trainer(run)["max_epochs"], trainer(run)["max_steps"]) == (None, 19)


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (["--trainer.accumulate=4"], 2),  # 1.5 of them
        (["--data.max_atoms=40"], None),  # batches differ from epoch to epoch
        (["--data.batch_size=100"], 1),
    ],
)
def test_a_step_may_take_several_batches(data, tmp_path, words, steps):
    seen: list[int] = []
    original = _LightningTask.training_step

    def noted(self, batch, place):
        seen.extend(batch.sid.tolist())
        return original(self, batch, place)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_LightningTask, "training_step", noted)
        words = arguments(data, tmp_path / "run", *words, "--trainer.max_epochs=1")
        assert main(["train", *words]) == 0
    assert set(seen) == set(range(22)) and len(seen) < 33
    assert steps is None or trainer(tmp_path / "run")["max_steps"] == steps


def test_one_of_the_two_decides(data, tmp_path, capsys):
    (tmp_path / "steps.yaml").write_text("trainer: {max_steps: 7}\n")
    (tmp_path / "both.yaml").write_text("trainer: {max_steps: 7, max_epochs: 1}\n")
    words = arguments(data, tmp_path / "run", f"--config={tmp_path / 'both.yaml'}")
    line = error_of(capsys, "train", *words)
    assert "trainer.max_steps=7" in line and "trainer.max_epochs=1" in line and "6 steps" in line
    assert not (tmp_path / "run" / "config.yaml").exists()
    words = ["--config", str(tmp_path / "steps.yaml"), "--trainer.max_epochs=1"]
    assert main(["train", *arguments(data, tmp_path / "run", *words)]) == 0
    assert trainer(tmp_path / "run")["max_steps"] == 6
    assert "[1, " in error_of(
        capsys, "train", *arguments(data, tmp_path / "a", "--trainer.max_epochs=0")
    )


def test_a_constant_rate(data, tmp_path):
    words = ["--task.schedule=constant", "--task.lr=1e-3", "--trainer.max_epochs=1"]
    assert main(["train", *arguments(data, tmp_path / "run", *words, "--trainer.log_every=1")]) == 0
    assert logged(tmp_path / "run", "lr") == pytest.approx([5e-4, *[1e-3] * 5])


def test_the_words_of_other_packages_are_answered(capsys):
    assert "--trainer.max_epochs" in error_of(capsys, "train", "--epochs", "100")
