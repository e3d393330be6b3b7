"""Compact store: structures and labels of one split in one safetensors file.

Arrays are concatenated over all structures, and ``offsets`` contains the start of each structure.
Reading does not unpickle or decompress anything. Edges are not stored; attention needs none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from functools import cached_property
from itertools import compress, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from molflt.atoms import Data
from molflt.data.structures.base import Structures
from molflt.data.structures.records import make_record
from molflt.files import clear_parts, read_header, save_tensors, shown, verify_tensors

STORE, _VERSION = "molflt-structures", "1"


class _Column(NamedTuple):
    dtype: str  # of numpy
    shape: tuple[int, ...]  # of one entry
    per: Literal["atom", "structure"]


_COLUMNS = {
    "pos": _Column("<f4", (3,), "atom"),
    "pos_relaxed": _Column("<f4", (3,), "atom"),
    "atomic_numbers": _Column("|u1", (), "atom"),
    "tags": _Column("|u1", (), "atom"),
    "fixed": _Column("|b1", (), "atom"),
    "cell": _Column("<f4", (3, 3), "structure"),
    "pbc": _Column("|b1", (3,), "structure"),
    "sid": _Column("<i8", (), "structure"),
    "y_init": _Column("<f8", (), "structure"),
    "y_relaxed": _Column("<f8", (), "structure"),
    "y_baseline": _Column("<f8", (), "structure"),
    "energy": _Column("<f8", (), "structure"),
    "forces": _Column("<f4", (3,), "atom"),
    "stress": _Column("<f4", (3, 3), "structure"),
    "charge": _Column("<f8", (), "structure"),
}
# columns that are omitted if no structure has values
_OPTIONAL = ("pos_relaxed", "y_baseline", "energy", "forces", "stress", "charge")
BASELINE = ", y_baseline from "
"""text between the origin of the structures and that of y_baseline in the header of a store"""
_LABELS = ("y_init", "y_relaxed", *_OPTIONAL)
_AT_ONCE = 1000  # structures that are concatenated at once


def write_store(
    path: str | Path,
    records: Iterable[Data],
    *,
    source: str = "",
    quantity: str = "",
    left_out: Callable[[np.ndarray, np.ndarray, np.ndarray], Collection[int]] | None = None,
) -> int:
    """Writes structures to a compact store atomically and returns their number.

    Args:
        path: file to write, ending in ``.safetensors``; an existing file is replaced.
        records: structures as :func:`molflt.data.structures.records.make_record` returns them,
            optionally with a `name`, which replaces the sid in tables.
        source: origin of the structures, stored in the header.
        quantity: name of the quantity in y_relaxed if it is not an energy, stored in the header.
        left_out: function that takes the sids, y_relaxed (in eV) and natoms of all structures, each
            of shape (structures,), and returns the indices of structures to leave out.
    """
    path = Path(path)
    arrays: dict[str, list[np.ndarray]] = {name: [] for name in _COLUMNS}
    names: list[str | None] = []
    sizes: list[int] = []  # numbers of atoms
    remaining = iter(records)
    while some := list(islice(remaining, _AT_ONCE)):
        names += [record.get("name") for record in some]
        checked = [_checked(record) for record in some]
        sizes += [record.natoms for record in checked]
        for name, column in _COLUMNS.items():
            rows = [np.asarray(record[name]).reshape(-1, *column.shape) for record in checked]
            arrays[name].append(np.concatenate(rows).astype(column.dtype))
    natoms, kept = np.array(sizes, dtype="<i8"), np.ones(len(sizes), dtype=bool)
    columns = {name: np.concatenate(parts) for name, parts in arrays.items() if parts}
    if left_out is not None and columns:
        kept[list(left_out(columns["sid"], columns["y_relaxed"], natoms))] = False
    if not kept.any():
        raise ValueError(f"{path}: no structures to write; expected at least one")
    if not kept.all():
        masks = {"atom": np.repeat(kept, natoms), "structure": kept}
        columns = {name: rows[masks[_COLUMNS[name].per]] for name, rows in columns.items()}
    columns["offsets"] = np.append(0, np.cumsum(natoms[kept])).astype("<i8")
    for name in _OPTIONAL:
        if np.isnan(columns[name]).all():
            del columns[name]
    named = {i: name for i, name in enumerate(compress(names, kept)) if name is not None}
    header = {"names": json.dumps(named)} if named else {}
    header |= {"quantity": quantity} if quantity else {}
    header |= {"format": STORE, "version": _VERSION, "source": source}
    clear_parts(path.parent, path.name)  # other machines may be writing other stores
    save_tensors(path, columns, header)
    return int(kept.sum())


def _checked(record: Data) -> Data:
    """Returns the record with the fields of a store; raises ValueError if it is invalid."""
    fields = {name: record[name] for name in _COLUMNS if name in record}
    for name in _LABELS:
        if name in fields and bool(torch.as_tensor(fields[name]).isnan().all()):
            del fields[name]
    return make_record(**fields)


class StructureStore(Structures):
    """Memory-mapped compact store, written by :func:`write_store`.

    Structures in stores without a digest (other programs, early versions) are checked when read.
    """

    kind = "compact store"
    suffixes = (".safetensors",)

    def __init__(self, path: str | Path, skip_bad: bool = False) -> None:
        super().__init__(path, skip_bad)
        header = read_header(self.path)
        if header.get("format") != STORE or header.get("version") != _VERSION:
            raise ValueError(
                f"{path}: expected format {STORE!r} version {_VERSION!r}; got "
                f"{shown(header.get('format'))} {shown(header.get('version'))}; convert it again"
            )
        self.source = header.get("source", "")
        """origin of the structures, as stored by the writer"""
        self.baseline = self.source.partition(BASELINE)[2]
        self.quantity = header.get("quantity", "")
        names = json.loads(header.get("names", "{}"))
        self.names = {int(i): str(name) for i, name in names.items()}
        self.is_checked = "sha256" in header
        self._length = len(self.columns["sid"])

    def __len__(self) -> int:
        return self._length

    @cached_property
    def _numbers(self) -> NDArray[np.float64]:
        columns = self.columns
        baseline = columns.get("y_baseline", np.full(len(self), np.nan))
        return np.array([np.diff(columns["offsets"]), columns["y_relaxed"], baseline])

    def verify(self) -> bool:
        return verify_tensors(self.path)

    def where(self, index: int) -> str:
        return f"{self.path}: sid {int(self.columns['sid'][self._stored(index)])}"

    def __getitem__(self, index: int) -> Data:
        from torch_geometric.data import Data

        columns, stored = self.columns, self._stored(index)
        start, end = columns["offsets"][stored : stored + 2].tolist()
        slices = {"atom": slice(start, end), "structure": slice(stored, stored + 1)}
        fields: dict[str, Any] = {"natoms": end - start, "sid": int(columns["sid"][stored])}
        for name, column in _COLUMNS.items():
            if name == "sid":
                continue
            rows = slices[column.per]
            if name in columns:
                is_integer = column.dtype == "|u1"
                array = columns[name][rows].astype(np.int64 if is_integer else column.dtype)
            else:
                array = np.full((rows.stop - rows.start, *column.shape), np.nan, column.dtype)
            fields[name] = torch.from_numpy(array)
        record = Data(**fields)
        if self.is_checked:
            return record
        try:
            return _checked(record)
        except ValueError as error:
            reason = str(error).removeprefix(f"sid {record.sid}: ")
            raise ValueError(f"{self.where(index)}: {reason}") from None

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "columns"}

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """Arrays, keyed by name, in a memory map that each process creates for itself."""
        from safetensors import safe_open

        path = self.path
        with safe_open(path, framework="pt") as file:
            names = {"offsets", *_COLUMNS} & set(file.keys())
            columns = {name: file.get_tensor(name).numpy() for name in names}
        offsets = columns.get("offsets", np.empty(0))
        is_list = offsets.dtype == "<i8" and offsets.ndim == 1 and len(offsets) > 1
        # comparisons instead of differences, which could overflow
        if not is_list or offsets[0] != 0 or (offsets[1:] <= offsets[:-1]).any():
            raise ValueError(
                f"{path}: key 'offsets' must be (structures + 1,) int64 that increase from 0; the "
                "file is damaged; convert it again"
            )
        entries = {"atom": int(offsets[-1]), "structure": len(offsets) - 1}
        for name, (dtype, shape, per) in _COLUMNS.items():
            array, expected = columns.get(name), (entries[per], *shape)
            if array is None and name in _OPTIONAL:
                continue
            if array is None or array.dtype != dtype or array.shape != expected:
                got = "nothing" if array is None else f"{array.dtype} {array.shape}"
                raise ValueError(
                    f"{path}: key {name!r} must be {np.dtype(dtype).name} {expected}; got {got}; "
                    "the file is damaged or has a different version; convert it again"
                )
        return columns
