"""Texts as blocks of tokens, one sequence or two parts of one, for masked models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from molflt.data.batches import BatchedData
from molflt.data.text.fixed import FIXED
from molflt.data.text.sources import _line_blocks, _text_blocks
from molflt.data.text.tokenizer import TOKENIZER, Tokenizer, TokenizerKind, find_tokenizer

__all__ = ["PieceBlocks", "TokenizedData", "TokenizedText", "read_pieces"]

_PIECES = 8192
_FEW_KNOWN = 0.5  # share of unknown pieces from which on a tokenizer is none of this text
_Items = TypeVar("_Items", bound=Sized)


class PieceBlocks(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """A text cut into sequences [CLS] ... [SEP], or [CLS] ... [SEP] ... [SEP].

    Both parts of the latter are of one length, the second follows the first in the text.

    Args:
        ids: (n,) integers, without special tokens.
        length: tokens in a block, special ones too.
        tokenizer: whose ids they are.
        pairs: make two parts.
        keep_last: keep the rest that fills no block, padded.

    Raises:
        ValueError: too few tokens for one block, or a length without room for them.
    """

    def __init__(
        self,
        ids: np.ndarray,
        length: int,
        tokenizer: Tokenizer,
        pairs: bool = False,
        keep_last: bool = False,
    ) -> None:
        self.room = length - 2 - pairs
        self.first = (self.room + 1) // 2 if pairs else self.room
        if self.room < 1 + pairs:
            raise ValueError(
                f"data.length must be at least {3 + 2 * pairs}, with room for text between the "
                f"special tokens; got {length}"
            )
        least = (self.first + 1 if pairs else 1) if keep_last else self.room
        if len(ids) < least:
            raise ValueError(
                f"expected at least {least} tokens for one block; got {len(ids)}; use a longer "
                "text or a smaller data.length"
            )
        self.tokens, self.length, self.ids, self.pairs = len(ids), length, ids, pairs
        self.cls, self.sep, self.pad = tokenizer.cls, tokenizer.sep, tokenizer.pad
        whole, rest = divmod(len(ids), self.room)
        self.count = whole + (keep_last and rest >= (self.first + 1 if pairs else 1))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Ids and types, (length,) int64 each, and which of them exist, (length,) bool."""
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        piece = self.ids[index * self.room : (index + 1) * self.room].tolist()
        tokens = [self.cls, *piece[: self.first], self.sep]
        types = np.zeros(self.length, dtype=np.int64)
        if self.pairs:
            types[len(tokens) :] = 1
            tokens += [*piece[self.first :], self.sep]
        padded = np.full(self.length, self.pad, dtype=np.int64)
        padded[: len(tokens)] = tokens
        there = np.arange(self.length) < len(tokens)
        return torch.from_numpy(padded), torch.from_numpy(types), torch.from_numpy(there)


class TokenizedData(BatchedData[_Items]):
    """Base class: data whose text a tokenizer cuts, which is given, learned, or kept by a run.

    Args:
        batch_size: items in a batch, per device.
        workers: processes that read ahead; 0 reads in the main process.
        tokenizer: file of a tokenizer, or folder of a run or published model that has one.
        kind: of a tokenizer that is learned; or a given one, a key of `FIXED`.
        pieces: most pieces of one that is learned.
        lowercase: whether case makes no difference to one that is learned.

    Attributes:
        tokenizer: after `setup`.

    Raises:
        ValueError: for an option outside its range, or without effect.
    """

    tokenizer: Tokenizer

    def __init__(
        self,
        batch_size: int,
        workers: int,
        tokenizer: Path | None,
        kind: TokenizerKind | None,
        pieces: int | None,
        lowercase: bool | None,
    ) -> None:
        super().__init__(batch_size, workers)
        if pieces is not None and pieces < 6:
            raise ValueError(f"data.pieces must be at least 6; got {pieces}")
        self.tokenizer_file = None if tokenizer is None else Path(tokenizer)
        # nothing is learned then, but the tokens of a given tokenizer are checked
        self.fixed = kind if kind in FIXED else None
        given = {"kind": None if self.fixed else kind, "pieces": pieces, "lowercase": lowercase}
        idle = [name for name, value in given.items() if value is not None]
        if idle and (tokenizer is not None or self.fixed):
            reason = f"kind={kind}" if tokenizer is None else f"tokenizer={tokenizer}"
            raise ValueError(
                f"data.{idle[0]} has no effect with data.{reason}, which is not learned; leave one "
                "of them out"
            )
        self.kind: TokenizerKind = kind or "wordpiece"
        self.pieces = pieces or _PIECES
        self.lowercase = lowercase is None or lowercase

    def obtain(self, lines: Callable[[], Iterable[str]], name: str) -> None:
        """Sets the tokenizer: that of the run, or the given one, or one learned from a text.

        Args:
            lines: gives the text.
            name: of the text, for messages.

        Raises:
            FileNotFoundError: if there is no such tokenizer.
            ValueError: if it is damaged, or the text has no words.
        """
        source = self.tokenizer_file
        if self.kept is not None and (self.kept / TOKENIZER).is_file():
            source = self.kept / TOKENIZER
        elif self.kept is not None and source is None:
            raise FileNotFoundError(
                f"{self.kept / TOKENIZER}: no such file; expected the tokenizer that this run was "
                "begun with; put it back, or give data.tokenizer where torchrun starts processes"
            )
        if source is not None:
            content, label = find_tokenizer(source)
            self.tokenizer = Tokenizer.from_json(content, label)
            if self.fixed and self.tokenizer.fixed != self.fixed:
                raise ValueError(
                    f"{label}: its tokens are no {FIXED[self.fixed].what}s; expected them with "
                    f"data.kind={self.fixed}; change data.tokenizer, or leave it out"
                )
        else:
            self.tokenizer = Tokenizer.train(self.kind, lines(), self.pieces, self.lowercase, name)

    def files(self) -> dict[str, bytes]:
        """What a run must keep to read text later."""
        self.setup()
        return {TOKENIZER: self.tokenizer.to_json()}


class TokenizedText(TokenizedData[PieceBlocks]):
    """Blocks of a training, a validation and perhaps a test text.

    Each text is a file of UTF-8, plain or ending in .gz or .xz, or a Hugging Face data set, see
    `molflt.data.text.datamodule.TextData`. What is masked is the task's.

    Args:
        train: text to train on.
        val: text to validate on.
        test: text to evaluate on at the end.
        tokenizer: tokenizer.json, or the folder of a run or of a published model that has one; by
            default one is learned from the training text.
        kind: of a tokenizer that is learned: wordpiece (as BERT's), the default, unigram (as
            SentencePiece's, which FNet has), or bpe; or protein: tokens are residues, the files
            FASTA, records stand behind each other with a [SEP] between them, nothing is learned; or
            listops: tokens are its symbols, each line is an expression, with a [SEP] behind it; or
            byte: tokens are the 256 bytes, UTF-8 or not, each line with a [SEP] behind it.
        pieces: most pieces of one that is learned, 8192 by default.
        lowercase: whether case makes no difference to one that is learned; true by default.
        length: tokens in a block.
        next_sentence: blocks of two parts, of which the model is to tell whether they follow.
        batch_size: blocks in a batch, per device; at least 2 for `next_sentence`.
        workers: processes that read ahead; 0 reads in the main process.

    Raises:
        ValueError: for an option outside its range, or without effect.
    """

    items = "blocks"
    datasets: dict[str, PieceBlocks]

    def __init__(
        self,
        train: Path,
        val: Path,
        test: Path | None = None,
        tokenizer: Path | None = None,
        kind: TokenizerKind | None = None,
        pieces: int | None = None,
        lowercase: bool | None = None,
        length: int = 128,
        next_sentence: bool = False,
        batch_size: int = 64,
        workers: int = 0,
    ) -> None:
        super().__init__(batch_size, workers, tokenizer, kind, pieces, lowercase)
        if length < 3 + 2 * next_sentence:
            raise ValueError(f"data.length must be at least {3 + 2 * next_sentence}; got {length}")
        if next_sentence and batch_size < 2:
            raise ValueError(
                f"data.next_sentence takes wrong second parts from other blocks of the batch; "
                f"expected data.batch_size of at least 2; got {batch_size}"
            )
        self.sources = {"train": str(train), "val": str(val)}
        if test is not None:
            self.sources["test"] = str(test)
        self.length = length
        self.next_sentence = next_sentence

    def setup(self, stage: str = "fit") -> None:
        """Reads the texts, once.

        Raises:
            ValueError: a text that is empty, too short or not UTF-8; a tokenizer of another text.
            FileNotFoundError: naming the file.
        """
        source = self.sources["train"]
        if "train" not in self.datasets:
            self.obtain(lambda: _line_blocks(source, "train"), source)
        for use, name in self.sources.items():
            if use not in self.datasets and (use != "test" or stage != "fit"):
                self.datasets[use] = read_pieces(
                    name, self.tokenizer, self.length, self.next_sentence, use
                )

    def sizes(self) -> dict[str, int]:
        """What the data decide about the model."""
        self.setup()
        return {"vocabulary": len(self.tokenizer), "next_sentence": self.next_sentence}

    def describe(self) -> list[str]:
        return [
            f"{use} {blocks.tokens:,} tokens ({self.sources[use].rpartition('/')[2]})"
            for use, blocks in self.datasets.items()
        ]


def read_pieces(
    source: str, tokenizer: Tokenizer, length: int, pairs: bool = False, use: str = "val"
) -> PieceBlocks:
    """A text in blocks; all of it but for training, where the rest that fills no block is left out.

    A tokenizer of residues reads FASTA.

    Args:
        source: file or hf: name.
        tokenizer: of the model.
        length: tokens in a block.
        pairs: make two parts of each.
        use: "train", "val" or "test".

    Raises:
        ValueError: a text that is empty, or not UTF-8, or mostly unknown to the tokenizer.
        FileNotFoundError: naming the file.
    """
    records = tokenizer.letters is not None
    any_bytes = tokenizer.fixed == "byte"
    blocks = (
        _text_blocks(source, "protein", use) if records else _line_blocks(source, use, any_bytes)
    )
    ids = tokenizer.encode_blocks(cast("Iterable[str]", blocks), source)
    if not len(ids):
        raise ValueError(f"{source}: the file is empty; expected text")
    if (share := float(np.mean(ids == tokenizer.unk))) > _FEW_KNOWN:
        raise ValueError(
            f"{source}: {share:.0%} of it is unknown to this tokenizer; expected the tokenizer of "
            "such a text; change data.tokenizer, or leave it out to learn one"
        )
    try:
        return PieceBlocks(ids, length, tokenizer, pairs, use != "train")
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
