"""The compact store: structures and labels of one split in one safetensors file.

Arrays are laid end to end over all structures, ``offsets`` says where each begins, and nothing is
unpickled or decompressed on reading. Edges are left out: attention does not need them.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from molflt.atoms import MAX_ATOMIC_NUMBER
from molflt.data.structures.base import Structures
from molflt.data.structures.records import make_record
from molflt.files import atomically

if TYPE_CHECKING:
    from torch import Tensor
    from torch_geometric.data import Data

__all__ = ["StructureStore", "write_store"]

_FORMAT, _VERSION = "molflt-structures", "1"
# column: numpy type, shape of one entry, entries per "atom" or per "structure"
_COLUMNS: dict[str, tuple[str, tuple[int, ...], str]] = {
    "pos": ("<f4", (3,), "atom"),
    "pos_relaxed": ("<f4", (3,), "atom"),
    "atomic_numbers": ("|u1", (), "atom"),
    "tags": ("|u1", (), "atom"),
    "fixed": ("|b1", (), "atom"),
    "cell": ("<f4", (3, 3), "structure"),
    "pbc": ("|b1", (3,), "structure"),
    "sid": ("<i8", (), "structure"),
    "y_init": ("<f8", (), "structure"),
    "y_relaxed": ("<f8", (), "structure"),
}
_TYPES = {"F32": "<f4", "F64": "<f8", "I64": "<i8", "U8": "|u1", "BOOL": "|b1"}


def write_store(path: str | Path, records: Iterable[Data], *, source: str = "") -> int:
    """Write structures to a compact store; the file appears complete or not at all.

    Args:
        path: file to write, ending in ``.safetensors``; an existing one is replaced.
        records: structures as :func:`molflt.data.structures.records.make_record` returns them.
        source: where they came from, kept in the file's header.

    Returns:
        Number of structures written.

    Raises:
        ValueError: naming the sid of a structure that is not valid, or if there are none.
        OSError: if the file cannot be written, for instance on a full disk.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"{path}: a compact store ends in .safetensors; got {path.suffix!r}")
    parts: dict[str, list[np.ndarray]] = {name: [] for name in _COLUMNS}
    ends = [0]
    for record in records:
        for name, array in _columns(record).items():
            parts[name].append(array)
        ends.append(ends[-1] + int(record.natoms))
    if len(ends) == 1:
        raise ValueError(f"{path}: no structures to write; expected at least one")
    columns = {"offsets": np.array(ends, dtype="<i8")}
    for name in _COLUMNS:
        columns[name] = np.concatenate(parts.pop(name))
    if np.isnan(columns["pos_relaxed"]).all():
        del columns["pos_relaxed"]
    header = {"format": _FORMAT, "version": _VERSION, "source": source}
    with atomically(path) as part:
        try:
            save_file(columns, part, metadata=header)
        except SafetensorError as error:
            raise OSError(str(error)) from error
    return len(ends) - 1


def _columns(record: Data) -> dict[str, np.ndarray]:
    """One structure as arrays in the store's types, after the checks every reader makes."""
    relaxed = record.pos_relaxed
    checked = make_record(
        pos=record.pos,
        atomic_numbers=record.atomic_numbers,
        cell=record.cell,
        pbc=record.pbc,
        tags=record.tags,
        fixed=record.fixed,
        sid=record.sid,
        y_init=_present(record.y_init),
        y_relaxed=_present(record.y_relaxed),
        pos_relaxed=None if torch.isnan(relaxed).all() else relaxed,
    )
    arrays = {}
    for name, (dtype, shape, per) in _COLUMNS.items():
        entries = checked.natoms if per == "atom" else 1
        arrays[name] = np.asarray(checked[name]).astype(dtype).reshape(entries, *shape)
    return arrays


def _present(label: Tensor) -> float | None:
    value = float(label)
    return None if math.isnan(value) else value


class StructureStore(Structures):
    """A compact store; memory-mapped, safe to send to any worker process.

    Args:
        path: a ``.safetensors`` file made by :func:`write_store`.
        skip_bad: leave out structures with NaN or infinite numbers instead of refusing them;
            they are listed in ``bad`` as (sid, reason).

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is truncated, is no compact store, or holds a non-finite label.
    """

    suffixes = (".safetensors",)

    def __init__(self, path: str | Path, skip_bad: bool = False) -> None:
        super().__init__(path, skip_bad)
        if not self.path.is_file():
            raise FileNotFoundError(
                f"{self.path}: no such compact store; make one with "
                "molflt data convert SRC DST or molflt data make-emt DIR"
            )
        self._maps: dict[str, np.ndarray] | None = None
        maps = self._open()
        faults = self._faults(maps, atoms=skip_bad)
        if faults and not skip_bad:
            sid, reason = next(iter(faults.values()))
            raise ValueError(f"{self.path}: sid {sid}: {reason}; read with --skip-bad to leave out")
        if faults:
            self.bad = list(faults.values())
            self._kept = np.setdiff1d(np.arange(len(maps["sid"])), list(faults))

    def __len__(self) -> int:
        return len(self._open()["sid"]) if self._kept is None else len(self._kept)

    @property
    def natoms(self) -> np.ndarray:
        """Atoms in each structure, (len,) int64."""
        counts = np.diff(self._open()["offsets"])
        return counts if self._kept is None else counts[self._kept]

    @property
    def y_relaxed(self) -> np.ndarray:
        """Relaxed energies, (len,) float64, eV; NaN where there is none."""
        energies = np.array(self._open()["y_relaxed"])
        return energies if self._kept is None else energies[self._kept]

    @property
    def source(self) -> str:
        """Where the structures came from, as the writer noted it."""
        with safe_open(self.path, framework="numpy") as file:
            return str((file.metadata() or {}).get("source", ""))

    def where(self, index: int) -> str:
        return f"{self.path}: sid {int(self._open()['sid'][self._stored(index)])}"

    def __getitem__(self, index: int) -> Data:
        from torch_geometric.data import Data

        where, index, maps = self.where(index), self._stored(index), self._open()
        atoms = slice(int(maps["offsets"][index]), int(maps["offsets"][index + 1]))
        pos = np.array(maps["pos"][atoms])
        numbers = maps["atomic_numbers"][atoms].astype(np.int64)
        relaxed = (
            np.array(maps["pos_relaxed"][atoms])
            if "pos_relaxed" in maps
            else np.full_like(pos, np.nan)
        )
        if not np.isfinite(pos).all():
            raise ValueError(f"{where}: pos must be finite; read with --skip-bad")
        if numbers.min() < 1 or numbers.max() > MAX_ATOMIC_NUMBER:
            raise ValueError(
                f"{where}: atomic_numbers must be 1 to {MAX_ATOMIC_NUMBER}; "
                f"got {numbers.min()} to {numbers.max()}; the file is damaged, convert again"
            )
        return Data(
            pos=torch.from_numpy(pos),
            pos_relaxed=torch.from_numpy(relaxed),
            cell=torch.from_numpy(np.array(maps["cell"][index : index + 1])),
            pbc=torch.from_numpy(np.array(maps["pbc"][index : index + 1])),
            atomic_numbers=torch.from_numpy(numbers),
            tags=torch.from_numpy(maps["tags"][atoms].astype(np.int64)),
            fixed=torch.from_numpy(np.array(maps["fixed"][atoms])),
            natoms=len(pos),
            sid=int(maps["sid"][index]),
            y_init=torch.from_numpy(np.array(maps["y_init"][index : index + 1])),
            y_relaxed=torch.from_numpy(np.array(maps["y_relaxed"][index : index + 1])),
        )

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_maps": None}  # each process maps the file itself

    def _open(self) -> dict[str, np.ndarray]:
        if self._maps is None:
            self._maps = _map_columns(self.path)
        return self._maps

    def _faults(self, maps: dict[str, np.ndarray], atoms: bool) -> dict[int, tuple[str, str]]:
        """Non-finite structures by index; positions only on demand, they are most of the file."""
        wrong = {
            "cell must be finite": ~np.isfinite(maps["cell"]).all(axis=(1, 2)),
            "y_init must be finite": np.isinf(maps["y_init"]),
            "y_relaxed must be finite": np.isinf(maps["y_relaxed"]),
        }
        if atoms:
            starts = maps["offsets"][:-1]
            bad = ~np.isfinite(maps["pos"]).all(axis=1)
            wrong["pos must be finite"] = np.logical_or.reduceat(bad, starts)
            numbers = maps["atomic_numbers"]
            beyond = (numbers < 1) | (numbers > MAX_ATOMIC_NUMBER)
            wrong[f"atomic_numbers must be 1 to {MAX_ATOMIC_NUMBER}"] = np.logical_or.reduceat(
                beyond, starts
            )
        faults: dict[int, tuple[str, str]] = {}
        for reason, mask in wrong.items():
            for index in np.flatnonzero(mask):
                faults.setdefault(int(index), (str(maps["sid"][index]), reason))
        return dict(sorted(faults.items()))


def _map_columns(path: Path) -> dict[str, np.ndarray]:
    """Read-only views of every array, at the offsets of the header, after checking the header.

    ``safe_open`` checks that the header is sound and covers the file exactly; its ``get_slice``
    is slower than a numpy view, so the slicing is numpy's.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(
            f"{path}: not a complete safetensors file; expected a compact store; {error}; "
            "copy or convert it again"
        ) from None
    if metadata.get("format") != _FORMAT or metadata.get("version") != _VERSION:
        raise ValueError(
            f"{path}: expected a compact store with format {_FORMAT!r} version {_VERSION!r}; got "
            f"format {metadata.get('format')!r} version {metadata.get('version')!r}; "
            "make one with molflt data convert SRC DST"
        )
    with open(path, "rb") as raw:
        (length,) = struct.unpack("<Q", raw.read(8))
        header = json.loads(raw.read(length))
    content = np.memmap(path, dtype=np.uint8, mode="r", offset=0)[8 + length :]
    columns = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            dtype = _TYPES.get(entry["dtype"], "|u1")
            # a plain ndarray: slicing np.memmap costs several times as much per structure
            columns[name] = np.asarray(content[begin:end]).view(dtype).reshape(entry["shape"])
    _check_columns(path, columns)
    return columns


def _check_columns(path: Path, columns: dict[str, np.ndarray]) -> None:
    offsets = columns.get("offsets")
    if offsets is None or offsets.dtype != "<i8" or offsets.ndim != 1 or len(offsets) < 2:
        raise ValueError(f"{path}: key 'offsets' must be (structures + 1,) int64; convert it again")
    if offsets[0] != 0 or (np.diff(offsets) < 1).any():
        raise ValueError(f"{path}: key 'offsets' must rise from 0; damaged, convert it again")
    entries = {"atom": int(offsets[-1]), "structure": len(offsets) - 1}
    for name, (dtype, shape, per) in _COLUMNS.items():
        if name not in columns and name == "pos_relaxed":
            continue
        expected = (entries[per], *shape)
        column = columns.get(name)
        if column is None or column.dtype != dtype or column.shape != expected:
            got = "nothing" if column is None else f"{column.dtype} {column.shape}"
            raise ValueError(
                f"{path}: key {name!r} must be {np.dtype(dtype).name} {expected}; got {got}; "
                "the file is damaged or from another version, convert it again"
            )
