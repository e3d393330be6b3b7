"""Training: loss, schedule, metrics, the run folder and the errors of ``molflt train``."""

import json
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_run import (
    arguments,
    differences,
    error_of,
    last_state,
    logged,
    start,
    structures,
    table,
    write_data,
)
from torch_geometric.data import Batch

from molflt.commands.cli import main
from molflt.commands.train import build_parser
from molflt.data.structures.store import StructureStore, write_store
from molflt.graph.regressor import EnergyRegressor
from molflt.tasks.is2re import IS2RETask, _displacement_error
from molflt.training.callbacks import _Averages
from molflt.training.checkpoint import load_run


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """A short run with everything at its defaults, as the command line does it."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = ["--trainer.max_steps=24", "--trainer.val_every=10", "--trainer.log_every=6"]
    assert main(["train", *arguments(data, folder, *words)]) == 0
    return folder


def energies(root, split, model):
    """Predictions and labels, one structure at a time."""
    store = StructureStore(root / f"{split}.safetensors")
    with torch.no_grad():
        out = [float(model(Batch.from_data_list([record]))["energy"]) for record in store]
    return np.array(out), np.array([float(record.y_relaxed) for record in store])


def test_run_folder(run):
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["model"]["dim"] == 16  # given
    assert saved["task"]["position_weight"] == 15.0  # a default
    assert saved["task"]["energy_mean"] is None and saved["data"]["max_atoms"] is None
    assert set(saved) == {*("run", "seed", "recipe", "init", "model", "data", "task", "trainer")}
    assert saved["recipe"] == "is2re"
    versions = json.loads((run / "versions.json").read_text())
    assert versions["torch"] == torch.__version__
    assert {"molflt", "python", "lightning", "torch-geometric", "platform", "started"} <= {
        *versions
    }
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert names == {"last.ckpt", "best.safetensors", "last.safetensors"}
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_metrics_file_has_units_and_every_row(run):
    rows = table(run / "metrics.csv")
    trained = [int(row["step"]) for row in rows if row["train_loss"]]
    validated = [int(row["step"]) for row in rows if row["val_mae_eV"]]
    assert trained == [6, 12, 18, 24]
    assert validated == [10, 20, 24]  # the last step in any case
    assert {"train_mae_eV", "train_ewt_percent", "val_ewt_percent", "val_mse_eV2"} <= {*rows[0]}
    for row in rows:
        assert all(np.isfinite(float(value)) for value in row.values() if value)


def test_best_weights_give_the_best_logged_mae(data, run):
    model, saved = load_run(run)
    assert not model.training and saved["data"]["root"] == str(data)
    predicted, labels = energies(data, "val_id", model)
    best = min(table(run / "metrics.csv", "val_mae_eV"), key=lambda row: float(row["val_mae_eV"]))
    assert np.abs(predicted - labels).mean() == pytest.approx(float(best["val_mae_eV"]), rel=1e-5)
    with safe_open(run / "checkpoints" / "best.safetensors", framework="pt") as file:
        header = file.metadata()
    assert header["step"] == best["step"] and header["val_mae_eV"] == best["val_mae_eV"]
    assert json.loads(header["model"]) == saved["model"]


def test_checkpoints_hold_the_normalizer_of_the_training_set(data, run):
    """Its spread less the energies of adsorbate elements; nothing is added to clean slabs."""
    store = StructureStore(data / "train.safetensors")
    model, _ = load_run(run, "last")
    counts = store.compositions(np.arange(len(store)), of_adsorbates=True)
    left = store.y_relaxed - counts @ model.element_energies.numpy()
    assert float(model.energy_mean) == 0
    assert float(model.energy_std) == pytest.approx(left.std(), abs=1e-12)


def test_slabs_that_are_not_there_cannot_be_repeated(tmp_path, capsys):
    for split, seed in (("train", 0), ("val_id", 1)):
        records = list(structures(9, seed))
        for record in records:
            record.pbc[:] = False
        write_store(tmp_path / f"{split}.safetensors", records)
    words = arguments(tmp_path, tmp_path / "run", "--task.repeat=0.5")
    line = error_of(capsys, "train", *words)
    assert "task.repeat=0.5" in line and "slabs" in line


@pytest.mark.parametrize(
    ("options", "column"),
    [
        (
            "--task.position_weight=0 --task.position_weight_final=0 --model.radial_basis=8 "
            "--model.descriptors=true --model.subsurface=false",
            "train_mae_eV",
        ),
        ("--task.position_weight=1", "train_displacement_mae_A"),
        (
            "--task.position_weight=1 --task.interpolate=0.5 --task.noise=0.02 "
            "--model.position=multiplicative --model.near_field=3 --model.periodic=reciprocal "
            '--model.position_options={"num_gaussians":4} '
            "--model.refinements=2 --model.move_atoms=true --model.mixing=auto",
            "train_displacement_mae_A",
        ),
    ],
)
def test_training_learns(data, tmp_path, options, column):
    words = ["--trainer.max_steps=160", "--task.lr=1e-2", "--trainer.log_every=20"]
    start(data, tmp_path / "run", *words, *options.split())
    trained = logged(tmp_path / "run", column)
    assert trained[-1] < 0.5 * trained[0]
    load_run(tmp_path / "run", "last")


def test_same_seed_same_weights_other_seed_other_weights(data, tmp_path):
    def weights(name, seed):
        words = [f"--seed={seed}", "--trainer.max_steps=5", "--model.dropout=0.3"]
        start(data, tmp_path / name, *words)
        return (tmp_path / name / "checkpoints" / "last.safetensors").read_bytes()

    assert weights("a", 4) == weights("b", 4) != weights("c", 5)


def test_averaged_weights_are_validated_and_kept(data, tmp_path, capsys):
    """EMA from hand, against the file; with decay 1 - 1e-9 the first step's weights stay."""
    words = ["--trainer.max_steps=12", "--trainer.val_every=6", "--task.lr=0.01"]
    start(data, tmp_path / "still", *words, "--trainer.ema_decay=0.999999999")
    said = "100% of the averaged weights, which are validated and kept, are those of the first step"
    assert f"{said}; use 0.75 or less, or more steps" in capsys.readouterr().err
    start(data, tmp_path / "plain", *words)
    start(data, tmp_path / "quick", *words, "--trainer.ema_decay=0.75")
    assert said[4:] not in capsys.readouterr().err
    maes, others = (logged(tmp_path / name, "val_mae_eV") for name in ("still", "plain"))
    assert maes[0] == pytest.approx(maes[1], rel=1e-4)
    assert others[0] != pytest.approx(others[1], rel=1e-3)
    # training itself is untouched by averaging
    assert logged(tmp_path / "still", "train_loss") == logged(tmp_path / "plain", "train_loss")
    model, _ = load_run(tmp_path / "still", "last")
    predicted, labels = energies(data, "val_id", model)
    assert np.abs(predicted - labels).mean() == pytest.approx(maes[1], rel=1e-5)


def test_averages_are_made_where_the_steps_are():
    """Lightning makes them before it moves the weights to their device."""
    averages, module = _Averages(0.9), pl.LightningModule()
    module.layer = torch.nn.Linear(2, 2)
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("meta")))
    averages.setup(trainer, module, "fit")
    assert {weight.device.type for weight in averages._average_model.parameters()} == {"meta"}


def test_validation_leaves_float64_and_its_averages_alone(data, tmp_path):
    words = ["--trainer.precision=64-true", "--trainer.ema_decay=0.5", "--trainer.max_steps=6"]
    for every in (2, 6):
        start(data, tmp_path / str(every), *words, f"--trainer.val_every={every}", "--task.lr=0.01")
    often, once = (last_state(tmp_path / name) for name in ("2", "6"))
    for part in ("state_dict", "current_model_state"):
        assert differences(often[part], once[part]) == []
        assert torch.float32 not in {tensor.dtype for tensor in once[part].values()}
    for name in ("best", "last"):
        kept = load_file(tmp_path / "6" / "checkpoints" / f"{name}.safetensors")
        assert torch.float64 in (dtypes := {tensor.dtype for tensor in kept.values()})
        assert torch.float32 not in dtypes


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
def test_precisions(data, tmp_path, precision):
    words = [f"--trainer.precision={precision}", "--trainer.max_steps=4"]
    assert start(data, tmp_path / "run", *words) == 0
    model, _ = load_run(tmp_path / "run")
    assert next(model.parameters()).dtype == torch.float32


def bare(seed, count=9):
    """Nine structures, of which the first ones have no relaxed positions."""
    for index, record in enumerate(structures(9, seed)):
        if index < count:
            record.pos_relaxed = torch.full_like(record.pos, float("nan"))
        yield record


def test_structures_without_relaxed_positions_train_on_energies_alone(tmp_path, capsys):
    write_store(tmp_path / "train.safetensors", bare(0))
    write_store(tmp_path / "val_id.safetensors", bare(1))
    assert start(tmp_path, tmp_path / "run", "--trainer.max_steps=4") == 0
    words = ["--task.interpolate=0.5", "--task.noise=0.1", "--trainer.max_steps=4"]
    line = error_of(capsys, "train", *arguments(tmp_path, tmp_path / "moved", *words))
    assert f"{tmp_path / 'train.safetensors'}: none of 9 structures has relaxed positions" in line
    assert "expected some for task.interpolate=0.5, which moves structures" in line
    assert not (tmp_path / "moved" / "checkpoints").exists()


def test_structures_that_cannot_start_nearer_are_counted(tmp_path, capsys):
    write_store(tmp_path / "train.safetensors", bare(0, count=2))
    write_store(tmp_path / "val_id.safetensors", bare(1))
    words = arguments(tmp_path, tmp_path / "run", "--trainer.max_steps=4")
    assert main(["train", *words, "--task.interpolate=0.5"]) == 0
    text = "2 of 9 structures have no relaxed positions; task.interpolate=0.5 has no effect on them"
    assert capsys.readouterr().err.count(text) == 1


def test_displacement_error_and_its_gradient_by_hand():
    """Nothing of fixed atoms, or of structures whose relaxed positions are unknown."""
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


def test_learning_rate_rises_and_falls_linearly():
    task = IS2RETask(torch.nn.Linear(1, 1), warmup_steps=4)
    factors = [task.lr_factor(step, 12) for step in range(13)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4:] == pytest.approx(np.linspace(1, 0, 9))
    assert IS2RETask(torch.nn.Linear(1, 1), warmup_steps=0).lr_factor(0, 10) == 1.0


def test_position_weight_falls_linearly(data, tmp_path, monkeypatch):
    seen, original = [], IS2RETask._position_weight
    noting = lambda *arguments: seen.append(original(*arguments)) or seen[-1]  # noqa: E731
    monkeypatch.setattr(IS2RETask, "_position_weight", noting)
    words = ["--trainer.max_steps=8", "--task.position_weight=9", "--task.position_weight_final=1"]
    start(data, tmp_path / "run", *words)
    assert seen == pytest.approx(np.linspace(9, 1, 9)[:8])


def test_energy_metrics_by_hand():
    """An error of exactly 0.02 eV is not within the threshold; the next smaller number is."""
    error = torch.tensor([0.02, -0.02, np.nextafter(0.02, 0), 0.5, 0.0], dtype=torch.float64)
    metrics = IS2RETask.sums.of(error, torch.zeros(5)).metrics()
    assert metrics == pytest.approx(
        {"mae_eV": 0.56 / 5, "ewt_percent": 40.0, "mse_eV2": (3 * 0.02**2 + 0.25) / 5}
    )
    parts = [IS2RETask.sums.of(part, torch.zeros(len(part))) for part in error.split([2, 3])]
    totals = torch.stack([sum(field) for field in zip(*parts, strict=True)])
    assert IS2RETask(torch.nn.Linear(1, 1)).summarize(totals) == pytest.approx(metrics)


def test_energy_metrics_are_summed_in_float64():
    """In float32 the sum of these errors would be off in the fourth digit."""
    energy = torch.full((2_000_000,), 0.1)
    mae = IS2RETask.sums.of(energy, torch.zeros(2_000_000)).metrics()["mae_eV"]
    assert mae == pytest.approx(float(np.float32(0.1)), rel=1e-12)
    with pytest.raises(ValueError, match=r"one shape; got \(3, 1\) and \(3,\)"):
        IS2RETask.sums.of(torch.zeros(3, 1), torch.zeros(3))


def test_redraw_changes_features_at_its_steps_only(data, tmp_path, monkeypatch):
    steps = []
    original = EnergyRegressor.redraw_

    def feature_map(model):
        return model.stack.blocks[0].attention.feature_map

    def noting(self, generator=None):
        original(self, generator)
        steps.append(feature_map(self).projection.matrix())

    monkeypatch.setattr(EnergyRegressor, "redraw_", noting)
    words = ["--trainer.max_steps=9", "--task.redraw_every=4"]
    start(data, tmp_path / "run", *words)
    _, *steps = steps  # the first is of a copy: whether anything is random
    assert len(steps) == 2 and not torch.equal(*steps)  # before steps 4 and 8
    model, _ = load_run(tmp_path / "run", "last")
    assert torch.equal(feature_map(model).projection.matrix(), steps[-1])


def test_a_folder_with_checkpoints_is_not_overwritten(data, run, capsys):
    before = (run / "checkpoints" / "last.ckpt").read_bytes()
    line = error_of(capsys, "train", *arguments(data, run))
    assert "holds checkpoints of an earlier run" in line and f"--resume {run}" in line
    assert (run / "checkpoints" / "last.ckpt").read_bytes() == before


def test_a_configuration_of_ones_own_is_not_overwritten(data, tmp_path, capsys):
    """Whether it is the --config or not, and whether a start has been there before or not."""
    config = tmp_path / "run" / "config.yaml"
    config.parent.mkdir()
    config.write_text(text := "# careful notes\ntrainer:\n  max_steps: 4\n")
    words = arguments(data, config.parent)
    assert f"{config}: of no run, and would be" in error_of(capsys, "train", *words)
    (config.parent / "versions.json").write_text("{}")
    line = error_of(capsys, "train", *words, f"--config={config.parent}/../run/config.yaml")
    assert f"--run {config.parent}: its config.yaml is what --config reads" in line
    assert config.read_text() == text


def test_a_picture_that_cannot_be_drawn_is_named(data, tmp_path, capsys):
    (tmp_path / "run" / "curve.png").mkdir(parents=True)
    assert start(data, tmp_path / "run", "--trainer.max_steps=1") == 0
    assert f"{tmp_path / 'run' / 'curve.png'}: not drawn: " in capsys.readouterr().err


@pytest.mark.parametrize("split", ["train", "val_id"])
@pytest.mark.parametrize("normalizer", [[], ["--task.energy_mean=0", "--task.energy_std=1"]])
def test_missing_labels_name_file_and_sid(tmp_path, capsys, split, normalizer):
    write_data(tmp_path, 6, 6)
    records = list(structures(6, first_sid=40))
    records[3].y_relaxed = torch.full((1,), float("nan"), dtype=torch.float64)
    (tmp_path / f"{split}.safetensors").unlink()
    write_store(tmp_path / f"{split}.safetensors", records)
    words = arguments(tmp_path, tmp_path / "run", "--trainer.max_steps=9", *normalizer)
    line = error_of(capsys, "train", *words)
    assert f"{split}.safetensors: sid 43: y_relaxed must be a finite energy" in line


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--trainer.max_steps=0", "option --trainer.max_steps; expected int in [1, "),
        ("--task.lr=0", "option --task.lr; expected float in (0, "),
        ("--task.interpolate=2", "option --task.interpolate; expected float in [0, 1]; got 2"),
        ("--task.noise=0.1", "got interpolate=0.0, noise=0.1"),
        (
            "--task.redraw_every=2 --model.mixing=softmax --model.position=none "
            "--model.position_options=null --model.num_features=null",
            "task.redraw_every=2: this model has no random features; leave it out",
        ),
        ("--model.near_field=3", "corrects a kernel that multiplies; got position='spectral'"),
        ("--data.batch_size=0", "option --data.batch_size; expected int in [1, "),
        ("--trainer.precision=8", "trainer.precision"),
        ("--trainer.max_step=8", "did you mean --trainer.max_steps?"),
        ("--data.root=absent", "absent"),
        ("--data.max_atoms=10", "max_atoms=10 "),
    ],
)
def test_bad_options(data, tmp_path, capsys, word, message):
    words = arguments(data, tmp_path / "run", *word.split())
    assert message in error_of(capsys, "train", *words)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_print_config_is_a_configuration(data, tmp_path, capsys):
    words = [*arguments(data, tmp_path / "run", "--model.dim=24"), "--print_config"]
    assert main(["train", *words]) == 0
    (tmp_path / "config.yaml").write_text(capsys.readouterr().out)
    parsed = build_parser().parse_args([f"--config={tmp_path / 'config.yaml'}"])
    assert parsed.model.dim == 24 and str(parsed.data.root) == str(data)


def test_weights_that_cannot_be_loaded_are_named(run, tmp_path):
    path = tmp_path / "other.safetensors"
    weights = EnergyRegressor(**yaml.safe_load((run / "config.yaml").read_text())["model"])
    state = weights.state_dict()
    name = "readout.mlp.0.weight"
    save_file({**state, name: torch.zeros(8, 16)}, path)
    with pytest.raises(ValueError, match=rf"'{name}'.* expects \(16, 16\); got \(8, 16\)"):
        load_run(run, str(path))
    save_file({key: value for key, value in state.items() if key != name}, path)
    with pytest.raises(ValueError, match=rf"'{name}'.* got no such key"):
        load_run(run, str(path))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        load_run(run, str(path))
    with pytest.raises(FileNotFoundError, match=r"config\.yaml: no such file"):
        load_run(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no such checkpoint; there: none"):
        load_run(run, str(tmp_path / "none" / "absent.safetensors"))
    with pytest.raises(
        FileNotFoundError, match=r"lats: no such checkpoint; expected best, last, or"
    ):
        load_run(run, "lats")
