import json
import shutil

import pytest
import torch
import yaml
from tiny_run import (
    arguments,
    assert_same_state,
    at_step,
    error_of,
    header,
    last_state,
    logged,
    power_cut,
    resume,
    start,
    table,
    weights,
    write_data,
)

from molflt.commands.cli import main
from molflt.training.loop import _LightningTask


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Returns 24 structures: 6 batches of 4, or 3 of 8."""
    return write_data(tmp_path_factory.mktemp("data"), train=24)


def largest_difference(one, other):
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def steps_of(run, column):
    return [int(row["step"]) for row in table(run / "metrics.csv", column)]


def test_accumulated_batches_are_one_large_batch(data, tmp_path, monkeypatch):
    from molflt.data.batches import SizeBucketedBatchSampler

    def in_order(self, epoch=0):  # batches of 4 and of 8 then contain the same structures
        return self._cut(torch.arange(len(self.natoms)).numpy())

    monkeypatch.setattr(SizeBucketedBatchSampler, "batches", in_order)
    words = ["--trainer.precision=64-true", "--trainer.max_steps=7", "--trainer.val_every=3"]
    words += ["--trainer.log_every=2", "--trainer.ema_decay=0.5", "--task.weight_decay=0.1"]
    words += ["--trainer.gradient_clip=0.5", "--task.lr=1e-2"]
    start(data, tmp_path / "one", *words, "--data.batch_size=8")
    start(data, tmp_path / "parts", *words, "--trainer.accumulate=2")
    one, parts = weights(tmp_path / "one"), weights(tmp_path / "parts")
    assert largest_difference(one, parts) < 1e-6
    for column in ("lr", "train_loss", "train_mae_eV", "gradient_norm", "val_mae_eV"):
        assert logged(tmp_path / "parts", column) == pytest.approx(
            logged(tmp_path / "one", column), rel=1e-6
        )
        assert steps_of(tmp_path / "parts", column) == steps_of(tmp_path / "one", column)
    assert steps_of(tmp_path / "parts", "val_mae_eV") == [3, 6, 7]
    assert last_state(tmp_path / "parts")["global_step"] == 7


def test_accumulating_run_resumes_to_the_bit(data, tmp_path):
    words = ["--model.dropout=0.2", "--task.redraw_every=3", "--trainer.ema_decay=0.9"]
    words += ["--trainer.accumulate=4", "--trainer.val_every=4", "--task.schedule=inverse_sqrt"]
    words += ["--task.position_weight=1", "--task.position_weight_final=1"]  # not of max_steps
    start(data, tmp_path / "whole", *words, "--trainer.max_steps=9")
    start(data, tmp_path / "parts", *words, "--trainer.max_steps=5")
    assert resume(tmp_path / "parts", "--trainer.max_steps=9") == 0
    assert_same_state(tmp_path / "parts", tmp_path / "whole")
    last, other = (logged(tmp_path / name, "val_mae_eV")[-1] for name in ("parts", "whole"))
    assert last == other


PATIENT = ["--trainer.max_steps=40", "--trainer.val_every=2", "--trainer.patience=3"]
# the first steps are so large that later steps do not improve the error
WORSE = ["--model.readout=all", "--task.lr=3"]
WORSE += ["--task.position_weight=0", "--task.position_weight_final=0"]


@pytest.fixture(scope="module")
def stopped(data, tmp_path_factory):
    run = tmp_path_factory.mktemp("stopped") / "run"
    assert start(data, run, *PATIENT, *WORSE) == 0
    return run


def test_patience_ends_a_training_without_improvement(stopped):
    values = logged(stopped, "val_mae_eV")
    best = values.index(min(values))
    assert len(values) == best + 1 + 3 and steps_of(stopped, "val_mae_eV")[-1] < 40
    state = last_state(stopped)
    step = 2 * len(values)
    told = header(stopped, "last")
    assert told["step"] == str(step) and state["global_step"] == step
    found = json.loads(told["stopped"])
    assert found == state["molflt"]["stopped"]
    assert (found["step"], found["since"], found["best_step"]) == (step, 3, 2 * (best + 1))
    assert found["best"] == min(values)
    assert (stopped / "curve.png").is_file()
    *_, validated, trained = table(stopped / "metrics.csv")  # the last row is a training row
    assert trained["step"] == validated["step"] == str(step)
    assert validated["val_mae_eV"] and trained["train_loss"] and step % 50


def test_more_patience_resumes_to_the_bit(data, stopped, tmp_path, capsys):
    run = shutil.copytree(stopped, tmp_path / "run")
    text = error_of(capsys, "train", f"--resume={run}", "--trainer.max_steps=50")
    assert "--trainer.patience" in text and "above 3" in text and "got 3" in text
    assert resume(run, "--trainer.patience=null") == 0
    assert steps_of(run, "val_mae_eV")[-1] == 40
    assert "stopped" not in last_state(run)["molflt"]
    start(data, tmp_path / "whole", *PATIENT[:2], *WORSE)
    assert_same_state(run, tmp_path / "whole")
    for column in ("val_mae_eV", "train_loss", "train_mae_eV"):
        assert logged(run, column) == logged(tmp_path / "whole", column)


def test_tensorboard_has_every_row_once_after_resuming(data, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    words = ["--trainer.val_every=2", "--trainer.log_every=2", "--trainer.logger=tensorboard"]
    start(data, run, *words, "--trainer.max_steps=4")
    resume(run, "--trainer.max_steps=8")
    with at_step(13, power_cut), pytest.raises(RuntimeError, match="power cut"):
        resume(run, "--trainer.max_steps=16")  # then repeats the validation of step 12
    resume(run)
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    for column in ("train_loss", "val_mae_eV", "lr"):
        found = events.Scalars(column)
        assert [event.step for event in found] == [*range(2, 17, 2)]
        assert [event.value for event in found] == pytest.approx(logged(run, column), rel=1e-6)


def test_wandb_offline(data, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = tmp_path / "run"
    words = ["--trainer.max_steps=4", "--trainer.val_every=2", "--trainer.logger=wandb"]
    assert start(data, run, *words) == 0
    (file,) = (run / "wandb").glob("offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert b"val_mae_eV" in content and b"train_loss" in content
    assert resume(run, "--trainer.max_steps=6") == 0
    files = list((run / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1  # one run to wandb


@pytest.fixture(scope="module")
def two(shared_data, tmp_path_factory):
    """Trains two epochs of 22 structures, each with 5 batches of 4 and one of 2."""
    run = tmp_path_factory.mktemp("two") / "run"
    assert main(["train", *arguments(shared_data, run, "--trainer.max_epochs=2", *OFTEN)]) == 0
    return run


OFTEN = ["--trainer.val_every=5", "--trainer.log_every=1", "--trainer.checkpoint_every=3"]
OFTEN += ["--task.warmup_steps=7"]  # longer than one epoch


def trainer(run):
    return yaml.safe_load((run / "config.yaml").read_text())["trainer"]


def test_epochs_equal_steps(two, shared_data, tmp_path):
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
    ],
)
def test_an_epoch_covers_all_structures(shared_data, tmp_path, words, steps):
    """Batches of the same step have different dropout masks."""
    seen, drawn = [], []
    original = _LightningTask.training_step

    def noted(self, batch, place):
        seen.extend(batch.sid.tolist())
        drawn.append(torch.initial_seed())
        return original(self, batch, place)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_LightningTask, "training_step", noted)
        words = arguments(shared_data, tmp_path / "run", *words, "--trainer.max_epochs=1")
        assert main(["train", *words]) == 0
    assert set(seen) == set(range(22)) and len(seen) < 33
    assert len(drawn) == len(set(drawn)) > 4
    assert steps is None or trainer(tmp_path / "run")["max_steps"] == steps


def test_epochs_on_the_command_line_replace_steps(shared_data, tmp_path):
    (tmp_path / "steps.yaml").write_text("trainer: {max_steps: 7}")
    words = ["--config", str(tmp_path / "steps.yaml"), "--trainer.max_epochs=1"]
    words += ["--task.schedule=constant", "--task.lr=1e-3", "--trainer.log_every=1"]
    assert start(shared_data, tmp_path / "run", *words) == 0
    assert trainer(tmp_path / "run")["max_steps"] == 6
    assert logged(tmp_path / "run", "lr") == pytest.approx([5e-4, *[1e-3] * 5])
