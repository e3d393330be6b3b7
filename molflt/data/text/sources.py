"""Readers for text files."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from molflt.data.text.vocabulary import RESIDUES, _Level
from molflt.files import shown, unpacked

_BLOCK = 2**20  # bytes read at once
_BYTE_ORDER = "\ufeff"
_LETTERS = frozenset(RESIDUES + RESIDUES.lower())


class Record(NamedTuple):
    """Sequence from a FASTA file."""

    header: str  # text after the >
    residues: str  # upper-case letters

    @property
    def name(self) -> str:
        """First word of the header."""
        return (self.header.split(maxsplit=1) or [""])[0]


def _text_blocks(source: str, level: _Level = "word") -> Iterator[bytes | str]:
    """Returns a text in pieces that `Vocabulary.encode_blocks` accepts."""
    if level == "byte":
        return _raw(source)
    if level == "protein":
        return (f"{record.residues}\n" for record in _records(source))
    blocks = _line_blocks(source)
    if level == "char":
        return blocks
    return (block if block.endswith("\n") else f"{block}\n" for block in blocks)


def _line_blocks(source: str, any_bytes: bool = False) -> Iterator[str]:
    """Yields pieces of a text that end at line breaks; with `any_bytes`, it need not be UTF-8."""
    done = 0
    for raw in _raw(source):
        try:
            text = raw.decode(errors="surrogateescape" if any_bytes else "strict")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{source}: byte {done + error.start} is not UTF-8 ({error.reason}); expected text "
                "in UTF-8; convert it, or, for language models, set data.level or data.kind to byte"
            ) from None
        yield text if done or any_bytes else text.removeprefix(_BYTE_ORDER)
        done += len(raw)


def _lines(source: str) -> Iterator[str]:
    """Yields lines, which end with a line feed; other line breaks occur within sentences."""
    for block in _line_blocks(source):
        yield from block.removesuffix("\n").split("\n")


def _records(source: str) -> Iterator[Record]:
    header: str | None = None
    parts: list[str] = []
    for number, line in enumerate(_lines(source), 1):
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


def _raw(source: str) -> Iterator[bytes]:
    with unpacked(Path(source)) as file:
        while lines := file.readlines(_BLOCK):
            yield b"".join(lines)
