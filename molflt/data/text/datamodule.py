"""Blocks of token ids for language models, and the base class for data with a tokenizer."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from molflt.data.batches import BatchedData
from molflt.data.text.sources import _line_blocks, _text_blocks
from molflt.data.text.tokenizer import TOKENIZER, Tokenizer, TokenizerKind, find_tokenizer
from molflt.data.text.vocabulary import _MOST_UNKNOWN, FIXED, Vocabulary, _Level

_NO_TARGET = -1  # target of padding
_PIECES = 8192  # default size of a learned tokenizer
_Item = TypeVar("_Item", covariant=True)
_Items = TypeVar("_Items", bound=Sized)


class Blocks(Dataset[_Item]):
    """Base class for data sets that divide a text into blocks of `length` tokens.

    `ids` (tokens,) contains the ids of the text. Each block contains `inner` tokens of the text.
    With `keep_last`, an incomplete last block of at least `shortest` tokens is padded; otherwise,
    it is dropped.
    """

    def __init__(
        self, ids: np.ndarray, length: int, inner: int, shortest: int, keep_last: bool, source: str
    ) -> None:
        least = shortest if keep_last else inner
        if len(ids) < least:
            raise ValueError(
                f"{source}: expected at least {least} tokens for one block; got {len(ids)}; use a "
                "longer text or a smaller data.length"
            )
        self.count, rest = divmod(len(ids), inner)
        if keep_last and rest >= shortest:
            self.count += 1
        self.ids, self.tokens = ids, len(ids)
        self.length, self.inner = length, inner

    def __len__(self) -> int:
        return self.count

    def _piece(self, index: int) -> np.ndarray:
        if not 0 <= index < self.count:
            raise IndexError(f"block {index} of {self.count}")
        return self.ids[index * self.inner : (index + 1) * self.inner]


class TokenBlocks(Blocks[tuple[Tensor, Tensor]]):
    """Blocks of a text in which every token is predicted exactly once.

    The stream is [<eos>, t_1, ..., t_n]. Block i has the inputs stream[i L : (i + 1) L] and the
    targets t_(i L + 1) ... t_((i + 1) L). The first input of a block is the last token of the
    previous block; earlier tokens are not available as context. The language models of FLT are
    trained and evaluated in this way (arXiv:2302.01925, appendix B.1).

    Args:
        ids: integer ids of the text, of shape (n,), without the first <eos>.
        length: L, the number of tokens in a block.
        eos: id of <eos>.
        keep_last: keep an incomplete last block; its padding is <eos>, with the target -1.
        source: name of the text, for messages.
    """

    def __init__(
        self, ids: np.ndarray, length: int, eos: int, keep_last: bool = False, source: str = "text"
    ) -> None:
        super().__init__(ids, length, length, 1, keep_last, source)
        self.eos = eos

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns int64 inputs and targets, each of shape (length,); padding has the target -1."""
        piece = self._piece(index)
        inputs = np.full(self.length, self.eos, dtype=np.int64)
        targets = np.full(self.length, _NO_TARGET, dtype=np.int64)
        targets[: len(piece)] = piece
        if index:
            inputs[0] = self.ids[index * self.length - 1]
        inputs[1 : len(piece)] = piece[:-1]
        return torch.from_numpy(inputs), torch.from_numpy(targets)


class TextData(BatchedData[TokenBlocks]):
    """Blocks of a training text, a validation text and an optional test text.

    Each text is a UTF-8 file, plain or compressed (.gz or .xz).

    Args:
        train: training text.
        val: validation text.
        test: text for the final evaluation.
        level: kind of tokens: words, characters, bytes, or protein residues in FASTA files; see
            `molflt.data.text.vocabulary.Vocabulary`.
        length: number of tokens in a block.
        batch_size: number of blocks in a batch, per device.
        workers: number of processes that prefetch data; 0 reads in the main process.
        min_count: minimum count of a token in the training text; rarer tokens become <unk>.
        vocabulary: vocabulary.json of an earlier run; by default, the vocabulary is built from the
            training text.

    Attributes:
        vocabulary: vocabulary of the training text; available after `setup`.
    """

    items = "blocks"
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
        super().__init__(batch_size, workers, {"train": train, "val": val, "test": test})
        if min_count > 1 and (vocabulary is not None or level in FIXED):
            given = f"vocabulary={vocabulary}" if vocabulary is not None else f"level={level}"
            raise ValueError(
                f"data.min_count has no effect with data.{given}, which fixes the vocabulary; omit "
                "one of them"
            )
        self.level = level
        self.length = length
        self.min_count = min_count
        self.vocabulary_file = None if vocabulary is None else Path(vocabulary)

    def open(self, use: str) -> TokenBlocks:
        source, file = self.sources[use], self.vocabulary_file
        if use == "train" and file is None:
            blocks = _text_blocks(source, self.level)
            self.vocabulary, ids = Vocabulary.count(self.level, blocks, self.min_count)
            return TokenBlocks(ids, self.length, self.vocabulary.eos, source=source)
        if use == "train" and file is not None:
            self.vocabulary = Vocabulary.from_json(file.read_bytes(), str(file))
            if self.vocabulary.level != self.level:
                raise ValueError(
                    f"{file}: expected a vocabulary of level {self.level!r}; got "
                    f"{self.vocabulary.level!r}; change data.level"
                )
        return read_blocks(source, self.vocabulary, self.length, keep_last=use != "train")

    def _described(self, use: str) -> str:
        return f"{self.datasets[use].tokens:,} tokens ({Path(self.sources[use]).name})"

    def sizes(self) -> dict[str, int]:
        self.setup()
        return {"vocabulary": len(self.vocabulary)}

    def files(self) -> dict[str, bytes]:
        self.setup()
        return {"vocabulary.json": self.vocabulary.to_json()}


def read_blocks(
    source: str, vocabulary: Vocabulary, length: int, keep_last: bool = True
) -> TokenBlocks:
    """Reads a text file as blocks; warns if most of its tokens are unknown."""
    ids = vocabulary.encode_blocks(_text_blocks(source, vocabulary.level))
    if len(ids) and (share := float(np.mean(ids == vocabulary.unk))) > _MOST_UNKNOWN:
        warnings.warn(
            f"{source}: {share:.0%} of the tokens are not in the vocabulary and become <unk>; the "
            "perplexity is not meaningful for this text",
            stacklevel=2,
        )
    return TokenBlocks(ids, length, vocabulary.eos, keep_last, source)


class PieceBlocks(Blocks[tuple[Tensor, Tensor, Tensor]]):
    """Blocks [CLS] ... [SEP] of a text, or [CLS] ... [SEP] ... [SEP] with `pairs`.

    The ids (n,) of the text do not include special tokens, but the length of a block does. The two
    parts of a pair are adjacent in the text, and their lengths differ by at most one token.
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
        inner = length - (3 if pairs else 2)  # without special tokens
        self.first = (inner + 1) // 2 if pairs else inner
        shortest = self.first + 1 if pairs else 1  # a second part has at least one token
        super().__init__(ids, length, inner, shortest, keep_last, source)
        self.pairs = pairs
        self.cls, self.sep, self.pad = tokenizer.cls, tokenizer.sep, tokenizer.pad

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns ids, types and a mask that is False for padding, each of shape (length,)."""
        piece = self._piece(index).tolist()
        tokens = [self.cls, *piece[: self.first], self.sep]
        types = torch.zeros(self.length, dtype=torch.int64)
        if self.pairs:
            types[len(tokens) :] = 1
            tokens += [*piece[self.first :], self.sep]
        padded = torch.full((self.length,), self.pad)
        padded[: len(tokens)] = torch.tensor(tokens)
        return padded, types, torch.arange(self.length) < len(tokens)


class TokenizedData(BatchedData[_Items]):
    """Base class for data with a tokenizer, which is read from a file or learned.

    Args:
        batch_size: number of items in a batch, per device.
        sources: see `molflt.data.batches.BatchedData`.
        tokenizer: tokenizer.json, or the folder of a run or of a published model that contains it.
            By default, the tokenizer of the weights in --init is used; without --init, a tokenizer
            is learned from the training text.
        kind: kind of a learned tokenizer: wordpiece (as in BERT; the default), unigram (as in
            SentencePiece and FNet), or bpe (the default for translation). Alternatively, a fixed
            vocabulary with [SEP] after each sequence: protein (residues of FASTA records), listops
            (symbols of expressions, one per line), or byte (bytes of lines, which need not be UTF-8
            in texts for language models).
        pieces: maximum number of tokens of a learned tokenizer, 8192 by default.
        lowercase: ignore case in a learned tokenizer and, with wordpiece, accents and vowel signs,
            which matter in Thai or Hebrew; true by default, except for translation. BLEU ignores
            case if the tokenizer does.
        workers: number of processes that prefetch data; 0 reads in the main process.

    Attributes:
        tokenizer: tokenizer of all texts; available after `setup`.
    """

    default_kind: ClassVar[TokenizerKind] = "wordpiece"
    default_lowercase: ClassVar[bool] = True
    tokenizer: Tokenizer

    def __init__(
        self,
        batch_size: int,
        sources: Mapping[str, object],
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
        without_effect = [name for name, value in given.items() if value is not None]
        if without_effect and (tokenizer is not None or self.fixed):
            reason = f"kind={kind}" if tokenizer is None else f"tokenizer={tokenizer}"
            raise ValueError(
                f"data.{without_effect[0]} has no effect with data.{reason}, which is not learned; "
                "omit one of them"
            )
        self.kind = kind or self.default_kind
        self.pieces = _PIECES if pieces is None else pieces
        self.lowercase = self.default_lowercase if lowercase is None else lowercase

    def set_tokenizer(self, lines: Callable[[], Iterable[str]], name: str) -> None:
        """Loads the tokenizer of the resumed run or of a file; otherwise, trains a tokenizer."""
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
                f"{label}: expected a tokenizer of data.kind={self.fixed}; got a different one; "
                "change data.tokenizer, or omit it"
            )

    def sizes(self) -> dict[str, int]:
        self.setup()
        return {"vocabulary": len(self.tokenizer)}

    def files(self) -> dict[str, bytes]:
        self.setup()
        return {TOKENIZER: self.tokenizer.to_json()}


class TokenizedText(TokenizedData[PieceBlocks]):
    """Blocks of training, validation and optional test texts, for masked language models.

    Each text is a UTF-8 file, plain or compressed (.gz or .xz).

    Args:
        train: training text.
        val: validation text.
        test: text for the final evaluation.
        length: number of tokens in a block.
        next_sentence: make blocks of two parts; the model predicts whether the parts are adjacent.
        batch_size: number of blocks in a batch, per device; at least 2 with `next_sentence`.
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
        least = 5 if next_sentence else 3  # one token between special tokens
        if length < least:
            raise ValueError(f"data.length must be at least {least}; got {length}")
        if next_sentence and batch_size < 2:
            raise ValueError(
                "data.next_sentence draws false second parts from other blocks of the batch; "
                f"expected a data.batch_size of at least 2; got {batch_size}"
            )
        self.length = length
        self.next_sentence = next_sentence

    def open(self, use: str) -> PieceBlocks:
        source = self.sources[use]
        if use == "train":
            self.set_tokenizer(lambda: _line_blocks(source), source)
        return read_pieces(
            source, self.tokenizer, self.length, self.next_sentence, keep_last=use != "train"
        )

    def _described(self, use: str) -> str:
        return f"{self.datasets[use].tokens:,} tokens ({Path(self.sources[use]).name})"

    def sizes(self) -> dict[str, int]:
        return {**super().sizes(), "next_sentence": self.next_sentence}


def read_pieces(
    source: str, tokenizer: Tokenizer, length: int, pairs: bool = False, keep_last: bool = True
) -> PieceBlocks:
    """Reads a text file as blocks; for a tokenizer of residues, it must contain FASTA records."""
    if tokenizer.letters is None:
        blocks = _line_blocks(source, any_bytes=tokenizer.fixed == "byte")
    else:
        blocks = cast("Iterator[str]", _text_blocks(source, "protein"))
    ids = tokenizer.encode_blocks(blocks, source)
    tokenizer.expect_known(ids, source)
    return PieceBlocks(ids, length, tokenizer, pairs, keep_last, source)


def padded_rows(rows: Sequence[Tensor], value: int) -> Tensor:
    """Pads rows (n,) of different lengths with `value` at the end and stacks them."""
    return torch.nn.utils.rnn.pad_sequence([*rows], batch_first=True, padding_value=value)
