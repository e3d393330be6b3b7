"""Parallel texts: line i of one file is the translation of line i of the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from molflt.data.batches import SizeBucketedBatchSampler
from molflt.data.text.sources import _line_blocks
from molflt.data.text.tokenized import TokenizedData
from molflt.data.text.tokenizer import Tokenizer, TokenizerKind

__all__ = ["Pairs", "ParallelData", "ParallelText", "paired", "read_lines", "read_parallel"]

_PACKED = ("", ".gz", ".xz")
_NO_TARGET = -1
_FEW_KNOWN = 0.5  # share of unknown pieces from which on a tokenizer is none of this text

_Item = tuple[Tensor, Tensor]


class ParallelText(NamedTuple):
    """Sentences and their translations."""

    source: list[str]
    target: list[str]
    files: tuple[str, str]
    """names of the files, for messages"""


class Pairs(Dataset[_Item]):
    """Ids of sentences and of their translations.

    Args:
        text: the sentences.
        tokenizer: cuts both sides.
        length: most tokens of a sentence, with the one that ends it; longer pairs are left out.
            None for no limit.

    Attributes:
        left_out: how many pairs were too long.

    Raises:
        ValueError: no pair is left, or a side is mostly unknown to the tokenizer.
    """

    def __init__(self, text: ParallelText, tokenizer: Tokenizer, length: int | None = None) -> None:
        self.begin, self.end = tokenizer.cls, tokenizer.sep
        sides = [tokenizer.encode(side) for side in text[:2]]
        for name, side in zip(text.files, sides, strict=True):
            ids = np.fromiter(chain.from_iterable(side), dtype=np.int64)
            if (share := float(np.mean(ids == tokenizer.unk)) if len(ids) else 0.0) > _FEW_KNOWN:
                raise ValueError(
                    f"{name}: {share:.0%} of it is unknown to this tokenizer; expected the "
                    "tokenizer of such a text; change data.tokenizer, or leave it out to learn one"
                )
        pairs = list(zip(*sides, strict=True))
        room = None if length is None else length - 1
        self.pairs = [pair for pair in pairs if room is None or max(map(len, pair)) <= room]
        self.left_out = len(pairs) - len(self.pairs)
        if not self.pairs:
            raise ValueError(
                f"{text.files[0]}: all {len(pairs):,} pairs have more than {length} tokens; "
                "expected shorter ones; raise data.length"
            )

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> _Item:
        """Ids of the source, with the end, and of the target, between begin and end; (n,) int64."""
        if not 0 <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        source, target = self.pairs[index]
        ids = torch.tensor([*source, self.end]), torch.tensor([self.begin, *target, self.end])
        return ids

    @property
    def sizes(self) -> list[int]:
        """Tokens of the longer side of each pair."""
        return [max(map(len, pair)) + 1 for pair in self.pairs]


def paired(items: Sequence[_Item], pad: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A batch of items.

    Returns:
        Ids of sources and which of them exist, (batch, longest source); and of targets the tokens
        that are seen, and those that follow them (-1: none), (batch, longest target).
    """
    sources, targets = (list(side) for side in zip(*items, strict=True))
    source = _padded(sources, pad)
    there = _padded([torch.ones_like(ids) for ids in sources], 0).bool()
    seen = _padded([ids[:-1] for ids in targets], pad)
    return source, there, seen, _padded([ids[1:] for ids in targets], _NO_TARGET)


def _padded(rows: list[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


class ParallelData(TokenizedData[Pairs]):
    """Sentences and their translations, to train on, to validate on and perhaps to test on.

    Each name stands for two files of as many lines, NAME.SOURCE and NAME.TARGET, UTF-8, plain or
    ending in .gz or .xz: data/train with the languages de and en for data/train.de and
    data/train.en.

    Args:
        train: name of the pair of files to train on.
        val: name of that to validate on.
        source: ending of the files to translate from, such as de.
        target: ending of those to translate to.
        test: name of the pair to evaluate on at the end.
        tokenizer: tokenizer.json, or the folder of a run that has one; by default one is learned
            from both sides of the training text together.
        kind: of a tokenizer that is learned, see `molflt.data.text.tokenized.TokenizedText`; bpe by
            default.
        pieces: most pieces of one that is learned, 8192 by default.
        lowercase: whether case makes no difference to one that is learned; false by default. BLEU
            ignores case where the tokenizer does, learned or given.
        length: most tokens of a sentence; longer pairs are left out of training and validation,
            which says how many.
        batch_size: pairs in a batch, per device.
        max_tokens: most pairs of a batch times the tokens of its longest sentence; null for no cap.
        bucket: how many random batches are sorted by length together and cut again.
        workers: processes that read ahead; 0 reads in the main process.

    Raises:
        ValueError: for an option outside its range, or without effect.
    """

    items = "pairs"
    datasets: dict[str, Pairs]

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
        super().__init__(batch_size, workers, tokenizer, kind, pieces, lowercase)
        self.kind, self.lowercase = kind or "bpe", bool(lowercase)
        for name, value, least in (("length", length, 2), ("bucket", bucket, 1)):
            if value < least:
                raise ValueError(f"data.{name} must be at least {least}; got {value}")
        if max_tokens is not None and max_tokens < length:
            raise ValueError(
                f"data.max_tokens must be at least data.length={length}, or a pair fits into no "
                f"batch; got {max_tokens}; change one of them"
            )
        if source == target:
            raise ValueError(
                f"data.source and data.target are both {source!r}; expected two languages, the "
                "endings of the files"
            )
        self.names = {"train": str(train), "val": str(val)}
        if test is not None:
            self.names["test"] = str(test)
        self.source, self.target = source, target
        self.length, self.max_tokens, self.bucket = length, max_tokens, bucket

    def setup(self, stage: str = "fit") -> None:
        """Reads the files to train and to validate on, once.

        Raises:
            ValueError: a file that is empty or not UTF-8, files of unequal length, empty lines, or
                a tokenizer of another text.
            FileNotFoundError: naming the file.
        """
        for use in ("train", "val"):
            if use in self.datasets:
                continue
            text = read_parallel(self.names[use], self.source, self.target)
            if use == "train":
                lines = partial(chain, text.source, text.target)
                self.obtain(lines, " and ".join(text.files))
                self.collate = cast("None", partial(paired, pad=self.tokenizer.pad))
            self.datasets[use] = Pairs(text, self.tokenizer, self.length)

    def sizes(self) -> dict[str, int]:
        """What the data decide about the model."""
        self.setup()
        return {"vocabulary": len(self.tokenizer)}

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
    """Lines of a text, each a sentence, without white space around it.

    Lines end with a line feed alone: what else Unicode takes for an end would part the two sides.

    Raises:
        FileNotFoundError: naming the file.
        ValueError: an empty file, or one that is not UTF-8, with the offset.
    """
    found = list(_lines(path))
    if not found:
        raise ValueError(f"{path}: the file is empty; expected a sentence in each line")
    return found


def _lines(path: str) -> Iterator[str]:
    for block in _line_blocks(path):
        yield from (line.strip() for line in block.removesuffix("\n").split("\n"))


def read_parallel(name: str, source: str, target: str) -> ParallelText:
    """Both sides of a parallel text.

    Args:
        name: of the two files, without the language.
        source: language, the ending of the one.
        target: that of the other.

    Raises:
        FileNotFoundError: naming the file.
        ValueError: naming the file: empty, not UTF-8, fewer lines than the other, or empty lines.
    """
    files = _file(name, source), _file(name, target)
    sides = [read_lines(path) for path in files]
    if len(sides[0]) != len(sides[1]):
        raise ValueError(
            f"{files[0]} has {len(sides[0]):,} lines, {files[1]} {len(sides[1]):,}; expected as "
            "many, line i of one the translation of line i of the other; align them"
        )
    for path, other, side in zip(files, files[::-1], sides, strict=True):
        if empty := [number for number, line in enumerate(side, 1) if not line]:
            raise ValueError(
                f"{path}: {len(empty):,} empty line{'s' * (len(empty) > 1)}, the first is line "
                f"{empty[0]:,}; expected a sentence in each; remove the line there and in {other}"
            )
    return ParallelText(sides[0], sides[1], files)


def _file(name: str, language: str) -> str:
    for packed in _PACKED:
        if Path(found := f"{name}.{language}{packed}").is_file():
            return found
    raise FileNotFoundError(
        f"{name}.{language}: no such file; expected a text, plain or as .gz or .xz; data.source "
        "and data.target are the endings of the two files"
    )
