"""Readers for text files, and ``molflt data split``."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from molflt.data.text.vocabulary import RESIDUES, _Level
from molflt.files import atomically, shown, unpacked

_BLOCK = 2**20  # bytes read at once
_BYTE_ORDER = "\ufeff"
_LETTERS = frozenset(RESIDUES + RESIDUES.lower())
_WIDTH = 60  # residues in a line
_TRAIN = "train"


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


def split(
    src: Path,
    dst: Path,
    val_fraction: float = 0.05,
    test_fraction: float = 0.05,
    clusters: Path | None = None,
    seed: int = 0,
) -> None:
    """Splits a FASTA file by sequence, or by clusters of similar sequences.

    Writes train.fasta, val.fasta and test.fasta. Each cluster goes to one file only; without
    clusters, all copies of a sequence go to the same file. With similar sequences in different
    files, errors are underestimated; clusters, for example from MMseqs2 at 30 % sequence identity,
    avoid this.

    Args:
        src: FASTA file, plain or compressed (.gz or .xz).
        dst: folder to write to; existing files are replaced.
        val_fraction: maximum share of the records for validation.
        test_fraction: maximum share of the records for testing; 0 writes no test file.
        clusters: file with one line per record: the record's name, a tab, and the cluster's name.
        seed: seed of the random split.
    """
    shares = {"val": val_fraction, "test": test_fraction}
    if sum(shares.values()) >= 1:
        raise ValueError(
            "the sum of val_fraction and test_fraction must be below 1; got "
            f"{val_fraction} and {test_fraction}"
        )
    records = list(_records(str(src)))
    if clusters is None:
        codes = [record.residues.encode() for record in records]
        groups = [hashlib.blake2b(code, digest_size=16).digest() for code in codes]
    else:
        groups = _read_clusters(clusters, records)
    shares = {use: share for use, share in shares.items() if share}
    side = _sides(groups, shares, seed, str(src))
    for use in ("val", "test"):
        if use not in shares and (old := Path(dst) / f"{use}.fasta").exists():
            raise ValueError(
                f"{old}: expected no such file with {use}_fraction 0, because its records may be "
                f"in the new {_TRAIN}.fasta; remove it, or choose another folder"
            )
    paths = {use: Path(dst) / f"{use}.fasta" for use in (_TRAIN, *shares)}
    for path in paths.values():
        if path.exists() and path.samefile(src):
            raise ValueError(f"{path} is the source file; choose another folder")
    kind = "clusters" if clusters else "different sequences"
    print(f"{dst}: {len(groups):,} records in {len(side):,} {kind}")
    for use, path in paths.items():
        own = [record for record, group in zip(records, groups, strict=True) if side[group] == use]
        with atomically(path) as part, open(part, "w", encoding="utf-8") as file:
            for header, residues in own:
                lines = [residues[i : i + _WIDTH] for i in range(0, len(residues), _WIDTH)]
                print(f">{header}", *lines, sep="\n", file=file)
        print(f"  {use}: {len(own):,} records, {sum(len(x.residues) for x in own):,} residues")


def _read_clusters(path: Path, records: list[Record]) -> list[bytes]:
    found: dict[str, str] = {}
    for number, line in enumerate(_lines(str(path)), 1):
        cells = line.rstrip("\r").split("\t")
        if cells == [""]:
            continue
        if len(cells) != 2 or not all(cells) or found.setdefault(*cells) != cells[1]:
            raise ValueError(
                f"{path}: line {number}: expected the name of a record, a tab, and the name of its "
                f"only cluster; got {shown(line)}; swap the columns of a file from MMseqs2"
            )
    if missing := [record.name for record in records if record.name not in found]:
        raise ValueError(
            f"{path}: expected a cluster for each record; got none for {shown(missing[0])}; add a "
            "line that begins with this name"
        )
    return [found[record.name].encode() for record in records]


def _sides(
    groups: list[bytes], shares: dict[str, float], seed: int, source: str
) -> dict[bytes, str]:
    """Assigns each group, in random order, to the first set with enough space, or to training."""
    sizes = Counter(groups)
    names = sorted(sizes)
    left = {use: share * len(groups) for use, share in shares.items()}
    side = {}
    for i in np.random.default_rng(seed).permutation(len(names)):
        group = names[i]
        use = next((use for use, free in left.items() if sizes[group] <= free), _TRAIN)
        side[group] = use
        if use in left:
            left[use] -= sizes[group]
    if missing := {_TRAIN, *shares} - set(side.values()):
        raise ValueError(
            f"{source}: expected records for {min(missing)}; got {len(groups)} in {len(sizes)} "
            f"groups; change the fractions {', '.join(map(str, shares.values()))}"
        )
    return side
