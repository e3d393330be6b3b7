"""Vocabularies that are given and not learned: residues, symbols of ListOps, bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from molflt.data.text.proteins import RESIDUES

__all__ = ["BYTES", "FIXED", "LISTOPS", "FixedVocabulary", "byte_ids", "text_of"]

LISTOPS = ("[MIN", "[MAX", "[MED", "[SM", "]", *"0123456789")
"""Tokens of ListOps (arXiv:1804.06028); the parentheses in published files carry no information."""

_VISIBLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHER = [byte for byte in range(256) if byte not in _VISIBLE]
BYTES = tuple(chr(b) if b in _VISIBLE else chr(256 + _OTHER.index(b)) for b in range(256))
"""A visible character for each byte: GPT-2's, which the pre-tokenizer ByteLevel writes."""


class FixedVocabulary(NamedTuple):
    """Tokens, and how a text is cut into them."""

    tokens: tuple[str, ...]
    what: str
    """what a token is called"""
    expected: str
    """all of them, for messages"""
    cut: Callable[[Any, Any], None]
    """(library, tokenizer) -> sets what cuts and joins"""

    def build(self, library: Any, special: tuple[str, ...], unknown: str) -> Any:
        """The library's tokenizer: the special tokens first, then these."""
        ids = {name: index for index, name in enumerate([*special, *self.tokens])}
        inner = library.Tokenizer(library.models.WordLevel(ids, unk_token=unknown))
        self.cut(library, inner)
        inner.add_special_tokens(list(special))
        return inner


def _characters(library: Any, inner: Any) -> None:
    each = library.Regex(r"[\s\S]")
    inner.pre_tokenizer = library.pre_tokenizers.Split(each, "isolated")
    inner.decoder = library.decoders.Fuse()


def _symbols(library: Any, inner: Any) -> None:
    """Between white space; parentheses, which published files have, count for nothing."""
    inner.normalizer = library.normalizers.Replace(library.Regex("[()]"), " ")
    inner.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()


def _bytes(library: Any, inner: Any) -> None:
    each = library.Regex(r"[\s\S]")
    inner.pre_tokenizer = library.pre_tokenizers.Sequence(
        [
            library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            library.pre_tokenizers.Split(each, "isolated"),
        ]
    )
    inner.decoder = library.decoders.ByteLevel()


def text_of(content: bytes) -> str:
    """Any bytes as a text, of which `byte_ids` makes the same bytes, UTF-8 or not."""
    return content.decode("utf-8", "surrogateescape")


def byte_ids(text: str, ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """Ids of the bytes of a text in UTF-8, or of what `text_of` was given.

    What looks like a special token is none: its bytes are text.

    Args:
        text: to cut.
        ids: of each byte, (256,).

    Returns:
        (bytes of the text,).
    """
    return ids[np.frombuffer(text.encode("utf-8", "surrogateescape"), dtype=np.uint8)]


FIXED = {
    "protein": FixedVocabulary(tuple(RESIDUES), "residue", f"the letters {RESIDUES}", _characters),
    "listops": FixedVocabulary(LISTOPS, "ListOps symbol", " ".join(LISTOPS), _symbols),
    "byte": FixedVocabulary(BYTES, "byte", "256 of them", _bytes),
}
