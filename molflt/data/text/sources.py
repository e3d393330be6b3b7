"""Readers of texts: files, compressed or not, and Hugging Face data sets."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from molflt.data.hub import dataset_loader
from molflt.data.packed import unpacked
from molflt.data.text.proteins import Record, read_records
from molflt.data.text.vocabulary import _Level

_BLOCK = 2**20  # bytes read at once
_PACKED = {".gz": "gzip", ".xz": "xz"}
_HF = "hf:"
_BYTE_ORDER = "\ufeff"
_SPLITS = {"train": "train", "val": "validation", "test": "test"}


def _text_blocks(source: str, level: _Level = "word", use: str = "train") -> Iterator[bytes | str]:
    """Returns the pieces of a text for `Vocabulary`.

    Args:
        source: file or hf: name, see `molflt.data.text.datamodule.TextData`.
        level: level of the tokens. Pieces of "byte" are bytes and need not be UTF-8, those of
            "word" are whole words, and those of "protein" are the residues of one FASTA record and
            a line break.
        use: "train", "val" or "test", the default split of a Hugging Face data set.
    """
    if level == "protein":
        return (f"{record.residues}\n" for record in _records(source, use))
    raw = _raw(source, use)
    if level == "byte":
        return raw
    text = _decoded(raw, source, "convert it, or use data.level byte")
    return _whole_words(text) if level == "word" else text


def _line_blocks(source: str, use: str = "train", any_bytes: bool = False) -> Iterator[str]:
    """Yields pieces of a text that end with a line; arguments as for `_text_blocks`.

    With `any_bytes`, a byte order mark is kept and bytes that are not UTF-8 are read as by
    `molflt.data.text.fixed.text_of`.
    """
    rest = ""
    for block in _decoded(_raw(source, use), source, "convert it", any_bytes):
        head, line_break, tail = block.rpartition("\n")
        if line_break:
            yield rest + head + line_break
            rest = ""
        rest += tail
    if rest:
        yield rest


def _lines(source: str) -> Iterator[str]:
    """Yields the lines of a file, which end with a line feed only."""
    for block in _line_blocks(source):
        yield from block.removesuffix("\n").split("\n")


def _records(source: str, use: str = "train") -> Iterator[Record]:
    """Yields the records of a FASTA file; arguments as for `_text_blocks`."""
    return read_records(_line_blocks(source, use), source)


def _raw(source: str, use: str) -> Iterator[bytes]:
    return _rows(source, use) if source.startswith(_HF) else _file(Path(source))


def _file(path: Path) -> Iterator[bytes]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected a text, plain or as .gz or .xz")
    kind = _PACKED.get(path.suffix)
    with open(path, "rb") if kind is None else unpacked(path, kind) as file:
        while block := file.read(_BLOCK):
            yield block


def _decoded(
    raw: Iterable[bytes], source: str, advice: str, any_bytes: bool = False
) -> Iterator[str]:
    errors = "surrogateescape" if any_bytes else "strict"
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    done, begun = 0, any_bytes
    for block in itertools.chain(raw, (b"",)):
        waiting = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{source}: byte {done - waiting + error.start} is not UTF-8 ({error.reason}); "
                f"expected text in UTF-8; {advice}"
            ) from None
        done += len(block)
        if text and not begun:
            begun, text = True, text.removeprefix(_BYTE_ORDER)
        if text:
            yield text


def _whole_words(blocks: Iterable[str]) -> Iterator[str]:
    """Yields the same text in whole words; adds a line break to the last line if it is missing."""
    rest = end = ""
    for block in blocks:
        end = block[-1:]
        cut = len(block) if end.isspace() else len(block) - len(block.rsplit(maxsplit=1)[-1])
        if cut:
            yield rest + block[:cut]
            rest = ""
        rest += block[cut:]
    if rest or end not in ("", "\n"):
        yield f"{rest}\n"


def _rows(source: str, use: str) -> Iterator[bytes]:
    """Yields the rows of a Hugging Face data set as lines."""
    name, _, which = source.removeprefix(_HF).partition(":")
    split, _, column = which.partition(".")
    split, column = split or _SPLITS[use], column or "text"
    load = dataset_loader(source)
    parts = name.split("/")
    try:
        rows = load("/".join(parts[:2]), *parts[2:], split=split)
    except Exception as error:  # the library raises many classes
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{source}: cannot be loaded ({reason}); expected "
            "hf:OWNER/NAME[/CONFIG][:SPLIT[.COLUMN]]"
        ) from None
    if column not in rows.column_names:
        raise ValueError(
            f"{source}: expected one of the columns {', '.join(rows.column_names)}; got {column!r}"
        )
    for row in rows:
        text = row[column]
        if not isinstance(text, str):
            raise ValueError(f"{source}: expected text in column {column!r}; got {text!r:.80}")
        yield (text if text.endswith("\n") else f"{text}\n").encode()
