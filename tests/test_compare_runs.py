"""``molflt compare``: a table, JSON and pictures of runs."""

import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_run import error_of, last_state, page_of, start, structures, table, write_data

from molflt.commands.cli import main
from molflt.data.structures.store import write_store
from molflt.evaluation.runs import standard_error
from molflt.plots.training import best_place
from molflt.tasks.is2re import IS2RETask
from molflt.training.checkpoint import load_run

STEPS = ["--trainer.max_steps=6", "--trainer.val_every=3", "--trainer.log_every=3"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Returns the folder of two evaluated runs that differ in width and learning rate."""
    root = tmp_path_factory.mktemp("compare")
    data = write_data(root / "data")
    start(data, root / "narrow", *STEPS)
    start(data, root / "wide", *STEPS, "--model.dim=24", "--task.lr=1e-2")
    for name in ("narrow", "wide"):
        assert main(["evaluate", str(root / name), "--splits", "val_id", "train"]) == 0
    return root


def compare(capsys, *words):
    capsys.readouterr()
    assert main(["compare", *map(str, words)]) == 0
    return capsys.readouterr().out


def rows_of(text):
    """Returns the rows of a table, first cell -> others; two blanks separate cells."""
    lines = (line.split("  ") for line in text.splitlines())
    cells = ([cell.strip() for cell in line if cell.strip()] for line in lines)
    return {line[0]: line[1:] for line in cells if line}


def test_the_table_contains_differences_and_results(runs, capsys):
    text = compare(capsys, runs / "narrow", runs / "wide")
    rows = rows_of(text)
    assert rows["narrow"] == ["wide"]
    keys = [key for key in rows if "." in key.split()[0]]
    assert keys == ["model.dim", "task.lr"]
    assert rows["model.dim"] == ["16", "24"] and rows["task.lr"] == ["0.0003", "0.01"]
    sizes = [load_run(runs / name)[0] for name in ("narrow", "wide")]
    count = [f"{sum(p.numel() for p in model.parameters()):,}" for model in sizes]
    assert rows["parameters"] == count
    assert rows["steps"] == ["6", "6"] and all(cell.endswith(" s") for cell in rows["time"])
    assert "different" not in text and "not evaluated" not in text


def test_the_best_of_a_row_has_a_star(runs, capsys):
    rows = rows_of(compare(capsys, runs / "narrow", runs / "wide"))
    found = [json.loads((runs / name / "results.json").read_text()) for name in ("narrow", "wide")]
    for split in ("val_id", "train"):
        values = [one[split]["mae_eV"] for one in found]
        cells = rows[f"{split} mae_eV"]
        assert [f"{value:.4f}" for value in values] == [
            cell.split()[0].strip("*") for cell in cells
        ]
        assert ["*" in cell for cell in cells] == [value == min(values) for value in values]
    # the standard error of |error| over the systems
    errors = [float(row["error_eV"]) for row in table(runs / "wide" / "predictions.csv")]
    spread = np.abs(errors[:13]).std(ddof=1) / 13**0.5
    assert rows["val_id mae_eV"][1].endswith(f" ± {spread:.4f}")
    best = [float(row["val_mae_eV"]) for row in table(runs / "wide" / "metrics.csv", "val_mae_eV")]
    assert rows["val mae_eV, best"][1].replace("*", "") == (
        f"{min(best):.4f} at {3 * (1 + best.index(min(best)))}"
    )
    assert rows["val_id n"] == ["13", "13"]  # neither better nor worse


def test_json_and_pictures(runs, capsys, tmp_path):
    out = tmp_path / "out"
    found = json.loads(compare(capsys, runs / "narrow", runs / "wide", "--json", f"--out={out}"))
    assert found == json.loads((out / "comparison.json").read_text())
    assert found["differences"]["model.dim"] == {"narrow": 16, "wide": 24}
    own = found["runs"]["wide"]
    assert own["steps"] == 6 and own["recipe"] == "is2re" and own["measure"] == "val_mae_eV"
    assert own["results"] == json.loads((runs / "wide" / "results.json").read_text())
    share = own["results"]["val_id"]["ewt_percent"] / 100
    expected = 100 * (share * (1 - share) / 13) ** 0.5
    errors = own["standard_errors"]["val_id"]  # without that of a share of 0, which is not known
    assert errors.get("ewt_percent", 0.0) == pytest.approx(expected)
    assert own["seconds"] == pytest.approx(last_state(runs / "wide")["molflt"]["seconds"])
    assert 0 < own["seconds"] < 600
    for name in ("curves.png", "metrics.png"):
        assert (out / name).stat().st_size > 5000
    assert not list(runs.glob("*/comparison.json"))


def test_shares_of_zero_and_one_have_no_standard_error():
    for share, error in ((0.0, None), (100.0, None), (50.0, pytest.approx(100 * (1 / 48) ** 0.5))):
        row = {"ewt_percent": share, "n": 12}
        run = SimpleNamespace(results={"val_id": row}, errors={}, metrics=IS2RETask.metrics)
        assert standard_error(run, "val_id", "ewt_percent") == error


def test_validations_with_a_value_that_is_not_finite_are_never_the_best():
    """A column without values is ignored."""
    nan = math.nan
    columns = {"step": [2, 2, 4, 6, 8], "val_top1_percent": [nan, 50, 99, 70, nan]}
    columns |= {"train_loss": [1, nan, nan, nan, 1], "val_top5_percent": [nan] * 5}
    columns |= {"val_cross_entropy": [nan, 1, nan, 2, 3]}
    columns = {name: np.array(values, dtype=float) for name, values in columns.items()}
    assert best_place(columns, "val_top1_percent", largest_is_best=True) == 3
    assert best_place(columns, "val_top1_percent", largest_is_best=False) == 1
    assert best_place(columns, "val_top5_percent", largest_is_best=True) is None
    assert best_place({}, "val_mae_eV", largest_is_best=False) is None


def test_runs_on_other_data_or_without_an_evaluation_are_named(runs, capsys, tmp_path):
    root = tmp_path / "data"
    write_store(root / "train.safetensors", structures(9, seed=3))
    shutil.copy(runs / "data" / "val_id.safetensors", root)
    start(root, tmp_path / "other", *STEPS)
    text = compare(capsys, runs / "narrow", tmp_path / "other", runs / "wide")
    names = [f"{runs.name}/narrow", f"{tmp_path.name}/other", f"{runs.name}/wide"]
    line = next(line for line in text.splitlines() if line.startswith("different data"))
    for name in names:
        assert name.rpartition("/")[2] in line
    assert line.count("|") == 1
    assert "validated on" not in text  # the same systems, in another place
    assert f"not evaluated: {tmp_path / 'other'}" in text
    assert [*rows_of(text)["val_id mae_eV"]][1] == "-"


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("results.json", lambda text: text[: len(text) // 2], "JSON"),
        ("predictions.csv", lambda _: "split,error_eV\nval_id,x\n", "error_eV"),
        ("metrics.csv", lambda _: "loss\n1\n", "step"),
    ],
)
def test_damaged_files_are_named(runs, capsys, tmp_path, name, change, said):
    shutil.copytree(runs / "narrow", tmp_path / "run")
    file = tmp_path / "run" / name
    file.write_text(change(file.read_text()))
    text = error_of(capsys, "compare", str(runs / "wide"), str(tmp_path / "run"))
    assert said in text and str(file) in text


def test_results_of_other_weights_are_left_out(runs, tmp_path, capsys):
    """The page of a run also leaves them out."""
    wide = tmp_path / "wide"
    shutil.copytree(runs / "wide", wide)
    before = page_of(wide)
    assert ">Results<" in before and "omitted" not in before
    shutil.copy(
        wide / "checkpoints" / "last.safetensors", wide / "checkpoints" / "best.safetensors"
    )
    text = compare(capsys, runs / "narrow", wide)
    assert f"omitted: {wide / 'results.json'}" in text and f"not evaluated: {wide}" in text
    assert rows_of(text)["val_id mae_eV"][1] == "-"
    page = page_of(wide)
    assert ">Results<" not in page and "Pictures of the evaluation" not in page
    assert "other weights" in page and "no parity" not in page
    (wide / "results_of.json").write_text("[]")
    line = error_of(capsys, "compare", str(runs / "narrow"), str(wide))
    assert line.startswith(str(wide / "results_of.json"))
