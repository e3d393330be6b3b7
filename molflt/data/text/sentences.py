"""Labeled sentences and pairs: GLUE (arXiv:1804.07461), Long Range Arena (arXiv:2011.04006)."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from molflt.data.batches import held_out
from molflt.data.images.files import open_images
from molflt.data.text.datamodule import TokenizedData, padded_rows
from molflt.data.text.sources import _lines
from molflt.data.text.tokenizer import Tokenizer, TokenizerKind
from molflt.data.text.vocabulary import text_of
from molflt.files import natural, packed_names, shown

CLASSES = "classes.json"
"""file in a run that lists the class names in order, or "score" if the labels are scores"""

_Item = tuple[Tensor, Tensor, Tensor]
_AT_ONCE = 512  # texts encoded at once; the library needs 150 bytes per token
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
# The type defines the choices on the command line
if TYPE_CHECKING:
    TaskName = str
else:
    TaskName = Literal[tuple(TASKS)]


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


class Sentences(Dataset[_Item]):
    """Labeled sequences [CLS] first [SEP], or [CLS] first [SEP] second [SEP].

    Examples of more than `length` tokens are shortened at the end of the longer sentence, one token
    at a time; `cut` is the number of shortened examples.
    """

    def __init__(
        self, examples: Sequence[Example], tokenizer: Tokenizer, length: int, source: str = ""
    ) -> None:
        self.labels = [example.label for example in examples]
        self.rows: list[tuple[NDArray[np.int32], int]] = []  # ids, number of tokens of type 0
        self.cut = 0
        cls, sep = tokenizer.cls, tokenizer.sep
        for start in range(0, len(examples), _AT_ONCE):
            some = examples[start : start + _AT_ONCE]
            firsts = tokenizer.encode([example.first for example in some], source)
            seconds = tokenizer.encode([example.second or "" for example in some], source)
            for example, first, second in zip(some, firsts, seconds, strict=True):
                is_pair = example.second is not None
                most = length - (3 if is_pair else 2)  # without special tokens
                of_second = min(len(second), max(most - len(first), most // 2))
                of_first = min(len(first), most - of_second)
                if of_first + of_second < len(first) + len(second):
                    self.cut += 1
                ids = [cls, *first[:of_first], sep]
                of_type_0 = len(ids)
                if is_pair:
                    ids += [*second[:of_second], sep]
                self.rows.append((np.array(ids, np.int32), of_type_0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> _Item:
        """Returns ids (tokens,), types (tokens,), and the class or score as a float64 scalar."""
        ids, of_type_0 = self.rows[index]
        types = torch.arange(len(ids)) >= of_type_0
        label = torch.tensor(self.labels[index], dtype=torch.float64)
        return torch.from_numpy(ids).long(), types.long(), label


def padded(items: Sequence[_Item], pad: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Collates items into ids, types and masks, each (batch, longest), and labels (batch,)."""
    tokens, types, labels = zip(*items, strict=True)
    mask = padded_rows([torch.ones_like(row) for row in tokens], 0).bool()
    return padded_rows(tokens, pad), padded_rows(types, 0), mask, torch.stack(labels)


class SentenceData(TokenizedData[Sentences]):
    """Training and validation examples of a task from GLUE or Long Range Arena.

    Tables are the published tab-separated files, plain or compressed (.gz or .xz):
    ROOT/SST-2/train.tsv and dev.tsv, or ROOT/SST-2.train.tsv. IMDb reviews are in the folders pos
    and neg of ROOT/aclImdb/train. Images, whose pixels become gray tokens, are in ROOT/Image/train,
    with one folder per class, or in ROOT/Image/train-images-idx3-ubyte.

    Args:
        task: name of the task: CoLA, SST-2, MRPC, STS-B, QQP, MNLI, QNLI or RTE from GLUE, or
            ListOps, IMDb or Image from Long Range Arena.
        root: folder with the files of the tasks.
        tokenizer: tokenizer.json, or a folder that contains it; see
            `molflt.data.text.datamodule.TokenizedData`.
        kind: kind of the tokenizer; see `molflt.data.text.datamodule.TokenizedData`. Defaults to
            listops for ListOps and byte for IMDb and Image.
        length: maximum number of tokens in a sentence or pair, including special tokens; longer
            examples are shortened.
        val_fraction: share of the training rows of IMDb or Image to validate on, taken from the end
            of each class; null means 0.1. Other tasks have validation files.
        batch_size: number of sentences or pairs in a batch, per device.
        tokens: further arguments of `molflt.data.text.datamodule.TokenizedData`.
    """

    items = "sentences"

    def __init__(
        self,
        task: TaskName,
        root: Path,
        tokenizer: Path | None = None,
        kind: TokenizerKind | None = None,
        length: int = 128,
        val_fraction: float | None = None,
        batch_size: int = 16,
        **tokens: Any,
    ) -> None:
        kind = kind or (TASKS[task].kind if tokenizer is None else None)
        super().__init__(batch_size, {}, tokenizer=tokenizer, kind=kind, **tokens)
        if length < 5:
            raise ValueError(f"data.length must be at least 5; got {length}")
        if val_fraction is not None and not TASKS[task].held_out:
            raise ValueError(
                f"data.val_fraction has no effect on {task}, which has a validation file; omit it"
            )
        self.task, self.root, self.length = task, Path(root), length
        self.val_fraction = val_fraction
        self.classes: list[str] = []

    def setup(self, stage: str = "fit") -> None:
        if self.datasets:
            return
        self.classes = classes_in(find_split(self.root, self.task, "train"), self.task)
        found = read_splits(self.root, self.task, ("train", "val"), self.val_fraction, self.classes)
        path, examples = found["train"]
        pairs = ((example.first, example.second) for example in examples)
        texts = (text for pair in pairs for text in pair if text is not None)
        self.set_tokenizer(lambda: texts, str(path))
        self.collate = cast("None", partial(padded, pad=self.tokenizer.pad))
        for use, (path, examples) in found.items():
            self.datasets[use] = Sentences(examples, self.tokenizer, self.length, str(path))

    def sizes(self) -> dict[str, int]:
        return {**super().sizes(), "classes": len(self.classes)}  # 1 for scores

    def files(self) -> dict[str, bytes]:
        return {**super().files(), CLASSES: (json.dumps(self.classes) + "\n").encode()}

    def _described(self, use: str) -> str:
        what = "pairs" if "second" in TASKS[self.task].columns else "sentences"
        rows = self.datasets[use]
        cut = f", {rows.cut:,} of them cut" if rows.cut else ""
        return f"{len(rows):,} {what} of {self.task}{cut}"
