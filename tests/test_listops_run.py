"""Long Range Arena on the command line: inputs with gaps first, then their labels, then a test."""

from __future__ import annotations

import json

import listops
import numpy as np
import pytest
from tiny_run import error_of, logged

import molflt
from molflt.commands.cli import main
from molflt.data.text.fixed import LISTOPS as SYMBOLS
from molflt.data.text.glue import find_split, read_examples

pytest.importorskip("tokenizers")
pytest.importorskip("sklearn")
SIZE = ["--model.dim=16", "--model.heads=2", "--model.layers=1", "--model.ffn_dim=16"]
SIZE += ["--model.max_length=24", "--model.mixer=fourier"]
STEPS = ["--trainer.accelerator=cpu", "--task.warmup_steps=2", "--data.length=24"]
STEPS += ["--data.batch_size=8", "--trainer.log_every=1"]


def steps(count: int) -> list[str]:
    return [*STEPS, f"--trainer.max_steps={count}", f"--trainer.val_every={count}"]


def test_expressions_with_gaps_then_with_labels(tmp_path, capsys):
    folder, gaps, run = tmp_path / "ListOps", tmp_path / "gaps", tmp_path / "run"
    limits = ["--depth=4", "--arguments=3", "--min_length=4", "--max_length=23"]
    draws = ["--train=60", "--val=20", "--test=30"]
    assert listops.main([str(folder), *draws, *limits]) == 0
    for use in ("train", "val"):  # what `tail -n +2 FILE | cut -f 1` writes
        rows = (folder / f"{use}.tsv").read_text().splitlines()[1:]
        (folder / f"{use}.txt").write_text("".join(f"{row.split(chr(9))[0]}\n" for row in rows))
    texts = [f"--data.{use}={folder / use}.txt" for use in ("train", "val")]
    words = ["train", "--recipe=masked_language", "--data.kind=listops", *texts, *SIZE]
    assert main([*words, *steps(3), f"--run={gaps}"]) == 0
    assert "val_accuracy_percent" in (gaps / "metrics.csv").read_text()

    words = ["train", "--recipe=sentences", "--data.task=ListOps", f"--data.root={tmp_path}"]
    assert main([*words, *steps(4), f"--run={run}", f"--init={gaps}"]) == 0
    record = json.loads((run / "init.json").read_text())
    new = {f"{part}.{kind}" for part in ("pooler", "classify") for kind in ("weight", "bias")}
    assert set(record["new"]) == new
    assert (run / "tokenizer.json").read_bytes() == (gaps / "tokenizer.json").read_bytes()
    capsys.readouterr()
    assert main(["evaluate", str(run), "--splits", "val", "test"]) == 0
    found = json.loads((run / "results.json").read_text())
    assert found["val"]["accuracy_percent"] == pytest.approx(logged(run, "val_score_percent")[-1])
    assert found["test"].keys() == {"accuracy_percent", "n"} and found["test"]["n"] == 30
    rows = read_examples(find_split(tmp_path, "ListOps", "test"), "ListOps")
    labels = molflt.load(run).classify([one.first for one in rows])
    told = np.array([float(label.name) for label in labels])
    right = np.mean(told == [one.label for one in rows])
    assert found["test"]["accuracy_percent"] == pytest.approx(100 * right)
    kept = json.loads((run / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(kept, key=kept.get)[5:] == [*SYMBOLS]

    (folder / "val.tsv").write_text("Source\tTarget\n[MAX 1 2 ]\t12\n")
    assert "val.tsv: row 2: label '12'; expected one of 0, 1" in error_of(capsys, *words, *STEPS)
