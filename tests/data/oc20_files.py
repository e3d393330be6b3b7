"""Structures and hand-made OC20 files for the tests of the data package."""

import os
import pickle
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import torch

from molflt.data.structures.records import make_record


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, sentinel: object) -> None:
        self.sentinel = sentinel

    def __reduce__(self):
        return os.system, (f"touch {self.sentinel}",)


def fields(seed: int = 0, atoms: int = 7, **changes: Any) -> dict[str, Any]:
    """Returns a record with OC20's names and types; relaxed positions are wrapped into the cell."""
    rng = np.random.default_rng(seed)
    cell = np.array([[6.0, 0.0, 0.0], [1.5, 7.0, 0.0], [0.0, 0.0, 20.0]])
    pos = rng.random((atoms, 3)) @ cell
    pos[1:3, :2] *= 0.01  # atoms near the corner, some of which relax out of the cell
    inside = (pos + rng.normal(scale=0.3, size=pos.shape)) @ np.linalg.inv(cell)
    found = {
        "pos": torch.tensor(pos, dtype=torch.float32),
        "cell": torch.tensor(cell, dtype=torch.float32)[None],
        "atomic_numbers": torch.tensor(rng.integers(1, 80, atoms), dtype=torch.float32),
        "natoms": atoms,
        "tags": torch.arange(atoms) % 3,
        "fixed": (torch.arange(atoms) % 3 == 0).float(),
        "sid": 1000 + seed,
        "y_init": 1.5 + seed,
        "y_relaxed": -0.25 * seed - 1.0,
        "pos_relaxed": torch.tensor((inside % 1.0) @ cell, dtype=torch.float32),
    }
    found.update(changes)
    return {name: value for name, value in found.items() if value is not None}


def record(seed: int = 0, **changes: Any):
    found = fields(seed, **changes)
    found.pop("natoms")
    return make_record(**found)


def old_pickle(state: bytes) -> bytes:
    """Returns a pickled `Data` of PyG 1.x whose state consists of these protocol-3 opcodes."""
    return b"\x80\x03ctorch_geometric.data.data\nData\n)\x81" + state + b"b."


def opcodes(value: Any) -> bytes:
    """Returns protocol-3 opcodes that leave a value on the stack."""
    return pickle.dumps(value, 3)[2:-1]


def old_record(seed: int = 0, **changes: Any) -> bytes:
    state = {"x": None, "edge_index": None, **fields(seed, **changes)}
    return old_pickle(opcodes(state))


def write_lmdb(path: Path, content: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    environment = lmdb.open(str(path), subdir=False, map_size=1 << 26, lock=False)
    with environment.begin(write=True) as transaction:
        for key, value in content.items():
            transaction.put(key.encode(), value)
    environment.close()
    return path


def same(a: Any, b: Any) -> None:
    """Asserts that two records are equal, including NaN and types."""
    assert sorted(a.keys()) == sorted(b.keys())
    for key in a.keys():  # noqa: SIM118  (Data iterates over pairs)
        x, y = a[key], b[key]
        assert type(x) is type(y), key
        if isinstance(x, torch.Tensor):
            assert (x.dtype, x.shape) == (y.dtype, y.shape), key
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
        else:
            assert x == y, key
