"""The compact store: exact round trip, whole files or none, clear errors for damaged ones."""

from __future__ import annotations

import numpy as np
import pytest
from oc20_files import record, same
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from molflt.commands.cli import main
from molflt.data.structures import open_dataset
from molflt.data.structures.datamodule import IS2REData
from molflt.data.structures.records import make_record
from molflt.data.structures.store import StructureStore, write_store
from molflt.evaluation.predictions import open_structures


def mixed():
    """With and without labels, relaxed positions, cell and tags; one atom and many."""
    molecule = make_record(pos=[[0.0, 0.0, 0.0]], atomic_numbers=[1], sid=-3, y_init=2.5, charge=-1)
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
        metadata = file.metadata()
        assert len(metadata.pop("sha256")) == 64 and metadata == header
    assert dataset.source == "a test" and dataset.verify() is True
    assert dataset.path == store and len(dataset) == 5 and dataset.bad == []
    for written, read in zip(mixed(), dataset, strict=True):
        same(written, read)
    assert dataset.natoms.tolist() == [7, 1, 7, 31, 7] and dataset.natoms.dtype == np.int64


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_truncated(store, keep):
    content = store.read_bytes()
    store.write_bytes(content[:keep])
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
    metadata.pop("sha256", None)  # as written by another program, or an older version
    save_file(columns, path, metadata=metadata)


def put(position, value):
    def change(column):
        raw = column.view("u1") if column.dtype == bool else column  # of bools, any byte
        raw[position] = value
        return column

    return change


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cell": None}, "key 'cell' must be float32 .* got nothing"),
        ({"pos": lambda c: c[:-1]}, r"key 'pos' must be float32 \(53, 3\); got .*\(52, 3\)"),
        ({"offsets": put(1, 0)}, "'offsets' must rise from 0"),
        ({"offsets": None}, "'offsets' must be"),
        ({"offsets": put(slice(1, 3), (2**63 - 1, -10))}, "'offsets' must rise from 0"),
        ({"tags": lambda c: c.astype("f2")}, "key 'tags' must be uint8"),
    ],
)
def test_damaged(store, changes, message):
    damage(store, **changes)
    with pytest.raises(ValueError, match=message) as caught:
        open_dataset(store)
    assert str(store) in str(caught.value) and "\n" not in str(caught.value)


def test_a_changed_byte_is_found_by_whoever_reads(store, tmp_path, capsys):
    assert main(["data", "inspect", str(store)]) == 0
    assert "digest      correct" in capsys.readouterr().out
    content = bytearray(store.read_bytes())
    content[-3] ^= 1
    store.write_bytes(content)
    message = f"{store}: damaged since it was written"
    copy = tmp_path / "copy.safetensors"
    for words in (["inspect", str(store)], ["convert", str(store), str(copy)]):
        assert main(["data", *words]) == 2
        assert message in capsys.readouterr().err
    assert not copy.exists()
    with pytest.raises(ValueError, match="damaged since it was written"):
        open_structures(store, skip_bad=False)
    with pytest.raises(ValueError, match="damaged since it was written"):
        IS2REData(tmp_path, val_split="train").setup()


def test_only_one_process_of_a_machine_verifies(store, monkeypatch):
    asked = []
    monkeypatch.setattr(StructureStore, "verify", lambda self: asked.append(self.path))
    for rank, times in (("0", 1), ("1", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        asked.clear()
        IS2REData(store.parent, val_split="train", skip_bad=True).setup()
        assert len(asked) == times


def test_store_without_a_digest(store, capsys):
    damage(store, y_init=put(0, 7.0))
    assert StructureStore(store).verify() is False
    assert main(["data", "inspect", str(store)]) == 0
    assert "digest      none; molflt data convert adds one" in capsys.readouterr().out


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
