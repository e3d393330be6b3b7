"""The compact store: exact round trip, whole files or none, clear errors for damaged ones."""

from __future__ import annotations

import resource

import numpy as np
import pytest
from oc20_files import record, same
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from molflt.data.structures import open_dataset
from molflt.data.structures.records import make_record
from molflt.data.structures.store import StructureStore, write_store


def mixed():
    """With and without labels, relaxed positions, cell and tags; one atom and many."""
    molecule = make_record(pos=[[0.0, 0.0, 0.0]], atomic_numbers=[1], sid=-3, y_init=2.5)
    unlabelled = record(1, y_relaxed=None, pos_relaxed=None, tags=None)
    slab = record(2, atoms=31, pbc=[True, True, False])
    return [record(0), molecule, unlabelled, slab, record(3, sid=2**40)]


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "train.safetensors"
    assert write_store(path, mixed(), source="a test") == 5
    return path


def test_round_trip_is_exact(store):
    dataset = open_dataset(store)
    assert isinstance(dataset, StructureStore)
    with safe_open(store, framework="numpy") as file:
        header = {"format": "molflt-structures", "version": "1", "source": "a test"}
        assert file.metadata() == header and dataset.source == "a test"
    assert dataset.path == store and len(dataset) == 5 and dataset.bad == []
    for written, read in zip(mixed(), dataset, strict=True):
        same(written, read)
    assert dataset.natoms.tolist() == [7, 1, 7, 31, 7] and dataset.natoms.dtype == np.int64


def test_without_relaxed_positions_none_are_stored(tmp_path):
    path = tmp_path / "test_id.safetensors"
    write_store(path, [record(i, pos_relaxed=None, y_relaxed=None) for i in range(3)])
    assert "pos_relaxed" not in load_file(path)
    assert all(item.pos_relaxed.isnan().all() for item in StructureStore(path))


@pytest.mark.parametrize("keep", [0, 3, 100, 0.5, -1])
def test_truncated(store, keep):
    content = store.read_bytes()
    size = int(keep * len(content)) if isinstance(keep, float) else keep
    store.write_bytes(content[:size])
    with pytest.raises(ValueError, match=r"train\.safetensors: not a complete safetensors file"):
        open_dataset(store)


def damage(path, **changes):
    columns = load_file(path)
    for name, change in changes.items():
        old = columns.pop(name)
        if change is not None:
            columns[name] = change(old.copy())
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    save_file(columns, path, metadata=metadata)


def put(position, value):
    def change(column):
        column[position] = value
        return column

    return change


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cell": None}, "key 'cell' must be float32 .* got nothing"),
        ({"pos": lambda c: c[:-1]}, r"key 'pos' must be float32 \(53, 3\); got .*\(52, 3\)"),
        ({"pos": lambda c: c.astype("f8")}, "key 'pos' must be float32"),
        ({"y_relaxed": lambda c: c.astype("f4")}, "key 'y_relaxed' must be float64"),
        ({"offsets": put(1, 0)}, "'offsets' must rise from 0"),
        ({"offsets": put(0, 1)}, "'offsets' must rise from 0"),
        ({"offsets": None}, "'offsets' must be"),
        ({"y_relaxed": put(3, np.inf)}, "sid 1002: y_relaxed must be finite"),
        ({"cell": put((3, 0, 0), np.nan)}, "sid 1002: cell must be finite"),
    ],
)
def test_damaged(store, changes, message):
    damage(store, **changes)
    with pytest.raises(ValueError, match=message) as caught:
        open_dataset(store)
    assert str(store) in str(caught.value) and "\n" not in str(caught.value)


def test_bad_positions_and_elements_are_refused_or_left_out(store):
    damage(store, pos=put(0, np.nan), atomic_numbers=put(7, 200), y_init=put(3, -np.inf))
    with pytest.raises(ValueError, match="sid 1002: y_init must be finite"):
        open_dataset(store)
    damage(store, y_init=put(3, 0.0))
    dataset = open_dataset(store)
    with pytest.raises(ValueError, match="sid 1000: pos must be finite"):
        dataset[0]
    with pytest.raises(ValueError, match="sid -3: atomic_numbers must be 1 to 118; got 200"):
        dataset[1]
    kept = open_dataset(store, skip_bad=True)
    assert [name for name, _ in kept.bad] == ["1000", "-3"]
    assert len(kept) == 3 and kept.natoms.tolist() == [7, 31, 7]
    same(kept[0], mixed()[2])


def test_writing_fails_as_a_whole(store):
    before = store.read_bytes()

    def broken():
        yield record(0)
        raise ValueError("sid 9: something")

    with pytest.raises(ValueError, match="sid 9"):
        write_store(store, broken())
    invalid = record(5)
    invalid.pos[0] = float("inf")
    with pytest.raises(ValueError, match="sid 1005: pos must be finite"):
        write_store(store, [record(0), invalid])
    with pytest.raises(ValueError, match="no structures to write"):
        write_store(store, [])
    assert store.read_bytes() == before
    assert [p.name for p in store.parent.iterdir()] == [store.name]


def test_full_disk_is_an_os_error_and_leaves_nothing(tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / "big.safetensors"
    records = [record(i, atoms=50) for i in range(20)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(OSError, match=r"big\.safetensors: could not be written"):
            write_store(path, records)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert list(tmp_path.iterdir()) == []


def test_names(tmp_path):
    with pytest.raises(ValueError, match=r"ends in \.safetensors; got '\.npz'"):
        write_store(tmp_path / "a.npz", [record(0)])
    save_file({"weight": np.zeros(3)}, tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match="expected a compact store with format"):
        open_dataset(tmp_path / "weights.safetensors")
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        open_dataset(tmp_path / "absent.safetensors")
    with pytest.raises(FileNotFoundError, match="molflt data convert"):
        StructureStore(tmp_path / "absent.safetensors")
