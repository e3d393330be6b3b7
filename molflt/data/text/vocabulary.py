"""Texts to token ids and back: words, characters, bytes, or residues of proteins."""

from __future__ import annotations

import json
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor

from molflt.data.text.proteins import RESIDUES, residue_ids

__all__ = ["Vocabulary"]

_Level = Literal["word", "char", "byte", "protein"]
_UNK, _EOS = "<unk>", "<eos>"
_FORMAT, _VERSION = "molflt-vocabulary", 1
_PIECE = 2**20  # ids
_MANY = 2**19  # words, which take 200 MB; WikiText-103 has 268,000
_REPEATS = 8  # how often a word comes on average, at least, where there are many; 380 there
_FIXED = {"byte": [*map(chr, range(256)), _EOS], "protein": [*RESIDUES, _EOS]}


class Vocabulary:
    """The tokens of a text by id, the most frequent first.

    Words are what lies between white space, and the end of each line, empty ones too, is one
    `<eos>`: so perplexities per token of WikiText-2 and -103 are counted (AWD-LSTM, fairseq).
    Characters are code points, line breaks included. Bytes have their own value as id, and then
    comes `<eos>`: there is no unknown byte. Of proteins, tokens are residues, and each sequence
    ends with one `<eos>`; there is no unknown residue, either. A stream of tokens begins with
    `<eos>` at every level.

    Args:
        level: "word", "char", "byte" or "protein".
        tokens: by id.

    Raises:
        ValueError: an unknown level, a token twice, or `<eos>` or `<unk>` missing.
    """

    def __init__(self, level: _Level, tokens: list[str]) -> None:
        if level not in get_args(_Level):
            raise ValueError(
                f"level={str(level)[:80]!r}; expected one of {', '.join(get_args(_Level))}"
            )
        self.level = level
        self.tokens = list(tokens)
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(t for i, t in enumerate(self.tokens) if self.ids[t] != i)
            raise ValueError(
                f"token {twice[:80]!r} stands twice in the vocabulary; expected it once"
            )
        if level in _FIXED and self.tokens != _FIXED[level]:
            what = "bytes has the 256 bytes" if level == "byte" else f"proteins has {RESIDUES}"
            raise ValueError(f"a vocabulary of {what} in order and {_EOS}")
        specials = (_EOS,) if level in _FIXED else (_EOS, _UNK)
        for special in specials:
            if special not in self.ids:
                raise ValueError(f"the vocabulary has no {special}; expected one")
        if level == "char" and (long := [t for t in tokens if len(t) != 1 and t not in specials]):
            raise ValueError(f"a vocabulary of characters has the token {long[0][:80]!r}")
        self.eos = self.ids[_EOS]
        self.unk = self.ids.get(_UNK)

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def count(
        cls,
        level: _Level,
        blocks: Iterable[bytes | str],
        min_count: int = 1,
        name: str = "text",
    ) -> tuple[Vocabulary, np.ndarray]:
        """The vocabulary of a text and its ids, in one pass.

        Args:
            level: see the class.
            blocks: pieces of the text, as for `encode_blocks`.
            min_count: how often a token has to occur to be in the vocabulary.
            name: of the text, for messages.

        Returns:
            Tokens by falling count, then by text; and ids (tokens,) int32.

        Raises:
            ValueError: the words are too many, and nearly all different.
        """
        if level in _FIXED:
            found = cls(level, _FIXED[level])
            return found, found.encode_blocks(blocks)
        seen: defaultdict[str, int] = defaultdict()
        seen.default_factory = seen.__len__  # a new token gets the next number
        ids = _joined(_numbered(level, seen, blocks, name))
        counts = np.zeros(len(seen), dtype=np.int64)
        for piece in _pieces(ids):
            counts += np.bincount(piece, minlength=len(seen))
        names = list(seen)
        pairs = zip(names, counts, strict=True)
        kept = {t: int(n) for t, n in pairs if n >= min_count or t == _EOS}
        kept.setdefault(_EOS, 0)
        kept[_UNK] = kept.get(_UNK, 0) + int(counts.sum()) - sum(kept.values())
        vocabulary = cls(level, sorted(kept, key=lambda token: (-kept[token], token)))
        unknown = vocabulary.ids[_UNK]
        new = np.array([vocabulary.ids.get(t, unknown) for t in names], dtype=np.int32)
        for piece in _pieces(ids):
            piece[:] = new[piece]
        return vocabulary, ids

    def encode_blocks(self, blocks: Iterable[bytes | str]) -> np.ndarray:
        """Ids (tokens,) int32 of a text given in pieces.

        Args:
            blocks: bytes at level "byte"; else text, at level "word" in whole words.

        Raises:
            ValueError: a letter that is no residue, at level "protein".
        """
        if self.level == "protein":
            texts = (block.decode() if isinstance(block, bytes) else block for block in blocks)
            return _joined(residue_ids(text, self.ids, self.eos) for text in texts)
        if self.level == "byte":
            raw = (block.encode() if isinstance(block, str) else block for block in blocks)
            return _joined(np.frombuffer(block, dtype=np.uint8).astype(np.int32) for block in raw)
        ids = _Known(self.ids, self.ids[_UNK])
        return _joined(_numbers(self.level, ids.__getitem__, block) for block in blocks)

    def encode(self, text: str) -> Tensor:
        """Ids (tokens,) int64. Line breaks are `<eos>` of words and proteins, the end is not."""
        return torch.from_numpy(self.encode_blocks([text]).astype(np.int64))

    def decode(self, ids: Iterable[int] | Tensor) -> str:
        """Text of ids; `<eos>` is a line break of words and proteins and nothing at other levels.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        numbers = [int(index) for index in ids]
        for index in numbers:
            if not 0 <= index < len(self):
                raise ValueError(f"token id {index}; expected 0 to {len(self) - 1}")
        if self.level == "byte":
            return bytes(index for index in numbers if index < 256).decode("utf-8", "replace")
        tokens = [self.tokens[index] for index in numbers]
        if self.level == "protein":
            return "".join("\n" if token == _EOS else token for token in tokens)
        if self.level == "char":
            return "".join(token for token in tokens if token != _EOS)
        lines = " ".join("\n" if token == _EOS else token for token in tokens)
        return lines.replace(" \n", "\n").replace("\n ", "\n")

    def to_json(self) -> bytes:
        """A file's content that `from_json` reads."""
        tokens = None if self.level == "byte" else self.tokens
        fields = {"format": _FORMAT, "version": _VERSION, "level": self.level, "tokens": tokens}
        return json.dumps(fields, ensure_ascii=False, indent=0).encode() + b"\n"

    @classmethod
    def from_json(cls, content: bytes, name: str = "vocabulary") -> Vocabulary:
        """Reads what `to_json` wrote.

        Args:
            content: of the file.
            name: of the file, for messages.

        Raises:
            ValueError: naming the file and what is wrong with it.
        """
        try:
            fields = json.loads(content.decode("utf-8"))
        except (ValueError, RecursionError) as error:  # also numbers too long, lists too deep
            raise ValueError(f"{name}: expected a vocabulary in JSON; got {error}") from None
        if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
            raise ValueError(f"{name}: expected JSON with format {_FORMAT!r}; got another file")
        if fields.get("version") != _VERSION:
            raise ValueError(
                f"{name}: expected version {_VERSION} of {_FORMAT}; got "
                f"{str(fields.get('version'))[:80]!r}; "
                "use the molflt that wrote it"
            )
        level, tokens = cast(_Level, fields.get("level")), fields.get("tokens")
        if level == "byte" and tokens is None:
            tokens = _FIXED[level]
        if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
            raise ValueError(f"{name}: tokens must be a list of texts; got something else")
        try:
            return cls(level, tokens)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{name}: {error}") from None


class _Known(dict[str, int]):
    """Ids of a fixed vocabulary."""

    def __init__(self, ids: dict[str, int], unknown: int) -> None:
        super().__init__(ids)
        self.unknown = unknown

    def __missing__(self, token: str) -> int:
        return self.unknown


def _numbers(level: str, number: Callable[[str], int], block: bytes | str) -> np.ndarray:
    """Numbers of the tokens of a piece of text, (tokens,) int32."""
    text = block.decode("utf-8") if isinstance(block, bytes) else block
    tokens = text if level == "char" else text.replace("\n", f" {_EOS} ").split()
    return np.fromiter(map(number, tokens), dtype=np.int32, count=len(tokens))


def _numbered(
    level: str, seen: Mapping[str, int], blocks: Iterable[bytes | str], name: str
) -> Iterator[np.ndarray]:
    """Numbers of the tokens of each block; `seen` numbers new ones."""
    tokens = 0
    for block in blocks:
        found = _numbers(level, seen.__getitem__, block)
        tokens += len(found)
        if len(seen) > _MANY and tokens < _REPEATS * len(seen):
            raise ValueError(
                f"{name}: expected words that come again; got {len(seen):,} different ones among "
                f"the first {tokens:,}; use data.level char or byte"
            )
        yield found


def _joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    """One array (tokens,) int32, which grows in place: text is never in memory twice."""
    found = array("i")
    for part in parts:
        found.frombytes(part.tobytes())
    return np.frombuffer(found, dtype=np.int32) if found else np.empty(0, dtype=np.int32)


def _pieces(ids: np.ndarray) -> Iterator[np.ndarray]:
    """Views of an array: NumPy copies the indices that it is given to 8 bytes each."""
    return (ids[start : start + _PIECE] for start in range(0, len(ids), _PIECE))
