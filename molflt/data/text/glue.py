"""Tasks with labels for sequences: which file, which columns, which labels, which metrics.

Those of GLUE (arXiv:1804.07461), and those of Long Range Arena (arXiv:2011.04006).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from molflt.data.held_out import held_out
from molflt.data.images.files import open_images
from molflt.data.text.folders import read_grey, read_texts
from molflt.data.text.sources import _line_blocks
from molflt.files import shown

if TYPE_CHECKING:
    from molflt.data.text.tokenizer import TokenizerKind

__all__ = [
    "GLUE",
    "LONG_RANGE",
    "TASKS",
    "VAL_FRACTION",
    "Example",
    "GlueTask",
    "classes_in",
    "find_split",
    "read_examples",
    "read_splits",
]

VAL_FRACTION = 0.1
"""Share of the training rows to validate on, of tasks without files for that, if nobody says."""

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
    """classes in the order of their index; None for a score from 0 to 5, and for images"""
    metrics: tuple[str, ...] = ("accuracy",)
    places: Mapping[str, int] | None = None
    """the same columns in files without a header, from 0"""
    files: Mapping[str, tuple[str, ...]] = {}
    """split -> names of files other than the usual ones"""
    broken_rows: bool = False
    """whether the public files have rows with missing columns, which everybody leaves out"""
    kind: TokenizerKind | None = None
    """of its tokenizer where none is asked for; None for one that is learned"""
    form: Literal["rows", "texts", "images"] = "rows"
    """a table, a folder of texts for each class, or images"""
    folder: str | None = None
    """where the files are, below the root, if it is not named as the task"""

    @property
    def held_out(self) -> bool:
        """Whether there are no files to validate on: a share of the training rows is."""
        return self.form != "rows"


def _pair(first: str, second: str, label: str = "label") -> dict[str, str]:
    return {"first": first, "second": second, "label": label}


_MATCHED = {"val": ("dev_matched.tsv",), "val_mismatched": ("dev_mismatched.tsv",)}
_USUAL = {"train": ("train.tsv",), "val": ("dev.tsv",), "test": ("test.tsv",)}
_MRPC = {"test": ("msr_paraphrase_test.txt",)}  # that of training holds GLUE's dev.tsv as well
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


def _folders(train: str, test: str) -> dict[str, tuple[str, ...]]:
    return {"train": (*train.split(),), "val": (*train.split(),), "test": (*test.split(),)}


_ARENA = {use: (f"{use}.tsv", f"basic_{use}.tsv") for use in ("train", "val", "test")}

LONG_RANGE: dict[str, GlueTask] = {
    "ListOps": GlueTask(
        {"first": "Source", "label": "Target"},
        tuple("0123456789"),
        places={"first": 1, "label": 0},  # of the original files (arXiv:1804.06028)
        files=_ARENA,
        kind="listops",
    ),
    "IMDb": GlueTask(
        {},
        ("neg", "pos"),
        files=_folders("train", "test"),
        kind="byte",
        form="texts",
        folder="aclImdb",
    ),
    "Image": GlueTask(
        {},
        None,
        files=_folders("train train-images-idx3-ubyte", "test t10k-images-idx3-ubyte"),
        kind="byte",
        form="images",
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
    spec, root = TASKS[task], Path(root)
    names = [*spec.files.get(split, ()), *(() if spec.held_out else _USUAL.get(split, ()))]
    forms = [f"{spec.folder or task}/{name}" for name in names]
    for form in forms:
        for packed in _PACKED:
            for path in (root / f"{form}{packed}", root / f"{form.replace('/', '.', 1)}{packed}"):
                if path.is_file() or (spec.held_out and path.is_dir()):
                    return path
    kind = "an unpacked folder" if spec.form == "texts" else "plain or as .gz or .xz"
    raise FileNotFoundError(
        f"{root}: no {split} file of {task}; expected {' or '.join(forms) or 'no such split'}, "
        f"{kind}; change data.root"
    )


def read_splits(
    root: Path,
    task: str,
    splits: Sequence[str],
    val_fraction: float | None = None,
    classes: Sequence[str] | None = None,
) -> dict[str, tuple[Path, list[Example]]]:
    """File or folder, and rows, of each split.

    Where a task has no files to validate on, val are the last of each class of the training rows,
    and train the others: IMDb's reviews of one film stand behind each other, so that hardly a film
    is in both.

    Args:
        root: folder of the tasks.
        task: key of `TASKS`.
        splits: train, val, test, or val_mismatched of MNLI.
        val_fraction: share of the training rows that is val; None is `VAL_FRACTION`.
        classes: see `read_examples`.

    Raises:
        FileNotFoundError: naming what was looked for.
        ValueError: see `read_examples`; or a share that leaves none to train or to validate on.
    """
    paths = {split: find_split(root, task, split) for split in splits}
    rows = {path: read_examples(path, task, classes) for path in dict.fromkeys(paths.values())}
    found = {split: rows[path] for split, path in paths.items()}
    for split in {"train", "val"} & found.keys() if TASKS[task].held_out else ():
        path, whole = paths[split], found[split]
        share = VAL_FRACTION if val_fraction is None else val_fraction
        labels = torch.tensor([one.label for one in whole])
        held = held_out(labels, share, path, TASKS[task].form).tolist()
        found[split] = [
            one for one, kept in zip(whole, held, strict=True) if kept == (split == "val")
        ]
    return {split: (path, found[split]) for split, path in paths.items()}


def classes_in(path: Path, task: str) -> list[str]:
    """Names of the classes, those of images as `path` has them; of scores the word score."""
    if TASKS[task].form == "images":
        return open_images(path).classes
    return list(TASKS[task].labels or ("score",))


def read_examples(path: Path, task: str, classes: Sequence[str] | None = None) -> list[Example]:
    """All rows of a file: cells between tabs, where quotation marks mean nothing.

    Args:
        path: of the file, or of the folder of a task that has folders.
        task: key of `TASKS`.
        classes: names of the classes of images, in the order of labels; by default as found.

    Raises:
        FileNotFoundError: naming the file.
        ValueError: naming the file and the row: not UTF-8, an empty file, a missing column, a label
            that the task has not. See also `molflt.data.text.folders`.
    """
    spec = TASKS[task]
    if spec.held_out:
        names = classes_in(path, task) if classes is None else classes
        read = read_grey if spec.form == "images" else read_texts
        return [Example(text, None, label) for text, label in read(path, names)]
    rows = _rows(path)
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
