"""Runs of the recipes for texts, images and optimizers: what all of them have in common."""

from pathlib import Path

import pytest
from recipe_runs import CASES, evaluated, trained, words_of
from tiny_run import assert_same_state, logged, page_of, table

from molflt.commands.cli import main
from molflt.training.recipes import RECIPES

pytest.importorskip("tokenizers")
pytest.importorskip("sacrebleu")
pytest.importorskip("sklearn")
OPTIMIZERS = ("learned_optimizer", "population_optimizer")
NAMES = {"score_percent": "pearson_percent"}  # measure -> its name in results.json, if they differ
RESUMED = [name for name, case in CASES.items() if case.resumed]
SHORT = ["--trainer.val_every=3", "--task.warmup_steps=2", "--task.schedule=inverse_sqrt"]


def test_every_recipe_has_a_case() -> None:
    """Recipes for structures have their own tests of runs."""
    assert {case.recipe for case in CASES.values()} == RECIPES.keys() - {"is2re", "potential"}


@pytest.mark.parametrize("name", CASES)
def test_training_learns_and_evaluation_repeats_the_best_validation(name: str) -> None:
    case, run = CASES[name], trained(name)
    found = logged(run, f"val_{case.metric}")
    sign = 1 if case.metric.endswith("percent") else -1
    assert len(found) > 1 and sign * found[-1] > sign * case.bound
    columns = table(run / "metrics.csv")[0].keys()
    assert any(column.endswith("_per_s") for column in columns)
    assert any(column.startswith("train_") for column in columns)
    assert (run / "curve.png").stat().st_size > 1000
    if name not in OPTIMIZERS:
        result = evaluated(name)["val"][NAMES.get(case.metric, case.metric)]
        assert result == pytest.approx(sign * max(sign * one for one in found), rel=1e-4)
        assert ">Missing<" not in page_of(run)


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_has_the_same_weights(name: str, tmp_path: Path) -> None:
    """Resuming repeats the dropout, masks, augmentation, redraws and averages of every step."""
    for run, steps in (("whole", 6), ("half", 4)):
        more = [*SHORT, *CASES[name].resumed.split(), f"--trainer.max_steps={steps}"]
        words = words_of(name, tmp_path / run, *more)
        kept = f"--data.tokenizer={trained(name)}"  # learned subwords may differ
        assert main([kept if "data.pieces" in word else word for word in words]) == 0
    assert main(["train", f"--resume={tmp_path / 'half'}", "--trainer.max_steps=6"]) == 0
    assert_same_state(tmp_path / "half", tmp_path / "whole")
