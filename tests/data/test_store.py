"""The compact store: exact round trip, whole files or none, clear errors for damaged ones."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from oc20_files import record, same
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from molflt.commands.cli import main
from molflt.data.structures import open_dataset
from molflt.data.structures.convert import convert
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
        ({"y_relaxed": lambda c: c.astype("f4")}, "key 'y_relaxed' must be float64"),
        ({"offsets": put(1, 0)}, "'offsets' must rise from 0"),
        ({"offsets": None}, "'offsets' must be"),
        ({"offsets": put(slice(1, 3), (2**63 - 1, -10))}, "'offsets' must rise from 0"),
        ({"tags": lambda c: c[:0].astype("i4")}, "key 'tags' must be uint8 .*; got"),
        ({"offsets": lambda c: c[:1]}, "'offsets' must be"),
    ],
)
def test_damaged(store, changes, message):
    damage(store, **changes)
    with pytest.raises(ValueError, match=message) as caught:
        open_dataset(store)
    assert str(store) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "index", "message"),
    [
        ({"pos": put(0, np.nan)}, 0, "sid 1000: pos must be finite"),
        ({"atomic_numbers": put(7, 200)}, 1, "sid -3: atomic_numbers must be 1 to 118; got 200"),
        ({"tags": put(7, 3)}, 1, "sid -3: tags must be 0 .* got 3"),
        ({"pos_relaxed": put(3, np.nan)}, 0, "sid 1000: pos_relaxed must be finite.* for atom 3"),
        ({"y_init": put(3, -np.inf)}, 3, "sid 1002: y_init must be finite"),
        ({"cell": put((3, 1), (0, 0.4, 0))}, 3, "sid 1002: .* at least 0.5 Å apart"),
    ],
)
def test_structures_of_other_writers_are_checked(store, changes, index, message):
    damage(store, **changes)
    dataset, others = open_dataset(store), [i for i in range(5) if i != index]
    for i in others:
        same(dataset[i], mixed()[i])
    with pytest.raises(ValueError, match=rf"train\.safetensors: {message}"):
        dataset[index]
    kept = open_dataset(store, skip_bad=True)
    ((name, reason),) = kept.bad
    assert re.search(message, f"{name}: {reason}") and len(kept) == 4
    assert kept.natoms.tolist() == [dataset.natoms[i] for i in others]


def test_a_killed_conversion_leaves_no_store(tmp_path):
    """Killed before the store takes its name; a second run removes the unfinished file."""
    source, path = tmp_path / "data.safetensors", tmp_path / "out" / "a.safetensors"
    write_store(source, mixed())
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nimport molflt.files\n"
        "from molflt.data.structures.convert import convert\n"
        "molflt.files.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "convert(*map(Path, sys.argv[1:]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, source, path], check=False)
    assert done.returncode == -signal.SIGKILL and not path.exists()
    convert(source, path)
    assert list(path.parent.iterdir()) == [path] and len(open_dataset(path)) == 5


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
