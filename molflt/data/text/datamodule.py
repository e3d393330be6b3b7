"""Plain text as blocks of token ids: files, compressed or not, and Hugging Face data sets."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from molflt.data.batches import BatchedData
from molflt.data.text.sources import _text_blocks
from molflt.data.text.vocabulary import _FIXED, Vocabulary, _Level

__all__ = ["TextData", "TokenBlocks", "read_blocks"]

_FEW_KNOWN = 0.5  # share of unknown tokens from which on a vocabulary is none of this text
_NO_TARGET = -1


class TokenBlocks(Dataset[tuple[Tensor, Tensor]]):
    """A text cut into blocks, where every token is to be predicted exactly once.

    The stream is [<eos>, t_1, ..., t_n]. Block i has the inputs stream[i L : (i + 1) L] and, one
    place later, the targets t_(i L + 1) ... t_((i + 1) L), and knows nothing of earlier blocks. So
    are FLT's language models trained and evaluated (arXiv:2302.01925, appendix B.1).

    Args:
        ids: (n,) integers, without the first <eos>.
        length: L, tokens in a block.
        eos: id of <eos>.
        keep_last: keep the rest that fills no block, padded by <eos> without a target (-1).

    Raises:
        ValueError: no token, or without `keep_last` fewer than `length` tokens.
    """

    def __init__(self, ids: np.ndarray, length: int, eos: int, keep_last: bool = False) -> None:
        if length < 1:
            raise ValueError(f"length must be at least 1; got {length}")
        least = 1 if keep_last else length
        if len(ids) < least:
            raise ValueError(
                f"expected at least {least} tokens for one block; got {len(ids)}; use a longer "
                "text or a smaller data.length"
            )
        self.tokens = len(ids)
        self.length = length
        self.eos = eos
        self.keep_last = keep_last
        self.ids = ids

    def __len__(self) -> int:
        return -(-self.tokens // self.length) if self.keep_last else self.tokens // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, (length,) int64 each; the target is -1 where there is none."""
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        start = index * self.length
        piece = self.ids[start : start + self.length]
        inputs = np.full(self.length, self.eos, dtype=np.int64)
        targets = np.full(self.length, _NO_TARGET, dtype=np.int64)
        targets[: len(piece)] = piece
        if start:
            inputs[0] = self.ids[start - 1]
        inputs[1 : len(piece)] = piece[:-1]
        return torch.from_numpy(inputs), torch.from_numpy(targets)


class TextData(BatchedData[TokenBlocks]):
    """Blocks of a training, a validation and perhaps a test text.

    Each text is a file of UTF-8, plain or ending in .gz or .xz, or a Hugging Face data set where
    `datasets` is installed: hf:OWNER/NAME[/CONFIG][:SPLIT[.COLUMN]], such as
    hf:Salesforce/wikitext/wikitext-2-v1:train.text, whose rows are lines.

    Args:
        train: text to train on.
        val: text to validate on.
        test: text to evaluate on at the end.
        level: tokens are words, characters, bytes, or residues of proteins in FASTA files, one
            `<eos>` behind each record; see `molflt.data.text.vocabulary.Vocabulary`.
        length: tokens in a block.
        batch_size: blocks in a batch, per device.
        workers: processes that read ahead; 0 reads in the main process.
        min_count: how often a token has to occur in the training text; rarer ones are <unk>.
        vocabulary: vocabulary.json of an earlier run, instead of that of the training text.

    Attributes:
        vocabulary: after `setup`.

    Raises:
        ValueError: for an option outside its range, or without effect.
    """

    items = "blocks"
    datasets: dict[str, TokenBlocks]
    vocabulary: Vocabulary

    def __init__(
        self,
        train: Path,
        val: Path,
        test: Path | None = None,
        level: _Level = "word",
        length: int = 512,
        batch_size: int = 64,
        workers: int = 0,
        min_count: int = 1,
        vocabulary: Path | None = None,
    ) -> None:
        super().__init__(batch_size, workers)
        for name, value in (("length", length), ("min_count", min_count)):
            if value < 1:
                raise ValueError(f"data.{name} must be at least 1; got {value}")
        given = f"vocabulary={vocabulary}" if vocabulary is not None else f"level={level}"
        if min_count > 1 and (vocabulary is not None or level in _FIXED):
            raise ValueError(
                f"data.min_count has no effect with data.{given}, of which nothing is counted; "
                "leave one of them out"
            )
        self.sources = {"train": str(train), "val": str(val)}
        if test is not None:
            self.sources["test"] = str(test)
        self.level = level
        self.length = length
        self.min_count = min_count
        self.vocabulary_file = None if vocabulary is None else Path(vocabulary)

    def setup(self, stage: str = "fit") -> None:
        """Reads the texts, once.

        Raises:
            ValueError: a text that is empty, too short or not UTF-8; a vocabulary of another text.
            FileNotFoundError: naming the file.
        """
        if "train" not in self.datasets:
            source = self.sources["train"]
            if self.vocabulary_file is None:
                blocks = _text_blocks(source, self.level, "train")
                self.vocabulary, ids = Vocabulary.count(self.level, blocks, self.min_count, source)
            else:
                self.vocabulary = _read_vocabulary(self.vocabulary_file, self.level)
                ids = self.vocabulary.encode_blocks(_text_blocks(source, self.level, "train"))
                if (share := _unknown(ids, self.vocabulary)) > _FEW_KNOWN:
                    raise ValueError(
                        f"{self.vocabulary_file}: {share:.0%} of the tokens of {source} are not in "
                        "this vocabulary; expected the one of this text; leave it out to make one"
                    )
            self.datasets["train"] = _cut(source, ids, self.length, self.vocabulary, False)
        for use, source in self.sources.items():
            if use not in self.datasets and (use != "test" or stage != "fit"):
                self.datasets[use] = read_blocks(source, self.vocabulary, self.length, use)

    def sizes(self) -> dict[str, int]:
        """What the data decide about the model."""
        self.setup()
        return {"vocabulary": len(self.vocabulary)}

    def files(self) -> dict[str, bytes]:
        """What a run must keep to read and write text later."""
        self.setup()
        return {"vocabulary.json": self.vocabulary.to_json()}

    def describe(self) -> list[str]:
        return [
            f"{use} {blocks.tokens:,} tokens ({self.sources[use].rpartition('/')[2]})"
            for use, blocks in self.datasets.items()
        ]


def read_blocks(source: str, vocabulary: Vocabulary, length: int, use: str = "val") -> TokenBlocks:
    """All tokens of a text in blocks for evaluation, read with a known vocabulary.

    Args:
        source: file or hf: name, see `TextData`.
        vocabulary: of the model.
        length: tokens in a block.
        use: "train", "val" or "test": which split of a Hugging Face data set if none is named.

    Raises:
        ValueError: a text that is empty or not UTF-8.
        FileNotFoundError: naming the file.
    """
    ids = vocabulary.encode_blocks(_text_blocks(source, vocabulary.level, use))
    if (share := _unknown(ids, vocabulary)) > _FEW_KNOWN:
        warnings.warn(
            f"{source}: {share:.0%} of the tokens are not in the vocabulary and count as <unk>: "
            "the perplexity says little about this text",
            stacklevel=2,
        )
    return _cut(source, ids, length, vocabulary, True)


def _read_vocabulary(path: Path, level: _Level) -> Vocabulary:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected a vocabulary.json")
    vocabulary = Vocabulary.from_json(path.read_bytes(), str(path))
    if vocabulary.level != level:
        raise ValueError(
            f"{path}: is a vocabulary of level {vocabulary.level!r}; expected {level!r}; change "
            "data.level"
        )
    return vocabulary


def _cut(
    source: str, ids: np.ndarray, length: int, vocabulary: Vocabulary, keep_last: bool
) -> TokenBlocks:
    if not len(ids):
        raise ValueError(f"{source}: the file is empty; expected text")
    try:
        return TokenBlocks(ids, length, vocabulary.eos, keep_last)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _unknown(ids: np.ndarray, vocabulary: Vocabulary) -> float:
    """Share of <unk>."""
    return float(np.mean(ids == vocabulary.unk)) if len(ids) else 0.0
