"""Bytes on the command line: gaps first, then classes of reviews, then of grey images."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from data.test_bytes import write_reviews
from data.test_images import write_folder
from tiny_run import error_of, logged

import molflt
from molflt.commands.cli import main
from molflt.data.text.glue import read_splits

pytest.importorskip("tokenizers")
pytest.importorskip("sklearn")
SIZE = ["--model.dim=16", "--model.heads=2", "--model.layers=1", "--model.ffn_dim=16"]
SIZE += ["--model.max_length=24", "--model.mixer=fourier", "--task.lr=1e-2"]
STEPS = ["--trainer.accelerator=cpu", "--task.warmup_steps=2", "--data.length=24"]
STEPS += ["--data.batch_size=8", "--trainer.log_every=1"]


def steps(count: int) -> list[str]:
    return [*STEPS, f"--trainer.max_steps={count}", f"--trainer.val_every={count}"]


def test_gaps_then_reviews_whose_validation_is_held_out(tmp_path: Path, capsys) -> None:
    root, gaps, run = write_reviews(tmp_path), tmp_path / "gaps", tmp_path / "run"
    text = tmp_path / "reviews.txt"
    files = sorted((root / "aclImdb" / "train").rglob("*.txt"))
    text.write_bytes(b"".join(file.read_bytes() + b"\n" for file in files))
    words = ["train", "--recipe=masked_language", "--data.kind=byte", *SIZE]
    words += [f"--data.{use}={text}" for use in ("train", "val")]
    assert main([*words, *steps(2), f"--run={gaps}"]) == 0
    assert len(molflt.load(gaps).fill("gr[MASK]at", 3)[0]) == 3

    words = ["train", "--recipe=sentences", "--data.task=IMDb", f"--data.root={root}"]
    words += ["--data.val_fraction=0.25", "--model.pool=mean", "--task.lr=1e-2"]
    assert main([*words, *steps(30), f"--run={run}", f"--init={gaps}"]) == 0
    assert "encoder.words.weight" not in json.loads((run / "init.json").read_text())["new"]
    assert main(["evaluate", str(run), "--splits", "train", "val", "test"]) == 0
    found = json.loads((run / "results.json").read_text())
    assert [found[use]["n"] for use in ("train", "val", "test")] == [30, 10, 40]
    assert found["val"]["accuracy_percent"] == pytest.approx(logged(run, "val_score_percent")[-1])
    assert found["test"]["accuracy_percent"] > 90  # awful or great
    rows = read_splits(root, "IMDb", ("test",))["test"][1]
    told = [label.name for label in molflt.load(run).classify([one.first for one in rows])]
    right = np.mean(
        [name == ("neg", "pos")[int(one.label)] for name, one in zip(told, rows, strict=True)]
    )
    assert found["test"]["accuracy_percent"] == pytest.approx(100 * right)


def test_grey_images(tmp_path: Path, capsys) -> None:
    """The names of the classes are kept: a test folder with fewer of them means the same."""
    write_folder(tmp_path / "Image" / "train", count=4, side=4)
    other = write_folder(tmp_path / "other", count=2, side=4, classes="dog")
    run = tmp_path / "run"
    words = ["train", "--recipe=sentences", "--data.task=Image", f"--data.root={tmp_path}"]
    assert main([*words, *SIZE, *steps(2), "--data.val_fraction=0.25", f"--run={run}"]) == 0
    assert json.loads((run / "classes.json").read_text()) == ["cat", "dog", "eel"]
    assert main(["evaluate", str(run), "--data", str(other)]) == 0
    lines = (run / "predictions.csv").read_text().splitlines()
    assert [line.split(",")[2] for line in lines[1:]] == ["dog", "dog"]
    (tmp_path / "text.txt").write_text("some text\n")
    assert main(["export", str(run), str(tmp_path / "out"), "--about=animals"]) == 0
    for model in (run, tmp_path / "out"):  # lines of a text would be read as grey levels
        message = error_of(capsys, "predict", str(model), str(tmp_path / "text.txt"))
        assert "a model of the grey levels of images (Image); got text" in message
