"""Texts to tokens and back: pieces of words, learned by `tokenizers`, or a given vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from molflt.data.text.fixed import BYTES, FIXED, byte_ids
from molflt.data.text.proteins import residue_ids
from molflt.files import shown

if TYPE_CHECKING:
    import tokenizers

__all__ = ["TOKENIZER", "Tokenizer", "TokenizerKind", "find_tokenizer"]

TOKENIZER = "tokenizer.json"
"""The file of a tokenizer, here and in published models."""

TokenizerKind = Literal["wordpiece", "unigram", "bpe", "protein", "listops", "byte"]
_UNKNOWN = "[UNK]"
_SPECIAL = ("[PAD]", _UNKNOWN, "[CLS]", "[SEP]", "[MASK]")  # ids 0 to 4 of a trained one
_OTHER_NAMES = {
    "[PAD]": "<pad>",
    _UNKNOWN: "<unk>",
    "[CLS]": "<s>",
    "[SEP]": "</s>",
    "[MASK]": "<mask>",
}
_MOST_BYTES = 100_000_000
_CONFIG = "config.json"


class Tokenizer:
    """Pieces of words by id, and the tokens that stand around and between sentences.

    Args:
        inner: of the library.
        name: of the file, for messages.

    Attributes:
        pad, unk, cls, sep, mask: ids of padding, of what is unknown (None if nothing is), of what
            begins a sequence, of what ends a sentence, and of what stands in a gap.
        special: ids that stand for no text, sorted.
        fixed: key of `molflt.data.text.fixed.FIXED` whose tokens these are, otherwise None.
        letters: ids of residues by their letters, if the tokens are these, otherwise None.

    Raises:
        ValueError: if one of these is missing.
    """

    def __init__(self, inner: tokenizers.Tokenizer, name: str = TOKENIZER) -> None:
        self._inner = inner
        ids: dict[str, int] = {}
        for special in _SPECIAL:
            for known in (special, _OTHER_NAMES.get(special, special)):
                if special not in ids and (number := inner.token_to_id(known)) is not None:
                    ids[special] = number
        missing = [special for special in _SPECIAL if special not in (*ids, _UNKNOWN)]
        if missing:
            raise ValueError(
                f"{name}: a tokenizer without {missing[0]}; expected {', '.join(_SPECIAL)}; use "
                "one of BERT's kind, or leave data.tokenizer out to train one"
            )
        self.unk = ids.get(_UNKNOWN)
        self.pad, self.cls, self.sep, self.mask = (ids[n] for n in _SPECIAL if n != _UNKNOWN)
        added = {number for number, one in inner.get_added_tokens_decoder().items() if one.special}
        # not what the library writes again: it rounds the scores of Unigram differently
        self._content = inner.to_str().encode()
        self.special = sorted(added | set(ids.values()))
        own = inner.get_vocab() if type(inner.model).__name__ == "WordLevel" else {}
        ordinary = {token: i for token, i in own.items() if i not in self.special}
        kinds = (kind for kind, one in FIXED.items() if ordinary.keys() == set(one.tokens))
        self.fixed = next(kinds, None)
        self.letters = ordinary if self.fixed == "protein" else None
        self._bytes = None
        if self.fixed == "byte":
            self._bytes = np.array([ordinary[one] for one in BYTES], dtype=np.int32)

    def __len__(self) -> int:
        return self._inner.get_vocab_size()

    @classmethod
    def train(
        cls,
        kind: TokenizerKind,
        lines: Iterable[str],
        size: int,
        lowercase: bool,
        name: str = "text",
    ) -> Tokenizer:
        """Learns the pieces of a text; those of `molflt.data.text.fixed.FIXED` are given.

        WordPiece as BERT (arXiv:1810.04805), Unigram as SentencePiece (arXiv:1808.06226), byte pair
        encoding (arXiv:1508.07909) with a mark for each space, so that texts can be joined again.
        Two trainings may number rare pieces differently; a run keeps its tokenizer.

        Args:
            kind: "wordpiece", "unigram", "bpe", or a key of `FIXED`.
            lines: of the text, one or more in each string; not read for the latter.
            size: most pieces, special ones too.
            lowercase: whether case, and with WordPiece accents, make no difference.
            name: of the text, for messages.

        Raises:
            ModuleNotFoundError: without the package `tokenizers`.
            ValueError: an unknown kind, or a text without words.
        """
        if kind not in get_args(TokenizerKind):
            raise ValueError(
                f"data.kind={kind!r}; expected one of {', '.join(get_args(TokenizerKind))}"
            )
        library = _library()
        if kind in FIXED:
            given = FIXED[kind].build(library, _SPECIAL, _UNKNOWN)
            return cls.from_json(given.to_str().encode(), name)
        inner, trainer = _MAKE[kind](library, size, lowercase)
        try:
            # no piece goes beyond a line: lines are encoded one by one
            single = (line for block in _texts(lines, name) for line in block.splitlines())
            inner.train_from_iterator(single, trainer)
        except (ValueError, TypeError):
            raise
        except Exception as error:  # of the library's own making
            raise ValueError(f"{name}: no tokenizer can be made of it; {error}") from None
        if inner.get_vocab_size() <= len(_SPECIAL):
            raise ValueError(f"{name}: no words in it; expected text")
        # as a run keeps it, and reads it again
        return cls.from_json(inner.to_str().encode(), name)

    @classmethod
    def from_json(cls, content: bytes, name: str = TOKENIZER) -> Tokenizer:
        """Reads what `to_json` or another program with `tokenizers` has written.

        Raises:
            ModuleNotFoundError: without the package `tokenizers`.
            ValueError: naming the file and what is wrong with it.
        """
        library = _library()
        try:
            parsed = {**json.loads(content), "padding": None, "truncation": None}
            text = json.dumps(parsed, ensure_ascii=False, indent=0)
            inner = library.Tokenizer.from_str(text)
        except Exception as error:  # the library raises no narrower one
            reason = shown(str(error).splitlines()[0] if str(error) else type(error).__name__)
            raise ValueError(
                f"{name}: not a tokenizer in JSON; {reason}; expected {TOKENIZER} of a run or of a "
                "published model"
            ) from None
        found = cls(inner, name)
        found._content = f"{text}\n".encode()
        return found

    def to_json(self) -> bytes:
        """A file's content that `from_json` reads, and would write again."""
        return self._content

    def encode(self, texts: list[str], source: str = "", special: bool = False) -> list[list[int]]:
        """Ids of each text, without special tokens around them.

        Args:
            texts: to cut; of bytes, what `molflt.data.text.fixed.text_of` makes of them.
            source: of the texts, for messages.
            special: whether [MASK] in a text is a gap even where tokens are bytes; where they are
                others, it always is.

        Raises:
            ValueError: something that is no token of a given vocabulary, and the source if named;
                or bytes that are not UTF-8, for a tokenizer of text.
        """
        if self._bytes is not None and not special:
            return [byte_ids(text, self._bytes).tolist() for text in texts]
        if self.letters is not None:
            texts = [text.upper() for text in texts]
        checked = [*_texts(texts, source)]
        found = self._inner.encode_batch(checked, add_special_tokens=False)
        for text, one in zip(texts, found, strict=True) if self.fixed is not None else ():
            if self.unk in one.ids:
                start, end = one.offsets[one.ids.index(self.unk)]
                known, where = FIXED[str(self.fixed)], f"{source}: " if source else ""
                wrong = shown(text[start:end])
                raise ValueError(f"{where}{wrong} is no {known.what}; expected {known.expected}")
        return [one.ids for one in found]

    def encode_blocks(self, blocks: Iterable[str], source: str = "") -> np.ndarray:
        """Ids (tokens,) int32 of a text given in whole lines; white space counts for nothing.

        With a given vocabulary, lines are sequences, and what ends a sentence stands behind each.
        Of bytes, spaces count, and only a line feed ends a line.
        """
        found: list[np.ndarray] = [np.empty(0, dtype=np.int32)]
        for block in blocks:
            if self.letters is not None:
                found.append(residue_ids(block, self.letters, self.sep))
                continue
            cut = block.splitlines() if self._bytes is None else block.split("\n")
            lines = [line for line in cut if line.strip()]
            end = [] if self.fixed is None else [self.sep]
            found += [np.array(ids + end, dtype=np.int32) for ids in self.encode(lines, source)]
        return np.concatenate(found)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, without special tokens."""
        return self._inner.decode([int(one) for one in ids])

    @property
    def ignores_case(self) -> bool:
        """Whether capitals are read as small letters, so that no capital is ever decoded."""
        normalizer = self._inner.normalizer
        return normalizer is not None and bool(
            normalizer.normalize_str("A") == normalizer.normalize_str("a")
        )

    def token(self, index: int) -> str:
        """The piece of an id, as the tokenizer writes it.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        found = self._inner.id_to_token(index)
        if found is None:
            raise ValueError(f"token id {index}; expected 0 to {len(self) - 1}")
        return found


def find_tokenizer(path: Path) -> tuple[bytes, str]:
    """The tokenizer in a file, in the folder of a run or a published model, or in an export.

    Returns:
        What its file holds, and its name.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if the file is too large to be one.
    """
    path = Path(path)
    inside = path / TOKENIZER if path.is_dir() else path
    if not inside.is_file() and (path / _CONFIG).is_file():
        found = _of_export(path / _CONFIG)
        if found is not None:
            return found, f"{path / _CONFIG}: {TOKENIZER}"
    if not inside.is_file():
        raise FileNotFoundError(
            f"{inside}: no such file; expected a tokenizer; give its file or the folder of a run, "
            "or leave data.tokenizer out to train one"
        )
    if inside.stat().st_size > _MOST_BYTES:
        raise ValueError(
            f"{inside}: expected a tokenizer of at most {_MOST_BYTES:,} bytes; got "
            f"{inside.stat().st_size:,}"
        )
    return inside.read_bytes(), str(inside)


def _of_export(path: Path) -> bytes | None:
    """The tokenizer that the configuration of an exported model holds."""
    try:
        files = json.loads(path.read_bytes()).get("files", {})
        content = files.get(TOKENIZER)
    except (ValueError, RecursionError, AttributeError):
        return None
    return None if content is None else json.dumps(content, ensure_ascii=False, indent=0).encode()


def _texts(texts: Iterable[str], source: str) -> Iterator[str]:
    """The same, unless one was made of bytes that are not UTF-8."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            where = f"{source}: " if source else ""
            raise ValueError(
                f"{where}{shown(text[max(0, error.start - 20) : error.end])} is not UTF-8; "
                "expected a text; convert it, or use data.kind byte"
            ) from None
        yield text


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ModuleNotFoundError(
            "pieces of words need the package tokenizers; got none; run: pip install molflt[text]"
        ) from None
    return tokenizers


def _wordpiece(library: Any, size: int, lowercase: bool) -> tuple[Any, Any]:
    inner = library.Tokenizer(library.models.WordPiece(unk_token="[UNK]"))
    inner.normalizer = library.normalizers.BertNormalizer(lowercase=lowercase)
    inner.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    inner.decoder = library.decoders.WordPiece()
    trainer = library.trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=list(_SPECIAL), show_progress=False
    )
    return inner, trainer


def _spaced(library: Any, inner: Any, lowercase: bool) -> None:
    """Marks spaces, which are then part of the pieces."""
    steps = [library.normalizers.NFKC()]
    steps += [library.normalizers.Lowercase()] if lowercase else []
    inner.normalizer = library.normalizers.Sequence(steps)
    inner.pre_tokenizer = library.pre_tokenizers.Metaspace()
    inner.decoder = library.decoders.Metaspace()


def _bpe(library: Any, size: int, lowercase: bool) -> tuple[Any, Any]:
    inner = library.Tokenizer(library.models.BPE(unk_token=_UNKNOWN))
    _spaced(library, inner, lowercase)
    marks = library.pre_tokenizers.Punctuation()  # no piece is part of a word and a mark behind it
    inner.pre_tokenizer = library.pre_tokenizers.Sequence([inner.pre_tokenizer, marks])
    trainer = library.trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(_SPECIAL), show_progress=False
    )
    return inner, trainer


def _unigram(library: Any, size: int, lowercase: bool) -> tuple[Any, Any]:
    inner = library.Tokenizer(library.models.Unigram())
    _spaced(library, inner, lowercase)
    trainer = library.trainers.UnigramTrainer(
        vocab_size=size, special_tokens=list(_SPECIAL), unk_token="[UNK]", show_progress=False
    )
    return inner, trainer


_MAKE = {"wordpiece": _wordpiece, "unigram": _unigram, "bpe": _bpe}
