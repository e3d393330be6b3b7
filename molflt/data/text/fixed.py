"""Vocabularies that are given and not learned: residues of proteins, symbols of ListOps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from molflt.data.text.listops import SYMBOLS
from molflt.data.text.proteins import RESIDUES

__all__ = ["FIXED", "FixedVocabulary"]


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


FIXED = {
    "protein": FixedVocabulary(tuple(RESIDUES), "residue", f"the letters {RESIDUES}", _characters),
    "listops": FixedVocabulary(SYMBOLS, "ListOps symbol", " ".join(SYMBOLS), _symbols),
}
