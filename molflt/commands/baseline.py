"""``molflt data baseline``: energies from an ASE calculator, for models that learn a difference."""

import csv
import hashlib
import math
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import packages_distributions, version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from tqdm import tqdm

from molflt.atoms import Tag
from molflt.commands.options import refuse_idle
from molflt.data.structures import Structures, open_dataset
from molflt.data.structures.ase_fields import fixed_atoms
from molflt.data.structures.base import Reading, Tags, to_atoms, with_bar
from molflt.data.structures.convert import one_pass
from molflt.data.structures.sources import files_of, is_one_source
from molflt.data.structures.store import BASELINE, write_store
from molflt.evaluation.relaxation import relax_atoms
from molflt.evaluation.results import write_csv
from molflt.files import add_row, counted, csv_rows, expect_ending, expect_writable, warn
from molflt.lock import FolderLock
from molflt.pretrained.calculator import calculator_named, is_class
from molflt.training.checkpoint import find_weights, weights_digest

_PARTS = ("whole", "slab", "adsorbate")
_cache: dict[str, Any] = {}  # calculator of this process, and energies of parts by digest

_Row = dict[str, str]
_Job = tuple[_Row, Atoms]


def baseline(
    src: list[Path],
    dst: Path,
    *,
    calculator: str,
    relax_steps: int = 0,
    fmax: float | None = None,
    subtract_adsorbate: bool = True,
    workers: int = 1,
    device: str | None = None,
    energy_key: str | None = None,
    tags: Tags = "oc20",
) -> None:
    """Adds baseline energies, computed with an ASE calculator, for --data.baseline_key.

    The baseline of an adsorbate on a slab is E(slab with adsorbate) - E(slab) - E(adsorbate), each
    computed in the same cell; it is 0 for clean slabs and free molecules. For structures without
    tags, it is the total energy. Each energy is also written to a table next to DST (.csv), from
    which the same command continues after an interruption.

    Args:
        src: files that ASE reads, compact stores, OC20 LMDBs, folders of these, or quoted patterns.
        dst: compact store to write, with the energies as y_baseline.
        calculator: module:Class of an ASE calculator, or a potential trained with molflt: a run or
            an exported model.
        relax_steps: maximum number of relaxation steps for each structure and each part; 0 computes
            the energies of the given structures.
        fmax: largest force on a free atom at convergence, in eV/Å, with --relax-steps; 0.05 by
            default.
        subtract_adsorbate: subtract E(adsorbate). Set to false for atoms and radicals, because most
            potentials do not describe them without a slab; with task.references fit, their energies
            are then learned from the labels.
        workers: number of processes.
        device: auto (the default), cpu, cuda or cuda:N, for potentials trained with molflt.
        energy_key: name of the label, in eV, in ASE's formats; by default y_relaxed, else energy.
        tags: oc20 (0 subsurface, 1 surface, 2 adsorbate), ase (layer numbers from the top, 1, 2,
            ..., and 0 for adsorbates) or, for any source, guess (from the geometry).
    """
    expect_ending(dst, ".safetensors")
    if relax_steps == 0:
        refuse_idle(calculator, "no --relax-steps", {"fmax": fmax})
    if is_class(calculator):
        refuse_idle(calculator, "a class, which selects its own device", {"device": device})
    fmax = 0.05 if fmax is None else fmax
    table = dst.with_suffix(".csv")
    for path in (dst, table):
        expect_writable(path, *files_of(src))
    _refuse_splits(src)
    dataset = open_dataset(src, reading=Reading(energy_key, tags))
    dataset.verify()  # the new store has a new digest
    make = partial(calculator_named, calculator, device or "auto")
    _cache.clear()
    _cache["calculator"] = make()  # errors are reported here, not in each process
    totals = _count_totals(dataset)
    label = f"{calculator} {_version(calculator)}, {relax_steps} steps"
    label += f" to {fmax:g} eV/Å" if relax_steps else ""
    label += "" if subtract_adsorbate else ", adsorbates not subtracted"
    doing = f"is computing {dst.name}; wait for it, or choose another DST"
    with FolderLock(dst.parent, doing, f".lock.{dst.name}").held():
        rows = _finished(table, dataset, label)
        subtracted = ("slab", "adsorbate") if subtract_adsorbate else ("slab",)
        compute = partial(_row, subtracted, fmax, relax_steps)
        jobs = _jobs(dataset, [i for i in range(len(dataset)) if i not in rows])
        with tqdm(initial=len(rows), total=len(dataset), unit=" structures", disable=None) as bar:
            for row in _computed(workers, make, compute, jobs):
                row["calculator"] = label
                add_row(table, row, first=not rows)
                rows[int(row["index"])] = row
                bar.update()
    _cache.clear()
    energies = [float(rows[i]["baseline_eV"] or math.nan) for i in range(len(dataset))]
    if absent := [rows[i] for i in range(len(dataset)) if not rows[i]["baseline_eV"]]:
        which = f"{counted(len(absent), 'structure')}, such as sid {absent[0]['sid']}"
        rest = "run the same command again to retry; to train without them, set --data.skip_bad"
        warn(f"{dst}: no baseline for {which}: {absent[0]['why']}; {rest} true")
    records = (
        record.update({"y_baseline": torch.tensor([energy], dtype=torch.float64)})
        for record, energy in zip(one_pass(dataset), energies, strict=True)
    )
    source = f"{dataset.path.name}{BASELINE}{label}"
    count = write_store(dst, records, source=source, quantity=dataset.quantity)
    made = f"{counted(count, 'structure')} with y_baseline from {label}"
    note = f"; total energies: {totals:,}" if totals else ""
    print(f"{dst}: {made}{note}; table in {table}")


def _refuse_splits(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.is_dir() and not is_one_source(path):
            raise ValueError(
                f"{path}: expected the structures of one split; got a folder of splits; run the "
                "command once for each split"
            )


def _count_totals(dataset: Structures) -> int:
    """Counts structures without tags; rejects them among structures with tags."""
    with_tags = [bool(record.tags.any()) for record in with_bar(dataset, "reading tags")]
    if any(with_tags) and not all(with_tags):
        raise ValueError(
            f"{dataset.where(with_tags.index(False))}: expected tags, because other structures "
            "have tags, and their baselines are energy differences; got only tag 0, which would "
            "give a total energy; add tags, or compute these structures separately"
        )
    return with_tags.count(False)


def _version(calculator: str) -> str:
    if not is_class(calculator):
        return weights_digest(find_weights(calculator, None)[0])[:12]
    packages = packages_distributions().get(calculator.partition(":")[0].partition(".")[0])
    return version(packages[0]) if packages else "(version unknown)"


def _finished(table: Path, dataset: Structures, label: str) -> dict[int, _Row]:
    """Reads the table of an interrupted computation; returns the rows with energies by index."""
    if not table.exists():
        return {}
    try:
        text = table.read_text(encoding="utf-8")
        complete = csv_rows(text[: text.rfind("\n") + 1])  # the last row may be incomplete
        rows = {int(row["index"]): row for row in complete if row["baseline_eV"]}
        labels = {row["calculator"] for row in complete} - {label}
        changed = [i for i, row in rows.items() if row["digest"] != _digest(to_atoms(dataset[i]))]
    except (KeyError, IndexError, ValueError, csv.Error):
        raise ValueError(f"{table}: not a table from this command; choose another DST") from None
    if labels or changed:
        other = f"from {labels.pop()}" if labels else f"for a different structure {changed[0]}"
        raise ValueError(
            f"{table}: expected energies of these structures from {label}; got one {other}; delete "
            "the table, or choose another DST"
        )
    if rows:
        write_csv(table, list(rows.values()))
    return rows


def _digest(atoms: Atoms) -> str:
    """Returns a digest of all properties on which the energy and a relaxation depend."""
    arrays = (atoms.numbers, atoms.positions, atoms.cell.array, atoms.pbc, atoms.get_tags())
    content = [np.ascontiguousarray(x).tobytes() for x in (*arrays, fixed_atoms(atoms))]
    charge = str(atoms.info.get("charge", 0)).encode()
    return hashlib.sha256(b"".join([*content, charge])).hexdigest()[:16]


def _jobs(dataset: Structures, indices: Sequence[int]) -> Iterator[_Job]:
    """Yields the structures with the first entries of their rows."""
    for index in indices:
        atoms = to_atoms(dataset[index])
        if "charge" in atoms.info and 0 < (atoms.get_tags() == Tag.ADSORBATE).sum() < len(atoms):
            raise ValueError(
                f"{dataset.where(index)}: expected no charge, because it cannot be divided "
                f"between slab and adsorbate; got {atoms.info['charge']:g} e"
            )
        sid = str(dataset.name(index, atoms.info["sid"]))
        yield {"index": str(index), "sid": sid, "digest": _digest(atoms)}, atoms


def _computed(
    workers: int, make: Callable[[], Any], compute: Callable[[_Job], _Row], jobs: Iterator[_Job]
) -> Iterator[_Row]:
    """Computes rows, in several processes unless `workers` is 1."""
    if workers == 1:
        yield from map(compute, jobs)
        return
    _cache.clear()  # each process loads its own calculator
    threads = max(1, torch.get_num_threads() // workers)
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, spawn, initializer=_begin, initargs=(make, threads))
    try:
        while batch := list(islice(jobs, 4 * workers)):
            yield from pool.map(compute, batch)
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(make: Callable[[], Any], threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the computation
    torch.set_num_threads(threads)
    _cache["calculator"] = make()


def _row(subtracted: Sequence[str], fmax: float, steps: int, job: _Job) -> _Row:
    """Computes E(whole) minus the energies of the parts in `subtracted`, which are cached."""
    row, atoms = job
    adsorbed = atoms.get_tags() == Tag.ADSORBATE
    energies = {"whole": _energy(atoms, fmax, steps)}
    for name in subtracted if atoms.get_tags().any() else ():
        mask = adsorbed if name == "adsorbate" else ~adsorbed
        if not mask.any():
            continue
        part = atoms[mask]
        key = _digest(part)
        if key not in _cache:
            _cache[key] = energies["whole"] if mask.all() else _energy(part, fmax, steps)
        energies[name] = _cache[key]
    failures = [reason for energy, reason in energies.values() if not math.isfinite(energy)]
    whole, *parts = (energy for energy, _ in energies.values())
    for name in _PARTS:
        row[f"{name}_eV"] = str(energies[name][0]) if name in energies else ""
    row["baseline_eV"] = "" if failures else str(whole - sum(parts))
    row["why"] = failures[0] if failures else ""
    return row


def _energy(atoms: Atoms, fmax: float, steps: int) -> tuple[float, str]:
    """Returns the energy in eV (NaN if the calculator fails) and the reason if it is not finite."""
    try:
        if not steps:
            atoms.calc = _cache["calculator"]
            return float(atoms.get_potential_energy()), "not finite"
        relaxed = relax_atoms(atoms, _cache["calculator"], fmax=fmax, steps=steps)
        failed = not relaxed.converged and relaxed.steps < steps
        return math.nan if failed else relaxed.after, relaxed.why
    except Exception as error:  # calculators can raise anything
        return math.nan, " ".join(f"{type(error).__name__}: {error}".split())
