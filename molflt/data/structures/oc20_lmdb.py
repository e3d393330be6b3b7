"""LMDB files of pickled records, as OC20 publishes them, read without running code."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from molflt.data.structures.base import Structures, with_bar
from molflt.data.structures.lmdb_file import LmdbFile
from molflt.data.structures.oc20_pickle import (
    _FIELDS,
    _SINGLE_POINT,
    _decode_count,
    _decode_record,
    _Field,
)
from molflt.data.structures.records import _shown, _whole, make_record

if TYPE_CHECKING:
    from torch_geometric.data import Data

__all__ = ["Oc20Lmdb"]

_UNUSED = ("forces", "stress", "energy")  # labels of IS2RE are y_relaxed and y_init
_S2EF = (
    "y and force are the energy and forces of single geometries, as in S2EF; expected IS2RE with "
    "y_relaxed, the energy after relaxation; train on these with --recipe potential"
)


def _shards_in(folder: Path) -> list[Path]:
    shards = sorted(p for p in folder.glob("*.lmdb") if p.is_file())
    return shards or [p for p in (folder / "data.mdb",) if p.is_file()]


class Oc20Lmdb(Structures):
    """Pickled LMDB of OC20: one file, or a folder of shards sorted by name.

    Reading takes about 2 ms per record. Convert to a compact store before training.

    Args:
        path: LMDB file, or folder with ``*.lmdb`` shards.
        skip_bad: leave out missing or invalid records and list them in ``bad`` as (name, reason).
        check: with `skip_bad`, find invalid records first, in one pass; otherwise, they raise an
            error when they are read.
    """

    kind = "OC20 LMDB"
    suffixes = (".lmdb", ".mdb")

    def __init__(self, path: str | Path, skip_bad: bool = False, *, check: bool = True) -> None:
        super().__init__(path, skip_bad)
        shards = _shards_in(self.path) if self.path.is_dir() else [self.path]
        if not shards:
            raise ValueError(
                f"{self.path}: expected a folder with data.lmdb or data.*.lmdb shards; found none; "
                "give the LMDB file or its folder"
            )
        self.shards = [LmdbFile(shard) for shard in shards]
        self._keys = [self._record_keys(shard) for shard in self.shards]
        self._ends = np.cumsum([len(keys) for keys in self._keys])
        self._natoms: np.ndarray | None = None
        if skip_bad and check:
            self._natoms = self._leave_out_bad()

    @classmethod
    def takes(cls, path: Path) -> bool:
        return path.is_dir() or super().takes(path)

    @classmethod
    def find(cls, stem: Path) -> Path | None:
        return super().find(stem) or (stem if _shards_in(stem) else None)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._kept is None else len(self._kept)

    def __getitem__(self, index: int) -> Data:
        return self._record(self._fields(index), index)

    @property
    def natoms(self) -> np.ndarray:
        """Number of atoms in each structure, (len,) int64, from one pass over all records."""
        if self._natoms is None:
            fields = map(self._fields, with_bar(range(len(self)), f"{self.path.name}: atoms"))
            self._natoms = np.array([np.shape(own["pos"])[0] for own in fields], dtype=np.int64)
        return self._natoms

    def where(self, index: int) -> str:
        shard, key = self._locate(index)
        return f"{shard.path}: key '{key}'"

    def with_unwrapped(self, index: int) -> tuple[Data, int]:
        fields = self._fields(index)
        record, wrapped = self._record(fields, index), fields.get("pos_relaxed")
        if not isinstance(wrapped, torch.Tensor):
            return record, 0
        moved = (record.pos_relaxed - wrapped.float()).abs().amax(dim=1) > 1e-3
        return record, int((moved & ~record.fixed).sum())

    def _record_keys(self, shard: LmdbFile) -> range | list[int]:
        """Returns the integer keys of one shard; missing records are listed or refused."""
        length = _declared_length(shard)
        try:
            keys = sorted(int(name) for name in shard if re.fullmatch(rb"0|[1-9]\d{,18}", name))
        except ValueError:
            if not self.skip_bad:
                raise
            return range(min(len(shard), length or len(shard)))  # tried one by one
        if not keys:
            raise ValueError(
                f"{shard.path}: the LMDB has no records; expected integer keys from '0'; "
                f"got {len(shard)} other keys"
            )
        end = length if length is not None else keys[-1] + 1 if keys[0] == 0 else None
        below = [key for key in keys if end is None or key < end]
        ends = [] if end is None else [-1, *below, end]
        gaps = [(a + 1, b - 1) for a, b in itertools.pairwise(ends) if b - a > 1]
        missing = [f"key '{a}'" if a == b else f"keys '{a}' to '{b}'" for a, b in gaps]
        if missing and not self.skip_bad:
            said = "" if length is None else f"key 'length' says {length} records; "
            raise ValueError(
                f"{shard.path}: {said}got {len(keys)}; {missing[0]} missing; get a new copy, or "
                "read the existing records with --skip-bad"
            )
        self.bad += [(f"{shard.path}: {name}", "missing") for name in missing]
        if not self.skip_bad:
            beyond = keys[len(below) :]
            self.bad += [(f"{shard.path}: key '{key}'", "beyond 'length'") for key in beyond]
        return keys if self.skip_bad else below

    def _locate(self, index: int) -> tuple[LmdbFile, int]:
        """Returns the file and the key of a record."""
        stored = self._stored(index)
        shard = int(np.searchsorted(self._ends, stored, side="right"))
        keys = self._keys[shard]
        return self.shards[shard], keys[stored - int(self._ends[shard]) + len(keys)]

    def _fields(self, index: int) -> dict[str, _Field]:
        shard, key = self._locate(index)
        where, content = self.where(index), shard.get(str(key).encode())
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
        self.unused += [n for n in _UNUSED if n in fields and n not in self.unused]
        if not isinstance(fields["pos"], torch.Tensor) or fields["pos"].ndim != 2:
            raise ValueError(f"{where}: pos must be a tensor (N, 3) in Å")
        return fields

    def _record(self, fields: dict[str, _Field], index: int) -> Data:
        taken = {name: fields[name] for name in _FIELDS if name in fields}
        if fields.keys() >= _SINGLE_POINT.keys():  # some IS2RE records have only forces
            taken |= {own: fields[name] for name, own in _SINGLE_POINT.items()}
        try:
            record = make_record(sid=fields.get("sid", self._locate(index)[1]), **taken)
            natoms = fields.get("natoms", record.natoms)
            if _whole(natoms, "natoms") != record.natoms:
                raise ValueError(
                    f"sid {record.sid}: natoms must be {record.natoms}, the rows of pos; "
                    f"got {_shown(natoms)}"
                )
        except ValueError as error:
            raise ValueError(f"{self.where(index)}: {error}") from None
        return record


def _declared_length(shard: LmdbFile) -> int | None:
    """Returns the number of records under the key 'length', or None."""
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
            "it is incomplete, get a new copy"
        )
    return count
