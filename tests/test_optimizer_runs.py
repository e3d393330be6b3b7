import shutil
from pathlib import Path

import cma
import numpy as np
import pytest
import torch
from recipe_runs import trained
from safetensors.torch import load_file
from tiny_run import error_of, page_of, results_of, table
from token_files import write_idx

from molflt.data.optimizers import generator_of
from molflt.evaluation.optimizers import final_loss
from molflt.files import save_tensors
from molflt.optimizers import PopulationOptimizer
from molflt.optimizers.functions import Functions
from molflt.optimizers.problems import UNSEEN
from molflt.training.checkpoint import load_run

# --- optimizers of single coordinates -----------------------------------------------------------


def test_evaluation_with_adam(tmp_path: Path, monkeypatch) -> None:
    run = trained("learned_optimizer")
    monkeypatch.chdir(run)  # the folder is named in tables, not "."
    images = write_idx(tmp_path / "images")
    words = ["--steps", "12", "--repeats", "2", "--data", images, "--rates", "[0.01,0.1]"]
    results = results_of(Path(), *words, out=tmp_path)
    assert list(results) == [*UNSEEN, "image_network", "image_convolutions"]
    rows = table(tmp_path / "curves.csv")
    assert len(rows) == 5 * 2 * 2 * 12 and (tmp_path / "optimizations.png").stat().st_size > 10_000
    assert (tmp_path / "encoding.png").stat().st_size > 1000
    for task, found in results.items():
        own = [r for r in rows if r["task"] == task and float(r["step"]) == 11]
        ends = [float(r["loss"]) for r in own if r["optimizer"] == run.name]
        assert found["final_loss"] == pytest.approx(np.exp(np.mean(np.log(ends))), rel=1e-6)
        tuned = {float(r["tuned"]) for r in own if r["optimizer"] == "Adam"}
        assert {found["adam_lr"]} == tuned <= {0.01, 0.1}
    assert "mean log(f / f₀)" in page_of(run)


def test_final_losses() -> None:
    curves = np.ones((2, 20))
    curves[:, -2:] = [[1.0, 3.0], [100.0, 400.0]]
    end, spread = final_loss(curves)
    assert end == pytest.approx(np.sqrt(2 * 250))
    assert spread == pytest.approx(np.std(np.log10([2, 250]), ddof=1))
    curves[0, -1] = np.inf
    assert final_loss(curves)[0] == np.inf


# --- populations --------------------------------------------------------------------------------


def test_evaluation_of_populations(tmp_path: Path) -> None:
    run = trained("population_optimizer")
    words = ["--runs=3", "--evaluations=50", "--functions", "levy", "rastrigin_like"]
    results = results_of(run, *words, out=tmp_path)
    assert list(results) == ["levy", "rastrigin_like"]
    rows = table(tmp_path / "best_values.csv")
    last = {(row["function"], row["optimizer"], row["run"]): row for row in rows}
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


def test_baselines(tmp_path: Path, monkeypatch, capsys) -> None:
    """CMA-ES finds the minimum of a sphere, and the command names its missing package."""
    run, words = trained("population_optimizer"), ["--runs=2", "--functions=[sphere]"]
    more = ("--evaluations=900", "--dimension=2", "--members=9")
    found = results_of(run, *words, *more, out=tmp_path)["sphere"]
    assert found["cma-es_log10_best"] < -8 and -4 < found["random_log10_best"] < 0
    monkeypatch.setitem(__import__("sys").modules, "cma", None)
    assert "pip install molflt[bench]" in error_of(capsys, "evaluate", run, *words)


def test_use_in_another_dimension() -> None:
    """Minimizes a function of the package `cma`."""
    run = trained("population_optimizer")
    optimizer = PopulationOptimizer.from_run(str(run), dimension=5, members=8, start=1.0)
    assert optimizer.ask().shape == (8, 5)
    for _ in range(12):
        optimizer.tell([cma.ff.sphere(x.numpy()) for x in optimizer.ask()])
    assert optimizer.evaluations == 96 and optimizer.generation == 12
    assert cma.ff.sphere(optimizer.best.position.numpy()) == pytest.approx(optimizer.best.value)
    model, _ = load_run(run)
    assert model.of_dimension(3) is model
    assert torch.equal(model.of_dimension(5).head.weight, model.head.weight)


def test_a_diverged_population_is_evaluated_and_shown(tmp_path: Path) -> None:
    """The values of the population become infinite, which JSON cannot store."""
    run = shutil.copytree(trained("population_optimizer"), tmp_path / "run")
    file = run / "checkpoints" / "best.safetensors"
    weights = {name: 1e30 * tensor for name, tensor in load_file(file).items()}
    save_tensors(file, weights, {})
    words = ["--runs=2", "--evaluations=12", "--functions=[levy]", "--baselines=[random]"]
    (row,) = results_of(run, *words).values()
    assert row["random_log10_best"] is not None and row["random_log10_best_sd"] is not None
    ends = [float(one["log10_best"]) for one in table(run / "best_values.csv")]
    assert not any(np.isnan(ends))
    assert row["log10_best"] is None or np.isfinite(row["log10_best"])
    page = page_of(run)
    assert ">Missing<" not in page and page.count("<img") == 2
