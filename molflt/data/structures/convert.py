"""Conversion of any source of structures to a compact store."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from molflt.data.structures import AS_IT_IS, Reading, open_dataset
from molflt.data.structures.base import Tags, grouped
from molflt.data.structures.force_units import MOST_FRAMES, unit_fault
from molflt.data.structures.labels import label_faults, point_fault
from molflt.data.structures.overlaps import atoms_coincide, overlaps_of
from molflt.data.structures.sources import (
    Paths,
    files_of,
    is_one_source,
    is_same,
    is_shards,
    named,
    sources_in,
)
from molflt.data.structures.store import write_store
from molflt.files import readable_size

if TYPE_CHECKING:
    from torch_geometric.data import Data

__all__ = ["convert"]


def convert(
    src: Path | Sequence[Path],
    dst: Path,
    limit: int | None = None,
    skip_bad: bool = False,
    energy_key: str | None = None,
    tags: Tags = "oc20",
    forces_key: str | None = None,
    stress_key: str | None = None,
) -> None:
    """Convert structures to a compact store: no edges, no pickle, much faster to read.

    A folder becomes a folder with one store for each file or folder in it. If DST is a store,
    several files, the matches of a pattern, or a folder of files that are not splits are combined
    into it.

    Relaxed positions are stored unwrapped, in the image nearest to the initial positions.

    Args:
        src: OC20 LMDB file or folder, compact store, file that ASE reads, folder of such files, or
            pattern in quotes; or several of these.
        dst: compact store to write, ending in .safetensors; an existing one is replaced. For a
            folder of splits, this is a folder.
        limit: maximum number of structures to convert, from the start.
        skip_bad: leave out structures that are invalid or lack a label that others have; they are
            counted and listed on stderr.
        energy_key: name of the energy, eV, in files that ASE reads; by default y_relaxed, else
            energy.
        tags: convention of the tags in files that ASE reads: oc20 (0 subsurface, 1 surface, 2
            adsorbate) or ase (layer numbers from the top, 1, 2, ..., and 0 for adsorbates).
        forces_key: name of the forces, eV/Å, in files that ASE reads; by default forces, else
            REF_forces.
        stress_key: name of the stress, eV/Å^3, or, with "virial" in the name, of a virial, eV; by
            default stress, else REF_stress.
    """
    paths = [Path(src)] if isinstance(src, str | Path) else list(src)
    one = paths[0] if len(paths) == 1 else None
    jobs: list[tuple[Paths, Path]] = [(paths, dst)]
    whole = one is not None and (is_shards(one) or is_one_source(one))
    if one is not None and one.is_dir() and not (whole and dst.suffix == ".safetensors"):
        jobs = _jobs_of(one, dst)
    for path, store in jobs:
        if store.suffix != ".safetensors":  # checked before reading, which can take half an hour
            raise ValueError(f"{store}: a compact store ends in .safetensors; got {store.suffix!r}")
        if (limit is not None or skip_bad) and any(is_same(store, f) for f in files_of(path)):
            raise ValueError(
                f"{store} is also the input and would lose structures by --limit or --skip-bad; "
                "expected another file to write; choose another name"
            )
    reading = Reading(energy_key, tags, forces_key, stress_key)
    for path, store in jobs:
        _convert_one(_OnePass(path, limit, skip_bad, reading), store)


def _jobs_of(src: Path, dst: Path) -> list[tuple[Paths, Path]]:
    """Returns each source in a folder and the store for it."""
    if dst.suffix == ".safetensors" or dst.is_file():
        raise ValueError(f"{dst}: expected a folder, as {src} holds several sources; name one")
    if dst.exists() and dst.samefile(src):
        raise ValueError(f"{dst} is also the folder of the sources; expected another one; name one")
    found, others = sources_in(src)
    if others:
        print(f"{src}: no structures in {', '.join(others)}", file=sys.stderr)
    return [(path, dst / f"{name}.safetensors") for name, path in found.items()]


def _convert_one(structures: _OnePass, dst: Path) -> None:
    src, skip_bad, unwrapped = structures.src, structures.skip_bad, 0
    overlapping: dict[int, int] = {}  # sid by place among the structures read
    kept: list[Data] = []  # with forces
    absurd: dict[int, str] = {}  # faults of forces or stress, also by place

    def records() -> Iterator[Data]:
        nonlocal unwrapped
        for place, (record, moved) in enumerate(structures):
            unwrapped += moved
            if atoms_coincide(record):
                overlapping[place] = int(record.sid)
            if len(kept) < MOST_FRAMES and bool(record.forces.isfinite().any()):
                kept.append(record)
            if fault := point_fault(record):
                absurd[place] = fault
            yield record

    def left_out(sids: np.ndarray, energies: np.ndarray, natoms: np.ndarray) -> Collection[int]:
        some = skip_bad and bool(np.isfinite(energies).any())  # test splits are not labeled
        faults = absurd | label_faults(energies, natoms, required=some, at_pos=bool(kept))
        found = [(f"{src}: sid {sids[index]}", reason) for index, reason in faults.items()]
        if found and not skip_bad:
            raise ValueError(f"{': '.join(found[0])}; --skip-bad leaves it out ({len(found)} such)")
        structures.bad += found
        for place in faults:
            overlapping.pop(place, None)
        return faults

    count = write_store(dst, records(), source=src.name, left_out=left_out)
    before, after = sum(map(_size_on_disk, structures.files)), _size_on_disk(dst)
    print(f"{src} ({readable_size(before)}) -> {dst} ({readable_size(after)}): {count} structures")
    moved = f"{unwrapped} relaxed positions were stored in another periodic image; unwrapped"
    unused = f"labels that are there and not used: {', '.join(structures.unused)}"
    hint = f"warning: not all structures have y_relaxed; {structures.hint}"
    for text, known in ((moved, unwrapped), (unused, structures.unused), (hint, structures.hint)):
        if known:
            print(text)
    said = [overlaps_of(str(src), [*overlapping.values()], count)] if overlapping else []
    for text in [*said, *(f"{src}: {fault}" for fault in [unit_fault(kept)] if fault)]:
        print(f"molflt: warning: {text}", file=sys.stderr)
    _list_bad(structures.bad)


def _list_bad(bad: list[tuple[str, str]]) -> None:
    if bad:
        print(f"left out {len(bad)} structures that are not valid:", file=sys.stderr)
        for line in grouped(bad):
            print(f"  {line}", file=sys.stderr)


class _OnePass:
    """Iterates once over the structures of any source, with a progress bar on stderr."""

    def __init__(
        self,
        src: Paths,
        limit: int | None = None,
        skip_bad: bool = False,
        reading: Reading = AS_IT_IS,
    ) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1; got {limit}")
        self.paths, self.src = src, named(src)
        self.limit, self.skip_bad, self.reading = limit, skip_bad, reading
        self.bad: list[tuple[str, str]] = []
        self.verified: bool | None = None
        self.hint = ""
        self.unused: list[str] = []
        self.files: list[Path] = []

    def __iter__(self) -> Iterator[tuple[Data, int]]:
        dataset = open_dataset(self.paths, self.skip_bad, self.reading, once=True)
        self.bad, self.verified = list(dataset.bad), dataset.verify()
        self.unused, self.files = dataset.unused, dataset.files
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
                given = dataset.name(index, found[0].sid)
                if isinstance(given, str):
                    found[0].name = given
                yield found
                count += 1
                bar.update()
                if count == self.limit:
                    break
        if count == 0:
            why = f": {self.bad[0][1]}" if self.bad else ""
            raise ValueError(f"{self.src}: no valid structures; expected at least one{why}")


def _size_on_disk(path: Path) -> int:
    """Returns the size of a file, or of the files in a folder, in bytes."""
    if path.is_dir():
        return sum(p.stat().st_size for p in path.iterdir() if p.is_file())
    return path.stat().st_size
