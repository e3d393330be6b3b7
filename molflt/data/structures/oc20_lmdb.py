"""OC20 IS2RE as published: LMDB files of pickled records, read safely and worker by worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from tqdm import tqdm

from molflt.data.structures.base import Structures
from molflt.data.structures.oc20_pickle import _decode_count, _decode_record, _Field
from molflt.data.structures.records import make_record

if TYPE_CHECKING:
    import lmdb
    from torch_geometric.data import Data

__all__ = ["Oc20Lmdb"]

# real path -> (process, inode, environment). lmdb refuses to open a file twice in one process,
# so all datasets share one environment per file.
_ENVIRONMENTS: dict[str, tuple[int, int, lmdb.Environment]] = {}
_FEW_RECORDS = 1000  # below this a pass over the records needs no progress bar


def _environment(path: Path) -> lmdb.Environment:
    """This process's environment of an LMDB file, opened on first use."""
    real = os.path.realpath(path)
    inode = os.stat(real).st_ino
    cached = _ENVIRONMENTS.get(real)
    if cached is not None:
        if cached[:2] == (os.getpid(), inode):
            return cached[2]
        # Inherited by fork, or the file was replaced. A forked child counts the parent's
        # environment as its own until it closes its copy.
        del _ENVIRONMENTS[real]
        cached[2].close()
    environment = _open_environment(path, real)
    _ENVIRONMENTS[real] = (os.getpid(), inode, environment)
    return environment


def _open_environment(path: Path, real: str) -> lmdb.Environment:
    import lmdb

    size = os.path.getsize(real)
    if size == 0:
        raise ValueError(f"{path}: the file is empty; expected an OC20 LMDB; download it again")
    try:
        environment = lmdb.open(
            real, subdir=False, readonly=True, lock=False, readahead=False, meminit=False
        )
        # both come from the first pages; a page beyond the end of the file would kill the process
        needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    except lmdb.Error as error:
        reason = str(error).removeprefix(f"{real}: ")
        if "already open" in reason:
            raise ValueError(
                f"{path}: other code in this process has the LMDB open; close it there first"
            ) from None
        raise ValueError(
            f"{path}: not an LMDB file; expected OC20's data.lmdb; got {size} bytes that lmdb "
            f"refuses ({reason}); download or copy it again"
        ) from None
    if size < needed:
        environment.close()
        raise ValueError(
            f"{path}: the LMDB is truncated; expected {needed} bytes; got {size}; "
            "download or copy it again"
        )
    return environment


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

    Environments are opened on first use in each process and never travel to workers. Reading
    costs about 2 ms a record; train from a compact store (``molflt data convert``).

    Args:
        path: LMDB file, or folder with ``*.lmdb`` shards.
        skip_bad: read all records once, leave out those that are not valid and list them in
            ``bad`` as (name, reason).

    Raises:
        FileNotFoundError: if there is nothing at ``path``.
        ValueError: if a shard is empty, truncated or no LMDB, or holds no records.
    """

    suffixes = (".lmdb", ".mdb")
    checks_on_opening = False

    def __init__(self, path: str | Path, skip_bad: bool = False) -> None:
        super().__init__(path, skip_bad)
        self.shards = _shards(self.path)
        self._keys = [_record_keys(shard) for shard in self.shards]
        self._ends = np.cumsum([len(keys) for keys in self._keys])
        self._natoms: np.ndarray | None = None
        if skip_bad:
            self._leave_out_bad()

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
        """Atoms in each structure, (len,) int64, from metadata.npz or one pass over the records."""
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

    def _every(self, what: str) -> Iterator[int]:
        total = int(self._ends[-1])
        disable = True if total < _FEW_RECORDS else None  # None: only on a terminal
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

    def _locate(self, index: int) -> tuple[Path, int]:
        shard = int(np.searchsorted(self._ends, index, side="right"))
        keys = self._keys[shard]
        return self.shards[shard], keys[index - int(self._ends[shard]) + len(keys)]

    def _name(self, index: int) -> str:
        """File and key of a record, as messages name it."""
        shard, key = self._locate(index)
        return f"{shard}: key '{key}'"

    def _fields(self, index: int) -> dict[str, _Field]:
        shard, key = self._locate(index)
        where = self._name(index)
        with _environment(shard).begin() as transaction:
            content = transaction.get(str(key).encode())
        if content is None:
            raise ValueError(f"{where}: missing; expected a record for every key up to 'length'")
        fields = _decode_record(content, where)
        missing = [name for name in ("pos", "atomic_numbers") if name not in fields]
        if missing:
            raise ValueError(
                f"{where}: expected pos, atomic_numbers, cell, ...; {missing[0]} is missing; "
                f"got {', '.join(sorted(fields)) or 'no fields'}"
            )
        if not isinstance(fields["pos"], torch.Tensor) or fields["pos"].ndim != 2:
            raise ValueError(f"{where}: pos must be a tensor (N, 3) in Å")
        return fields

    def _count(self, index: int) -> int:
        return int(np.shape(self._fields(index)["pos"])[0])

    def _record(self, fields: dict[str, _Field], index: int) -> Data:
        where = self._name(index)
        try:
            record = make_record(
                sid=fields.get("sid", self._locate(index)[1]),
                **{name: fields[name] for name in _FIELDS if name in fields},
            )
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        natoms = fields.get("natoms", record.natoms)
        if not np.array_equal(np.asarray(natoms).reshape(-1), [record.natoms]):
            raise ValueError(
                f"{where}: sid {record.sid}: natoms must be {record.natoms}, the rows of pos; "
                f"got {natoms}"
            )
        return record

    def _natoms_beside(self) -> np.ndarray | None:
        """natoms of metadata.npz, if it is about these records: as many, ends alike."""
        folder = self.path if self.path.is_dir() else self.path.parent
        file = folder / "metadata.npz"
        if not file.is_file() or len(_shards(folder)) != len(self.shards):
            return None
        try:
            with np.load(file, allow_pickle=False) as metadata:
                counts = np.asarray(metadata["natoms"])
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{file}: expected an npz with natoms; {error}; delete it") from None
        if counts.shape != (int(self._ends[-1]),):
            return None
        ends = (0, len(counts) - 1)
        return counts if all(counts[i] == self._count(i) for i in ends) else None


_FIELDS = (
    "pos", "atomic_numbers", "cell", "pbc", "tags", "fixed", "y_init", "y_relaxed", "pos_relaxed"
)  # fmt: skip


def _record_keys(path: Path) -> range | list[int]:
    """Integer keys of one shard, with or without a ``length`` key."""
    environment = _environment(path)
    with environment.begin() as transaction:
        declared = transaction.get(b"length")
        if declared is not None:
            count = _declared_length(bytes(declared), path)
        else:
            count = environment.stat()["entries"]
        ends = (b"0", str(count - 1).encode())
        if count > 0 and all(transaction.get(key) is not None for key in ends):
            return range(count)
        names = (bytes(key) for key in transaction.cursor().iternext(values=False))
        keys = sorted(int(name) for name in names if name.isdigit())
    if not keys:
        raise ValueError(
            f"{path}: the LMDB holds no records; expected integer keys from '0'; "
            f"got {environment.stat()['entries']} other keys"
        )
    return keys


def _declared_length(content: bytes, path: Path) -> int:
    if content.isdigit():  # some writers store text instead of a pickle
        return int(content)
    return _decode_count(content, f"{path}: key 'length'")
