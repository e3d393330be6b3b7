"""Files of GLUE's form whose labels can be learned from the words."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from molflt.data.text.glue import GLUE

NOUNS = ["cat", "dog", "car", "tree", "lamp", "boat", "bird", "house"]
GOOD, BAD = ["good", "fine", "great"], ["bad", "poor", "awful"]


def _row(task: str, draw: np.random.Generator) -> dict[str, str]:
    """Sentences are good or bad; pairs agree where their nouns do."""
    noun, right = str(draw.choice(NOUNS)), bool(draw.integers(2))
    if "second" not in GLUE[task].columns:
        return {
            "first": f"the {noun} is {draw.choice(GOOD if right else BAD)}",
            "label": f"{right:d}",
        }
    other = noun if right else str(draw.choice([n for n in NOUNS if n != noun]))
    labels = GLUE[task].labels
    label = f"{4.0 * right + 0.5:.3f}" if labels is None else labels[right]
    return {"first": f"this is a {noun}", "second": f"a {other} it is", "label": label}


def write_sentences(root: Path, task: str, train: int, val: int, packed: str = "") -> None:
    """ROOT/TASK/train.tsv and dev.tsv, with these numbers of rows."""
    folder = root / task
    folder.mkdir(parents=True, exist_ok=True)
    spec = GLUE[task]
    for seed, (name, count) in enumerate({"train": train, "dev": val}.items()):
        draw = np.random.default_rng(seed)
        rows = [_row(task, draw) for _ in range(count)]
        if task == "CoLA":
            lines = [f"x\t{row['label']}\t\t{row['first']}" for row in rows]
        else:
            lines = ["index\t" + "\t".join(spec.columns.values())]
            lines += [
                f"{i}\t" + "\t".join(row[k] for k in spec.columns) for i, row in enumerate(rows)
            ]
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
