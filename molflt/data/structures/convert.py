"""Any readable source of structures to a compact store."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from molflt.data.structures import source_of
from molflt.data.structures.game_net import GameNet
from molflt.data.structures.game_net_archive import GAME_NET, _expect_archive
from molflt.data.structures.game_net_splits import _write_splits
from molflt.data.structures.labels import label_faults
from molflt.data.structures.store import write_store

if TYPE_CHECKING:
    from torch_geometric.data import Data

__all__ = ["convert"]


def convert(
    src: Path,
    dst: Path,
    limit: int | None = None,
    skip_bad: bool = False,
    splits: Path | None = None,
    folds: Path | None = None,
    hold_out: list[str] | None = None,
    sha256: str = GAME_NET.sha256,
) -> None:
    """Convert structures to a compact store: no edges, no pickle, much faster to read.

    Relaxed positions are stored unwrapped, in the image nearest to the initial ones. GAME-Net's
    archive becomes a folder of stores: train, val_id, and the same with molecules (val_ood_ads),
    metals (val_ood_cat) or both that train does not have; by default Cu, Ir, Pd and every fifth
    molecule of a family. What the systems are called is in systems.csv beside them.

    Args:
        src: OC20 LMDB file or folder, compact store, GAME-Net's FG_dataset_lite.tar.xz, or a file
            that ASE reads.
        dst: compact store to write, ending in .safetensors; an existing one is replaced. For
            GAME-Net's archive also a folder.
        limit: convert only the first so many structures.
        skip_bad: leave out structures that are not valid, count and list them on stderr: also
            those without a label where others have one.
        splits: JSON file with a list of names of systems for each split of GAME-Net's archive.
        folds: JSON file of folds by name, or npz file with arrays name and fold: writes a folder
            testI-valJ for each pair of folds, whose train has all the others.
        hold_out: metals and families of molecules, such as Cu amides, that train does not have.
        sha256: expected sum of GAME-Net's archive.

    Raises:
        ValueError: naming the file, key and sid of a structure that is not valid, or whose label is
            beyond 20 eV where the others look like adsorption energies.
        FileNotFoundError: if there is nothing at ``src``.
        OSError: if ``dst`` cannot be written; nothing is left behind then.
    """
    several = issubclass(source_of(src), GameNet) and dst.suffix != ".safetensors"
    if not several and (splits or folds or hold_out):
        raise ValueError(
            "--splits, --folds and --hold_out are for GAME-Net's archive, converted to a folder; "
            f"got {src} and {dst}"
        )
    if several:
        if limit is not None:
            raise ValueError("--limit is for one store; got a folder, which holds all systems")
        _list_bad(_write_splits(src, dst, sha256, skip_bad, splits, folds, hold_out or []))
        return
    if dst.suffix != ".safetensors":  # before reading for half an hour
        raise ValueError(f"{dst}: a compact store ends in .safetensors; got {dst.suffix!r}")
    if issubclass(source_of(src), GameNet):
        _expect_archive(src, sha256)
    structures = _OnePass(src, limit, skip_bad)
    unwrapped = 0

    def records() -> Iterator[Data]:
        nonlocal unwrapped
        for record, moved in structures:
            unwrapped += moved
            yield record

    def left_out(sids: np.ndarray, energies: np.ndarray, natoms: np.ndarray) -> Collection[int]:
        some = skip_bad and bool(np.isfinite(energies).any())  # test splits have no labels at all
        faults = label_faults(energies, natoms, required=some)
        found = [(f"{src}: sid {sids[index]}", reason) for index, reason in faults.items()]
        if found and not skip_bad:
            raise ValueError(f"{': '.join(found[0])}; --skip-bad leaves it out ({len(found)} such)")
        structures.bad += found
        return faults

    count = write_store(dst, records(), source=src.name, left_out=left_out)
    before, after = _size_on_disk(src), _size_on_disk(dst)
    print(
        f"{src} ({_readable_size(before)}) -> {dst} ({_readable_size(after)}): {count} structures"
    )
    if unwrapped:
        print(f"{unwrapped} relaxed positions were stored in another periodic image; unwrapped")
    _list_bad(structures.bad)


def _list_bad(bad: list[tuple[str, str]]) -> None:
    if bad:
        print(f"left out {len(bad)} structures that are not valid:", file=sys.stderr)
        for name, reason in bad:
            print(f"  {name}: {reason}", file=sys.stderr)


class _OnePass:
    """Iterates once over the structures of any source, with a progress bar on stderr.

    Yields a structure, and the number of its free atoms that the file has in another image.

    Args:
        src: what :func:`molflt.data.structures.open_dataset` opens.
        limit: stop after so many structures.
        skip_bad: leave out structures that are not valid instead of stopping at the first.

    Attributes:
        bad: (name, reason) of the structures left out so far.
        verified: whether the source has a digest, which fits; None if its kind never has.
        hint: what to say of missing labels; see :class:`Structures`.

    Raises:
        ValueError: naming a structure that is not valid, or if none is.
    """

    def __init__(self, src: Path, limit: int | None = None, skip_bad: bool = False) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1; got {limit}")
        self.src, self.limit, self.skip_bad = src, limit, skip_bad
        self.bad: list[tuple[str, str]] = []
        self.verified: bool | None = None
        self.hint = ""

    def __iter__(self) -> Iterator[tuple[Data, int]]:
        dataset = source_of(self.src).to_read_once(self.src, self.skip_bad)
        self.bad, self.verified = list(dataset.bad), dataset.verify()
        count, total = 0, min(len(dataset), self.limit or len(dataset))
        with tqdm(total=total, desc=self.src.name, unit=" structures", disable=None) as bar:
            for index in range(len(dataset)):
                try:
                    found = dataset.with_unwrapped(index)
                except ValueError as error:
                    if not self.skip_bad:
                        raise
                    name = dataset.where(index)
                    self.bad.append((name, str(error).removeprefix(f"{name}: ")))
                    continue
                self.hint = dataset.hint
                yield found
                count += 1
                bar.update()
                if count == self.limit:
                    break
        if count == 0:
            why = f": {self.bad[0][1]}" if self.bad else ""
            raise ValueError(f"{self.src}: no valid structures; expected at least one{why}")


def _size_on_disk(path: Path) -> int:
    """Bytes of a file, or of the files in a folder."""
    if path.is_dir():
        return sum(p.stat().st_size for p in path.iterdir() if p.is_file())
    return path.stat().st_size


def _readable_size(size: float) -> str:
    """Bytes as "1.4 MB"."""
    if size < 1000:
        return f"{size:.0f} bytes"
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 1000:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"
