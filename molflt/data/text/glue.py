"""Labeled texts from GLUE (arXiv:1804.07461) and Long Range Arena (arXiv:2011.04006)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, compress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from molflt.data.batches import held_out
from molflt.data.images.files import open_images
from molflt.data.text.sources import _lines
from molflt.data.text.vocabulary import text_of
from molflt.files import natural, packed_names, shown

if TYPE_CHECKING:
    from molflt.data.text.tokenizer import TokenizerKind

_VAL_FRACTION = 0.1  # default for tasks without a validation file
_UNLABELED = "unsup"  # folder of unlabeled reviews in the published data
_BINARY = ("0", "1")
_ENTAILED = ("entailment", "not_entailment")


class Example(NamedTuple):
    """Labeled example of a task."""

    first: str
    second: str | None  # None if examples are single sentences
    label: float  # index of the class, or score


class GlueTask(NamedTuple):
    """File format and metrics of a task."""

    columns: Mapping[str, str]  # header names of the columns `first`, `second`, `label`
    labels: tuple[str, ...] | None
    """class names in the order of their indices; None for images and for scores from 0 to 5"""
    metrics: tuple[str, ...] = ("accuracy",)
    places: Mapping[str, int] | None = None  # indices of the same columns in files without a header
    files: Mapping[str, tuple[str, ...]] = {}
    """additional file names of each split; names with a slash are relative to the root folder"""
    broken_rows: bool = False
    """the published files contain rows with missing columns, which are skipped by convention"""
    kind: TokenizerKind | None = None  # default kind of the tokenizer; None if learned
    form: Literal["rows", "texts", "images"] = "rows"
    """a table, a folder of texts for each class, or images"""

    @property
    def held_out(self) -> bool:
        """True for tasks without validation files, which are validated on training rows."""
        return self.form != "rows"


def _pair(first: str, second: str, label: str = "label") -> dict[str, str]:
    return {"first": first, "second": second, "label": label}


_SINGLE = {"first": "sentence", "label": "label"}
_MATCHED = {"val": ("dev_matched.tsv",), "val_mismatched": ("dev_mismatched.tsv",)}
_USUAL = {"train": ("train.tsv",), "val": ("dev.tsv",), "test": ("test.tsv",)}
_MRPC = {"test": ("msr_paraphrase_test.txt",)}  # GLUE's dev.tsv is part of the training file
_STS = {"train": ("sts-train.csv",), "val": ("sts-dev.csv",), "test": ("sts-test.csv",)}

GLUE: dict[str, GlueTask] = {
    "CoLA": GlueTask(_SINGLE, _BINARY, ("matthews",), places={"first": 3, "label": 1}),
    "SST-2": GlueTask(_SINGLE, _BINARY),
    "MRPC": GlueTask(
        _pair("#1 String", "#2 String", "Quality"), _BINARY, ("accuracy", "f1"), files=_MRPC
    ),
    "STS-B": GlueTask(
        _pair("sentence1", "sentence2", "score"),
        None,
        ("pearson", "spearman"),
        places={"first": 5, "second": 6, "label": 4},
        files=_STS,
    ),
    "QQP": GlueTask(
        _pair("question1", "question2", "is_duplicate"),
        _BINARY,
        ("accuracy", "f1"),
        broken_rows=True,
    ),
    "MNLI": GlueTask(
        _pair("sentence1", "sentence2", "gold_label"),
        ("entailment", "neutral", "contradiction"),
        files=_MATCHED,
    ),
    "QNLI": GlueTask(_pair("question", "sentence"), _ENTAILED),
    "RTE": GlueTask(_pair("sentence1", "sentence2"), _ENTAILED),
}


_IMDB = {"train": ("aclImdb/train",), "val": ("aclImdb/train",), "test": ("aclImdb/test",)}
_TRAIN_IMAGES, _TEST_IMAGES = "train-images-idx3-ubyte", "t10k-images-idx3-ubyte"
_PIXELS = {
    "train": ("train", _TRAIN_IMAGES), "val": ("train", _TRAIN_IMAGES),
    "test": ("test", _TEST_IMAGES),
}  # fmt: skip

_LONG_RANGE: dict[str, GlueTask] = {
    "ListOps": GlueTask(
        {"first": "Source", "label": "Target"},
        tuple("0123456789"),
        places={"first": 1, "label": 0},  # in the original files (arXiv:1804.06028)
        files={use: (f"{use}.tsv", f"basic_{use}.tsv") for use in ("train", "val", "test")},
        kind="listops",
    ),
    "IMDb": GlueTask({}, ("neg", "pos"), files=_IMDB, kind="byte", form="texts"),
    "Image": GlueTask({}, None, files=_PIXELS, kind="byte", form="images"),
}

TASKS = {**GLUE, **_LONG_RANGE}


def find_split(root: Path, task: str, split: str) -> Path:
    """Returns the path of a split, such as ROOT/TASK/train.tsv or ROOT/TASK.train.tsv.

    The file may be compressed. Splits are train, val, test, and val_mismatched for MNLI.
    """
    spec, root = TASKS[task], Path(root)
    usual = () if spec.held_out else _USUAL.get(split, ())
    names = [*spec.files.get(split, ()), *usual]
    names = list(dict.fromkeys(name if "/" in name else f"{task}/{name}" for name in names))
    for name in chain.from_iterable(map(packed_names, names)):
        for path in (root / name, root / name.replace("/", ".", 1)):
            if path.is_file() or (spec.held_out and path.is_dir()):
                return path
    kind = "an unpacked folder" if spec.form == "texts" else "plain or compressed (.gz or .xz)"
    raise FileNotFoundError(
        f"{root}: no {split} file of {task}; expected {' or '.join(names) or 'another split'}, "
        f"{kind}; change data.root"
    )


def read_splits(
    root: Path,
    task: str,
    splits: Sequence[str],
    val_fraction: float | None = None,
    classes: Sequence[str] | None = None,
) -> dict[str, tuple[Path, list[Example]]]:
    """Returns the path and the rows of each split; the path is a file or a folder.

    Tasks without validation files are validated on the last training rows of each class. Reviews of
    the same film are adjacent in IMDb, so few films have reviews in both sets. The default
    `val_fraction` is 0.1.
    """
    paths = {split: find_split(root, task, split) for split in splits}
    rows = {path: read_examples(path, task, classes) for path in dict.fromkeys(paths.values())}
    found = {split: (path, rows[path]) for split, path in paths.items()}
    if not TASKS[task].held_out:
        return found
    share = _VAL_FRACTION if val_fraction is None else val_fraction
    for split in {"train", "val"} & found.keys():
        path, examples = found[split]
        labels = torch.tensor([example.label for example in examples])
        in_val = held_out(labels, share, path, TASKS[task].form)
        mask = in_val if split == "val" else ~in_val
        found[split] = path, list(compress(examples, mask.tolist()))
    return found


def classes_in(path: Path, task: str) -> list[str]:
    """Returns the class names, which are read from `path` for images, or ["score"] for scores."""
    if TASKS[task].form == "images":
        return open_images(path).classes
    return list(TASKS[task].labels or ("score",))


def read_examples(path: Path, task: str, classes: Sequence[str] | None = None) -> list[Example]:
    """Reads all examples from a folder, or from a table with unquoted cells separated by tabs.

    Classes of images are numbered in the order of `classes`, which defaults to all classes in
    `path`.
    """
    spec = TASKS[task]
    if spec.held_out:
        names = classes_in(path, task) if classes is None else classes
        read = _read_gray if spec.form == "images" else _read_texts
        return [Example(text, None, label) for text, label in read(path, names)]
    lines = enumerate(_lines(str(path)), 1)
    rows = [(i, line.removesuffix("\r").split("\t")) for i, line in lines if line.strip()]
    head = rows[0][1] if rows else []
    places = {what: head.index(name) for what, name in spec.columns.items() if name in head}
    if spec.places is not None and not places:
        places = dict(spec.places)
    elif missing := [name for what, name in spec.columns.items() if what not in places]:
        raise ValueError(
            f"{path}: row 1: expected a header with {', '.join(spec.columns.values())}; got "
            f"{shown(head)}, without {missing[0]!r}"
        )
    else:
        rows = rows[1:]
    if spec.broken_rows:
        rows = [(i, cells) for i, cells in rows if len(cells) > max(places.values())]
    if not rows:
        raise ValueError(f"{path}: no rows after the header; expected rows of {task}")
    return [_example(f"{path}: row {i}", cells, places, spec.labels) for i, cells in rows]


def _example(
    where: str, cells: list[str], places: Mapping[str, int], labels: tuple[str, ...] | None
) -> Example:
    if len(cells) <= max(places.values()):
        raise ValueError(
            f"{where}: expected at least {max(places.values()) + 1} columns, separated by tabs; "
            f"got {len(cells)}; correct the row"
        )
    first, label = cells[places["first"]], cells[places["label"]].strip()
    second = cells[places["second"]] if "second" in places else None
    if labels is not None and label in labels:
        return Example(first, second, labels.index(label))
    with contextlib.suppress(ValueError):
        if labels is None and 0 <= (score := float(label)) <= 5:
            return Example(first, second, score)
    expected = "a score from 0 to 5" if labels is None else f"one of {', '.join(labels)}"
    raise ValueError(
        f"{where}: expected {expected} as label; got {shown(label)}; correct the row, or change "
        "data.task"
    )


def _read_texts(path: Path, classes: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yields the text (see `text_of`) and class index of each .txt file in the class folders."""
    folders = {entry.name for entry in path.glob("[!.]*") if entry.is_dir()} - {_UNLABELED}
    if folders != {*classes}:
        raise ValueError(
            f"{path}: expected folders {' and '.join(classes)} of .txt files; got "
            f"{', '.join(sorted(folders)) or 'no folders'}; change data.root or the folders"
        )
    for label, name in enumerate(classes):
        files = sorted((path / name).glob("*.txt"), key=natural)
        if not files:
            raise ValueError(f"{path / name}: expected .txt files; got none")
        for file in files:
            yield text_of(file.read_bytes()), label


def _read_gray(path: Path, classes: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yields the gray levels of each image, row by row, as text (see `text_of`), and its class."""
    from PIL import Image

    images = open_images(path, classes=classes)
    for index in range(len(images)):
        image, label = images[index]
        if images.channels == 3:
            gray = Image.fromarray(image.permute(1, 2, 0).numpy()).convert("L").tobytes()
        else:
            gray = image.numpy().tobytes()
        yield text_of(gray), int(label)
