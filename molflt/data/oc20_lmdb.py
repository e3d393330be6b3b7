"""OC20 IS2RE as published: LMDB files of pickled records, read safely and worker by worker."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import torch
from torch.utils.data import Dataset
from torch_geometric.data import Data
from tqdm import tqdm

from molflt.data.oc20_pickle import decode_count, decode_record
from molflt.data.records import make_record

__all__ = ["Oc20Lmdb", "write_oc20_lmdb"]

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
    shards = sorted(p for p in path.glob("*.lmdb") if p.is_file())
    if not shards and (path / "data.mdb").is_file():
        shards = [path / "data.mdb"]
    if not shards:
        raise ValueError(
            f"{path}: expected a folder with data.lmdb or data.*.lmdb shards; found none; "
            "name the LMDB file or its folder"
        )
    return shards


class Oc20Lmdb(Dataset[Data]):
    """Map-style dataset over OC20's pickled LMDB: one file, or a folder of shards sorted by name.

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

    def __init__(self, path: str | Path, skip_bad: bool = False) -> None:
        self.path = Path(path)
        self.skip_bad = skip_bad
        self.bad: list[tuple[str, str]] = []
        self.shards = _shards(self.path)
        self._keys = [_record_keys(shard) for shard in self.shards]
        self._ends = np.cumsum([len(keys) for keys in self._keys])
        self._natoms: np.ndarray | None = None
        self._kept: np.ndarray | None = None
        if skip_bad:
            self._leave_out_bad()

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
                counts = np.array([len(self._fields(i)["pos"]) for i in self._every("atoms")])
            self._natoms = counts.astype(np.int64)
        return self._natoms

    def with_unwrapped(self, index: int) -> tuple[Data, int]:
        """A record, and how many of its free atoms had relaxed into another periodic image."""
        fields = self._fields(self._stored(index))
        record = self._record(fields, self._stored(index))
        if "pos_relaxed" not in fields:
            return record, 0
        moved = (record.pos_relaxed - fields["pos_relaxed"].float()).abs().amax(dim=1) > 1e-3
        return record, int((moved & ~record.fixed).sum())

    def _stored(self, index: int) -> int:
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"{self.path}: index {index} is outside 0..{length - 1}")
        index = int(index) % length
        return index if self._kept is None else int(self._kept[index])

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)  # paths and keys only: environments live in the module's cache

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
                reason = str(error).removeprefix(f"{self.where(index)}: ")
                self.bad.append((self.where(index), reason))
            else:
                kept.append(index)
                counts.append(record.natoms)
        self._kept = np.array(kept, dtype=np.int64)
        self._natoms = np.array(counts, dtype=np.int64)

    def _locate(self, index: int) -> tuple[Path, int]:
        shard = int(np.searchsorted(self._ends, index, side="right"))
        keys = self._keys[shard]
        return self.shards[shard], keys[index - int(self._ends[shard]) + len(keys)]

    def where(self, index: int) -> str:
        """File and key of a record of the whole source, as messages name it."""
        shard, key = self._locate(index)
        return f"{shard}: key '{key}'"

    def _fields(self, index: int) -> dict[str, Any]:
        shard, key = self._locate(index)
        where = f"{shard}: key '{key}'"
        with _environment(shard).begin() as transaction:
            content = transaction.get(str(key).encode())
        if content is None:
            raise ValueError(f"{where}: missing; expected a record for every key up to 'length'")
        fields = decode_record(content, where)
        missing = [name for name in ("pos", "atomic_numbers") if name not in fields]
        if missing:
            raise ValueError(
                f"{where}: expected pos, atomic_numbers, cell, ...; {missing[0]} is missing; "
                f"got {', '.join(sorted(fields)) or 'no fields'}"
            )
        if not isinstance(fields["pos"], torch.Tensor) or fields["pos"].ndim != 2:
            raise ValueError(f"{where}: pos must be a tensor (N, 3) in Å")
        return fields

    def _record(self, fields: dict[str, Any], index: int) -> Data:
        where = self.where(index)
        try:
            record = make_record(
                sid=fields.get("sid", self._locate(index)[1]),
                **{name: fields.get(name) for name in _FIELDS},
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
        return counts if all(counts[i] == len(self._fields(i)["pos"]) for i in ends) else None


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
    return decode_count(content, f"{path}: key 'length'")


def write_oc20_lmdb(path: str | Path, records: Iterable[Data]) -> int:
    """Write structures as OC20 publishes them: one LMDB of pickled ``torch_geometric`` Data.

    Field names and types are the official ones, without edges; a ``pbc`` field is added only
    where the structure is not periodic in all three directions. The file appears complete or not
    at all.

    Args:
        path: file to write, usually ``data.lmdb``; an existing one is replaced.
        records: structures as :func:`molflt.data.records.make_record` returns them.

    Returns:
        Number of records written, under the keys "0", "1", ...
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    count = 0
    try:
        # a sparse file: only what is written takes space on disk
        environment = lmdb.open(
            str(part), subdir=False, map_size=1 << 40, lock=False, meminit=False, sync=False
        )
        try:
            for count, record in enumerate(records, start=1):
                content = pickle.dumps(_as_published(record), protocol=pickle.HIGHEST_PROTOCOL)
                with environment.begin(write=True) as transaction:
                    transaction.put(str(count - 1).encode(), content)
            environment.sync(True)
        except lmdb.Error as error:
            raise OSError(f"{path}: could not write the LMDB; {error}") from None
        finally:
            environment.close()
        if count == 0:
            raise ValueError(f"{path}: no structures to write; expected at least one")
        os.replace(part, path)
    finally:
        with suppress(FileNotFoundError):
            part.unlink()
    return count


def _as_published(record: Data) -> Data:
    fields: dict[str, Any] = {
        "pos": record.pos.clone(),
        "cell": record.cell.clone(),
        "atomic_numbers": record.atomic_numbers.float(),
        "natoms": int(record.natoms),
        "tags": record.tags.clone(),
        "fixed": record.fixed.float(),
        "sid": int(record.sid),
    }
    if not record.pbc.all():
        fields["pbc"] = record.pbc.clone()
    for label in ("y_init", "y_relaxed"):
        if not math.isnan(float(record[label])):
            fields[label] = float(record[label])
    if not torch.isnan(record.pos_relaxed).all():
        fields["pos_relaxed"] = record.pos_relaxed.clone()
    return Data(**fields)
