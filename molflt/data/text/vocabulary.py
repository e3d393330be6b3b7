"""Vocabularies that are not learned: words, characters, bytes, residues, and ListOps."""

from __future__ import annotations

import json
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from molflt.files import shown

__all__ = ["AMINO_ACIDS", "BYTES", "FIXED", "LISTOPS", "RESIDUES", "FixedVocabulary", "Vocabulary"]
__all__ += ["byte_ids", "residue_ids", "text_of"]

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
"""Letters of the 20 standard amino acids (IUPAC-IUB 1983)."""

RESIDUES = f"{AMINO_ACIDS}BZXUO"
"""Letters of UniProt: the amino acids, Asx, Glx, any residue, selenocysteine and pyrrolysine."""

LISTOPS = ("[MIN", "[MAX", "[MED", "[SM", "]", *"0123456789")
"""Tokens of ListOps (arXiv:1804.06028), without the redundant parentheses of published files."""

_VISIBLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHER = [byte for byte in range(256) if byte not in _VISIBLE]
BYTES = tuple(chr(b) if b in _VISIBLE else chr(256 + _OTHER.index(b)) for b in range(256))
"""Visible character for each byte, as in GPT-2 and the pre-tokenizer ByteLevel."""

_Level = Literal["word", "char", "byte", "protein"]
_UNK, _EOS = "<unk>", "<eos>"
_FORMAT, _VERSION = "molflt-vocabulary", 1
_PIECE = 2**20  # ids
_FIXED = {"byte": [*map(chr, range(256)), _EOS], "protein": [*RESIDUES, _EOS]}


class Vocabulary:
    """Tokens of a text by id, most frequent first.

    Words are separated by white space, and each line, even an empty one, ends with `<eos>`. Tokens
    are counted in this way for perplexities on WikiText-2 and -103 (AWD-LSTM, fairseq). Characters
    are code points, including line breaks. The id of a byte is its value, and 256 is `<eos>`. The
    tokens of proteins are residues, and each sequence ends with `<eos>`. Bytes and proteins do not
    have `<unk>`.

    Args:
        level: "word", "char", "byte" or "protein".
        tokens: tokens by id.
    """

    def __init__(self, level: _Level, tokens: list[str]) -> None:
        if level not in get_args(_Level):
            raise ValueError(f"level={shown(level)}; expected one of {', '.join(get_args(_Level))}")
        self.level = level
        self.tokens = list(tokens)
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if level in _FIXED and self.tokens != _FIXED[level]:
            expected = "the 256 bytes" if level == "byte" else RESIDUES
            raise ValueError(f"expected a vocabulary of {expected} and {_EOS}, in this order")
        specials = {_EOS} if level in _FIXED else {_EOS, _UNK}
        if len(self.ids) != len(self.tokens) or not specials <= self.ids.keys():
            raise ValueError(f"expected a vocabulary with {_EOS}, {_UNK} and each token once")
        self.eos = self.ids[_EOS]
        self.unk = self.ids.get(_UNK)

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def count(
        cls, level: _Level, blocks: Iterable[bytes | str], min_count: int = 1
    ) -> tuple[Vocabulary, np.ndarray]:
        """Returns the vocabulary of a text and the ids of its tokens, (tokens,) int32.

        Args:
            level: see the class.
            blocks: text as for `encode_blocks`.
            min_count: minimum count of a token in the vocabulary; rarer tokens become <unk>.
        """
        if level in _FIXED:
            found = cls(level, _FIXED[level])
            return found, found.encode_blocks(blocks)
        seen: defaultdict[str, int] = defaultdict()
        seen.default_factory = seen.__len__  # numbers new tokens consecutively
        ids = _joined(_numbers(level, seen.__getitem__, block) for block in blocks)
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
        """Returns the ids (tokens,) int32 of a text that is given in pieces.

        Args:
            blocks: bytes at level "byte", text at other levels, and whole words at level "word".
        """
        if self.level == "protein":
            texts = (block.decode() if isinstance(block, bytes) else block for block in blocks)
            return _joined(residue_ids(text, self.ids, self.eos) for text in texts)
        if self.level == "byte":
            raw = (block.encode() if isinstance(block, str) else block for block in blocks)
            return _joined(np.frombuffer(block, dtype=np.uint8).astype(np.int32) for block in raw)
        ids, unknown = self.ids, self.ids[_UNK]
        return _joined(_numbers(self.level, lambda t: ids.get(t, unknown), b) for b in blocks)

    def encode(self, text: str) -> Tensor:
        """Returns the ids (tokens,) int64 of a text; does not append `<eos>`."""
        return torch.from_numpy(self.encode_blocks([text]).astype(np.int64))

    def decode(self, ids: Iterable[int] | Tensor) -> str:
        """Returns the text of ids.

        `<eos>` becomes a line break for words and proteins, and is dropped at other levels.
        """
        numbers = [int(index) for index in ids]
        for index in numbers:
            if not 0 <= index < len(self):
                raise ValueError(f"token id {index}; expected 0 to {len(self) - 1}")
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
    def from_json(cls, content: bytes, name: str = "vocabulary") -> Vocabulary:
        """Reads a vocabulary that `to_json` wrote.

        Args:
            content: content of the file.
            name: name of the file, for messages.
        """
        try:
            fields = json.loads(content.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name}: expected a vocabulary in JSON; got {error}") from None
        if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
            raise ValueError(f"{name}: expected JSON with format {_FORMAT!r}; got another file")
        if (version := fields.get("version")) != _VERSION:
            raise ValueError(
                f"{name}: expected version {_VERSION} of {_FORMAT}; got {shown(version)}; use the "
                "version of molflt that wrote the file"
            )
        level, tokens = cast(_Level, fields.get("level")), fields.get("tokens")
        if level == "byte" and tokens is None:
            tokens = _FIXED[level]
        if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
            raise ValueError(f"{name}: expected a list of strings as tokens; got something else")
        try:
            return cls(level, tokens)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{name}: {error}") from None


def _numbers(level: str, number: Callable[[str], int], block: bytes | str) -> np.ndarray:
    """Returns the ids (tokens,) int32 of a piece of text."""
    text = block.decode("utf-8") if isinstance(block, bytes) else block
    tokens = text if level == "char" else text.replace("\n", f" {_EOS} ").split()
    return np.fromiter(map(number, tokens), dtype=np.int32, count=len(tokens))


def _joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Concatenates int32 arrays without a second copy in memory."""
    found = array("i")
    for part in parts:
        found.frombytes(part.tobytes())
    return np.frombuffer(found, dtype=np.int32) if found else np.empty(0, dtype=np.int32)


def _pieces(ids: np.ndarray) -> Iterator[np.ndarray]:
    """Yields slices of an array, because NumPy copies each index to 8 bytes."""
    return (ids[start : start + _PIECE] for start in range(0, len(ids), _PIECE))


class FixedVocabulary(NamedTuple):
    """Tokens, and the steps that split a text into them."""

    tokens: tuple[str, ...]
    what: str
    """name of a token, for messages"""
    expected: str
    """all tokens, for messages"""
    configure: Callable[[Any, Any], None]
    """function (library, tokenizer) that sets the steps that split and join a text"""

    def build(self, library: Any, special: tuple[str, ...], unknown: str) -> Any:
        """Returns a tokenizer of the library `tokenizers`; its special tokens come first."""
        ids = {name: index for index, name in enumerate([*special, *self.tokens])}
        inner = library.Tokenizer(library.models.WordLevel(ids, unk_token=unknown))
        self.configure(library, inner)
        inner.add_special_tokens(list(special))
        return inner


def _characters(library: Any) -> Any:
    return library.pre_tokenizers.Split(library.Regex(r"[\s\S]"), "isolated")


def _residues(library: Any, inner: Any) -> None:
    inner.pre_tokenizer = _characters(library)
    inner.decoder = library.decoders.Fuse()


def _symbols(library: Any, inner: Any) -> None:
    inner.normalizer = library.normalizers.Replace(library.Regex("[()]"), " ")
    inner.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()


def _bytes(library: Any, inner: Any) -> None:
    level = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = library.pre_tokenizers.Sequence([level, _characters(library)])
    inner.decoder = library.decoders.ByteLevel()


def text_of(content: bytes) -> str:
    """Decodes bytes to a text that `byte_ids` reads without loss, even if they are not UTF-8."""
    return content.decode("utf-8", "surrogateescape")


def byte_ids(text: str, ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """Returns the ids of the UTF-8 bytes of a text, (bytes,); special tokens are not recognized.

    Args:
        text: any text, including one from `text_of`.
        ids: id of each byte, (256,).
    """
    return ids[np.frombuffer(text.encode("utf-8", "surrogateescape"), dtype=np.uint8)]


def residue_ids(text: str, ids: Mapping[str, int], separator: int) -> NDArray[np.int32]:
    """Returns the ids (characters,) of residues, which may be in upper or lower case.

    Args:
        text: sequences.
        ids: id of each of `RESIDUES`.
        separator: id of a line break.
    """
    table = np.full(128, -1, dtype=np.int32)
    for letter in RESIDUES:
        table[[ord(letter), ord(letter.lower())]] = ids[letter]
    table[ord("\n")] = separator
    found = table[np.frombuffer(text.encode("ascii", "replace"), dtype=np.uint8)]
    if found.min(initial=0) < 0:
        letter = text[int((found < 0).argmax())]
        raise ValueError(f"{letter!r} is not a residue; expected the letters {RESIDUES}")
    return found


FIXED = {
    "protein": FixedVocabulary(tuple(RESIDUES), "residue", f"the letters {RESIDUES}", _residues),
    "listops": FixedVocabulary(LISTOPS, "ListOps symbol", " ".join(LISTOPS), _symbols),
    "byte": FixedVocabulary(BYTES, "byte", "256 of them", _bytes),
}
"""Fixed vocabularies by tokenizer kind."""
