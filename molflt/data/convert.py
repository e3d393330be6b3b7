"""Any readable source of structures to a compact store."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from torch_geometric.data import Data
from tqdm import tqdm

from molflt.data import is_lmdb, open_dataset
from molflt.data.store import write_store

__all__ = ["convert", "readable_size", "records_with_unwrapped", "size_on_disk"]

_UNITS = (("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12))


def convert(src: Path, dst: Path, limit: int | None = None, skip_bad: bool = False) -> None:
    """Convert structures to a compact store: no edges, no pickle, much faster to read.

    Relaxed positions are stored unwrapped, in the image nearest to the initial ones.

    Args:
        src: OC20 LMDB file or folder, compact store, or a file that ASE reads.
        dst: compact store to write, ending in .safetensors; an existing one is replaced.
        limit: convert only the first so many structures.
        skip_bad: leave out structures that are not valid, count and list them on stderr.

    Raises:
        ValueError: naming the file, key and sid of a structure that is not valid.
        FileNotFoundError: if there is nothing at ``src``.
        OSError: if ``dst`` cannot be written; nothing is left behind then.
    """
    if dst.suffix != ".safetensors":  # before reading for half an hour
        raise ValueError(f"{dst}: a compact store ends in .safetensors; got {dst.suffix!r}")
    bad: list[tuple[str, str]] = []
    unwrapped = 0

    def records() -> Iterator[Data]:
        nonlocal unwrapped
        for record, moved in records_with_unwrapped(src, limit, skip_bad, bad):
            unwrapped += moved
            yield record

    count = write_store(dst, records(), source=src.name)
    before, after = size_on_disk(src), size_on_disk(dst)
    print(f"{src} ({readable_size(before)}) -> {dst} ({readable_size(after)}): {count} structures")
    if unwrapped:
        print(f"{unwrapped} relaxed positions were stored in another periodic image; unwrapped")
    if bad:
        print(f"left out {len(bad)} structures that are not valid:", file=sys.stderr)
        for name, reason in bad:
            print(f"  {name}: {reason}", file=sys.stderr)


def records_with_unwrapped(
    src: Path, limit: int | None, skip_bad: bool, bad: list[tuple[str, str]]
) -> Iterator[tuple[Data, int]]:
    """Structures of any source in one pass, with a progress bar on stderr.

    Args:
        src: what :func:`molflt.data.open_dataset` opens.
        limit: stop after so many structures.
        skip_bad: add structures that are not valid to ``bad`` instead of stopping at the first.
        bad: is extended by (name, reason).

    Yields:
        A structure, and the number of its free atoms that had been stored in another image.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1; got {limit}")
    from molflt.data.oc20_lmdb import Oc20Lmdb

    # An LMDB is checked record by record below: checking it on opening would read it twice.
    dataset = open_dataset(src, skip_bad=skip_bad and not is_lmdb(src))
    bad.extend(dataset.bad)
    count = 0
    total = min(len(dataset), limit or len(dataset))
    with tqdm(total=total, desc=src.name, unit=" structures", disable=None) as bar:
        for index in range(len(dataset)):
            try:
                if isinstance(dataset, Oc20Lmdb):
                    record, moved = dataset.with_unwrapped(index)
                else:
                    record, moved = dataset[index], 0
            except ValueError as error:
                if not skip_bad:
                    raise
                name = dataset.where(index) if isinstance(dataset, Oc20Lmdb) else str(src)
                bad.append((name, str(error).removeprefix(f"{name}: ")))
                continue
            yield record, moved
            count += 1
            bar.update()
            if count == limit:
                break
    if count == 0:
        why = f": {bad[0][1]}" if bad else ""
        raise ValueError(f"{src}: no valid structures; expected at least one{why}")


def size_on_disk(path: Path) -> int:
    """Bytes of a file, or of the files in a folder."""
    if path.is_dir():
        return sum(p.stat().st_size for p in path.iterdir() if p.is_file())
    return path.stat().st_size


def readable_size(size: float) -> str:
    """Bytes as "1.4 MB"."""
    if size < 1000:
        return f"{size:.0f} bytes"
    unit, scale = next((u, s) for u, s in _UNITS if size < 1000 * s or u == "TB")
    return f"{size / scale:.1f} {unit}"
