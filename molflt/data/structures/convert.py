"""Conversion of any source of structures to a compact store."""

import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np

from molflt.atoms import Data
from molflt.data.structures import Reading, Structures, labels, open_dataset, sources
from molflt.data.structures.base import Tags, grouped, valid
from molflt.data.structures.geometry import atoms_coincide, overlaps_of
from molflt.data.structures.store import BASELINE, write_store
from molflt.files import counted, expect_ending, expect_writable, readable_size, warn


def convert(
    src: Path | Sequence[Path],
    dst: Path,
    limit: int | None = None,
    skip_bad: bool = False,
    energy_key: str | None = None,
    tags: Tags = "oc20",
    forces_key: str | None = None,
    stress_key: str | None = None,
    baseline_key: str | None = None,
) -> None:
    """Converts structures to a compact store that is fast to read and contains no pickles or edges.

    A folder is converted to a folder with one store for each file or folder in it. Several files,
    the matches of a pattern, or a folder of files that are not splits are combined into one store.

    Relaxed positions are stored unwrapped, in the image nearest to the initial positions.

    Args:
        src: OC20 LMDB file or folder, compact store, file that ASE reads, folder of such files, or
            pattern in quotes; or several of these.
        dst: compact store to write, ending in .safetensors; an existing file is replaced. For a
            folder of splits, this is a folder.
        limit: maximum number of structures to convert, from the start; of each split in a folder.
        skip_bad: skip invalid structures, and structures without a label that other structures
            have; they are counted and listed on stderr.
        energy_key: name of the energy, in eV, in ASE's formats; by default y_relaxed, else energy.
        tags: oc20 (0 subsurface, 1 surface, 2 adsorbate), ase (layer numbers from the top, 1, 2,
            ..., and 0 for adsorbates) or, for any source, guess (from the geometry).
        forces_key: name of the forces, in eV/Å, in ASE's formats; by default forces or REF_forces.
        stress_key: name of the stress, in eV/Å^3, or, if it contains "virial" but not "stress", of
            a virial, in eV; by default stress, else REF_stress.
        baseline_key: name of the baseline energy, in eV, in ASE's formats, stored as y_baseline.
    """
    paths = [Path(src)] if isinstance(src, str | Path) else list(src)
    jobs: list[tuple[sources.Paths, Path]] = [(paths, dst)]
    is_store = dst.suffix == ".safetensors"
    if len(paths) == 1 and paths[0].is_dir() and not (is_store and sources.is_one_source(paths[0])):
        jobs = _jobs_of(paths[0], dst)
    for path, store in jobs:
        expect_ending(store, ".safetensors")  # before reading, which can take half an hour
        expect_writable(store)
        drops = limit is not None or skip_bad
        if drops and any(sources.is_same(store, file) for file in sources.files_of(path)):
            raise ValueError(
                f"{store} is also the input and would lose structures with --limit or --skip-bad; "
                "expected a different output file; choose another name"
            )
    reading = Reading(energy_key, tags, forces_key, stress_key, baseline_key=baseline_key)
    for path, store in jobs:
        _convert(path, store, limit, skip_bad, reading)


def _jobs_of(src: Path, dst: Path) -> list[tuple[sources.Paths, Path]]:
    """Returns each source in a folder, with the store to write."""
    if dst.suffix == ".safetensors" or dst.is_file():
        raise ValueError(f"{dst}: expected a folder for the sources in {src}; pass a folder")
    if dst.exists() and dst.samefile(src):
        raise ValueError(f"{dst} is the source; expected a different folder; choose another name")
    found, others = sources.sources_in(src)
    if others:
        print(f"{src}: not read: {', '.join(others)}", file=sys.stderr)
    for path in filter(Path.is_dir, found.values()):
        if len(sources.sources_in(path)[0].keys() & {*sources.SPLITS_IN_ORDER}) > 1:
            raise ValueError(f"{path}: expected one split; got several; convert {path}, not {src}")
    return [(path, dst / f"{name}.safetensors") for name, path in found.items()]


def _convert(
    src: sources.Paths, dst: Path, limit: int | None, skip_bad: bool, reading: Reading
) -> None:
    dataset = open_dataset(src, skip_bad, reading, once=True)
    dataset.verify()
    overlapping: dict[int, int] = {}  # sids by index
    with_forces: list[Data] = []  # the first `MOST_FRAMES`
    point_faults: dict[int, str] = {}  # by index
    limits: list[float] = []  # of adsorption energies

    def records() -> Iterator[Data]:
        for index, record in enumerate(one_pass(dataset, limit)):
            if atoms_coincide(record):
                overlapping[index] = int(record.sid)
            if len(with_forces) < labels.MOST_FRAMES and bool(record.forces.isfinite().any()):
                with_forces.append(record)
            if fault := labels.point_fault(record):
                point_faults[index] = fault
            limits.append(labels.most_adsorption(record))
            yield record

    def left_out(sids: np.ndarray, energies: np.ndarray, natoms: np.ndarray) -> Collection[int]:
        required = skip_bad and bool(np.isfinite(energies).any())  # test splits have no labels
        at_pos, at = bool(with_forces or dataset.quantity), limits.__getitem__
        faults = point_faults | labels.label_faults(energies, natoms, required, at_pos, limits=at)
        bad = [(f"{dataset.path}: sid {sids[i]}", reason) for i, reason in faults.items()]
        if bad and not skip_bad:
            raise ValueError(
                f"{': '.join(bad[0])}; --skip-bad skips {counted(len(bad), 'structure')}"
            )
        dataset.bad += bad
        for index in faults:
            overlapping.pop(index, None)
        return faults

    source = dataset.path.name + (f"{BASELINE}{dataset.baseline}" if dataset.baseline else "")
    count = write_store(dst, records(), source=source, quantity=dataset.quantity, left_out=left_out)
    _report(dataset, dst, count)
    if overlapping:
        warn(overlaps_of(str(dataset.path), [*overlapping.values()], count))
    if fault := labels.unit_fault(with_forces):
        warn(f"{dataset.path}: {fault}")


def _report(dataset: Structures, dst: Path, count: int) -> None:
    before, after = readable_size(sum(map(_size, dataset.files))), readable_size(_size(dst))
    print(f"{dataset.path} ({before}) -> {dst} ({after}): {counted(count, 'structure')}")
    if dataset.unused:
        print(f"unused labels: {', '.join(dataset.unused)}")
    if dataset.hint:
        warn(f"{dst}: not all structures have y_relaxed; {dataset.hint}")
    if dataset.bad:
        lines = [
            f"skipped {counted(len(dataset.bad), 'invalid structure')}:",
            *grouped(dataset.bad),
        ]
        print("\n  ".join(lines), file=sys.stderr)


def one_pass(dataset: Structures, limit: int | None = None) -> Iterator[Data]:
    """Yields at most `limit` records as `valid` does, with their names; expects at least one."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1; got {limit}")
    count = 0
    for count, (index, record) in enumerate(valid(dataset), 1):
        name = dataset.name(index, record.sid)
        if isinstance(name, str):
            record.name = name
        yield record
        if count == limit:
            break
    if count == 0:
        text = f"{dataset.path}: no valid structures; expected at least one"
        if dataset.bad:
            where, reason = dataset.bad[0]
            text += f"; {where.removeprefix(f'{dataset.path}: ')}: {reason}"
        raise ValueError(text)


def _size(path: Path) -> int:
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)
