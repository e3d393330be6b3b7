"""A population from its meta-training to best values and use, on the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import cma
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_run import differences, error_of, last_state, logged, page_of, table

from molflt.commands.cli import main
from molflt.data.problems import generator_of
from molflt.optimizers import PopulationOptimizer
from molflt.optimizers.functions import Functions
from molflt.training.checkpoint import load_run, save_weights

SMALL = [
    *("--recipe=population_optimizer", "--model.dimension=3", "--model.dim=8", "--model.heads=2"),
    *("--model.ffn_dim=8", "--model.num_nodes=4", "--model.num_features=8", "--task.members=6"),
    *("--task.generations=5", "--task.window=3", "--task.warmup_steps=0", "--task.lr=0.02"),
    *("--data.batch_size=2", "--data.val_problems=3", "--trainer.accelerator=cpu"),
    *("--trainer.val_every=4", "--trainer.checkpoint_every=3", "--trainer.log_every=2"),
]


def trained(folder: Path, *more: str) -> Path:
    assert main(["train", f"--run={folder}", *SMALL, *more]) == 0
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("population") / "run", "--trainer.max_steps=8")


def test_a_resumed_run_has_the_same_weights(run: Path, tmp_path: Path) -> None:
    trained(tmp_path / "two", "--trainer.max_steps=5", "--task.schedule=inverse_sqrt")
    one = trained(tmp_path / "one", "--trainer.max_steps=8", "--task.schedule=inverse_sqrt")
    assert main(["train", "--resume", str(tmp_path / "two"), "--trainer.max_steps=8"]) == 0
    whole, resumed = (last_state(path)["state_dict"] for path in (one, tmp_path / "two"))
    assert differences(whole, resumed) == []
    assert len(logged(run, "val_log10_best")) == 2


def test_evaluation(run: Path, tmp_path: Path) -> None:
    words = ["evaluate", str(run), "--runs=3", "--evaluations=50", f"--out={tmp_path}"]
    assert main([*words, "--functions", "levy", "rastrigin_like"]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results) == ["levy", "rastrigin_like"]
    rows = table(tmp_path / "best_values.csv")
    last = {}
    for row in rows:
        last[row["function"], row["optimizer"], row["run"]] = row
    assert {row["evaluations"] for row in last.values()} == {"50"}
    for name, prefix in (("FLT", ""), ("cma-es", "cma-es_"), ("random", "random_")):
        found = [float(last["levy", name, str(i)]["log10_best"]) for i in range(3)]
        assert results["levy"][f"{prefix}log10_best"] == pytest.approx(np.mean(found))
        assert results["levy"][f"{prefix}log10_best_sd"] == pytest.approx(np.std(found, ddof=1))
    seed = int(last["levy", "FLT", "1"]["seed"])
    levy = Functions.draw("levy", 3, [generator_of(seed, 0)])
    optimizer, values = PopulationOptimizer.from_run(run, seed=seed), []
    while len(values) < 50:  # one run, by hand
        told = levy(optimizer.ask()[None])[0]
        optimizer.tell(told)
        values += told.tolist()
    found = float(last["levy", "FLT", "1"]["log10_best"])
    assert np.log10(min(values[:50])) == pytest.approx(found, abs=1e-4)  # float32 weights
    assert (tmp_path / "best_values.png").stat().st_size > 1000


def test_baselines(run: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """CMA-ES finds the minimum of a sphere, and requires its package."""
    words = ["evaluate", str(run), "--runs=2", f"--out={tmp_path}", "--functions=[sphere]"]
    assert main([*words, "--evaluations=900", "--dimension=2", "--members=9"]) == 0
    found = json.loads((tmp_path / "results.json").read_text())["sphere"]
    assert found["cma-es_log10_best"] < -8 and -4 < found["random_log10_best"] < 0
    monkeypatch.setitem(__import__("sys").modules, "cma", None)
    assert "pip install molflt[bench]" in error_of(capsys, *words)
    assert main([*words, "--evaluations=20", "--baselines=[random]"]) == 0
    for more, said in [
        (["--evaluations=5"], "--evaluations"),
        (["--functions=[spheer]"], "'spheer'"),
        (["--functions=[rosenbrock]", "--dimension=1"], "rosenbrock"),
    ]:
        assert said in error_of(capsys, *words, "--baselines=[]", *more)


def test_use_in_another_dimension(run: Path) -> None:
    """On a function of the package cma, which has the same interface."""
    optimizer = PopulationOptimizer.from_run(str(run), dimension=5, members=8, start=1.0)
    assert optimizer.ask().shape == (8, 5)
    for _ in range(12):
        optimizer.tell([cma.ff.sphere(x.numpy()) for x in optimizer.ask()])
    assert optimizer.evaluations == 96 and optimizer.generation == 12
    assert cma.ff.sphere(optimizer.best.position.numpy()) == pytest.approx(optimizer.best.value)
    model, _ = load_run(run)
    assert model.of_dimension(3) is model
    assert torch.equal(model.of_dimension(5).head.weight, model.head.weight)


def test_other_runs_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="a training run"):
        PopulationOptimizer.from_run(tmp_path)
    text = (run / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text.replace("population_optimizer", "poplation"))
    with pytest.raises(ValueError, match="poplation"):
        PopulationOptimizer.from_run(tmp_path)


def test_a_diverged_population_is_evaluated_and_shown(run: Path, tmp_path: Path) -> None:
    """Its values are not finite from some generation, and JSON cannot store them."""
    diverged = Path(shutil.copytree(run, tmp_path / "run"))
    file = diverged / "checkpoints" / "best.safetensors"
    weights = {name: 1e30 * tensor for name, tensor in load_file(file).items()}
    save_weights(file, weights, {}, {}, {})
    words = ["--runs=2", "--evaluations=12", "--functions=[levy]", "--baselines=[random]"]
    assert main(["evaluate", str(diverged), *words]) == 0
    (row,) = json.loads((diverged / "results.json").read_text()).values()
    assert row["random_log10_best"] is not None and row["random_log10_best_sd"] is not None
    ends = [float(one["log10_best"]) for one in table(diverged / "best_values.csv")]
    assert not any(np.isnan(ends))
    assert row["log10_best"] is None or np.isfinite(row["log10_best"])
    page = page_of(diverged)
    assert "What is missing" not in page and page.count("<img") == 2
