"""``molflt report``: the page of a complete, unfinished or damaged run."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from tiny_run import page_of, start, table, write_data

from molflt.commands.cli import main
from molflt.evaluation.page import Page as Contents
from molflt.evaluation.page import _repeat

STEPS = ["--trainer.max_steps=6", "--trainer.val_every=3", "--trainer.log_every=3"]
HOSTILE = "<script>alert(1)</script>"
VOID = {"meta", "img", "br", "link"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("report")
    assert start(write_data(root / "data"), root / "run", *STEPS) == 0
    assert main(["evaluate", str(root / "run"), "--splits", "val_id", "train", "--device=cpu"]) == 0
    return root / "run"


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture(scope="module")
def whole(trained) -> str:
    return page_of(trained)


@pytest.fixture
def quick(monkeypatch) -> None:
    """Replaces drawn pictures by empty ones."""

    def blank(self, text, draw):
        return [{"src": "data:,", "width": 2, "text": text}]

    monkeypatch.setattr(Contents, "drawn", blank)


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


def test_complete_run(trained, whole, capsys) -> None:
    assert page_of(trained) == whole and len(whole) < 3e6
    assert capsys.readouterr().err == ""
    page = Page(whole)
    assert page.words["h1"] == ["Run run"]
    names = ["Overview", "Results", "Training", "Pictures of the evaluation"]
    more = ["The worst predictions", "Settings", "Versions and files"]
    assert page.words["h2"] == [*names, *more, "How to repeat it"]
    links = [own["href"] for own in page.all("a")]
    assert links == [f"#{own['id']}" for own in page.all("h2")]
    for split, row in json.loads((trained / "results.json").read_text()).items():
        assert split in page.words["th"]
        for value in (f"{row['mae_eV']:.4f} ±", f"{row['baseline_mae_eV']:.4f}"):
            assert any(cell.startswith(value) for cell in page.words["td"])
    assert "MAE / eV ↓" in page.words["th"] and "EwT / % ↑" in page.words["th"]
    assert all(caption for caption in page.words["caption"])
    assert len(page.words["caption"]) == len(page.all("table"))


def test_the_page_is_self_contained(whole) -> None:
    page = Page(whole)
    images = page.all("img")
    assert len(images) == 1 + 1 + 1 + 6 + 1  # curve, parity, groups, worst, encoding
    assert all(own["alt"] and len(own["alt"]) > 30 for own in images)
    assert all((own["src"] or "").startswith("data:image/png;base64,") for own in images)
    named = {name for _, own in page.elements for name in own}
    assert not {"onload", "onclick", "srcset", "action", "style", "background"} & named
    assert not {"script", "iframe", "object", "embed", "link", "form", "base"} & page.words.keys()
    assert "url(" not in page.words["style"][0] and "@import" not in page.words["style"][0]
    (policy,) = [own["content"] for own in page.all("meta") if own.get("http-equiv")]
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def test_worst_predictions_have_the_largest_errors(trained, whole) -> None:
    page = Page(whole)
    rows = sorted(table(trained / "predictions.csv"), key=lambda row: -abs(float(row["error_eV"])))
    drawn = [text for text in page.words["figcaption"] if text.startswith("sid ")]
    assert len(drawn) == 6
    for text, row in zip(drawn, rows, strict=False):
        assert text.startswith(f"sid {row['sid']} ({row['split']}): {row['adsorbate']} on ")
        error = f"{float(row['error_eV']):+.3f} eV"
        assert text.endswith(f"error {error}") and error.removesuffix(" eV") in page.words["td"]


@pytest.mark.parametrize(
    ("recipe", "given", "words"),
    [
        ("is2re", "/x y", "--splits a 'b c' --data '/x y'"),
        ("language", "/x", "--data /x"),
        ("learned_optimizer", "/x", "--tasks a 'b c' --data /x"),
        ("population_optimizer", None, "--functions a 'b c'"),
    ],
)
def test_commands_have_the_options_of_their_recipe_and_one_line_each(recipe, given, words) -> None:
    versions = {"molflt": "1\n2", "git_commit": "abc\ncurl x | sh\u2028y\rz"}
    run = SimpleNamespace(results={"a": {}, "b c": {}})
    page = SimpleNamespace(run=run, path=Path("r"), recipe=recipe, given=given, versions=versions)
    lines = _repeat(page)[-1]["lines"]
    first, train, evaluate, report = "\n".join(lines).splitlines()
    assert first == "# molflt 1 2, commit abc curl x | sh y z"
    assert evaluate == f"molflt evaluate AGAIN {words}"
    assert train.startswith("molflt train ") and report == "molflt report AGAIN"


def changed(name: str, old: str, new: str) -> Callable[[Path], None]:
    """Replaces a pattern in a file."""

    def change(run: Path) -> None:
        text = (run / name).read_text()
        (run / name).write_text(re.sub(old, new, text, flags=re.M))

    return change


def cut(name: str, size: int = 60) -> Callable[[Path], None]:
    """Truncates a file."""
    return lambda run: (run / name).write_bytes((run / name).read_bytes()[:size])


@pytest.mark.parametrize(
    ("damage", "message", "absent"),
    [
        (changed("config.yaml", "max_steps: 6", "max_steps: 9"), "6 of 9 steps", ""),
        (lambda run: (run / "results.json").unlink(), "not evaluated", "Results"),
        (lambda run: (run / "metrics.csv").unlink(), "metrics.csv: missing", "Training"),
        (cut("results.json"), "results.json: ", "Results"),
        (cut("predictions.csv", 250), "predictions.csv: ", "The worst predictions"),
        (changed("predictions.csv", r"^(train|val_id),(\d+)", r"\1,77\2"), "predictions.csv", ""),
        (changed("config.yaml", "root: .*", "root: gone"), "gone", ""),
        (cut("encoding.png", 3000), "encoding.png: ", ""),
        (cut("checkpoints/last.ckpt"), "last.ckpt: ", ""),
        (lambda run: shutil.rmtree(run / "checkpoints"), "last.ckpt: missing", ""),
    ],
)
def test_missing_parts_are_named_and_others_are_shown(run, damage, message, absent, capsys, quick):
    damage(run)
    capsys.readouterr()
    page = Page(page_of(run))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"molflt: warning: {run}: missing: ") and message in line
    assert page.words["h2"][0] == "Missing"
    assert any(message in item for item in page.words["li"])
    titles = " ".join(page.words["h2"])
    assert not absent or absent not in titles
    assert "Versions and files" in titles and "Settings" in titles
    assert len(page.all("img")) >= 1


def test_text_from_data_is_escaped(trained, tmp_path) -> None:
    """Names of files and splits, options and versions."""
    run = shutil.copytree(trained, tmp_path / HOSTILE.replace("/", "$x^$"))
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


def test_large_pictures_do_not_exceed_the_size_of_the_page(run, capsys, quick) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (800, 800, 3), dtype=np.uint8)
    for name in ("attention", "losses", "confusion"):
        Image.fromarray(noise).save(run / f"{name}.png")
    text = page_of(run)
    assert len(text) < 3e6
    assert "3 MB" in capsys.readouterr().err
