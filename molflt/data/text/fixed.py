"""Fixed vocabularies: residues, symbols of ListOps, and bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "AMINO_ACIDS",
    "BYTES",
    "FIXED",
    "LISTOPS",
    "RESIDUES",
    "FixedVocabulary",
    "byte_ids",
    "residue_ids",
    "text_of",
]

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
"""Letters of the 20 standard amino acids (IUPAC-IUB 1983)."""

RESIDUES = f"{AMINO_ACIDS}BZXUO"
"""Letters of UniProt: the amino acids, Asx, Glx, any residue, selenocysteine and pyrrolysine."""

LISTOPS = ("[MIN", "[MAX", "[MED", "[SM", "]", *"0123456789")
"""Tokens of ListOps (arXiv:1804.06028), without the redundant parentheses of published files."""

_VISIBLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHER = [byte for byte in range(256) if byte not in _VISIBLE]
BYTES = tuple(chr(b) if b in _VISIBLE else chr(256 + _OTHER.index(b)) for b in range(256))
"""Visible character of each byte, as written by GPT-2 and the pre-tokenizer ByteLevel."""


class FixedVocabulary(NamedTuple):
    """Tokens, and the way in which a text is split into them."""

    tokens: tuple[str, ...]
    what: str
    """name of a token, for messages"""
    expected: str
    """all tokens, for messages"""
    configure: Callable[[Any, Any], None]
    """(library, tokenizer) -> sets the steps that split and join a text"""

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
    """Returns bytes as a text, which `byte_ids` reads without loss even if they are not UTF-8."""
    return content.decode("utf-8", "surrogateescape")


def byte_ids(text: str, ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """Returns the ids of the UTF-8 bytes of a text, (bytes,); special tokens are not recognized.

    Args:
        text: any text, also from `text_of`.
        ids: id of each byte, (256,).
    """
    return ids[np.frombuffer(text.encode("utf-8", "surrogateescape"), dtype=np.uint8)]


def residue_ids(text: str, ids: Mapping[str, int], separator: int) -> NDArray[np.int32]:
    """Returns the ids of residues, in upper or lower case, (characters of the text,).

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
"""Fixed vocabularies by the kind of their tokenizer."""
