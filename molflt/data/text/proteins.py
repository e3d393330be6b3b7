"""Protein sequences: residue letters and FASTA records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from molflt.files import shown

__all__ = ["AMINO_ACIDS", "RESIDUES", "Record", "read_records", "residue_ids"]

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
"""Letters of the 20 standard amino acids (IUPAC-IUB 1983)."""

RESIDUES = f"{AMINO_ACIDS}BZXUO"
"""Letters of UniProt: the amino acids, Asx, Glx, any residue, selenocysteine and pyrrolysine."""

_LETTERS = frozenset(RESIDUES + RESIDUES.lower())


class Record(NamedTuple):
    """One sequence of a FASTA file."""

    header: str
    """line after the >"""
    residues: str
    """upper-case letters"""

    @property
    def name(self) -> str:
        """First word of the header."""
        return (self.header.split(maxsplit=1) or [""])[0]


def read_records(blocks: Iterable[str], source: str) -> Iterator[Record]:
    """Yields the records of a FASTA file in upper case; empty lines are ignored.

    Args:
        blocks: text in whole lines.
        source: name of the text, for messages.
    """
    header: str | None = None
    parts: list[str] = []
    number = 0
    for block in blocks:
        for line in block.split("\n")[: -1 if block.endswith("\n") else None]:
            number += 1
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
    record = Record(header, "".join(parts).upper())
    letters = "".join(parts)
    wrong = next(((i, one) for i, one in enumerate(letters, 1) if one not in _LETTERS), None)
    if not letters or wrong:
        got = f"{wrong[1]!r} at residue {wrong[0]}" if wrong else "no residues"
        raise ValueError(
            f"{source}: record {shown(record.name)}: expected the letters {RESIDUES}; got {got}; "
            "correct or remove the record"
        )
    return record


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
