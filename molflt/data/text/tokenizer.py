"""Tokenizers from the package `tokenizers`: learned subwords, or a fixed vocabulary."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from molflt.data.text.vocabulary import _MOST_UNKNOWN, BYTES, FIXED
from molflt.files import shown
from molflt.optional import require

if TYPE_CHECKING:
    import tokenizers

_library = partial(require, "tokenizers", "this text", "text")
TOKENIZER = "tokenizer.json"  # file name of a tokenizer in runs and in published models

TokenizerKind = Literal["wordpiece", "unigram", "bpe", "protein", "listops", "byte"]
_UNK = "[UNK]"
_ALIASES = {"[PAD]": "<pad>", _UNK: "<unk>", "[CLS]": "<s>", "[SEP]": "</s>", "[MASK]": "<mask>"}
_NOT_UTF8 = "expected text in UTF-8; convert it, or use data.kind byte"
_SPECIAL = tuple(_ALIASES)  # ids 0 to 4 of tokenizers that are trained here


class Tokenizer:
    """Conversion between text and the ids of subwords and special tokens.

    Args:
        inner: tokenizer from the package `tokenizers`.
        name: name of the file, for messages.

    Attributes:
        pad: id of the padding token.
        unk: id of the token for unknown text; None if every text can be encoded.
        cls: id of the first token of a sequence.
        sep: id of the token after a sentence.
        mask: id of the token that replaces masked tokens.
        special: sorted ids of all special tokens.
        fixed: key of the vocabulary in `molflt.data.text.vocabulary.FIXED`; None if it is learned.
        letters: ids of residues by letter; None if the tokens are not residues.
    """

    def __init__(self, inner: tokenizers.Tokenizer, name: str = TOKENIZER) -> None:
        self._inner = inner
        ids: dict[str, int] = {}
        for special, alias in _ALIASES.items():
            for token in (alias, special):
                if (number := inner.token_to_id(token)) is not None:
                    ids[special] = number
        required = [special for special in _SPECIAL if special != _UNK]
        if missing := [special for special in required if special not in ids]:
            raise ValueError(
                f"{name}: expected a tokenizer with {', '.join(_SPECIAL)}; got one without "
                f"{missing[0]}; use a tokenizer like BERT's, or omit data.tokenizer to train one"
            )
        self.unk = ids.get(_UNK)
        self.pad, self.cls, self.sep, self.mask = (ids[special] for special in required)
        added = inner.get_added_tokens_decoder().items()
        others = {number for number, token in added if token.special}
        self.special = sorted(others | set(ids.values()))
        # Replaced in `from_json`, because serializing again rounds the scores of Unigram
        self._content = inner.to_str().encode()
        known = inner.get_vocab() if type(inner.model).__name__ == "WordLevel" else {}
        ordinary = {token: i for token, i in known.items() if i not in self.special}
        kinds = (kind for kind, tokens in FIXED.items() if ordinary.keys() == set(tokens))
        self.fixed = next(kinds, None)
        self.letters = ordinary if self.fixed == "protein" else None
        self._bytes = [ordinary[byte] for byte in BYTES] if self.fixed == "byte" else None

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
        """Learns a subword vocabulary from text, or returns a tokenizer with a fixed vocabulary.

        The subword model is WordPiece as in BERT (arXiv:1810.04805), Unigram as in SentencePiece
        (arXiv:1808.06226), or byte pair encoding (arXiv:1508.07909) with marks for spaces, which
        allow decoding to restore the text. Training again on the same text may assign different ids
        to rare subwords.

        Args:
            kind: "wordpiece", "unigram", "bpe", or a key of `molflt.data.text.vocabulary.FIXED`.
            lines: text in whole lines; ignored for a fixed vocabulary.
            size: maximum number of tokens, including special tokens.
            lowercase: ignore case, and with WordPiece also accents.
            name: name of the text, for messages.
        """
        if kind in FIXED:
            inner = _fixed(kind, _library())
        else:
            inner, trainer = _untrained(kind, _library(), size, lowercase)
            # Lines are encoded one by one, so no subword may contain a line break
            single = (line for block in lines for line in block.splitlines())
            try:
                inner.train_from_iterator(single, trainer)
            except UnicodeEncodeError:
                raise ValueError(f"{name}: {_NOT_UTF8}") from None
        # Read back from JSON, to match the tokenizer that a run loads
        return cls.from_json(inner.to_str().encode(), name)

    @classmethod
    def from_json(cls, content: bytes, name: str = TOKENIZER) -> Tokenizer:
        """Reads a tokenizer in the format of the package `tokenizers`."""
        library = _library()
        try:
            parsed = {**json.loads(content), "padding": None, "truncation": None}
            text = json.dumps(parsed, ensure_ascii=False, indent=0)
            inner = library.Tokenizer.from_str(text)
        except Exception as error:  # the library does not raise a narrower class
            raise ValueError(
                f"{name}: expected the {TOKENIZER} of a run or of a published model; got a "
                f"different file ({shown(str(error))})"
            ) from None
        tokenizer = cls(inner, name)
        tokenizer._content = f"{text}\n".encode()
        return tokenizer

    def to_json(self) -> bytes:
        """Returns the content of a file for `from_json`."""
        return self._content

    def encode(self, texts: list[str], source: str = "", special: bool = False) -> list[list[int]]:
        """Returns the ids of each text, without adding special tokens.

        Args:
            texts: texts to encode; for byte tokens, from `molflt.data.text.vocabulary.text_of`.
            source: name of the texts, for messages.
            special: recognize [MASK] even if the tokens are bytes; for other kinds of tokens,
                [MASK] is always recognized.
        """
        if self._bytes is not None and not special:
            contents = (text.encode("utf-8", "surrogateescape") for text in texts)
            return [[self._bytes[byte] for byte in content] for content in contents]
        if self.letters is not None:
            texts = [text.upper() for text in texts]
        where = f"{source}: " if source else ""
        try:
            encodings = self._inner.encode_batch(texts, add_special_tokens=False)
        except TypeError:  # a text from `text_of`
            raise ValueError(f"{where}{_NOT_UTF8}") from None
        for text, encoding in zip(texts, encodings, strict=True):
            if self.fixed is not None and self.unk in encoding.ids:
                start, end = encoding.offsets[encoding.ids.index(self.unk)]
                raise ValueError(
                    f"{where}{shown(text[start:end])} is unknown; expected the symbols "
                    f"{' '.join(FIXED[str(self.fixed)])}"
                )
        return [encoding.ids for encoding in encodings]

    def encode_blocks(self, blocks: Iterable[str], source: str = "") -> np.ndarray:
        """Encodes a text, given in pieces of whole lines, as int32 ids (tokens,).

        With a fixed vocabulary, [SEP] follows each nonblank line. Only byte tokens preserve white
        space, and only a line feed ends a line of bytes.
        """
        found: list[np.ndarray] = [np.empty(0, dtype=np.int32)]
        for block in blocks:
            if self.letters is not None:  # much faster than the library
                ids_of = {**self.letters, "\n": self.sep}
                numbers = (ids_of[letter] for letter in block)
                found.append(np.fromiter(numbers, dtype=np.int32, count=len(block)))
                continue
            lines = block.splitlines() if self._bytes is None else block.split("\n")
            lines = [line for line in lines if line.strip()]
            end = [] if self.fixed is None else [self.sep]
            found += [np.array(ids + end, dtype=np.int32) for ids in self.encode(lines, source)]
        return np.concatenate(found)

    def expect_known(self, ids: np.ndarray, source: str) -> None:
        """Raises ValueError if most tokens of a text are unknown."""
        if len(ids) and (share := float(np.mean(ids == self.unk))) > _MOST_UNKNOWN:
            raise ValueError(
                f"{source}: expected text that the tokenizer knows; got {share:.0%} unknown "
                "tokens; change data.tokenizer, or train one of a different data.kind"
            )

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids to text, without special tokens."""
        return self._inner.decode([int(index) for index in ids])

    @property
    def ignores_case(self) -> bool:
        """True if upper-case letters are encoded as lower-case letters."""
        normalizer = self._inner.normalizer
        return normalizer is not None and bool(
            normalizer.normalize_str("A") == normalizer.normalize_str("a")
        )

    def token(self, index: int) -> str:
        """Returns the token with the id `index`."""
        return str(self._inner.id_to_token(index))


def find_tokenizer(path: Path) -> tuple[bytes, str]:
    """Returns the content and the name of a tokenizer file; `path` may be the folder of a model."""
    path = Path(path)
    inside = path / TOKENIZER if path.is_dir() else path
    config = path / "config.json"  # of an exported model
    if not inside.is_file() and config.is_file():
        with contextlib.suppress(ValueError, LookupError, TypeError):
            found = json.loads(config.read_bytes())["files"][TOKENIZER]
            content = json.dumps(found, ensure_ascii=False, indent=0).encode()
            return content, f"{config}: {TOKENIZER}"
    return inside.read_bytes(), str(inside)


def _untrained(kind: str, library: Any, size: int, lowercase: bool) -> tuple[Any, Any]:
    options = {"vocab_size": size, "special_tokens": list(_SPECIAL), "show_progress": False}
    if kind == "wordpiece":
        inner = library.Tokenizer(library.models.WordPiece(unk_token=_UNK))
        inner.normalizer = library.normalizers.BertNormalizer(lowercase=lowercase)
        inner.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
        inner.decoder = library.decoders.WordPiece()
        return inner, library.trainers.WordPieceTrainer(**options)
    metaspace = library.pre_tokenizers.Metaspace()
    if kind == "unigram":
        inner = library.Tokenizer(library.models.Unigram())
        trainer = library.trainers.UnigramTrainer(unk_token=_UNK, **options)
        inner.pre_tokenizer = metaspace
    else:
        inner = library.Tokenizer(library.models.BPE(unk_token=_UNK))
        trainer = library.trainers.BpeTrainer(**options)
        splits = [metaspace, library.pre_tokenizers.Punctuation()]
        inner.pre_tokenizer = library.pre_tokenizers.Sequence(splits)
    normalizers = [library.normalizers.NFKC()]
    if lowercase:
        normalizers.append(library.normalizers.Lowercase())
    inner.normalizer = library.normalizers.Sequence(normalizers)
    inner.decoder = library.decoders.Metaspace()
    return inner, trainer


def _fixed(kind: str, library: Any) -> Any:
    ids = {name: index for index, name in enumerate([*_SPECIAL, *FIXED[kind]])}
    inner = library.Tokenizer(library.models.WordLevel(ids, unk_token=_UNK))
    single = library.pre_tokenizers.Split(library.Regex(r"[\s\S]"), "isolated")
    if kind == "protein":
        inner.pre_tokenizer = single
        inner.decoder = library.decoders.Fuse()
    elif kind == "listops":
        inner.normalizer = library.normalizers.Replace(library.Regex("[()]"), " ")
        inner.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    else:
        level = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.pre_tokenizer = library.pre_tokenizers.Sequence([level, single])
        inner.decoder = library.decoders.ByteLevel()
    inner.add_special_tokens(list(_SPECIAL))
    return inner
