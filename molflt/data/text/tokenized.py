"""Blocks of tokens for masked models, and the base class for data with a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from molflt.data.text.datamodule import Blocks, TextSets
from molflt.data.text.sources import _line_blocks, _text_blocks
from molflt.data.text.tokenizer import TOKENIZER, Tokenizer, TokenizerKind, find_tokenizer
from molflt.data.text.vocabulary import FIXED

__all__ = ["PieceBlocks", "TokenizedData", "TokenizedText", "padded_rows", "read_pieces"]

_PIECES = 8192
_Items = TypeVar("_Items", bound=Sized)


class PieceBlocks(Blocks[tuple[Tensor, Tensor, Tensor]]):
    """Blocks [CLS] ... [SEP] of a text, or [CLS] ... [SEP] ... [SEP] with two parts.

    The length includes special tokens, which are not in the ids (n,) of the text. With `pairs`, the
    two parts are adjacent in the text, and their lengths differ by at most one token.
    """

    def __init__(
        self,
        ids: np.ndarray,
        length: int,
        tokenizer: Tokenizer,
        pairs: bool = False,
        keep_last: bool = False,
        source: str = "text",
    ) -> None:
        inner = length - 2 - pairs
        self.first = (inner + 1) // 2 if pairs else inner
        shortest = self.first + 1 if pairs else 1  # a second part has at least one token
        super().__init__(ids, length, inner, shortest, keep_last, source)
        self.pairs = pairs
        self.cls, self.sep, self.pad = tokenizer.cls, tokenizer.sep, tokenizer.pad

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns ids and types, (length,) int64, and the mask (length,), False for padding."""
        piece = self._piece(index).tolist()
        tokens = [self.cls, *piece[: self.first], self.sep]
        types = torch.zeros(self.length, dtype=torch.int64)
        if self.pairs:
            types[len(tokens) :] = 1
            tokens += [*piece[self.first :], self.sep]
        padded = torch.full((self.length,), self.pad)
        padded[: len(tokens)] = torch.tensor(tokens)
        return padded, types, torch.arange(self.length) < len(tokens)


class TokenizedData(TextSets[_Items]):
    """Base class for data with a tokenizer, which is read from a file or learned.

    Args:
        batch_size: items in a batch, per device.
        sources: see `TextSets`.
        tokenizer: tokenizer.json, or the folder of a run or of a published model that contains it.
            By default, the tokenizer of the weights in --init is used; without --init, one is
            learned from the training text.
        kind: kind of a learned tokenizer: wordpiece (as in BERT; the default), unigram (as in
            SentencePiece and FNet), or bpe (the default for translation). Alternatively, a fixed
            vocabulary with [SEP] after each sequence: protein (residues of FASTA records), listops
            (symbols of expressions, one per line), or byte (bytes of lines, which need not be
            UTF-8).
        pieces: maximum number of tokens of a learned tokenizer, 8192 by default.
        lowercase: ignore case in a learned tokenizer; by default true, but false for translation.
            BLEU ignores case if the tokenizer does.
        workers: processes that read ahead; 0 reads in the main process.

    Attributes:
        tokenizer: tokenizer; available after `setup`.
    """

    default_kind: ClassVar[TokenizerKind] = "wordpiece"
    default_lowercase: ClassVar[bool] = True
    tokenizer: Tokenizer

    def __init__(
        self,
        batch_size: int,
        sources: Mapping[str, Path | None],
        tokenizer: Path | None = None,
        kind: TokenizerKind | None = None,
        pieces: int | None = None,
        lowercase: bool | None = None,
        workers: int = 0,
    ) -> None:
        super().__init__(batch_size, workers, sources)
        self.tokenizer_file = None if tokenizer is None else Path(tokenizer)
        self.fixed = kind if kind in FIXED else None
        given = {"kind": None if self.fixed else kind, "pieces": pieces, "lowercase": lowercase}
        idle = [name for name, value in given.items() if value is not None]
        if idle and (tokenizer is not None or self.fixed):
            reason = f"kind={kind}" if tokenizer is None else f"tokenizer={tokenizer}"
            raise ValueError(
                f"data.{idle[0]} has no effect with data.{reason}, which is not learned; omit one "
                "of them"
            )
        self.kind = kind or self.default_kind
        self.pieces = _PIECES if pieces is None else pieces
        self.lowercase = self.default_lowercase if lowercase is None else lowercase

    def set_tokenizer(self, lines: Callable[[], Iterable[str]], name: str) -> None:
        """Sets the tokenizer: from the resumed run, from `tokenizer`, or newly learned."""
        source = self.tokenizer_file
        if self.kept is not None and (source is None or (self.kept / TOKENIZER).is_file()):
            source = self.kept / TOKENIZER
        if source is None:
            self.tokenizer = Tokenizer.train(self.kind, lines(), self.pieces, self.lowercase, name)
            return
        content, label = find_tokenizer(source)
        self.tokenizer = Tokenizer.from_json(content, label)
        if self.fixed and self.tokenizer.fixed != self.fixed:
            raise ValueError(
                f"{label}: expected a tokenizer of data.kind={self.fixed}; got another one; change "
                "data.tokenizer, or omit it"
            )

    def sizes(self) -> dict[str, int]:
        self.setup()
        return {"vocabulary": len(self.tokenizer)}

    def files(self) -> dict[str, bytes]:
        self.setup()
        return {TOKENIZER: self.tokenizer.to_json()}


class TokenizedText(TokenizedData[PieceBlocks]):
    """Blocks of a training text, a validation text and an optional test text, for masked models.

    Each text is a UTF-8 file, plain or compressed (.gz or .xz), or a Hugging Face data set; see
    `molflt.data.text.datamodule.TextData`.

    Args:
        train: training text.
        val: validation text.
        test: text for the final evaluation.
        length: tokens in a block.
        next_sentence: make blocks of two parts; the model predicts whether they are adjacent.
        batch_size: blocks in a batch, per device; at least 2 with `next_sentence`.
        tokens: further arguments of `TokenizedData`.
    """

    items = "blocks"

    def __init__(
        self,
        train: Path,
        val: Path,
        test: Path | None = None,
        length: int = 128,
        next_sentence: bool = False,
        batch_size: int = 64,
        **tokens: Any,
    ) -> None:
        super().__init__(batch_size, {"train": train, "val": val, "test": test}, **tokens)
        if length < 3 + 2 * next_sentence:
            raise ValueError(f"data.length must be at least {3 + 2 * next_sentence}; got {length}")
        if next_sentence and batch_size < 2:
            raise ValueError(
                "data.next_sentence takes wrong second parts from other blocks of the batch; "
                f"expected a data.batch_size of at least 2; got {batch_size}"
            )
        self.length = length
        self.next_sentence = next_sentence

    def open(self, use: str) -> PieceBlocks:
        source = self.sources[use]
        if use == "train":
            self.set_tokenizer(lambda: _line_blocks(source), source)
        return read_pieces(source, self.tokenizer, self.length, self.next_sentence, use)

    def sizes(self) -> dict[str, int]:
        return {**super().sizes(), "next_sentence": self.next_sentence}


def read_pieces(
    source: str, tokenizer: Tokenizer, length: int, pairs: bool = False, use: str = "val"
) -> PieceBlocks:
    """Reads a text as blocks; an incomplete last block is dropped only if `use` is "train".

    The source is a file or an hf: name. A tokenizer of residues reads FASTA.
    """
    blocks = (
        _line_blocks(source, use, any_bytes=tokenizer.fixed == "byte")
        if tokenizer.letters is None
        else cast("Iterable[str]", _text_blocks(source, "protein", use))
    )
    ids = tokenizer.encode_blocks(blocks, source)
    tokenizer.expect_known(ids, source)
    return PieceBlocks(ids, length, tokenizer, pairs, use != "train", source)


def padded_rows(rows: Sequence[Tensor], value: int) -> Tensor:
    """Stacks rows (n,) of different lengths; `value` fills their ends."""
    return torch.nn.utils.rnn.pad_sequence([*rows], batch_first=True, padding_value=value)
