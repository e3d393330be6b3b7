"""``molflt data split``: training, validation and test sets from a FASTA file."""

import hashlib
from collections import Counter
from pathlib import Path

import numpy as np

from molflt.data.text.sources import Record, _lines, _records
from molflt.files import atomically, shown

_WIDTH = 60  # residues in a line
_TRAIN = "train"


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
