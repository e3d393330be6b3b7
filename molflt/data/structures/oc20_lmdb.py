"""OC20 IS2RE as published: LMDB files of pickled records, read without running code."""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from tqdm import tqdm

from molflt.data.structures.base import Structures
from molflt.data.structures.lmdb_file import LmdbFile
from molflt.data.structures.oc20_pickle import (
    _FIELDS,
    _SINGLE_POINT,
    _decode_count,
    _decode_record,
    _Field,
)
from molflt.data.structures.records import _shown, _whole, make_record
from molflt.files import read_arrays, shown

if TYPE_CHECKING:
    from torch_geometric.data import Data

__all__ = ["Oc20Lmdb"]

_WHOLE = re.compile(rb"0|[1-9][0-9]{,18}")
_FEW_RECORDS = 1000  # fewer records are read without a progress bar


def _shards(path: Path) -> list[Path]:
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: no such LMDB file or folder; see molflt data download oc20-is2re"
        )
    if path.is_file():
        return [path]
    shards = _shards_in(path)
    if not shards:
        raise ValueError(
            f"{path}: expected a folder with data.lmdb or data.*.lmdb shards; found none; "
            "name the LMDB file or its folder"
        )
    return shards


def _shards_in(folder: Path) -> list[Path]:
    shards = sorted(p for p in folder.glob("*.lmdb") if p.is_file())
    return shards or [p for p in (folder / "data.mdb",) if p.is_file()]


class Oc20Lmdb(Structures):
    """OC20's pickled LMDB: one file, or a folder of shards sorted by name.

    Reading takes about 2 ms per record. Train from a compact store (``molflt data convert``).

    Args:
        path: LMDB file, or folder with ``*.lmdb`` shards.
        skip_bad: leave out missing or invalid records and list them in ``bad`` as (name, reason).
        check: with `skip_bad`, read all records once; otherwise, invalid records raise an error
            when they are read.
    """

    suffixes = (".lmdb", ".mdb")

    def __init__(self, path: str | Path, skip_bad: bool = False, *, check: bool = True) -> None:
        super().__init__(path, skip_bad)
        self.shards = [LmdbFile(shard) for shard in _shards(self.path)]
        self._keys = [self._record_keys(shard) for shard in self.shards]
        self._ends = np.cumsum([len(keys) for keys in self._keys])
        self._natoms: np.ndarray | None = None
        if skip_bad and check:
            self._leave_out_bad()

    @classmethod
    def to_read_once(cls, path: Path, skip_bad: bool) -> Oc20Lmdb:
        return cls(path, skip_bad, check=False)

    @classmethod
    def takes(cls, path: Path) -> bool:
        return path.is_dir() or super().takes(path)

    @classmethod
    def find(cls, stem: Path) -> Path | None:
        return super().find(stem) or (stem if _shards_in(stem) else None)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._kept is None else len(self._kept)

    def __getitem__(self, index: int) -> Data:
        stored = self._stored(index)
        return self._record(self._fields(stored), stored)

    @property
    def natoms(self) -> np.ndarray:
        """Number of atoms in each structure, (len,) int64, from metadata.npz or all records."""
        if self._natoms is None:
            counts = self._natoms_beside()
            if counts is None:
                counts = np.array([self._count(i) for i in self._every("atoms")])
            self._natoms = counts.astype(np.int64)
        return self._natoms

    def where(self, index: int) -> str:
        return self._name(self._stored(index))

    def with_unwrapped(self, index: int) -> tuple[Data, int]:
        fields = self._fields(self._stored(index))
        record = self._record(fields, self._stored(index))
        wrapped = fields.get("pos_relaxed")
        if not isinstance(wrapped, torch.Tensor):
            return record, 0
        moved = (record.pos_relaxed - wrapped.float()).abs().amax(dim=1) > 1e-3
        return record, int((moved & ~record.fixed).sum())

    def _record_keys(self, shard: LmdbFile) -> range | list[int]:
        """Returns the integer keys of one shard; missing records and other keys are listed."""
        declared = _declared_length(shard)
        try:
            names = list(shard)
        except ValueError:
            if not self.skip_bad:
                raise
            return range(min(len(shard), declared or len(shard)))  # each is tried
        keys = sorted(int(name) for name in names if _WHOLE.fullmatch(name))
        if not keys:
            raise ValueError(
                f"{shard.path}: the LMDB holds no records; expected integer keys from '0'; "
                f"got {len(shard)} other keys"
            )
        said = "" if declared is None else f"key 'length' says {declared} records; "
        end = declared if declared is not None else keys[-1] + 1 if keys[0] == 0 else None
        below = keys if end is None else keys[: bisect.bisect_left(keys, end)]
        faults = [(gap, "missing") for gap in _gaps(below, end)]
        for name in names:
            if not _WHOLE.fullmatch(name) and name != b"length" and _is_record(shard, name):
                faults.append((f"key {shown(name.decode(errors='replace'))}", "not a whole number"))
        if faults and not self.skip_bad:
            raise ValueError(
                f"{shard.path}: {said}got {len(keys)}; {' '.join(faults[0])}; get the file again, "
                "or read what there is with --skip-bad"
            )
        if not self.skip_bad:  # records beyond 'length' are listed
            faults = [(f"key '{key}'", "beyond 'length'") for key in keys[len(below) :]]
        self.bad += [(f"{shard.path}: {name}", reason) for name, reason in faults]
        return keys if self.skip_bad else below

    def _every(self, what: str) -> Iterator[int]:
        total = int(self._ends[-1])
        disable = True if total < _FEW_RECORDS else None  # None shows it only on a terminal
        yield from tqdm(range(total), desc=f"{self.path.name}: {what}", disable=disable)

    def _leave_out_bad(self) -> None:
        kept, counts = [], []
        for index in self._every("checking"):
            try:
                record = self._record(self._fields(index), index)
            except ValueError as error:
                name = self._name(index)
                self.bad.append((name, str(error).removeprefix(f"{name}: ")))
            else:
                kept.append(index)
                counts.append(record.natoms)
        self._kept = np.array(kept, dtype=np.int64)
        self._natoms = np.array(counts, dtype=np.int64)

    def _locate(self, index: int) -> tuple[LmdbFile, int]:
        shard = int(np.searchsorted(self._ends, index, side="right"))
        keys = self._keys[shard]
        return self.shards[shard], keys[index - int(self._ends[shard]) + len(keys)]

    def _name(self, index: int) -> str:
        """Returns the file and key of a record, for messages."""
        shard, key = self._locate(index)
        return f"{shard.path}: key '{key}'"

    def _fields(self, index: int) -> dict[str, _Field]:
        shard, key = self._locate(index)
        where = self._name(index)
        content = shard.get(str(key).encode())
        if content is None:
            raise ValueError(f"{where}: missing")
        fields = _decode_record(content, where)
        missing = [name for name in ("pos", "atomic_numbers") if name not in fields]
        if missing:
            raise ValueError(
                f"{where}: expected pos, atomic_numbers, cell, ...; {missing[0]} is missing; "
                f"got {', '.join(sorted(fields)) or 'no fields'}"
            )
        if {"y", "force"} <= fields.keys() and "y_relaxed" not in fields:
            self.hint = _S2EF
        read = self.for_potentials if fields.keys() >= _SINGLE_POINT.keys() else self.unused
        read += [name for name in _SINGLE_POINT if name in fields and name not in read]
        others = (name for name in _UNUSED if name in fields and name not in self.unused)
        self.unused += others
        if not isinstance(fields["pos"], torch.Tensor) or fields["pos"].ndim != 2:
            raise ValueError(f"{where}: pos must be a tensor (N, 3) in Å")
        return fields

    def _count(self, index: int) -> int:
        return int(np.shape(self._fields(index)["pos"])[0])

    def _record(self, fields: dict[str, _Field], index: int) -> Data:
        where = self._name(index)
        taken = {name: fields[name] for name in _FIELDS if name in fields}
        if fields.keys() >= _SINGLE_POINT.keys():  # some IS2RE records have only forces
            taken |= {own: fields[name] for name, own in _SINGLE_POINT.items()}
        try:
            record = make_record(sid=fields.get("sid", self._locate(index)[1]), **taken)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        natoms = fields.get("natoms", record.natoms)
        try:
            fits = _whole(natoms, "natoms") == record.natoms
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                f"{where}: sid {record.sid}: natoms must be {record.natoms}, the rows of pos; "
                f"got {_shown(natoms)}"
            )
        return record

    def _natoms_beside(self) -> np.ndarray | None:
        """Returns natoms of metadata.npz if its length and end values match the records."""
        folder = self.path if self.path.is_dir() else self.path.parent
        file = folder / "metadata.npz"
        if not file.is_file() or len(_shards(folder)) != len(self.shards):
            return None
        counts = read_arrays(file, ["natoms"])["natoms"]
        if counts.shape != (int(self._ends[-1]),) or counts.dtype.kind not in "iu":
            return None
        ends = (0, len(counts) - 1)
        return counts if all(counts[i] == self._count(i) for i in ends) else None


_UNUSED = ("forces", "stress", "energy")  # labels of IS2RE are y_relaxed and y_init
_S2EF = (
    "its y and force are those of S2EF, energy and forces of single geometries; expected IS2RE, "
    "whose y_relaxed is the energy after relaxation; train on these with --recipe potential"
)


def _declared_length(shard: LmdbFile) -> int | None:
    """Returns the stated number of records, or None."""
    content = shard.get(b"length")
    if content is None:
        return None
    where = f"{shard.path}: key 'length'"
    if re.fullmatch(rb"[0-9]{1,19}", content):  # some writers store text instead of a pickle
        count = int(content)
    else:
        count = _decode_count(content, where)
    if count == 0 and len(shard) > 1:
        raise ValueError(
            f"{where}: expected the number of records; got 0, but the file has {len(shard)} keys; "
            "it was not written to its end, get it again"
        )
    return count


def _gaps(keys: list[int], count: int | None) -> list[str]:
    """Describes the gaps in sorted keys from 0 to count - 1; empty if `count` is None."""
    ends = [] if count is None else [-1, *keys, count]
    gaps = [(a + 1, b - 1) for a, b in itertools.pairwise(ends) if b - a > 1]
    return [f"key '{a}'" if a == b else f"keys '{a}' to '{b}'" for a, b in gaps]


def _is_record(shard: LmdbFile, name: bytes) -> bool:
    content = shard.get(name)
    try:
        return content is not None and bool(_decode_record(content, ""))
    except ValueError:
        return False
