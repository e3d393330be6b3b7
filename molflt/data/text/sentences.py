"""Labeled sentences and pairs of sentences, for GLUE and Long Range Arena."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from molflt.data.text.datamodule import TokenizedData, padded_rows
from molflt.data.text.glue import TASKS, Example, classes_in, find_split, read_splits
from molflt.data.text.tokenizer import Tokenizer, TokenizerKind

CLASSES = "classes.json"
"""file in a run that lists the class names in order, or "score" if the labels are scores"""

# The type defines the choices on the command line
if TYPE_CHECKING:
    TaskName = str
else:
    TaskName = Literal[tuple(TASKS)]

_Item = tuple[Tensor, Tensor, Tensor]
_AT_ONCE = 512  # texts encoded at once; the library needs 150 bytes per token


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
