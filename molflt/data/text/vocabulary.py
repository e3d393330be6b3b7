"""Vocabularies of words and characters, and fixed vocabularies (bytes, residues and ListOps)."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
"""letters of the 20 standard amino acids (IUPAC-IUB 1983)"""

RESIDUES = f"{AMINO_ACIDS}BZXUO"
"""letters in UniProt: the amino acids, Asx, Glx, any residue, selenocysteine and pyrrolysine"""

LISTOPS = ("[MIN", "[MAX", "[MED", "[SM", "]", *"0123456789")
"""tokens of ListOps (arXiv:1804.06028), without the redundant parentheses of published files"""

_MOST_UNKNOWN = 0.5  # a larger share of unknown tokens indicates the wrong vocabulary
_VISIBLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHER = [byte for byte in range(256) if byte not in _VISIBLE]
BYTES = tuple(chr(b) if b in _VISIBLE else chr(256 + _OTHER.index(b)) for b in range(256))
"""visible character for each byte, as in GPT-2 and the pre-tokenizer ByteLevel"""

FIXED = {"protein": tuple(RESIDUES), "listops": LISTOPS, "byte": BYTES}
"""tokens of each tokenizer kind, without special tokens"""

_Level = Literal["word", "char", "byte", "protein"]
_UNK, _EOS = "<unk>", "<eos>"
_FORMAT, _VERSION = "molflt-vocabulary", 1
_FIXED_LEVELS = {"byte": [*map(chr, range(256)), _EOS], "protein": [*RESIDUES, _EOS]}


class Vocabulary:
    """Tokens of a text and their ids, in order of decreasing frequency.

    Words are separated by white space, and each line, even an empty line, ends with `<eos>`. The
    usual perplexities on WikiText-2 and -103 count tokens in this way (AWD-LSTM, fairseq).
    Characters are code points, including line breaks. The id of a byte is its value, and 256 is
    `<eos>`. The tokens of proteins are residues, and each sequence ends with `<eos>`. The levels
    "byte" and "protein" do not have `<unk>`.

    Args:
        level: "word", "char", "byte" or "protein".
        tokens: tokens in the order of their ids.
    """

    def __init__(self, level: _Level, tokens: list[str]) -> None:
        self.level = level
        self.tokens = list(tokens)
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        self.unk = self.ids.get(_UNK)
        self.eos = self.ids[_EOS]

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def count(
        cls, level: _Level, blocks: Iterable[bytes | str], min_count: int = 1
    ) -> tuple[Self, np.ndarray]:
        """Returns the vocabulary of a text and the int32 ids of its tokens, of shape (tokens,).

        See `encode_blocks` for `blocks`. Tokens with fewer than `min_count` occurrences become
        <unk>.
        """
        if level in _FIXED_LEVELS:
            vocabulary = cls(level, _FIXED_LEVELS[level])
            return vocabulary, vocabulary.encode_blocks(blocks)
        seen: defaultdict[str, int] = defaultdict()
        seen.default_factory = seen.__len__  # numbers new tokens consecutively
        ids = _joined(_numbers(level, seen.__getitem__, block) for block in blocks)
        counts = np.bincount(ids, minlength=len(seen)).tolist()
        counted = zip(seen, counts, strict=True)
        kept = {token: count for token, count in counted if count >= min_count or token == _EOS}
        kept.setdefault(_EOS, 0)
        kept[_UNK] = kept.get(_UNK, 0) + len(ids) - sum(kept.values())
        vocabulary = cls(level, sorted(kept, key=lambda token: (-kept[token], token)))
        unknown = vocabulary.ids[_UNK]
        new_ids = np.array([vocabulary.ids.get(token, unknown) for token in seen], dtype=np.int32)
        return vocabulary, new_ids[ids]

    def encode_blocks(self, blocks: Iterable[bytes | str]) -> np.ndarray:
        """Encodes a text, given in pieces that do not split words, as int32 ids (tokens,).

        Pieces are bytes at level "byte", and strings at other levels.
        """
        if self.level == "byte":
            raw = (block.encode() if isinstance(block, str) else block for block in blocks)
            return _joined(np.frombuffer(block, dtype=np.uint8).astype(np.int32) for block in raw)
        return _joined(_numbers(self.level, self._number, block) for block in blocks)

    def _number(self, token: str) -> int:
        number = self.ids.get(token, self.unk)
        if number is None:
            raise ValueError(f"{token!r} is not a residue; expected the letters {RESIDUES}")
        return number

    def encode(self, text: str) -> Tensor:
        """Encodes a text as int64 ids (tokens,), without appending `<eos>`."""
        return torch.from_numpy(self.encode_blocks([text]).astype(np.int64))

    def decode(self, ids: Iterable[int] | Tensor) -> str:
        """Decodes ids to text.

        `<eos>` becomes a line break for words and proteins and is dropped at other levels.
        """
        numbers = [int(index) for index in ids]
        if self.level == "byte":
            return bytes(index for index in numbers if index < 256).decode("utf-8", "replace")
        end = "" if self.level == "char" else "\n"
        tokens = [end if index == self.eos else self.tokens[index] for index in numbers]
        if self.level == "word":
            return " ".join(tokens).replace(" \n", "\n").replace("\n ", "\n")
        return "".join(tokens)

    def to_json(self) -> bytes:
        """Returns the content of a file for `from_json`."""
        tokens = None if self.level == "byte" else self.tokens
        fields = {"format": _FORMAT, "version": _VERSION, "level": self.level, "tokens": tokens}
        return json.dumps(fields, ensure_ascii=False, indent=0).encode() + b"\n"

    @classmethod
    def from_json(cls, content: bytes, name: str = "vocabulary") -> Self:
        """Reads the content of a file that `to_json` wrote; `name` is used in messages."""
        try:
            fields = json.loads(content)
            got = fields["format"], fields["version"]
            if got != (_FORMAT, _VERSION):
                raise ValueError(f"expected {_FORMAT} of version {_VERSION}; got {got}")
            level, tokens = fields["level"], fields["tokens"]
            return cls(level, _FIXED_LEVELS[level] if tokens is None else tokens)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{name}: cannot be read as a JSON vocabulary; {error}") from None


def _numbers(level: str, number: Callable[[str], int], block: bytes | str) -> NDArray[np.int32]:
    """Applies `number` to each word, character or residue of a block."""
    text = cast(str, block)
    if level == "word":
        tokens: Sequence[str] = text.replace("\n", f" {_EOS} ").split()
    elif level == "char":
        tokens = text
    else:
        tokens = [_EOS if letter == "\n" else letter for letter in text.upper()]
    return np.fromiter(map(number, tokens), dtype=np.int32, count=len(tokens))


def _joined(parts: Iterable[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.concatenate([np.empty(0, dtype=np.int32), *parts])


def text_of(content: bytes) -> str:
    """Decodes any bytes to text that byte tokenizers encode without loss."""
    return content.decode("utf-8", "surrogateescape")
