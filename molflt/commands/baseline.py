"""``molflt data baseline``: energies by an ASE calculator, for models that learn a difference."""

from __future__ import annotations

import math
import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm import tqdm

from molflt.atoms import Tag
from molflt.commands.options import expect_ending
from molflt.data.structures import Structures, open_dataset
from molflt.data.structures.base import to_atoms
from molflt.data.structures.sources import files_of
from molflt.data.structures.store import write_store
from molflt.evaluation.relaxation import relax_atoms
from molflt.evaluation.results import csv_rows, csv_text, warn, write_csv
from molflt.files import append, expect_writable
from molflt.pretrained.calculator import calculator_named
from molflt.training.checkpoint import find_weights, weights_digest

if TYPE_CHECKING:
    from ase import Atoms
    from torch_geometric.data import Data

__all__ = ["baseline"]

_PARTS = ("whole", "slab", "adsorbate")
_Row = dict[str, str | float | None]
_made: dict[str, Any] = {}  # the calculator of a worker process


def baseline(
    src: Path | Sequence[Path],
    dst: Path,
    *,
    calculator: str,
    relax_steps: int = 0,
    fmax: float = 0.05,
    workers: int = 1,
    device: str = "auto",
) -> None:
    """Adds baseline energies by an ASE calculator to structures, for --data.baseline_key.

    The baseline of an adsorbate on a slab is E(slab with adsorbate) - E(slab) - E(adsorbate), each
    computed in the same cell. Without adsorbate (tag 2) or slab atoms, it is the total energy. The
    energies are added to a table next to DST (.csv) as they are computed. After an interruption,
    the same command continues from the table.

    Args:
        src: files that ASE reads, compact stores, OC20 LMDBs, folders of these, or quoted patterns.
        dst: compact store to write, with the energies as y_baseline.
        calculator: module:Class of an ASE calculator, or a potential trained with molflt: a run or
            an exported model.
        relax_steps: maximum number of steps that relax each structure and each part; 0 computes the
            energies of the structures as they are.
        fmax: largest force on a free atom at convergence, eV/Å.
        workers: number of processes.
        device: auto, cpu, cuda or cuda:N, for potentials trained with molflt.
    """
    expect_ending(dst, ".safetensors")
    if relax_steps < 0 or workers < 1 or not fmax > 0:
        raise ValueError(
            "expected --relax-steps of at least 0, --workers of at least 1 and --fmax above 0; got "
            f"{relax_steps}, {workers} and {fmax}"
        )
    table = dst.with_suffix(".csv")
    for path in (dst, table):
        expect_writable(path, *files_of(src))
    dataset = open_dataset(src)
    label = f"{calculator} {_version(calculator)}, {relax_steps} steps"
    rows = _known(table, dataset, label)
    make = partial(calculator_named, calculator, device)
    make()  # errors are reported here, not in each process
    bar = tqdm(initial=len(rows), total=len(dataset), unit=" structures", disable=None)
    with bar, _pool(workers, make) as pool:

        def submit(atoms: Atoms) -> Future[float]:
            return pool.submit(_energy, atoms, fmax, relax_steps)

        try:
            for row in _computed(dataset, len(rows), submit):
                row["calculator"] = label
                if rows:
                    append(table, csv_text([row]).partition("\n")[2])
                else:
                    write_csv(table, [row])
                rows.append({name: "" if one is None else str(one) for name, one in row.items()})
                bar.update()
        finally:
            pool.shutdown(cancel_futures=True)
    energies = [float(row["baseline_eV"] or math.nan) for row in rows]
    if absent := [row["sid"] for row in rows if not row["baseline_eV"]]:
        warn(f"{dst}: no finite baseline for {len(absent)} structures: sid {', '.join(absent[:5])}")
    records = map(_with_baseline, dataset, energies)
    count = write_store(dst, records, source=f"{dataset.path.name}, y_baseline by {label}")
    print(f"{dst}: {count:,} structures with y_baseline by {label}; table in {table}")


def _version(calculator: str) -> str:
    """Returns the version of the package of a calculator, or the digest of trained weights."""
    module, _, name = calculator.partition(":")
    if not name or module == "hf":
        return weights_digest(find_weights(calculator, None)[0])[:12]
    packages = packages_distributions().get(module.partition(".")[0])
    return version(packages[0]) if packages else "(version unknown)"


def _known(table: Path, dataset: Structures, label: str) -> list[dict[str, str]]:
    """Reads the rows of an interrupted computation."""
    rows = csv_rows(table.read_text()) if table.exists() else []
    for index, row in enumerate(rows):
        if index >= len(dataset) or not _own(dataset, index).items() <= row.items():
            raise ValueError(f"{table}: row {index + 1} belongs to other structures; delete it")
        if row["calculator"] != label:
            raise ValueError(
                f"{table}: expected energies by {label}; got {row['calculator']}; delete it, or "
                "choose another DST"
            )
    return rows


def _own(dataset: Structures, index: int) -> dict[str, str]:
    record = dataset[index]
    return {"sid": str(int(record.sid)), "natoms": str(len(record.atomic_numbers))}


def _pool(workers: int, make: Callable[[], Any]) -> ProcessPoolExecutor:
    threads = max(1, torch.get_num_threads() // workers)
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, spawn, initializer=_begin, initargs=(make, threads))


def _begin(make: Callable[[], Any], threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the computation
    torch.set_num_threads(threads)
    _made["calculator"] = make()


def _energy(atoms: Atoms, fmax: float, steps: int) -> float:
    """Returns the energy of a relaxed structure, eV, in a worker process."""
    return relax_atoms(atoms, _made["calculator"], fmax=fmax, steps=steps).after


def _computed(
    dataset: Structures, first: int, submit: Callable[[Atoms], Future[float]]
) -> Iterator[_Row]:
    """Yields the rows from index `first` on; parts that occur several times are computed once."""
    parts: dict[bytes, Future[float]] = {}
    waiting: deque[tuple[dict[str, str], dict[str, Future[float]]]] = deque()
    for index in range(first, len(dataset)):
        atoms = to_atoms(dataset[index])
        adsorbed = atoms.get_tags() == Tag.ADSORBATE
        jobs = {"whole": submit(atoms)}
        if 0 < adsorbed.sum() < len(atoms):
            for name, chosen in (("slab", ~adsorbed), ("adsorbate", adsorbed)):
                part = atoms[chosen]
                key = b"".join(np.ascontiguousarray(one).tobytes() for one in _content(part))
                jobs[name] = parts[key] = parts.get(key) or submit(part)
        waiting.append((_own(dataset, index), jobs))
        if len(waiting) > 32:
            yield _row(*waiting.popleft())
    while waiting:
        yield _row(*waiting.popleft())


def _content(atoms: Atoms) -> tuple[np.ndarray, ...]:
    return atoms.numbers, atoms.positions, atoms.cell.array, atoms.pbc


def _row(own: dict[str, str], jobs: dict[str, Future[float]]) -> _Row:
    try:
        energies = {f"{name}_eV": jobs[name].result() if name in jobs else None for name in _PARTS}
    except Exception as error:  # calculators may raise any exception
        raise ValueError(f"sid {own['sid']}: the calculator failed: {error}") from error
    whole, *others = (one for one in energies.values() if one is not None)
    difference = whole - sum(others)
    return {**own, **energies, "baseline_eV": difference if math.isfinite(difference) else None}


def _with_baseline(record: Data, energy: float) -> Data:
    record = record.clone()
    record.y_baseline = torch.tensor([energy], dtype=torch.float64)
    return record
