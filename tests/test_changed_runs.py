"""What has changed since a run was begun is named on resuming; what may change takes effect."""

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
    write_data,
)

from molflt.commands.cli import main
from molflt.data.structures.store import write_store
from molflt.training.loop import _LightningTask

WORDS = ["--trainer.max_steps=6", "--trainer.val_every=4", "--trainer.ema_decay=0.5"]
WORDS += ["--model.dropout=0.1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def stopped(data, tmp_path_factory):
    """A run that was stopped at step 3 of 6."""
    run = tmp_path_factory.mktemp("runs") / "run"
    original = _LightningTask.training_step

    def stop(self, batch, index):
        if self.global_step == 2:
            os.kill(os.getpid(), signal.SIGHUP)  # as a terminal does that is closed
        return original(self, batch, index)

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(_LightningTask, "training_step", stop)
            assert start(data, run, *WORDS) == 128 + signal.SIGHUP
    finally:
        signal.signal(signal.SIGHUP, before)
    assert last_state(run)["global_step"] == 3
    return run


@pytest.fixture
def run(stopped, tmp_path):
    return shutil.copytree(stopped, tmp_path / "run")


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    run = tmp_path_factory.mktemp("whole") / "run"
    assert start(data, run, *WORDS) == 0
    return run


def edit(run, **values):
    """Changes keys such as task__lr of config.yaml."""
    path = run / "config.yaml"
    config = yaml.safe_load(path.read_text())
    for key, value in values.items():
        group, _, name = key.rpartition("__")
        (config[group] if group else config)[name] = value
    path.write_text(yaml.safe_dump(config))


def assert_same_end(run, whole):
    one, other = last_state(run), last_state(whole)
    for part in ("state_dict", "current_model_state", "optimizer_states", "lr_schedulers"):
        assert differences(one[part], other[part]) == [], part
    for name in ("best", "last"):
        left, right = (each / "checkpoints" / f"{name}.safetensors" for each in (run, whole))
        assert left.read_bytes() == right.read_bytes()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("task__lr", 0.5, "task.lr is 0.0003; got 0.5 for --resume; start a new run instead"),
        ("seed", 5, "seed is 0; got 5"),
        ("data__batch_size", 5, "data.batch_size is 4; got 5"),
        ("model__dropout", 0.2, "model.dropout is 0.1; got 0.2"),
        ("model__position_options", {}, "model.position_options is {"),
        ("trainer__ema_decay", None, "trainer.ema_decay is 0.5; got None"),
        ("trainer__val_every", 3, "trainer.val_every is 4; got 3"),
        ("trainer__gradient_clip", None, "trainer.gradient_clip is 5.0; got None"),
        ("trainer__max_steps", 5, "trainer.max_steps is 6; got 5 for --resume; it may only be rai"),
        ("data__train_split", "val_id", "data.train_split is 'train'; got 'val_id'"),
    ],
)
def test_an_edited_configuration_is_named_and_nothing_is_written(run, capsys, key, value, message):
    edit(run, **{key: value})
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert message in error_of(capsys, "train", "--resume", str(run))
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_all_differences_are_named_at_once(run, capsys):
    edit(run, task__lr=0.5, seed=5)
    line = error_of(capsys, "train", "--resume", str(run), "--model.dim", "32")
    for part in ("task.lr is", "seed is", "model.dim is 16; got 32"):
        assert part in line


def test_fewer_steps_than_are_done_are_refused(whole, tmp_path, capsys):
    run = shutil.copytree(whole, tmp_path / "run")
    line = error_of(capsys, "train", "--resume", str(run), "--trainer.max_steps", "4")
    assert "trainer.max_steps is 6; got 4" in line and "6 steps are done" in line


def shuffled(records):
    return [records[i] for i in torch.randperm(22, generator=torch.Generator().manual_seed(1))]


def moved(records):
    records[7].pos[0, 0] += 1e-4
    return records


def relabeled(records):
    records[7].y_relaxed += 1e-6
    return records


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shuffled, "train: sha256 was '"),
        (moved, "train: sha256 was '"),
        (relabeled, "train: sha256 was '"),
        (lambda records: records[:15], "train: systems was 22; got 15"),
    ],
)
def test_other_data_are_refused(data, run, tmp_path, capsys, change, message):
    other = tmp_path / "data"
    shutil.copytree(data, other)
    write_store(other / "train.safetensors", change(list(structures(22))))
    line = error_of(capsys, "train", "--resume", str(run), f"--data.root={other}")
    assert "the data of this run have changed; " + message in line
    assert yaml.safe_load((run / "config.yaml").read_text())["data"]["root"] == str(data)


def test_what_may_change_takes_effect_is_recorded_and_changes_nothing_else(
    data, run, whole, tmp_path
):
    elsewhere, other = tmp_path / "moved", shutil.copytree(data, tmp_path / "data")
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


def test_a_machine_that_rounds_otherwise_is_said(run, capsys, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 17)
    assert main(["train", "--resume", str(run)]) == 0
    assert last_state(run)["molflt"]["machine"]["threads"] == 17
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "sums may round" in x]
    assert line.startswith(f"{run}: resumed with threads was ") and "is 17" in line


def test_a_checkpoint_without_a_record_of_its_run_still_resumes(run, whole):
    """As earlier versions wrote them: no digest, no configuration, no fingerprints."""
    path = run / "checkpoints" / "last.ckpt"
    state = last_state(run)
    del state["molflt"]
    torch.save(state, path)
    assert main(["train", "--resume", str(run)]) == 0
    assert_same_end(run, whole)


def test_weights_that_lag_behind_their_checkpoint_are_written_again(whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    path = run / "checkpoints" / "last.safetensors"
    expected = path.read_bytes()
    path.unlink()  # killed between the two files
    assert main(["train", "--resume", str(run)]) == 0
    assert path.read_bytes() == expected


def test_the_best_weights_are_found_again_when_they_were_removed(whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    (run / "checkpoints" / "best.safetensors").unlink()
    assert main(["train", "--resume", str(run), "--trainer.max_steps=8"]) == 0
    assert (run / "checkpoints" / "best.safetensors").exists()


def test_weights_of_a_run_whose_checkpoint_is_gone_are_not_overwritten(
    data, whole, tmp_path, capsys
):
    run = shutil.copytree(whole, tmp_path / "run")
    (run / "checkpoints" / "last.ckpt").unlink()
    line = error_of(capsys, "train", *arguments(data, run, *WORDS))
    assert "safetensors: belongs to an earlier run, whose last.ckpt is gone" in line
    assert "no such checkpoint; nothing to resume" in error_of(
        capsys, "train", "--resume", str(run)
    )


def test_a_folder_that_is_removed_while_training_ends_it(data, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    original = _LightningTask.training_step

    def remove(self, batch, index):
        if self.global_step == 4:
            shutil.rmtree(run)
        return original(self, batch, index)

    monkeypatch.setattr(_LightningTask, "training_step", remove)
    line = error_of(capsys, "train", *arguments(data, run, *WORDS))
    assert line.startswith(f"{run}: the run folder was removed or replaced while training in it")
    assert not run.exists()


def test_an_ignored_hangup_stays_ignored(data, tmp_path, monkeypatch):
    """nohup starts a training so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    original = _LightningTask.training_step

    def hang_up(self, batch, index):
        os.kill(os.getpid(), signal.SIGHUP)
        return original(self, batch, index)

    monkeypatch.setattr(_LightningTask, "training_step", hang_up)
    try:
        assert start(data, tmp_path / "run", *WORDS) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_warning_is_one_line_of_our_own(tmp_path, capsys):
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
