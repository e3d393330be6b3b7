import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import yaml
from tiny_run import (
    SMALL,
    alone,
    arguments,
    assert_same_state,
    at_step,
    differences,
    error_of,
    header,
    last_state,
    logged,
    power_cut,
    printed,
    resume,
    start,
    structures,
    table,
    weights,
    write_data,
)
from torch_geometric.data import Batch

from molflt.commands.cli import main
from molflt.data.structures.store import StructureStore, write_store
from molflt.graph.regressor import EnergyRegressor
from molflt.tasks.is2re import IS2RETask, _displacement_error
from molflt.training.checkpoint import load_run
from molflt.training.fit import _Averages, _warn_of_slow_average
from molflt.training.loop import _LightningTask
from molflt.training.run_folder import best_of
from molflt.training.start import dated_run


def mae(run, root, name="best"):
    path = root / "val_id.safetensors"
    return np.abs(alone(run, path, name) - StructureStore(path).y_relaxed).mean()


def test_run_folder(shared_run, shared_data):
    """energy_std excludes the energies of adsorbate elements; energy_mean is 0."""
    saved = yaml.safe_load((shared_run / "config.yaml").read_text())
    assert saved["model"]["dim"] == 16  # given
    assert saved["task"]["position_weight"] == 15.0  # a default
    assert set(saved) == {*("run", "seed", "recipe", "init", "model", "data", "task", "trainer")}
    versions = json.loads((shared_run / "versions.json").read_text())
    assert versions["torch"] == torch.__version__
    assert versions["git_commit"] is None or len(versions["git_commit"]) == 40
    assert {"molflt", "python", "lightning", "torch-geometric", "started"} <= {*versions}
    rows = table(shared_run / "metrics.csv")
    assert {"train_mae_eV", "train_ewt_percent", "val_ewt_percent", "val_mse_eV2"} <= {*rows[0]}
    assert [int(row["step"]) for row in rows if row["train_loss"]] == [2, 4, 6, 8]
    assert [int(row["step"]) for row in rows if row["val_mae_eV"]] == [4, 8]
    for row in rows:
        assert all(np.isfinite(float(value)) for value in row.values() if value)
    model, saved = load_run(shared_run)
    assert not model.training and saved["data"]["root"] == str(shared_data)
    rows = table(shared_run / "metrics.csv", "val_mae_eV")
    best = min(rows, key=lambda row: float(row["val_mae_eV"]))
    assert mae(shared_run, shared_data) == pytest.approx(float(best["val_mae_eV"]), rel=1e-5)
    told = header(shared_run, "best")
    assert told["step"] == best["step"] and told["val_mae_eV"] == best["val_mae_eV"]
    assert json.loads(told["model"]) == saved["model"]
    store = StructureStore(shared_data / "train.safetensors")
    model, _ = load_run(shared_run, "last")
    counts = store.compositions(np.arange(len(store)), of_adsorbates=True)
    left = store.y_relaxed - counts @ model.element_energies.numpy()
    assert float(model.energy_mean) == 0
    assert float(model.energy_std) == pytest.approx(left.std(), abs=1e-12)


@pytest.mark.parametrize(
    ("options", "column"),
    [
        (
            "--task.position_weight=0 --task.position_weight_final=0 --model.radial_basis=8 "
            "--model.descriptors=true --model.subsurface=false",
            "train_mae_eV",
        ),
        (
            "--task.position_weight=1 --task.interpolate=0.5 --task.noise=0.02 "
            "--model.position=multiplicative --model.near_field=3 --model.periodic=reciprocal "
            '--model.position_options={"num_gaussians":4} '
            "--model.refinements=2 --model.move_atoms=true --model.mixing=auto",
            "train_displacement_mae_A",
        ),
    ],
)
def test_training_learns(shared_data, tmp_path, options, column):
    words = ["--trainer.max_steps=60", "--task.lr=2e-2", "--trainer.log_every=6"]
    start(shared_data, tmp_path / "run", *words, *options.split())
    trained = logged(tmp_path / "run", column)
    assert trained[-1] < 0.5 * trained[0]
    load_run(tmp_path / "run", "last")


def test_averaged_weights_are_validated_and_kept(shared_data, tmp_path, capsys):
    """With decay 1 - 1e-9, the average stays at the weights of the first step."""
    words = ["--trainer.max_steps=12", "--trainer.val_every=6", "--task.lr=0.01"]
    start(shared_data, tmp_path / "still", *words, "--trainer.ema_decay=0.999999999")
    assert "use 0.75 or less" in capsys.readouterr().err
    start(shared_data, tmp_path / "plain", *words)
    maes, others = (logged(tmp_path / name, "val_mae_eV") for name in ("still", "plain"))
    assert maes[0] == pytest.approx(maes[1], rel=1e-4)
    assert others[0] != pytest.approx(others[1], rel=1e-3)
    # averaging does not change training
    assert logged(tmp_path / "still", "train_loss") == logged(tmp_path / "plain", "train_loss")
    assert mae(tmp_path / "still", shared_data, "last") == pytest.approx(maes[1], rel=1e-5)


@pytest.mark.parametrize(
    ("decay", "steps", "word"),
    [(0.5, 1, ""), (0.5, 2, "50% of the"), (0.5, 9, ""), (0.9999, 10_000, "use 0.9997 or less")],
)
def test_the_first_average_is_that_of_the_first_step(decay, steps, word, recwarn):
    _warn_of_slow_average(decay, steps)
    assert word in str(recwarn.pop().message) if word else not recwarn


def test_validation_keeps_float64_weights_and_averages(shared_data, tmp_path):
    words = ["--trainer.precision=64-true", "--trainer.ema_decay=0.5", "--trainer.max_steps=6"]
    for every in (2, 6):
        more = [f"--trainer.val_every={every}", "--task.lr=0.01"]
        start(shared_data, tmp_path / str(every), *words, *more)
    often, once = (last_state(tmp_path / name) for name in ("2", "6"))
    for part in ("state_dict", "current_model_state"):
        assert differences(often[part], once[part]) == []
        assert torch.float32 not in {tensor.dtype for tensor in once[part].values()}
    kept = weights(tmp_path / "6", "best").values()
    assert torch.float32 not in {tensor.dtype for tensor in kept}


@pytest.mark.parametrize(
    ("without", "more"), [(9, "--task.noise=0"), (2, "--task.interpolate=0.5")]
)
def test_structures_without_relaxed_positions_train_on_energies(tmp_path, capsys, without, more):
    records = list(structures(9))
    for record in records[:without]:
        record.pos_relaxed[:] = float("nan")
    write_store(tmp_path / "train.safetensors", records)
    write_store(tmp_path / "val_id.safetensors", structures(5, 7, first_sid=99))
    assert start(tmp_path, tmp_path / "run", "--trainer.max_steps=4", more) == 0
    assert capsys.readouterr().err.count("2 of 9 structures") == (without == 2)


def test_displacement_error_and_its_gradient_by_hand():
    records = list(structures(3))
    records[2].pos_relaxed = torch.full_like(records[2].pos, float("nan"))
    batch = Batch.from_data_list(records)
    prediction = torch.randn(batch.num_nodes, 3, generator=torch.Generator().manual_seed(0))
    prediction.requires_grad_()
    expected = []
    for i, record in enumerate(records[:2]):
        own = prediction[batch.batch == i]
        error = (own - (record.pos_relaxed - record.pos))[~record.fixed]
        expected.append(error.abs().mean())
    value = _displacement_error(prediction, batch)
    assert float(value) == pytest.approx(float(torch.stack(expected).mean()), rel=1e-6)
    value.backward()
    counted = ~batch.fixed & (batch.batch < 2)
    assert torch.isfinite(prediction.grad).all()
    assert (prediction.grad[counted] != 0).all() and (prediction.grad[~counted] == 0).all()


def test_energy_metrics_by_hand():
    """EwT counts errors strictly below 0.02 eV."""
    error = torch.tensor([0.02, -0.02, np.nextafter(0.02, 0), 0.5, 0.0], dtype=torch.float64)
    metrics = IS2RETask.sums.of(error, torch.zeros(5)).metrics()
    assert metrics == pytest.approx(
        {"mae_eV": 0.56 / 5, "ewt_percent": 40.0, "mse_eV2": (3 * 0.02**2 + 0.25) / 5}
    )
    parts = [IS2RETask.sums.of(part, torch.zeros(len(part))) for part in error.split([2, 3])]
    totals = torch.stack([sum(field) for field in zip(*parts, strict=True)])
    assert IS2RETask(torch.nn.Linear(1, 1)).summarize(totals) == pytest.approx(metrics)
    energy = torch.full((2_000_000,), 0.1)  # in float32, the sum is wrong in the fourth digit
    found = IS2RETask.sums.of(energy, torch.zeros(2_000_000)).metrics()["mae_eV"]
    assert found == pytest.approx(float(np.float32(0.1)), rel=1e-12)


def test_changes_during_training(shared_data, tmp_path, monkeypatch):
    """In mixed precision, features are redrawn and the position weight falls linearly."""
    steps, seen = [], []
    original, weight = EnergyRegressor.redraw_, IS2RETask._position_weight

    def feature_map(model):
        return model.stack.blocks[0].attention.feature_map

    def noting(self, generator=None):
        original(self, generator)
        steps.append(feature_map(self).projection.matrix())

    monkeypatch.setattr(EnergyRegressor, "redraw_", noting)
    noting_weight = lambda *arguments: seen.append(weight(*arguments)) or seen[-1]  # noqa: E731
    monkeypatch.setattr(IS2RETask, "_position_weight", noting_weight)
    words = ["--trainer.max_steps=9", "--task.redraw_every=4", "--trainer.precision=bf16-mixed"]
    words += ["--task.position_weight=10", "--task.position_weight_final=1"]
    start(shared_data, tmp_path / "run", *words)
    assert seen == pytest.approx(np.linspace(10, 1, 10)[:9])
    _, *steps = steps  # the first call checks whether a copy is random
    assert len(steps) == 2 and not torch.equal(*steps)  # before steps 4 and 8
    model, _ = load_run(tmp_path / "run", "last")
    assert torch.equal(feature_map(model).projection.matrix(), steps[-1])
    assert next(model.parameters()).dtype == torch.float32


def test_averages_are_on_the_device_of_the_weights():
    """Lightning creates the averages before it moves the weights to the device."""
    averages, module = _Averages(0.9), pl.LightningModule()
    module.layer = torch.nn.Linear(2, 2)
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("meta")))
    averages.setup(trainer, module, "fit")
    assert {weight.device.type for weight in averages._average_model.parameters()} == {"meta"}


# --- output, names of runs, and molflt info ----------------------------------------------------


def test_default_names_have_a_date_and_are_unique(shared_data, tmp_path, monkeypatch, capsys):
    """A shortened warm-up, and options that take effect after the last step, are reported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    (tmp_path / "my own.yaml").write_text(f"data: {{root: {shared_data}}}\n")
    words = ["train", "--config", "my own.yaml", *SMALL, "--trainer.max_steps=1"]
    words += ["--task.redraw_every=1", "--trainer.patience=2"]
    assert main(words) == main(words) == 0
    told = capsys.readouterr().out.splitlines()
    assert "task.warmup_steps=2" in told[0]
    assert "task.redraw_every: has no effect" in told[1] and "patience: has no" in told[2]
    day = time.strftime("%Y-%m-%d")
    assert {path.name for path in Path("runs").iterdir()} == {f"{day}-my-own", f"{day}-my-own-2"}
    saved = yaml.safe_load(Path("runs", f"{day}-my-own", "config.yaml").read_text())
    assert saved["task"]["warmup_steps"] == 0
    assert dated_run("my own") == Path("runs") / f"{day}-my-own-3"
    monkeypatch.setenv("LOCAL_RANK", "1")  # another process of this training run
    assert dated_run("anything") == Path("runs") / f"{day}-my-own-3"
    monkeypatch.delenv("MOLFLT_RUN")
    assert "--run" in error_of(capsys, *words)


def test_info_describes_a_run(shared_run, shared_data, capsys) -> None:
    found = json.loads(printed(capsys, "info", shared_run, "--json").out)
    best = best_of(shared_run)
    assert best is not None and found["best"] == best._asdict()
    assert (found["recipe"], found["steps"], found["max_steps"]) == ("is2re", 8, 8)
    assert found["data"]["root"] == str(shared_data) and found["model"]["dim"] == 16
    assert found["sets"]["train"]["systems"] == 22 and found["sets"]["val"]["systems"] == 13
    assert found["versions"]["molflt"] and "checkpoints/best.safetensors" in found["files"]
    learned = [p.numel() for p in load_run(shared_run)[0].parameters() if p.requires_grad]
    assert found["parameters"] == sum(learned)
    for part in ("data", "model"):  # the text omits null
        found[part] = {key: value for key, value in found[part].items() if value is not None}
    found["best"]["value"] = pytest.approx(found["best"]["value"], rel=1e-5)
    assert yaml.safe_load(printed(capsys, "info", shared_run).out) == found


# --- accumulated batches, patience, loggers and epochs --------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Returns 24 structures: 6 batches of 4, or 3 of 8."""
    return write_data(tmp_path_factory.mktemp("data"), train=24)


def steps_of(run, column):
    return [int(row["step"]) for row in table(run / "metrics.csv", column)]


def test_accumulated_batches_are_one_large_batch(data, tmp_path, monkeypatch):
    from molflt.data.batches import SizeBucketedBatchSampler

    def in_order(self, epoch=0):  # batches of 4 and of 8 then contain the same structures
        return self._cut(torch.arange(len(self.sizes)).numpy())

    monkeypatch.setattr(SizeBucketedBatchSampler, "batches", in_order)
    words = ["--trainer.precision=64-true", "--trainer.max_steps=7", "--trainer.val_every=3"]
    words += ["--trainer.log_every=2", "--trainer.ema_decay=0.5", "--task.weight_decay=0.1"]
    words += ["--trainer.gradient_clip=0.5", "--task.lr=1e-2"]
    start(data, tmp_path / "one", *words, "--data.batch_size=8")
    start(data, tmp_path / "parts", *words, "--trainer.accumulate=2")
    one, parts = weights(tmp_path / "one"), weights(tmp_path / "parts")
    for name, tensor in one.items():
        torch.testing.assert_close(parts[name], tensor, rtol=0, atol=1e-6)
    for column in ("lr", "train_loss", "train_mae_eV", "gradient_norm", "val_mae_eV"):
        assert logged(tmp_path / "parts", column) == pytest.approx(
            logged(tmp_path / "one", column), rel=1e-6
        )
        assert steps_of(tmp_path / "parts", column) == steps_of(tmp_path / "one", column)
    assert steps_of(tmp_path / "parts", "val_mae_eV") == [3, 6, 7]
    assert last_state(tmp_path / "parts")["global_step"] == 7


PATIENT = ["--trainer.max_steps=20", "--trainer.val_every=2", "--trainer.patience=3"]
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
    assert len(values) == best + 1 + 3 and steps_of(stopped, "val_mae_eV")[-1] < 20
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


def test_the_validation_that_stops_a_run_may_be_repeated(data, stopped, tmp_path):
    """The row of the last steps contains their learning rate and gradient, also when resumed."""
    run, step = tmp_path / "run", steps_of(stopped, "val_mae_eV")[-1]
    with at_step(step, power_cut, "validation_step"), pytest.raises(RuntimeError):
        start(data, run, *PATIENT, *WORSE)
    assert resume(run) == 0
    rows = [table(folder / "metrics.csv") for folder in (run, stopped)]
    for row in (*rows[0], *rows[1]):
        del row["atoms_per_s"]
    assert rows[0] == rows[1]


def test_more_patience_resumes_to_the_bit(data, stopped, tmp_path, capsys):
    run = shutil.copytree(stopped, tmp_path / "run")
    text = error_of(capsys, "train", f"--resume={run}", "--trainer.max_steps=30")
    assert "--trainer.patience" in text and "above 3" in text and "got 3" in text
    assert resume(run, "--trainer.patience=null") == 0
    assert steps_of(run, "val_mae_eV")[-1] == 20
    assert "stopped" not in last_state(run)["molflt"]
    start(data, tmp_path / "whole", *PATIENT[:2], *WORSE)
    assert_same_state(run, tmp_path / "whole")
    for column in ("val_mae_eV", "train_loss", "train_mae_eV"):
        assert logged(run, column) == logged(tmp_path / "whole", column)


def test_tensorboard_has_every_row_once_after_interruptions(data, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    words = ["--trainer.val_every=2", "--trainer.log_every=2", "--trainer.logger=tensorboard"]
    with at_step(1, power_cut), pytest.raises(RuntimeError, match="power cut"):
        start(data, run, *words[::2], "--trainer.log_every=1")  # starts again from step 0
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
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = tmp_path / "run"
    words = ["--trainer.max_steps=4", "--trainer.val_every=2", "--trainer.logger=wandb"]
    assert start(data, run, *words) == 0
    (file,) = (run / "wandb").glob("offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert b"val_mae_eV" in content and b"train_loss" in content
    run = run.rename(tmp_path / "moved")
    opened = Mock(side_effect=wandb.errors.UsageError("opened"))
    monkeypatch.setattr(wandb, "init", opened)
    with pytest.raises(ValueError, match="opened"):
        resume(run, "--trainer.max_steps=6")
    assert file.name == f"run-{opened.call_args.kwargs['id']}.wandb"  # one run to wandb


def test_wandb_without_a_login(data, tmp_path, monkeypatch, capsys):
    wandb = pytest.importorskip("wandb")
    refused = wandb.errors.UsageError("No API key configured.")
    monkeypatch.setattr(wandb, "init", Mock(side_effect=refused))
    words = ["--trainer.max_steps=4", "--trainer.logger=wandb"]
    line = error_of(capsys, "train", *arguments(data, tmp_path / "run", *words))
    assert "trainer.logger=wandb" in line and "No API key" in line and "wandb login" in line


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
    (tmp_path / "lr.yaml").write_text("task: {lr: 2.0}")
    words = ["--task.lr=1e-3", "--config", str(tmp_path / "steps.yaml"), "--trainer.max_epochs=1"]
    words += ["--task.schedule=constant", "--trainer.log_every=1"]
    words += [f"--config={tmp_path / 'lr.yaml'}"]  # files never override the command line
    assert start(shared_data, tmp_path / "run", *words) == 0
    assert trainer(tmp_path / "run")["max_steps"] == 6
    assert logged(tmp_path / "run", "lr") == pytest.approx([5e-4, *[1e-3] * 5])
