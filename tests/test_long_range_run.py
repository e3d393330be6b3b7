"""Long Range Arena on the command line: masked inputs first, then labels, then a test set."""

from __future__ import annotations

import json
from pathlib import Path

import listops
import numpy as np
import pytest
from tiny_run import error_of, logged
from token_files import write_folder

import molflt
from molflt.commands.cli import main
from molflt.data.text.glue import find_split, read_examples
from molflt.data.text.vocabulary import LISTOPS as SYMBOLS

pytest.importorskip("tokenizers")
pytest.importorskip("sklearn")
SIZE = ["--model.dim=16", "--model.heads=2", "--model.layers=1", "--model.ffn_dim=16"]
SIZE += ["--model.max_length=24", "--model.mixer=fourier"]
STEPS = ["--trainer.accelerator=cpu", "--task.warmup_steps=2", "--data.length=24"]
STEPS += ["--data.batch_size=8", "--trainer.log_every=1", "--task.lr=1e-2"]


def steps(count: int) -> list[str]:
    return [*STEPS, f"--trainer.max_steps={count}", f"--trainer.val_every={count}"]


def accuracy(root: Path, task: str, run: Path) -> float:
    """Classifies the test set in Python."""
    path = find_split(root, task, "test")
    rows = read_examples(path, task)
    classes = json.loads((run / "classes.json").read_text())
    labels = molflt.load(run).classify([one.first for one in rows])
    pairs = zip(labels, rows, strict=True)
    return 100 * float(np.mean([one.name == classes[int(row.label)] for one, row in pairs]))


def test_expressions(tmp_path: Path) -> None:
    folder, masked, run = tmp_path / "ListOps", tmp_path / "masked", tmp_path / "run"
    limits = ["--depth=4", "--arguments=3", "--min_length=4", "--max_length=23"]
    draws = ["--train=60", "--val=20", "--test=30"]
    assert listops.main([str(folder), *draws, *limits]) == 0
    for use in ("train", "val"):
        rows = (folder / f"{use}.tsv").read_text().splitlines()[1:]
        (folder / f"{use}.txt").write_text("".join(f"{row.split(chr(9))[0]}\n" for row in rows))
    texts = [f"--data.{use}={folder / use}.txt" for use in ("train", "val")]
    words = ["train", "--recipe=masked_language", "--data.kind=listops", *texts, *SIZE]
    assert main([*words, *steps(3), f"--run={masked}"]) == 0
    assert logged(masked, "val_accuracy_percent")

    words = ["train", "--recipe=sentences", "--data.task=ListOps", f"--data.root={tmp_path}"]
    assert main([*words, *steps(4), f"--run={run}", f"--init={masked}"]) == 0
    record = json.loads((run / "init.json").read_text())
    new = {f"{part}.{kind}" for part in ("pooler", "classify") for kind in ("weight", "bias")}
    assert set(record["new"]) == new
    assert (run / "tokenizer.json").read_bytes() == (masked / "tokenizer.json").read_bytes()
    assert main(["evaluate", str(run), "--splits", "val", "test"]) == 0
    found = json.loads((run / "results.json").read_text())
    assert found["val"]["accuracy_percent"] == pytest.approx(logged(run, "val_score_percent")[-1])
    assert found["test"]["n"] == 30
    assert found["test"]["accuracy_percent"] == pytest.approx(accuracy(tmp_path, "ListOps", run))
    kept = json.loads((run / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(kept, key=kept.get)[5:] == [*SYMBOLS]


def test_gray_images(tmp_path: Path, capsys) -> None:
    """A run keeps the names of its classes: a test folder may contain fewer of them."""
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
    for model in (run, tmp_path / "out"):
        assert "Image" in error_of(capsys, "predict", str(model), str(tmp_path / "text.txt"))
