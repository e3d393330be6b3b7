"""Parallel texts: a file of sentences and a file of their translations, line by line."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from molflt.data.batches import SizeBucketedBatchSampler
from molflt.data.text.sources import _PACKED, _lines
from molflt.data.text.tokenized import TokenizedData
from molflt.data.text.tokenizer import Tokenizer, TokenizerKind

__all__ = ["Pairs", "ParallelData", "ParallelText", "paired", "read_lines", "read_parallel"]

_NO_TARGET = -1
_Item = tuple[Tensor, Tensor]


class ParallelText(NamedTuple):
    """Sentences and their translations."""

    source: list[str]
    target: list[str]
    files: tuple[str, str]
    """names of the files, for messages"""


class Pairs(Dataset[_Item]):
    """Token ids of sentences and of their translations.

    Args:
        text: sentences.
        tokenizer: tokenizer of both languages.
        length: maximum number of tokens in a sentence, including the end token; longer pairs are
            left out. None for no limit.

    Attributes:
        left_out: number of pairs that were too long.
    """

    def __init__(self, text: ParallelText, tokenizer: Tokenizer, length: int | None = None) -> None:
        self.begin, self.end = tokenizer.cls, tokenizer.sep
        sides = [tokenizer.encode(side) for side in text[:2]]
        for name, side in zip(text.files, sides, strict=True):
            tokenizer.expect_known(np.fromiter(chain.from_iterable(side), dtype=np.int64), name)
        pairs = list(zip(*sides, strict=True))
        self.pairs = [pair for pair in pairs if length is None or max(map(len, pair)) < length]
        self.left_out = len(pairs) - len(self.pairs)
        if not self.pairs:
            raise ValueError(
                f"{text.files[0]}: expected pairs of at most {length} tokens; got {len(pairs):,} "
                "longer ones; increase data.length"
            )

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> _Item:
        """Returns ids, (n,) int64 each: the source followed by end, and the target between begin
        and end."""
        source, target = self.pairs[index]
        return torch.tensor([*source, self.end]), torch.tensor([self.begin, *target, self.end])

    @property
    def sizes(self) -> list[int]:
        """Number of tokens of the longer side of each pair."""
        return [max(map(len, pair)) + 1 for pair in self.pairs]


def paired(items: Sequence[_Item], pad: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Collates items into a padded batch.

    Returns:
        Ids and mask of the sources, (batch, longest source), and the inputs and targets of the
        decoder, (batch, longest target); the target of padding is -1.
    """
    sources, targets = (list(side) for side in zip(*items, strict=True))
    source = _padded(sources, pad)
    there = _padded([torch.ones_like(ids) for ids in sources], 0).bool()
    seen = _padded([ids[:-1] for ids in targets], pad)
    return source, there, seen, _padded([ids[1:] for ids in targets], _NO_TARGET)


def _padded(rows: list[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


class ParallelData(TokenizedData[Pairs]):
    """Sentences and their translations for training, validation and an optional test.

    Each option names two UTF-8 files with the same number of lines, NAME.SOURCE and NAME.TARGET,
    plain or compressed (.gz or .xz). For example, data/train with the languages de and en means
    data/train.de and data/train.en.

    Args:
        train: name of the training files.
        val: name of the validation files.
        source: extension of the files to translate from, such as de.
        target: extension of the files to translate to.
        test: name of the files for the final evaluation.
        tokenizer: tokenizer.json, or the folder of a run that has one; by default one is learned
            from both sides of the training text.
        kind: kind of a learned tokenizer, see `molflt.data.text.tokenized.TokenizedText`; bpe by
            default.
        pieces: maximum number of tokens of a learned tokenizer, 8192 by default.
        lowercase: ignore case in a learned tokenizer; false by default. BLEU ignores case if the
            tokenizer does.
        length: maximum number of tokens in a sentence; longer pairs are left out of training and
            validation.
        batch_size: pairs in a batch, per device.
        max_tokens: limit on the number of pairs in a batch times the number of tokens in its
            longest sentence; null for no limit.
        bucket: number of random batches that are pooled, sorted by length and cut again.
        workers: processes that read ahead; 0 reads in the main process.
    """

    items = "pairs"

    def __init__(
        self,
        train: Path,
        val: Path,
        source: str,
        target: str,
        test: Path | None = None,
        tokenizer: Path | None = None,
        kind: TokenizerKind | None = None,
        pieces: int | None = None,
        lowercase: bool | None = None,
        length: int = 256,
        batch_size: int = 128,
        max_tokens: int | None = None,
        bucket: int = 16,
        workers: int = 0,
    ) -> None:
        sources = {"train": train, "val": val, "test": test}
        super().__init__(batch_size, workers, sources, tokenizer, kind, pieces, lowercase)
        self.kind, self.lowercase = kind or "bpe", bool(lowercase)
        for name, value, least in (("length", length, 2), ("bucket", bucket, 1)):
            if value < least:
                raise ValueError(f"data.{name} must be at least {least}; got {value}")
        if max_tokens is not None and max_tokens < length:
            raise ValueError(
                f"data.max_tokens must be at least data.length={length}; got {max_tokens}; change "
                "one of them"
            )
        if source == target:
            raise ValueError(
                f"data.source and data.target are both {source!r}; expected two languages, the "
                "endings of the files"
            )
        self.source, self.target = source, target
        self.length, self.max_tokens, self.bucket = length, max_tokens, bucket

    def open(self, use: str) -> Pairs:
        text = read_parallel(self.sources[use], self.source, self.target)
        if use == "train":
            self.set_tokenizer(partial(chain, text.source, text.target), " and ".join(text.files))
            self.collate = cast("None", partial(paired, pad=self.tokenizer.pad))
        return Pairs(text, self.tokenizer, self.length)

    def describe(self) -> list[str]:
        return [
            f"{use} {len(pairs):,} pairs {self.source}-{self.target}"
            + (f", {pairs.left_out:,} longer than {self.length} left out" if pairs.left_out else "")
            for use, pairs in self.datasets.items()
        ]

    def _sampler(self, use: str, rank: int, world: int) -> SizeBucketedBatchSampler:
        return SizeBucketedBatchSampler(
            self.datasets[use].sizes,
            self.batch_size,
            self.max_tokens,
            shuffle=use == "train",
            bucket=self.bucket,
            seed=self.seed,
            rank=rank,
            world=world,
        )


def read_lines(path: str) -> list[str]:
    """Reads the lines of a file, one sentence each, and strips white space.

    Only a line feed ends a line; other Unicode line breaks occur within sentences.
    """
    found = [line.strip() for line in _lines(path)]
    if not found:
        raise ValueError(f"{path}: the file is empty; expected a sentence in each line")
    return found


def read_parallel(name: str, source: str, target: str) -> ParallelText:
    """Reads both sides of a parallel text.

    Args:
        name: name of the two files, without the languages.
        source: source language, the extension of the first file.
        target: target language, the extension of the second file.
    """
    files = _file(name, source), _file(name, target)
    sides = [read_lines(path) for path in files]
    if len(sides[0]) != len(sides[1]):
        raise ValueError(
            f"expected equally many lines in {files[0]} and {files[1]}; got {len(sides[0]):,} and "
            f"{len(sides[1]):,}; line i of one must be the translation of line i of the other"
        )
    for path, other, side in zip(files, files[::-1], sides, strict=True):
        if empty := [number for number, line in enumerate(side, 1) if not line]:
            raise ValueError(
                f"{path}: expected a sentence in each line; got {len(empty):,} empty "
                f"line{'s' * (len(empty) > 1)}, first line {empty[0]:,}; remove it here and in "
                f"{other}"
            )
    return ParallelText(sides[0], sides[1], files)


def _file(name: str, language: str) -> str:
    for packed in ("", *_PACKED):
        if Path(found := f"{name}.{language}{packed}").is_file():
            return found
    raise FileNotFoundError(
        f"{name}.{language}: no such file; expected a text, plain or as .gz or .xz; data.source "
        "and data.target are the endings of the two files"
    )
