"""Readers for texts: files, compressed or not, and Hugging Face data sets."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from molflt.data.packed import dataset_loader, unpacked
from molflt.data.text.vocabulary import RESIDUES, _Level
from molflt.files import shown

_BLOCK = 2**20  # bytes read at once
_PACKED = {".gz": "gzip", ".xz": "xz"}
_HF = "hf:"
_BYTE_ORDER = "\ufeff"
_LETTERS = frozenset(RESIDUES + RESIDUES.lower())
_SPLITS = {"train": "train", "val": "validation", "test": "test"}


class Record(NamedTuple):
    """One sequence of a FASTA file."""

    header: str
    """text after the >"""
    residues: str
    """upper-case letters"""

    @property
    def name(self) -> str:
        """First word of the header."""
        return (self.header.split(maxsplit=1) or [""])[0]


def _text_blocks(source: str, level: _Level = "word", use: str = "train") -> Iterator[bytes | str]:
    """Returns the pieces of a text for `Vocabulary`."""
    if level == "protein":
        return (f"{record.residues}\n" for record in _records(source, use))
    raw = _raw(source, use)
    if level == "byte":
        return raw
    text = _decoded(raw, source, "convert it, or use data.level byte")
    return _whole_words(text) if level == "word" else text


def _line_blocks(source: str, use: str = "train", any_bytes: bool = False) -> Iterator[str]:
    """Yields pieces of a text that end at line breaks; arguments as for `_text_blocks`."""
    rest = ""
    for block in _decoded(_raw(source, use), source, "convert it", any_bytes):
        head, line_break, tail = block.rpartition("\n")
        if line_break:
            yield rest + head + line_break
            rest = ""
        rest += tail
    if rest:
        yield rest


def _lines(source: str, use: str = "train") -> Iterator[str]:
    """Yields the lines of a text; only a line feed ends a line."""
    for block in _line_blocks(source, use):
        yield from block.removesuffix("\n").split("\n")


def _records(source: str, use: str = "train") -> Iterator[Record]:
    """Yields the records of a FASTA file in upper case; arguments as for `_text_blocks`."""
    header: str | None = None
    parts: list[str] = []
    for number, line in enumerate(_lines(source, use), 1):
        text = line.strip()
        if text.startswith(">"):
            if header is not None:
                yield _record(header, parts, source)
            header, parts = text[1:].strip(), []
        elif text and header is None:
            raise ValueError(
                f"{source}: line {number}: expected FASTA, whose records begin with a line "
                f">NAME; got {shown(text, 20)}"
            )
        elif text:
            parts.append(text)
    if header is None:
        raise ValueError(f"{source}: the file is empty; expected FASTA records")
    yield _record(header, parts, source)


def _record(header: str, parts: list[str], source: str) -> Record:
    record, letters = Record(header, "".join(parts).upper()), "".join(parts)
    if not letters or not _LETTERS.issuperset(letters):
        wrong = ((i, one) for i, one in enumerate(letters, 1) if one not in _LETTERS)
        place, letter = next(wrong, (0, ""))
        raise ValueError(
            f"{source}: record {shown(record.name)}: expected the letters {RESIDUES}; got "
            f"{f'{letter!r} at residue {place}' if letter else 'no residues'}; correct or remove "
            "the record"
        )
    return record


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
    """Yields a text in blocks of whole words; adds a line break at the end if it is missing."""
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
