"""Protein sequences: the letters of residues, and records of FASTA."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from molflt.files import shown

__all__ = ["AMINO_ACIDS", "RESIDUES", "Record", "read_records", "residue_ids"]

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
"""The 20 that the genetic code has, by their letters (IUPAC-IUB 1983)."""

RESIDUES = f"{AMINO_ACIDS}BZXUO"
"""Those, and Asx, Glx, any, selenocysteine and pyrrolysine: the letters of UniProt."""

_LETTERS = frozenset(RESIDUES + RESIDUES.lower())
_ADVICE = f"expected the letters {RESIDUES}; correct the record, or leave it out"


class Record(NamedTuple):
    """One sequence of a file."""

    header: str
    """line behind the >"""
    residues: str
    """capital letters"""

    @property
    def name(self) -> str:
        """First word of the header."""
        return (self.header.split(maxsplit=1) or [""])[0]


def read_records(blocks: Iterable[str], source: str) -> Iterator[Record]:
    """Records of a FASTA file; small letters count as capital ones, empty lines for nothing.

    Args:
        blocks: of the text, in whole lines.
        source: its name, for messages.

    Raises:
        ValueError: naming the file, and the record or line: no record, one without residues, a
            letter that is none of `RESIDUES`.
    """
    header: str | None = None
    parts: list[str] = []
    number = 0
    for block in blocks:
        for line in block.split("\n")[: -1 if block.endswith("\n") else None]:
            number += 1
            text = line.removeprefix("\ufeff").strip() if number == 1 else line.strip()
            if text.startswith(">"):
                if header is not None:
                    yield _record(header, parts, source)
                header, parts = text[1:].strip(), []
            elif text and header is None:
                raise ValueError(
                    f"{source}: line {number}: {shown(text, 20)} before the first record; expected "
                    "FASTA, whose records begin with a line >NAME"
                )
            elif text:
                parts.append(text)
    if header is None:
        raise ValueError(f"{source}: the file is empty; expected records of FASTA")
    yield _record(header, parts, source)


def _record(header: str, parts: list[str], source: str) -> Record:
    letters = "".join(parts)
    name = shown((header.split(maxsplit=1) or ["without a name"])[0])
    if not letters:
        raise ValueError(f"{source}: record {name}: no residues; {_ADVICE}")
    if not _LETTERS.issuperset(letters):
        place, letter = next((i, one) for i, one in enumerate(letters) if one not in _LETTERS)
        raise ValueError(f"{source}: record {name}: residue {place + 1} is {letter!r}; {_ADVICE}")
    return Record(header, letters.upper())


def residue_ids(text: str, ids: Mapping[str, int], separator: int) -> NDArray[np.int32]:
    """Ids of residues, capital letters or small ones, and of a separator at each end of a line.

    Args:
        text: sequences.
        ids: of each of `RESIDUES`.
        separator: what stands between sequences.

    Returns:
        (characters of the text,).

    Raises:
        ValueError: naming a letter that is no residue.
    """
    table = np.full(128, -1, dtype=np.int32)
    for letter in RESIDUES:
        table[[ord(letter), ord(letter.lower())]] = ids[letter]
    table[ord("\n")] = separator
    found = table[np.frombuffer(text.encode("ascii", "replace"), dtype=np.uint8)]
    if found.min(initial=0) < 0:
        letter = text[int((found < 0).argmax())]
        raise ValueError(f"{letter!r} is no residue; expected the letters {RESIDUES}")
    return found
