"""Speed and size of ways to store structures: systems/s and bytes, in one run, on one core.

    python scripts/bench_reading.py path/to/oc20.lmdb [--systems 2000]

The records of a genuine OC20 LMDB (with edges, as published) are replicated and written in each
form; then every form is read in the same random order, as training does, to the same tensors.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import lmdb
import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import load_file
from torch_geometric.data import Data

from molflt.data import open_dataset
from molflt.data.store import StructureStore, write_store

PER_ATOM = ("pos", "pos_relaxed", "atomic_numbers", "tags", "fixed")
PER_STRUCTURE = ("cell", "pbc", "sid", "y_init", "y_relaxed")
ROUNDS = 5


def copy_pickled(source: Path, target: Path, systems: int) -> None:
    """An LMDB of the source's pickles, repeated under new keys."""
    environment = lmdb.open(str(source), subdir=False, readonly=True, lock=False)
    with environment.begin() as transaction:
        records = [bytes(value) for key, value in transaction.cursor() if key.isdigit()]
    environment.close()
    write_lmdb(target, itertools.islice(itertools.cycle(records), systems))


def write_lmdb(target: Path, values: Iterable[bytes]) -> None:
    environment = lmdb.open(str(target), subdir=False, map_size=1 << 36, lock=False)
    with environment.begin(write=True) as transaction:
        for index, value in enumerate(values):
            transaction.put(str(index).encode(), value)
    environment.close()


class NpyFolder(StructureStore):
    """The store's arrays as one memory-mapped .npy file each."""

    def __init__(self, folder: Path) -> None:
        self.path, self._kept = folder, None
        self._maps = {file.stem: np.load(file, mmap_mode="r") for file in folder.glob("*.npy")}


class SliceReader:
    """The compact store through safetensors' own get_slice."""

    def __init__(self, path: Path) -> None:
        self.file = safe_open(path, framework="pt")
        self.offsets = self.file.get_tensor("offsets")
        self.columns = {name: self.file.get_slice(name) for name in PER_ATOM + PER_STRUCTURE}

    def __getitem__(self, index: int) -> Data:
        begin, end = int(self.offsets[index]), int(self.offsets[index + 1])
        atoms = {name: self.columns[name][begin:end] for name in PER_ATOM}
        for name in ("atomic_numbers", "tags"):
            atoms[name] = atoms[name].long()
        rest = {name: self.columns[name][index : index + 1] for name in PER_STRUCTURE}
        return Data(**atoms, **{**rest, "sid": int(rest["sid"])}, natoms=end - begin)


class PlainLmdb:
    """An LMDB whose values are the store's bytes of one structure, without a pickle."""

    def __init__(self, path: Path) -> None:
        self.environment = lmdb.open(
            str(path), subdir=False, readonly=True, lock=False, readahead=False
        )

    @staticmethod
    def encode(columns: dict[str, np.ndarray], index: int) -> bytes:
        atoms = slice(columns["offsets"][index], columns["offsets"][index + 1])
        parts = [columns[name][index].tobytes() for name in PER_STRUCTURE]
        parts += [columns[name][atoms].tobytes() for name in PER_ATOM]
        return struct.pack("<q", atoms.stop - atoms.start) + b"".join(parts)

    def __getitem__(self, index: int) -> Data:
        with self.environment.begin() as transaction:
            raw = bytes(transaction.get(str(index).encode(), b""))
        (count,) = struct.unpack_from("<q", raw)
        place = 8

        def take(dtype: str, *shape: int) -> torch.Tensor:
            nonlocal place
            size = int(np.prod(shape))
            array = np.frombuffer(raw, dtype, size, place).reshape(shape)
            place += array.nbytes
            return torch.from_numpy(array.copy())

        fields = {
            "cell": take("<f4", 1, 3, 3),
            "pbc": take("|b1", 1, 3),
            "sid": int(take("<i8", 1)),
            "y_init": take("<f8", 1),
            "y_relaxed": take("<f8", 1),
            "pos": take("<f4", count, 3),
            "pos_relaxed": take("<f4", count, 3),
            "atomic_numbers": take("|u1", count).long(),
            "tags": take("|u1", count).long(),
            "fixed": take("|b1", count),
        }
        return Data(**fields, natoms=count)


def rates(datasets: dict[str, object], order: list[int]) -> dict[str, float]:
    """Systems/s, the median of rounds in which the forms take turns: a busy moment hits all."""
    found: dict[str, list[float]] = {label: [] for label in datasets}
    for _ in range(ROUNDS):
        for label, dataset in datasets.items():
            start = time.perf_counter()
            for index in order:
                dataset[index]  # type: ignore[index]
            found[label].append(len(order) / (time.perf_counter() - start))
    return {label: statistics.median(values) for label, values in found.items()}


def size(path: Path) -> int:
    return sum(p.stat().st_size for p in ([path] if path.is_file() else path.iterdir()))


def check(reference: object, dataset: object, order: list[int]) -> None:
    for index in order[:50]:
        a, b = reference[index], dataset[index]  # type: ignore[index]
        for name in (*PER_ATOM, *PER_STRUCTURE, "natoms"):
            if not torch.equal(torch.as_tensor(a[name]), torch.as_tensor(b[name])):
                raise SystemExit(f"{type(dataset).__name__}: {name} differs at {index}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lmdb", type=Path, help="genuine OC20 LMDB, pickled, with edges")
    parser.add_argument("--systems", type=int, default=2000)
    options = parser.parse_args()
    if not options.lmdb.exists():
        parser.error(f"{options.lmdb}: no such file; expected an OC20 LMDB")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pickled, store = folder / "pickled.lmdb", folder / "store.safetensors"
        plain, npy = folder / "plain.lmdb", folder / "npy"
        copy_pickled(options.lmdb, pickled, options.systems)
        original = open_dataset(pickled)
        write_store(store, (original[i] for i in range(options.systems)))
        columns = load_file(store)
        npy.mkdir()
        for key, column in columns.items():
            np.save(npy / f"{key}.npy", column)
        write_lmdb(plain, (PlainLmdb.encode(columns, i) for i in range(options.systems)))
        readers: dict[str, tuple[Callable[[Path], object], Path]] = {
            "OC20 LMDB, pickled, safe reader": (open_dataset, pickled),
            "compact store (safetensors, mapped)": (open_dataset, store),
            "the same through get_slice": (SliceReader, store),
            "folder of .npy, memory-mapped": (NpyFolder, npy),
            "LMDB of plain bytes": (PlainLmdb, plain),
        }
        order = np.random.default_rng(0).permutation(options.systems).tolist()
        datasets = {label: reader(path) for label, (reader, path) in readers.items()}
        reference = next(iter(datasets.values()))
        for dataset in datasets.values():
            check(reference, dataset, order)
        found = rates(datasets, order)
        sizes = {label: size(path) for label, (_, path) in readers.items()}
        rate, count = next(iter(found.values())), next(iter(sizes.values()))
        print(f"| {options.systems} systems | systems/s | faster | bytes | smaller |")
        print("|---|---|---|---|---|")
        for label in readers:
            ratios = f"{found[label] / rate:.1f} x", f"{count / sizes[label]:.1f} x"
            print(
                f"| {label} | {found[label]:,.0f} | {ratios[0]} | {sizes[label]:,} | {ratios[1]} |"
            )


if __name__ == "__main__":
    main()
