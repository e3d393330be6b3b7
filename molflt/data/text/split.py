"""``molflt data split``: sequences of a FASTA file to train on, to validate on, and to test on."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from molflt.data.text.proteins import Record
from molflt.data.text.sources import _line_blocks, _records
from molflt.files import atomically, shown

__all__ = ["split"]

_WIDTH = 60  # residues in a line
_TRAIN, _VAL, _TEST = "train", "val", "test"


def split(
    src: Path,
    dst: Path,
    val_fraction: float = 0.05,
    test_fraction: float = 0.05,
    clusters: Path | None = None,
    seed: int = 0,
) -> None:
    """Splits a FASTA file by its records, or by clusters of similar ones.

    Writes train.fasta, val.fasta and test.fasta. Nothing is on two sides: no cluster, where these
    are given, and otherwise no sequence, however often it comes. Similar sequences that are on two
    sides make a model look better than it is: give clusters, such as those of MMseqs2 at 30 %
    identity.

    Args:
        src: FASTA, plain or as .gz or .xz.
        dst: folder to write; files in it are replaced.
        val_fraction: share of the records to validate on, at most.
        test_fraction: share of the records to test on, at most; 0 for no test file.
        clusters: lines of a record's name, a tab, and its cluster's; of all records.
        seed: of the draw.

    Raises:
        FileNotFoundError: naming the file.
        ValueError: a file that cannot be read, a record without a cluster, nothing to validate
            on, or an older test.fasta where none is to be written.
    """
    if val_fraction + test_fraction >= 1:
        raise ValueError(
            "val_fraction and test_fraction must be below 1 together; got "
            f"{val_fraction} and {test_fraction}"
        )
    source = str(src)
    known = None if clusters is None else _read_clusters(clusters)
    groups = [_group(record, known, clusters) for record in _records(source)]
    shares = {_VAL: val_fraction, _TEST: test_fraction}
    side = _sides(groups, {use: share for use, share in shares.items() if share}, seed, source)
    counts: Counter[str] = Counter()
    residues: Counter[str] = Counter()
    with ExitStack() as stack:
        paths = {use: Path(dst) / f"{use}.fasta" for use in (_TRAIN, *shares)}
        for path in paths.values():
            if path.exists() and path.samefile(src):
                raise ValueError(f"{path}: would replace its own source; choose another folder")
        used = {use: path for use, path in paths.items() if use in set(side.values())}
        for use in paths.keys() - used.keys():
            if paths[use].exists():
                raise ValueError(
                    f"{paths[use]}: expected no such file, because none is to be written "
                    f"({use}_fraction 0) and records of an older one may be in the new "
                    f"{_TRAIN}.fasta; remove it, or choose another folder"
                )
        parts = {use: stack.enter_context(atomically(path)) for use, path in used.items()}
        files = {use: stack.enter_context(open(part, "w")) for use, part in parts.items()}
        for record, group in zip(_records(source), groups, strict=True):
            use = side[group]
            files[use].writelines(_lines(record))
            counts[use] += 1
            residues[use] += len(record.residues)
    what = "clusters" if clusters else "different sequences"
    print(f"{dst}: {len(groups):,} records in {len(side):,} {what}")
    for use in used:
        print(f"  {use}: {counts[use]:,} records, {residues[use]:,} residues")


def _read_clusters(path: Path) -> dict[str, str]:
    """Cluster of each record by name."""
    found: dict[str, str] = {}
    number = 0
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected names of records and clusters")
    for block in _line_blocks(str(path)):
        for line in block.removesuffix("\n").split("\n"):
            number += 1
            cells = line.rstrip("\r").split("\t")
            if cells == [""]:
                continue
            if len(cells) != 2 or not all(cells):
                raise ValueError(
                    f"{path}: line {number}: {shown(line)}; expected the name of a record, a tab, "
                    "and that of its cluster"
                )
            if found.setdefault(*cells) != cells[1]:
                raise ValueError(
                    f"{path}: line {number}: record {shown(cells[0])} is in two clusters; expected "
                    "one; the first column is the record"
                )
    return found


def _group(record: Record, clusters: dict[str, str] | None, path: Path | None) -> bytes:
    """What must not be on two sides: a cluster, or a sequence."""
    if clusters is None:
        return hashlib.blake2b(record.residues.encode(), digest_size=16).digest()
    if record.name not in clusters:
        raise ValueError(
            f"{path}: no cluster of record {shown(record.name)}; expected one of each record; add "
            "it, the first column is the record"
        )
    return clusters[record.name].encode()


def _sides(
    groups: list[bytes], shares: dict[str, float], seed: int, source: str
) -> dict[bytes, str]:
    """The side of each group: drawn at random, as long as its records fit into the share."""
    sizes = Counter(groups)
    names = sorted(sizes)
    order: Iterator[bytes] = (names[i] for i in np.random.default_rng(seed).permutation(len(names)))
    room = {use: share * len(groups) for use, share in shares.items()}
    side = {}
    for group in order:
        use = next((use for use, left in room.items() if sizes[group] <= left), _TRAIN)
        side[group] = use
        if use in room:
            room[use] -= sizes[group]
    missing = [use for use in (_TRAIN, *shares) if use not in side.values()]
    if missing:
        raise ValueError(
            f"{source}: {len(groups)} records in {len(sizes)} groups leave none for {missing[0]}; "
            f"expected more; raise or lower the fractions {', '.join(map(str, shares.values()))}"
        )
    return side


def _lines(record: Record) -> Iterator[str]:
    yield f">{record.header}\n"
    for start in range(0, len(record.residues), _WIDTH):
        yield f"{record.residues[start : start + _WIDTH]}\n"
