"""Any readable source of structures to a compact store."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from molflt.data.structures import AS_IT_IS, Reading, open_dataset
from molflt.data.structures.base import Tags
from molflt.data.structures.labels import force_fault, label_faults
from molflt.data.structures.overlaps import atoms_coincide, overlaps_of
from molflt.data.structures.sources import is_one_source, sources_in
from molflt.data.structures.store import write_store
from molflt.files import readable_size

if TYPE_CHECKING:
    from torch_geometric.data import Data

__all__ = ["convert"]


def convert(
    src: Path,
    dst: Path,
    limit: int | None = None,
    skip_bad: bool = False,
    energy_key: str | None = None,
    tags: Tags = "oc20",
    forces_key: str | None = None,
    stress_key: str | None = None,
) -> None:
    """Convert structures to a compact store: no edges, no pickle, much faster to read.

    A folder becomes a folder, with a store for each file or folder of shards in it.

    Relaxed positions are stored unwrapped, in the image nearest to the initial ones.

    Args:
        src: OC20 LMDB file or folder, compact store, a file that ASE reads, or a folder of such.
        dst: compact store to write, ending in .safetensors; an existing one is replaced. For a
            folder, a folder.
        limit: convert only the first so many structures.
        skip_bad: leave out structures that are not valid, count and list them on stderr: also
            those without a label where others have one.
        energy_key: entry of a file that ASE reads that is the energy, eV; by default y_relaxed,
            else energy.
        tags: what tags mean in a file that ASE reads: oc20 (0 subsurface, 1 surface, 2 adsorbate)
            or ase (numbers of layers from the top, 1, 2, ..., and 0 for adsorbates).
        forces_key: array of a file that ASE reads that is the forces, eV/Å; by default forces, else
            REF_forces.
        stress_key: its entry that is the stress, eV/Å^3; by default stress, else REF_stress.

    Raises:
        ValueError: naming the file, key and sid of a structure that is not valid, or whose label is
            beyond 20 eV where the others look like adsorption energies, or which has a force
            beyond 1,000 eV/Å.
        FileNotFoundError: if there is nothing at ``src``.
        OSError: if ``dst`` cannot be written; nothing is left behind then.
    """
    whole = src.is_dir() and not is_one_source(src)
    jobs = _jobs_of(src, dst) if whole else {src: dst}
    for path, store in jobs.items():
        if store.suffix != ".safetensors":  # before reading for half an hour
            raise ValueError(f"{store}: a compact store ends in .safetensors; got {store.suffix!r}")
        if (limit is not None or skip_bad) and store.exists() and store.samefile(path):
            raise ValueError(
                f"{store}: is what is read, and would lose what --limit or --skip-bad leaves out; "
                "expected another file to write; choose another name"
            )
    reading = Reading(energy_key, tags, forces_key, stress_key)
    for path, store in jobs.items():
        _convert_one(_OnePass(path, limit, skip_bad, reading), store)


def _jobs_of(src: Path, dst: Path) -> dict[Path, Path]:
    """The store for each source in a folder.

    Raises:
        ValueError: if `dst` is no folder, or that of the sources.
    """
    if dst.suffix == ".safetensors" or dst.is_file():
        raise ValueError(f"{dst}: expected a folder, as {src} holds several sources; name one")
    if dst.exists() and dst.samefile(src):
        raise ValueError(f"{dst}: expected another folder than that of the sources; name one")
    found, others = sources_in(src)
    if others:
        print(f"{src}: no structures in {', '.join(others)}", file=sys.stderr)
    return {path: dst / f"{name}.safetensors" for name, path in found.items()}


def _convert_one(structures: _OnePass, dst: Path) -> None:
    src, skip_bad, unwrapped, with_forces = structures.src, structures.skip_bad, 0, False
    overlapping: dict[int, int] = {}  # sid by place among those that are read
    absurd: dict[int, str] = {}  # likewise, what is wrong with forces

    def records() -> Iterator[Data]:
        nonlocal unwrapped, with_forces
        for place, (record, moved) in enumerate(structures):
            unwrapped += moved
            if atoms_coincide(record):
                overlapping[place] = int(record.sid)
            with_forces |= bool(record.forces.isfinite().any())
            if fault := force_fault(record.forces.numpy()):
                absurd[place] = fault
            yield record

    def left_out(sids: np.ndarray, energies: np.ndarray, natoms: np.ndarray) -> Collection[int]:
        some = skip_bad and bool(np.isfinite(energies).any())  # test splits have no labels at all
        faults = absurd | label_faults(energies, natoms, required=some, at_pos=with_forces)
        found = [(f"{src}: sid {sids[index]}", reason) for index, reason in faults.items()]
        if found and not skip_bad:
            raise ValueError(f"{': '.join(found[0])}; --skip-bad leaves it out ({len(found)} such)")
        structures.bad += found
        for place in faults:
            overlapping.pop(place, None)
        return faults

    count = write_store(dst, records(), source=src.name, left_out=left_out)
    before, after = _size_on_disk(src), _size_on_disk(dst)
    print(f"{src} ({readable_size(before)}) -> {dst} ({readable_size(after)}): {count} structures")
    if unwrapped:
        print(f"{unwrapped} relaxed positions were stored in another periodic image; unwrapped")
    if structures.unused:
        print(f"labels that are there and not used: {', '.join(structures.unused)}")
    if structures.hint:
        print(f"warning: not all structures have y_relaxed; {structures.hint}")
    if overlapping:
        said = overlaps_of(str(src), [*overlapping.values()], count)
        print(f"molflt: warning: {said}", file=sys.stderr)
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
        reading: what the entries of a file that ASE reads mean.

    Attributes:
        bad: (name, reason) of the structures left out so far.
        verified: whether the source has a digest, which fits; None if its kind never has.
        hint: what to say of missing labels; see :class:`Structures`.
        unused: labels that are there and not read.

    Raises:
        ValueError: naming a structure that is not valid, or if none is.
    """

    def __init__(
        self,
        src: Path,
        limit: int | None = None,
        skip_bad: bool = False,
        reading: Reading = AS_IT_IS,
    ) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1; got {limit}")
        self.src, self.limit, self.skip_bad, self.reading = src, limit, skip_bad, reading
        self.bad: list[tuple[str, str]] = []
        self.verified: bool | None = None
        self.hint = ""
        self.unused: list[str] = []

    def __iter__(self) -> Iterator[tuple[Data, int]]:
        dataset = open_dataset(self.src, self.skip_bad, self.reading, once=True)
        self.bad, self.verified = list(dataset.bad), dataset.verify()
        self.unused = dataset.unused
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
