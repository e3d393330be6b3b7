"""Readers for texts from files and Hugging Face data sets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from molflt.data.packed import dataset_loader, unpacked
from molflt.data.text.vocabulary import RESIDUES, _Level
from molflt.files import shown

_BLOCK = 2**20  # bytes read at once
_HF = "hf:"
_BYTE_ORDER = "\ufeff"
_LETTERS = frozenset(RESIDUES + RESIDUES.lower())
_SPLITS = {"train": "train", "val": "validation", "test": "test"}


class Record(NamedTuple):
    """Sequence from a FASTA file."""

    header: str  # text after the >
    residues: str  # upper-case letters

    @property
    def name(self) -> str:
        """First word of the header."""
        return (self.header.split(maxsplit=1) or [""])[0]


def _text_blocks(source: str, level: _Level = "word", use: str = "train") -> Iterator[bytes | str]:
    """Returns a text in pieces that `Vocabulary.encode_blocks` accepts."""
    if level == "byte":
        return _raw(source, use)
    if level == "protein":
        return (f"{record.residues}\n" for record in _records(source, use))
    blocks = _line_blocks(source, use)
    if level == "char":
        return blocks
    return (block if block.endswith("\n") else f"{block}\n" for block in blocks)


def _line_blocks(source: str, use: str = "train", any_bytes: bool = False) -> Iterator[str]:
    """Yields pieces of a text that end at line breaks; see `_text_blocks` for the arguments."""
    done = 0
    for raw in _raw(source, use):
        try:
            text = raw.decode(errors="surrogateescape" if any_bytes else "strict")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{source}: byte {done + error.start} is not UTF-8 ({error.reason}); expected text "
                "in UTF-8; convert it, or set data.level or data.kind to byte"
            ) from None
        yield text if done or any_bytes else text.removeprefix(_BYTE_ORDER)
        done += len(raw)


def _lines(source: str, use: str = "train") -> Iterator[str]:
    """Yields the lines of a text; only a line feed ends a line."""
    for block in _line_blocks(source, use):
        yield from block.removesuffix("\n").split("\n")


def _records(source: str, use: str = "train") -> Iterator[Record]:
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
    letters = "".join(parts)
    record = Record(header, letters.upper())
    if not letters or not _LETTERS.issuperset(letters):
        wrong = [f"{x!r} at residue {i}" for i, x in enumerate(letters, 1) if x not in _LETTERS]
        raise ValueError(
            f"{source}: record {shown(record.name)}: expected the letters {RESIDUES}; got "
            f"{wrong[0] if wrong else 'no residues'}; correct or remove the record"
        )
    return record


def _raw(source: str, use: str) -> Iterator[bytes]:
    if source.startswith(_HF):
        yield from _rows(source, use)
        return
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file; expected a text file, plain or compressed (.gz or .xz)"
        )
    with unpacked(path) as file:
        while lines := file.readlines(_BLOCK):
            yield b"".join(lines)


def _rows(source: str, use: str) -> Iterator[bytes]:
    name, _, which = source.removeprefix(_HF).partition(":")
    split, _, column = which.partition(".")
    split, column = split or _SPLITS[use], column or "text"
    load = dataset_loader(source)
    parts = name.split("/")
    try:
        rows = load("/".join(parts[:2]), *parts[2:], split=split)
    except Exception as error:  # the library raises many kinds of errors
        raise ValueError(
            f"{source}: cannot be loaded ({' '.join(str(error).split())}); expected "
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
