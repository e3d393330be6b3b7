"""Parallel texts: a file of sentences and a file of their translations, line by line."""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from molflt.data.text.datamodule import _NO_TARGET, TokenizedData, padded_rows
from molflt.data.text.sources import _lines
from molflt.data.text.tokenizer import Tokenizer
from molflt.files import packed_names

_Item = tuple[Tensor, Tensor]


class ParallelText(NamedTuple):
    """Sentences and their translations; `files` contains the paths of the two files."""

    source: list[str]
    target: list[str]
    files: tuple[str, str]


class Pairs(Dataset[_Item]):
    """Token ids of sentences and of their translations.

    Pairs in which a sentence has more than `length` tokens, including the end token, are skipped;
    `skipped` is the number of these pairs. `sizes` contains the number of tokens in the longer
    sentence of each remaining pair.
    """

    def __init__(self, text: ParallelText, tokenizer: Tokenizer, length: int | None = None) -> None:
        self.begin, self.end = tokenizer.cls, tokenizer.sep
        sides = [tokenizer.encode(side) for side in text[:2]]
        for name, side in zip(text.files, sides, strict=True):
            tokenizer.expect_known(np.fromiter(chain.from_iterable(side), dtype=np.int64), name)
        pairs = list(zip(*sides, strict=True))
        self.pairs = [pair for pair in pairs if length is None or max(map(len, pair)) < length]
        self.sizes = [max(map(len, pair)) + 1 for pair in self.pairs]
        self.skipped = len(pairs) - len(self.pairs)
        if not self.pairs:
            raise ValueError(
                f"{text.files[0]}: expected pairs of up to {length} tokens; got {len(pairs):,} "
                "longer ones; increase data.length"
            )

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> _Item:
        """Returns the source ids and the target ids: two int64 vectors that end with `end`."""
        source, target = self.pairs[index]
        return torch.tensor([*source, self.end]), torch.tensor([self.begin, *target, self.end])


def paired(items: Sequence[_Item], pad: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Collates items into a padded batch of source ids, source mask, decoder inputs and targets.

    Sources have shape (batch, longest source). Inputs and targets have shape (batch, longest
    target); the target of padding is -1.
    """
    sources, targets = zip(*items, strict=True)
    source_mask = padded_rows([torch.ones_like(ids) for ids in sources], 0).bool()
    inputs = padded_rows([ids[:-1] for ids in targets], pad)
    following = padded_rows([ids[1:] for ids in targets], _NO_TARGET)
    return padded_rows(sources, pad), source_mask, inputs, following


class ParallelData(TokenizedData[Pairs]):
    """Sentences and their translations for training, validation and, optionally, testing.

    `train`, `val` and `test` each specify two UTF-8 files with the same number of lines,
    NAME.SOURCE and NAME.TARGET, plain or compressed (.gz or .xz). For example, data/train with the
    languages de and en means data/train.de and data/train.en. One tokenizer is learned from both
    sides.

    Args:
        train: name of the training files, without the extensions.
        val: name of the validation files.
        source: extension of the files to translate from, such as de.
        target: extension of the files to translate to.
        test: name of the files for the final evaluation.
        length: maximum number of tokens in a sentence; pairs with longer sentences are skipped from
            training and validation.
        batch_size: number of pairs in a batch, per device.
        max_tokens: limit on the number of pairs in a batch times the number of tokens in its
            longest sentence; null for no limit.
        bucket: number of random batches that are pooled, sorted by length and divided again.
        tokens: further arguments of `molflt.data.text.datamodule.TokenizedData`.
    """

    items = "pairs"
    default_kind = "bpe"
    default_lowercase = False

    def __init__(
        self,
        train: Path,
        val: Path,
        source: str,
        target: str,
        test: Path | None = None,
        length: int = 256,
        batch_size: int = 128,
        max_tokens: int | None = None,
        bucket: int = 16,
        **tokens: Any,
    ) -> None:
        super().__init__(batch_size, {"train": train, "val": val, "test": test}, **tokens)
        if source == target:
            raise ValueError(f"data.source and data.target must differ; got {source!r} for both")
        self.source, self.target = source, target
        self.length, self.max_size, self.bucket = length, max_tokens, bucket

    def open(self, use: str) -> Pairs:
        text = read_parallel(self.sources[use], self.source, self.target)
        if use == "train":
            self.set_tokenizer(partial(chain, text.source, text.target), " and ".join(text.files))
            self.collate = cast("None", partial(paired, pad=self.tokenizer.pad))
        return Pairs(text, self.tokenizer, self.length)

    def _described(self, use: str) -> str:
        said, skipped = super()._described(use), self.datasets[use].skipped
        cut = f", {skipped:,} longer than {self.length} skipped" if skipped else ""
        return f"{said} {self.source}-{self.target}{cut}"

    def _lengths(self, use: str) -> list[int]:
        return self.datasets[use].sizes


def read_lines(path: str) -> list[str]:
    """Reads a file with one sentence per line and strips white space at the ends of sentences."""
    found = [line.strip() for line in _lines(path)]
    if not found:
        raise ValueError(f"{path}: the file is empty; expected a sentence in each line")
    if "" in found:
        raise ValueError(
            f"{path}: expected a sentence in each line; got an empty line {found.index('') + 1:,}; "
            "remove it, in a parallel text from both files"
        )
    return found


def read_parallel(name: str, source: str, target: str) -> ParallelText:
    """Reads both sides of a parallel text from the files NAME.SOURCE and NAME.TARGET."""
    files = _file(name, source), _file(name, target)
    sides = read_lines(files[0]), read_lines(files[1])
    if len(sides[0]) != len(sides[1]):
        raise ValueError(
            f"expected the same number of lines in {files[0]} and {files[1]}; got "
            f"{len(sides[0]):,} and {len(sides[1]):,}"
        )
    return ParallelText(*sides, files)


def _file(name: str, language: str) -> str:
    names = packed_names(f"{name}.{language}")
    return next((path for path in names if Path(path).is_file()), names[0])
