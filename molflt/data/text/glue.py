"""Tasks with labels for sequences: which file, which columns, which labels, which metrics.

Those of GLUE (arXiv:1804.07461), and those of Long Range Arena (arXiv:2011.04006).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from molflt.data.text.sources import _line_blocks
from molflt.files import shown

if TYPE_CHECKING:
    from molflt.data.text.tokenizer import TokenizerKind

__all__ = ["GLUE", "LONG_RANGE", "TASKS", "Example", "GlueTask", "find_split", "read_examples"]

_PACKED = ("", ".gz", ".xz")
_BYTE_ORDER = "\ufeff"
_TWO = ("0", "1")
_ENTAILED = ("entailment", "not_entailment")


class Example(NamedTuple):
    """One row."""

    first: str
    second: str | None
    """None for a task of single sentences"""
    label: float
    """index of the class, or the score"""


class GlueTask(NamedTuple):
    """How the files of a task are read, and what is reported of it."""

    columns: Mapping[str, str]
    """what -> name in the header: first, second (of pairs), label"""
    labels: tuple[str, ...] | None
    """classes in the order of their index; None for a score from 0 to 5"""
    metrics: tuple[str, ...] = ("accuracy",)
    places: Mapping[str, int] | None = None
    """the same columns in files without a header, from 0"""
    files: Mapping[str, tuple[str, ...]] = {}
    """split -> names of files other than the usual ones"""
    broken_rows: bool = False
    """whether the public files have rows with missing columns, which everybody leaves out"""
    kind: TokenizerKind | None = None
    """of its tokenizer where none is asked for; None for one that is learned"""


def _pair(first: str, second: str, label: str = "label") -> dict[str, str]:
    return {"first": first, "second": second, "label": label}


_MATCHED = {"val": ("dev_matched.tsv",), "val_mismatched": ("dev_mismatched.tsv",)}
_USUAL = {"train": ("train.tsv",), "val": ("dev.tsv",), "test": ("test.tsv",)}
_MRPC = {"train": ("msr_paraphrase_train.txt",), "test": ("msr_paraphrase_test.txt",)}
_STS = {"train": ("sts-train.csv",), "val": ("sts-dev.csv",), "test": ("sts-test.csv",)}

GLUE: dict[str, GlueTask] = {
    "CoLA": GlueTask(
        {"first": "sentence", "label": "label"},
        _TWO,
        ("matthews",),
        places={"first": 3, "label": 1},
    ),
    "SST-2": GlueTask({"first": "sentence", "label": "label"}, _TWO),
    "MRPC": GlueTask(
        _pair("#1 String", "#2 String", "Quality"), _TWO, ("accuracy", "f1"), files=_MRPC
    ),
    "STS-B": GlueTask(
        _pair("sentence1", "sentence2", "score"),
        None,
        ("pearson", "spearman"),
        places={"first": 5, "second": 6, "label": 4},
        files=_STS,
    ),
    "QQP": GlueTask(
        _pair("question1", "question2", "is_duplicate"), _TWO, ("accuracy", "f1"), broken_rows=True
    ),
    "MNLI": GlueTask(
        _pair("sentence1", "sentence2", "gold_label"),
        ("entailment", "neutral", "contradiction"),
        files=_MATCHED,
    ),
    "QNLI": GlueTask(_pair("question", "sentence"), _ENTAILED),
    "RTE": GlueTask(_pair("sentence1", "sentence2"), _ENTAILED),
}

_ARENA = {use: (f"{use}.tsv", f"basic_{use}.tsv") for use in ("train", "val", "test")}

LONG_RANGE: dict[str, GlueTask] = {
    "ListOps": GlueTask(
        {"first": "Source", "label": "Target"},
        tuple("0123456789"),
        places={"first": 1, "label": 0},  # of the original files (arXiv:1804.06028)
        files=_ARENA,
        kind="listops",
    ),
}

TASKS = {**GLUE, **LONG_RANGE}


def find_split(root: Path, task: str, split: str) -> Path:
    """The file of a split: ROOT/TASK/train.tsv or ROOT/TASK.train.tsv, plain or as .gz or .xz.

    Args:
        root: folder of the tasks.
        task: key of `TASKS`.
        split: train, val, test, or val_mismatched of MNLI.

    Raises:
        FileNotFoundError: naming what was looked for.
    """
    names = [*TASKS[task].files.get(split, ()), *_USUAL.get(split, ())]
    for name in names:
        for form in (f"{task}/{name}", f"{task}.{name}"):
            for packed in _PACKED:
                if (path := Path(root) / f"{form}{packed}").is_file():
                    return path
    wanted = " or ".join(f"{task}/{name}" for name in names) or "no such split"
    raise FileNotFoundError(
        f"{root}: no {split} file of {task}; expected {wanted}, plain or as .gz or .xz; change "
        "data.root"
    )


def read_examples(path: Path, task: str) -> list[Example]:
    """All rows of a file: cells between tabs, where quotation marks mean nothing.

    Args:
        path: of the file.
        task: key of `TASKS`.

    Raises:
        FileNotFoundError: naming the file.
        ValueError: naming the file and the row: not UTF-8, an empty file, a missing column, a label
            that the task has not.
    """
    spec, rows = TASKS[task], _rows(path)
    number, head = next(rows, (0, []))
    if not number:
        raise ValueError(f"{path}: the file is empty; expected rows of {task}")
    places = {what: head.index(name) for what, name in spec.columns.items() if name in head}
    headless = spec.places is not None and not places
    if headless and spec.places is not None:
        places = dict(spec.places)
    elif missing := [name for what, name in spec.columns.items() if what not in places]:
        raise ValueError(
            f"{path}: row 1: no column {missing[0]!r}; expected a header with "
            f"{', '.join(spec.columns.values())}; got {shown(head)}"
        )
    found = [_example(path, number, head, places, spec)] if headless else []
    for number, cells in rows:
        if spec.broken_rows and len(cells) <= max(places.values()):
            continue
        found.append(_example(path, number, cells, places, spec))
    if not found:
        raise ValueError(f"{path}: no row behind the header; expected rows of {task}")
    return found


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Number, from 1, and cells of each row that is not blank."""
    number = 0
    for block in _line_blocks(str(path)):
        for line in block.removesuffix("\n").split("\n"):
            number += 1
            text = line.removeprefix(_BYTE_ORDER) if number == 1 else line
            if text.strip():
                yield number, text.removesuffix("\r").split("\t")


def _example(
    path: Path, number: int, cells: list[str], places: Mapping[str, int], spec: GlueTask
) -> Example:
    if len(cells) <= max(places.values()):
        raise ValueError(
            f"{path}: row {number}: {len(cells)} columns; expected at least "
            f"{max(places.values()) + 1}, between tabs; correct the row"
        )
    first, label = cells[places["first"]], cells[places["label"]].strip()
    second = cells[places["second"]] if "second" in places else None
    if spec.labels is not None:
        if label not in spec.labels:
            raise ValueError(
                f"{path}: row {number}: label {shown(label)}; expected one of "
                f"{', '.join(spec.labels)}; correct the row, or change data.task"
            )
        return Example(first, second, spec.labels.index(label))
    try:
        score = float(label)
    except ValueError:
        score = math.nan
    if not 0 <= score <= 5:
        raise ValueError(
            f"{path}: row {number}: score {shown(label)}; expected a number from 0 to 5; correct "
            "the row, or change data.task"
        )
    return Example(first, second, score)
