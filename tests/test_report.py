import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.torch import save_file
from tiny_run import flip, last_state, page_of, printed, start, structures, table, weights

import molflt
from molflt.commands.cli import main
from molflt.commands.compare import _marked, standard_error
from molflt.data.structures.store import write_store
from molflt.evaluation.results import write_csv
from molflt.tasks.is2re import IS2RETask
from molflt.training.checkpoint import load_run

STEPS = ["--trainer.max_steps=8", "--trainer.val_every=4", "--trainer.log_every=2"]
HOSTILE = "<script>alert(1)</script>"
VOID = {"meta", "img", "br", "link"}


@pytest.fixture(scope="module")
def runs(shared_data, shared_run, tmp_path_factory) -> Path:
    """Returns the folder of two evaluated runs that differ in width and learning rate."""
    root = tmp_path_factory.mktemp("runs")
    shutil.copytree(shared_run, root / "narrow")
    start(shared_data, root / "wide", *STEPS, "--model.dim=24", "--task.lr=1e-2")
    for name in ("narrow", "wide"):
        words = ["--splits", "val_id", "train", "--device=cpu"]
        assert main(["evaluate", str(root / name), *words]) == 0
    return root


class Page(HTMLParser):
    """Parses a page, and checks that elements are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs) -> None:
        self.elements.append((tag, dict(attrs)))
        self.words.setdefault(tag, []).append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        for tag in set(self.open):
            self.words[tag][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [own for name, own in self.elements if name == tag]


def test_complete_run(runs, capsys) -> None:
    whole = page_of(runs / "narrow")
    capsys.readouterr()
    assert page_of(runs / "narrow") == whole and capsys.readouterr().err == ""
    page = Page(whole)
    assert page.words["h1"] == ["Run narrow"]
    names = ["Overview", "Results", "Training", "Figures of the evaluation"]
    more = ["The worst predictions", "Settings", "Versions"]
    assert page.words["h2"] == [*names, *more]
    links = [own["href"] for own in page.all("a")]
    assert links == [f"#{own['id']}" for own in page.all("h2")]
    for split, row in json.loads((runs / "narrow/results.json").read_text()).items():
        assert split in page.words["th"]
        for value in (f"{row['mae_eV']:.4f} ±", f"{row['baseline_mae_eV']:.4f}"):
            assert any(cell.startswith(value) for cell in page.words["td"])
    assert "MAE / eV ↓" in page.words["th"] and "EwT / % ↑" in page.words["th"]
    assert all(caption for caption in page.words["caption"])
    assert len(page.words["caption"]) == len(page.all("table"))
    # the page is self-contained
    images = page.all("img")
    assert len(images) == 3  # curve, parity, encoding
    assert all(own["alt"] and len(own["alt"]) > 30 for own in images)
    assert all((own["src"] or "").startswith("data:image/png;base64,") for own in images)
    named = {name for _, own in page.elements for name in own}
    assert not {"onload", "onclick", "srcset", "action", "style", "background"} & named
    assert not {"script", "iframe", "object", "embed", "link", "form", "base"} & page.words.keys()
    assert "url(" not in page.words["style"][0] and "@import" not in page.words["style"][0]
    (policy,) = [own["content"] for own in page.all("meta") if own.get("http-equiv")]
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    # the worst predictions have the largest errors
    rows = table(runs / "narrow" / "predictions.csv")
    rows.sort(key=lambda row: -abs(float(row["error_eV"])))
    place = page.words["th"].index(f"{rows[0]['adsorbate']} on {rows[0]['slab']}")
    names = [f"{row['adsorbate']} on {row['slab']}" for row in rows[:15]]
    assert page.words["th"][place : place + 15] == names
    for row in rows[:15]:
        assert f"{float(row['error_eV']):+.3f}" in page.words["td"]


def test_the_worst_predictions_have_textual_sids(runs, tmp_path) -> None:
    run = Path(shutil.copytree(runs / "narrow", tmp_path / "run"))
    rows = [{**row, "name": f"ag-{i}"} for i, row in enumerate(table(run / "predictions.csv"))]
    write_csv(run / "predictions.csv", rows)
    worst = max(rows, key=lambda row: abs(float(row["error_eV"])))
    assert worst["name"] in Page(page_of(run)).words["td"]


def changed(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        text = (run / name).read_text()
        (run / name).write_text(re.sub(old, new, text, flags=re.M))

    return change


def cut(name: str, size: int = 60) -> Callable[[Path], None]:
    return lambda run: (run / name).write_bytes((run / name).read_bytes()[:size])


@pytest.mark.parametrize(
    ("damage", "message", "absent"),
    [
        (changed("config.yaml", "max_steps: 8", "max_steps: 9"), "8 of 9 steps", ""),
        (lambda run: (run / "results.json").unlink(), "not evaluated", "Results"),
        (cut("results.json"), "results.json: ", "Results"),
        (cut("predictions.csv", 250), "predictions.csv: ", "The worst predictions"),
        (changed("metrics.csv", "^8,.*", "8,0.5"), "metrics.csv: expected CSV with", ""),
        (changed("predictions.csv", "natoms", "atoms"), "column 'natoms'", "The worst"),
        (lambda run: flip(run / "checkpoints/best.safetensors"), "best.safetensors: ", ""),
        (lambda run: shutil.rmtree(run / "checkpoints"), "last.ckpt: missing", ""),
    ],
)
def test_missing_parts_are_named_and_others_are_shown(
    runs, damage, message, absent, tmp_path, capsys
):
    run = shutil.copytree(runs / "narrow", tmp_path / "run")
    damage(run)
    capsys.readouterr()
    page = Page(page_of(run))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"molflt: warning: {run}") and message in line
    assert f"{run}: missing: {run}" not in line  # each part has a name already
    assert page.words["h2"][0] == "Missing"
    assert any(message in item for item in page.words["li"])
    titles = " ".join(page.words["h2"])
    assert not absent or absent not in titles
    assert "Versions" in titles and "Settings" in titles
    assert len(page.all("img")) >= 1


def test_text_from_data_is_escaped(runs, tmp_path) -> None:
    run = shutil.copytree(runs / "narrow", tmp_path / HOSTILE.replace("/", "$x^$"))
    for name in ("predictions.csv", "results.json"):
        changed(name, "val_id", f"{HOSTILE}&amp;")(run)
    (run / "versions.json").write_text(json.dumps({HOSTILE: "'\"><img src=x>"}))
    changed("config.yaml", "root: .*", f"root: {HOSTILE}")(run)
    page = Page(page_of(run))
    assert "script" not in page.words
    assert all((own["src"] or "").startswith("data:") for own in page.all("img"))
    assert page.words["h1"] == [f"Run {run.name}"]
    assert any(f"root {HOSTILE}" in cell for cell in page.words["td"])
    assert any(f"{HOSTILE}&amp;" in cell for cell in page.words["th"])


# --- comparisons --------------------------------------------------------------------------------


def compare(capsys, *words):
    return printed(capsys, "compare", *words).out


def rows_of(text):
    """Returns the rows of a table by their first cell; two blanks separate cells."""
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
    assert rows["steps"] == ["8", "8"] and all(cell.endswith(" s") for cell in rows["time"])
    assert "different" not in text and "not evaluated" not in text
    # the best of a row has a star
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
        f"{min(best):.4f} at {4 * (1 + best.index(min(best)))}"
    )
    assert rows["val_id n"] == ["13", "13"]  # neither better nor worse


def test_json_and_pictures(runs, capsys, tmp_path):
    out = tmp_path / "out"
    found = json.loads(compare(capsys, runs / "narrow", runs / "wide", "--json", f"--out={out}"))
    assert found == json.loads((out / "comparison.json").read_text())
    assert found["differences"]["model.dim"] == {"narrow": 16, "wide": 24}
    own = found["runs"]["wide"]
    assert own["steps"] == 8 and own["recipe"] == "is2re" and own["measure"] == "val_mae_eV"
    assert own["results"] == json.loads((runs / "wide" / "results.json").read_text())
    assert own["standard_errors"].keys() == {"val_id", "train"}
    assert own["seconds"] == pytest.approx(last_state(runs / "wide")["molflt"]["seconds"])
    assert 0 < own["seconds"] < 600
    assert (out / "curves.png").stat().st_size > 5000
    assert not list(runs.glob("*/comparison.json"))


@pytest.mark.parametrize(
    ("name", "best"),
    [("bleu", 1), ("adwt_percent", 1), ("residue_perplexity", 0), ("final_loss", 0)],
)
def test_the_best_of_metrics_that_only_evaluate_computes_has_a_star(name, best):
    cells = _marked([SimpleNamespace(metrics={})], name, [1.5, 2.5], ["", ""])
    assert ["*" in cell for cell in cells] == [best == 0, best == 1]


def test_rows_of_metrics_with_long_names_have_different_names(runs, tmp_path, capsys):
    names = [shutil.copytree(runs / name, tmp_path / name) for name in ("narrow", "wide")]
    for run in names:
        changed("results.json", "mae_eV", "energy_mae_meV_per_atom")(run)
    rows = rows_of(compare(capsys, *names))
    assert all(f"{split} baseline_energy_mae_meV_per_atom" in rows for split in ("val_id", "train"))


def test_shares_of_zero_and_one_have_no_standard_error():
    for share, error in ((0.0, None), (100.0, None), (50.0, pytest.approx(100 * (1 / 48) ** 0.5))):
        row = {"ewt_percent": share, "n": 12}
        run = SimpleNamespace(results={"val_id": row}, errors={}, metrics=IS2RETask.metrics)
        assert standard_error(run, "val_id", "ewt_percent") == error


def test_runs_on_other_data_or_without_an_evaluation_are_named(runs, shared_data, capsys, tmp_path):
    root = tmp_path / "data"
    write_store(root / "train.safetensors", structures(9, seed=3))
    shutil.copy(shared_data / "val_id.safetensors", root)
    start(root, tmp_path / "other", *STEPS)
    text = compare(capsys, runs / "narrow", tmp_path / "other", runs / "wide")
    line = next(line for line in text.splitlines() if line.startswith("different data"))
    assert all(name in line for name in ("narrow", "other", "wide")) and line.count("|") == 1
    assert "validated on" not in text  # the same systems, in another place
    assert f"not evaluated: {tmp_path / 'other'}" in text
    assert [*rows_of(text)["val_id mae_eV"]][1] == "-" and "; ± standard error" in text
    shutil.copytree(tmp_path / "other", tmp_path / "again")
    assert "±" not in compare(capsys, tmp_path / "other", tmp_path / "again")


def test_results_of_other_weights_are_left_out(runs, tmp_path, capsys):
    """The page of a run and models loaded from it also leave them out."""
    wide = shutil.copytree(runs / "wide", tmp_path / "wide")
    before = page_of(wide)
    assert ">Results<" in before and "omitted" not in before and molflt.load(wide).trained.results
    tensors = weights(wide, "best")
    tensors["readout.mlp.0.weight"] += 0.1
    save_file(tensors, wide / "checkpoints" / "best.safetensors")  # the file lacks a digest
    trained = molflt.load(wide).trained
    assert not trained.results and "different weights" in trained.unmeasured
    text = compare(capsys, runs / "narrow", wide)
    assert f"omitted: {wide / 'results.json'}" in text and f"not evaluated: {wide}" in text
    assert rows_of(text)["val_id mae_eV"][1] == "-"
    page = page_of(wide)
    assert ">Results<" not in page and "Figures of the evaluation" not in page
    assert "different weights" in page and "no parity" not in page
