"""``molflt data split``: training, validation and test sets of a FASTA file."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from molflt.data.text.sources import Record, _lines, _records
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
    """Splits a FASTA file by record, or by clusters of similar records.

    Writes train.fasta, val.fasta and test.fasta. Each cluster goes to one file only; without
    clusters, all copies of a sequence go to one file. Similar sequences in different files make a
    model look better than it is. To avoid this, give clusters, such as those of MMseqs2 at 30 %
    identity.

    Args:
        src: FASTA file, plain or compressed (.gz or .xz).
        dst: folder to write to; existing files are replaced.
        val_fraction: maximum share of the records for validation.
        test_fraction: maximum share of the records for testing; 0 writes no test file.
        clusters: file with one line per record: its name, a tab, and the name of its cluster.
        seed: seed of the random split.
    """
    if val_fraction + test_fraction >= 1:
        raise ValueError(
            "the sum of val_fraction and test_fraction must be below 1; got "
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
                raise ValueError(f"{path}: is the source file; choose another folder")
        used = {use: path for use, path in paths.items() if use in set(side.values())}
        for use in paths.keys() - used.keys():
            if paths[use].exists():
                raise ValueError(
                    f"{paths[use]}: expected no such file with {use}_fraction 0, because records "
                    f"of an older one may be in the new {_TRAIN}.fasta; remove it, or choose "
                    "another folder"
                )
        parts = {use: stack.enter_context(atomically(path)) for use, path in used.items()}
        files = {use: stack.enter_context(open(part, "w")) for use, part in parts.items()}
        for record, group in zip(_records(source), groups, strict=True):
            use = side[group]
            files[use].writelines(_fasta(record))
            counts[use] += 1
            residues[use] += len(record.residues)
    what = "clusters" if clusters else "different sequences"
    print(f"{dst}: {len(groups):,} records in {len(side):,} {what}")
    for use in used:
        print(f"  {use}: {counts[use]:,} records, {residues[use]:,} residues")


def _read_clusters(path: Path) -> dict[str, str]:
    """Returns the cluster of each record by name."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected names of records and clusters")
    found: dict[str, str] = {}
    for number, line in enumerate(_lines(str(path)), 1):
        cells = line.rstrip("\r").split("\t")
        if cells == [""]:
            continue
        if len(cells) != 2 or not all(cells):
            raise ValueError(
                f"{path}: line {number}: expected the name of a record, a tab, and its cluster; "
                f"got {shown(line)}"
            )
        if found.setdefault(*cells) != cells[1]:
            raise ValueError(
                f"{path}: line {number}: expected one cluster of each record; got a second one of "
                f"{shown(cells[0])}; the first column is the record"
            )
    return found


def _group(record: Record, clusters: dict[str, str] | None, path: Path | None) -> bytes:
    """Returns the cluster of a record, or a digest of its sequence."""
    if clusters is None:
        return hashlib.blake2b(record.residues.encode(), digest_size=16).digest()
    if record.name not in clusters:
        raise ValueError(
            f"{path}: expected a cluster of each record; got none of {shown(record.name)}; add it, "
            "the first column is the record"
        )
    return clusters[record.name].encode()


def _sides(
    groups: list[bytes], shares: dict[str, float], seed: int, source: str
) -> dict[bytes, str]:
    """Assigns groups in random order to the first set that can hold them, or else to training."""
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
    missing = [use for use in (_TRAIN, *shares) if use not in side.values()]
    if missing:
        raise ValueError(
            f"{source}: expected records for {missing[0]}; got {len(groups)} in {len(sizes)} "
            f"groups; change the fractions {', '.join(map(str, shares.values()))}"
        )
    return side


def _fasta(record: Record) -> Iterator[str]:
    yield f">{record.header}\n"
    for start in range(0, len(record.residues), _WIDTH):
        yield f"{record.residues[start : start + _WIDTH]}\n"
