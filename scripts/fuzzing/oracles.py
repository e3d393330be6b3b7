"""What files of structures hold, by decoders that share no code with the package.

A structure is a dictionary of float32 and integer arrays in the units of the compact store; each
oracle gives a list of them, with None for one that it cannot decode.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
import shutil
import struct
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fuzzing.seeds import tensors

Structure = dict[str, np.ndarray]
_MOST_FRAMES = 50
_TYPES = {"F32": "<f4", "F64": "<f8", "I64": "<i8", "U8": "|u1", "BOOL": "|u1"}
_PER_ATOM = ("pos", "atomic_numbers", "tags", "fixed", "pos_relaxed")
_PER_STRUCTURE = ("cell", "pbc", "sid", "y_init", "y_relaxed")


def stored(path: Path) -> list[Structure]:
    """Structures of a compact store that the package wrote."""
    columns = {
        name: np.frombuffer(content, _TYPES[kind]).reshape(shape)
        for (name, kind, shape), content in tensors(path).items()
    }
    offsets = columns["offsets"]
    found = []
    for i, (a, b) in enumerate(itertools.pairwise(offsets)):
        one = {name: columns[name][a:b] for name in _PER_ATOM if name in columns}
        one.setdefault("pos_relaxed", np.full((b - a, 3), np.nan, np.float32))
        found.append(one | {name: columns[name][i] for name in _PER_STRUCTURE})
    return found


class _Known(pickle._Unpickler):  # the one in Python
    """Knows Data as a dictionary, tensors as torch does, and numbers as numpy does.

    Frames say how much to read at once, and nothing of what is read: they are skipped.
    """

    dispatch = {**pickle._Unpickler.dispatch, pickle.FRAME[0]: lambda self: self.read(8)}  # noqa: RUF012

    def find_class(self, module: str, name: str) -> object:

        if module.startswith("torch_geometric.data"):
            return _Bag
        known = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch.storage", "_load_from_bytes"): _storage,
            ("numpy", "dtype"): np.dtype,
            ("numpy.core.multiarray", "scalar"): np._core.multiarray.scalar,
            ("numpy._core.multiarray", "scalar"): np._core.multiarray.scalar,
        }
        return known[module, name]


def _tensor(storage: object, offset: int, size: object, stride: object, *hooks: object) -> object:
    from torch._utils import _rebuild_tensor as rebuild

    return rebuild(storage, offset, size, stride)


def _storage(content: bytes) -> object:
    import torch

    return torch.load(io.BytesIO(content), weights_only=True)


class _Bag:
    state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state


def _fields(content: bytes) -> Mapping[str, object]:
    state = _Known(io.BytesIO(content)).load().state
    store = state.get("_store")
    found: Mapping[str, object] = store.state["_mapping"] if isinstance(store, _Bag) else state
    return found


def lmdb_records(path: Path) -> list[Structure | None]:
    """Records of an LMDB, in the order of their whole-numbered keys."""
    import lmdb

    copied = shutil.copy(path, path.with_name("oracle.lmdb"))  # one opening per process and file
    options = {"subdir": False, "readonly": True, "lock": False}
    with lmdb.open(str(copied), **options) as environment, environment.begin() as transaction:
        try:
            keys = sorted(int(key) for key, _ in transaction.cursor() if key.isdigit())
        except lmdb.Error:  # some page cannot be reached, others can
            keys = list(range(_MOST))
        return [decoded(key, _value(transaction, key)) for key in keys]


def _value(transaction: Any, key: int) -> bytes:
    import lmdb

    try:
        return bytes(transaction.get(str(key).encode()) or b"")
    except lmdb.Error:
        return b""


def decoded(key: int, content: bytes) -> Structure | None:
    try:
        fields = _fields(content)
        return structure(**{name: fields.get(name) for name in _NAMES}, number=key)
    except Exception:  # a damaged record fails in many ways
        return None


_MOST = 5  # records of the seed
_NAMES = (*_PER_ATOM, *_PER_STRUCTURE)


def structure(
    *,
    pos: object,
    atomic_numbers: object,
    cell: object,
    pbc: object,
    tags: object,
    fixed: object,
    sid: object,
    y_init: object,
    y_relaxed: object,
    pos_relaxed: object,
    number: int,
) -> Structure:
    """A structure in the store's types; None is what a file does not have."""
    places = _array(pos, np.float32)
    lattice = np.zeros((3, 3), np.float32) if cell is None else _array(cell, np.float32)
    axes = np.full(3, lattice.any()) if pbc is None else np.asarray(pbc).reshape(-1).astype(bool)
    none = np.zeros(len(places))
    return {
        "pos": places,
        "atomic_numbers": _array(atomic_numbers, np.uint8),
        "tags": _array(none if tags is None else tags, np.uint8),
        "fixed": np.asarray(none if fixed is None else fixed) != 0,
        "cell": lattice.reshape(3, 3),
        "pbc": np.broadcast_to(axes, 3),
        "sid": np.int64(number if sid is None else int(np.asarray(sid).reshape(()).item())),
        "y_init": _label(y_init),
        "y_relaxed": _label(y_relaxed),
        "pos_relaxed": np.full_like(places, np.nan)
        if pos_relaxed is None
        else _array(pos_relaxed, np.float32),
    }


def _array(value: object, kind: Any) -> np.ndarray:
    return np.asarray(value).astype(kind)


def _label(value: object) -> np.ndarray:
    return np.asarray(math.nan if value is None else value, np.float64).reshape(())


def ase_frames(path: Path, kind: str) -> list[Structure | None]:
    """Frames of a file, as ASE itself reads them."""
    import ase.db
    import ase.io

    if kind in ("db", "json"):
        with ase.db.connect(str(path), type=kind, use_lock_file=False) as database:
            frames = [(row.id, row.toatoms(True)) for row in database.select()]
    elif kind == "extxyz":  # bad frames between good ones are left out alone
        return list(_xyz_frames(path))
    else:
        images = ase.io.read(str(path), index=":", format=kind, do_not_split_by_at_sign=True)
        frames = list(enumerate(images))
    return [_frame(atoms, number) for number, atoms in frames]


def _xyz_frames(path: Path) -> Iterator[Structure | None]:
    import ase.io

    for number in range(_MOST_FRAMES):
        try:
            atoms = ase.io.read(str(path), number, "extxyz", do_not_split_by_at_sign=True)
        except (IndexError, StopIteration):
            return
        except Exception:
            yield None
        else:
            yield _frame(atoms, number)


def _frame(atoms: Any, number: int) -> Structure | None:
    info = {**atoms.info, **atoms.info.get("key_value_pairs", {})}
    results = getattr(atoms.calc, "results", {})
    try:
        return structure(
            pos=atoms.positions,
            atomic_numbers=atoms.numbers,
            cell=atoms.cell.array,
            pbc=atoms.pbc,
            tags=atoms.get_tags(),
            fixed=_held(atoms),
            sid=info.get("sid"),
            y_init=info.get("y_init"),
            y_relaxed=info.get("y_relaxed", results.get("energy", info.get("energy"))),
            pos_relaxed=atoms.arrays.get("pos_relaxed"),
            number=number,
        )
    except Exception:  # what is no number is for the package to refuse
        return None


def _held(atoms: Any) -> np.ndarray:
    held = np.zeros(len(atoms), bool)
    for constraint in atoms.constraints:
        name = type(constraint).__name__
        if name == "FixAtoms" or (name == "FixCartesian" and np.all(constraint.mask)):
            held[constraint.index] = True
    return held


def compare(found: list[Structure], truth: list[Structure | None], some: bool) -> str | None:
    """What differs between a store and the truth.

    Args:
        some: structures may be left out of the store.
    """
    if not some and len(found) != len(truth):
        return f"{len(found)} structures for {len(truth)}"
    rest = iter(truth)
    for i, one in enumerate(found):
        differs: str | None = "nothing like it in the file"
        for other in rest:
            differs = "accepted, but the reference cannot read it"
            if other is not None:
                differs = _differs(one, other)
            if differs is None or not some:
                break
        if differs is not None:
            return f"structure {i}: {differs}"
    return None


def _differs(one: Structure, other: Structure) -> str | None:
    for name in _NAMES:
        a, b = np.asarray(one[name]), np.asarray(other[name])
        if name == "pos_relaxed":
            b = _same_image(a, b, one)
        if a.shape != b.shape or not np.array_equal(a, b, equal_nan=a.dtype.kind == "f"):
            return f"{name} is {_short(a)}, but the file has {_short(b)}"
    return None


def _same_image(a: np.ndarray, b: np.ndarray, one: Structure) -> np.ndarray:
    """Relaxed positions `b`, moved by whole lattice vectors to where `a` is, if they can be."""
    rows = one["cell"][one["pbc"].astype(bool)].astype(np.float64)
    if a.shape != b.shape or len(rows) == 0 or not np.isfinite(b).all():
        return b
    steps = (a.astype(np.float64) - b) @ np.linalg.pinv(rows)
    moved = b + np.round(steps) @ rows
    return np.where(np.abs(moved - a) <= 1e-5 * (1 + np.abs(moved) + np.abs(b)), a, b)


def _short(array: np.ndarray) -> str:
    return f"{array.shape} {array.reshape(-1)[:4].tolist()}"


def idx_bytes(content: bytes) -> np.ndarray:
    """An idx file of bytes, unpacked."""
    axes = content[3]
    shape = struct.unpack(f">{axes}I", content[4 : 4 + 4 * axes])
    return np.frombuffer(content[4 + 4 * axes :], np.uint8).reshape(shape)
