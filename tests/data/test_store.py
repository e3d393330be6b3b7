"""The compact store: exact round trip, whole files or none, clear errors for damaged ones."""

from __future__ import annotations

import re
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest
from oc20_files import old_record, record, same, write_lmdb
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


def test_missing_relaxed_positions_are_not_stored(tmp_path):
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
        ({"pos": lambda c: c.astype("f8")}, "key 'pos' must be float32"),
        ({"y_relaxed": lambda c: c.astype("f4")}, "key 'y_relaxed' must be float64"),
        ({"offsets": put(1, 0)}, "'offsets' must rise from 0"),
        ({"offsets": put(0, 1)}, "'offsets' must rise from 0"),
        ({"offsets": None}, "'offsets' must be"),
        ({"y_relaxed": put(3, np.inf)}, "sid 1002: y_relaxed must be finite"),
        ({"cell": put((3, 0, 0), np.nan)}, "sid 1002: cell must be finite"),
        ({"cell": put(3, 0)}, "sid 1002: periodic axes need linearly independent"),
        ({"cell": put((3, 0), (1.5, 7, 0))}, "sid 1002: periodic axes need linearly independent"),
        ({"cell": put((3, 1), (0, 0.4, 0))}, "sid 1002: .* at least 0.5 Å apart"),
        ({"pbc": put((3, 2), 2)}, "sid 1002: pbc must be 0 or 1"),
        ({"offsets": put(slice(1, 3), (2**63 - 1, -10))}, "'offsets' must rise from 0"),
        ({"offsets": put(slice(1, 3), (2**62, 2**62 + 1))}, "'offsets' must rise from 0"),
        ({"pos": lambda c: c[:0]}, r"key 'pos' must be float32 .* got .*\(0, 3\)"),
        ({"tags": lambda c: c[:0].astype("i4")}, "key 'tags' must be uint8 .*; got"),
        ({"tags": lambda c: c.astype("f2")}, "key 'tags' must be uint8"),
        ({"cell": lambda c: c.reshape(-1)}, "key 'cell' must be float32"),
        ({"offsets": lambda c: c[:1]}, "'offsets' must be"),
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tags": put(7, 3)}, "tags must be 0 to 2; got 3 for atom 0"),
        ({"tags": put(7, 255)}, "tags must be 0 to 2; got 255"),
        ({"fixed": put(7, 2)}, "fixed must be 0 or 1; got 2 for atom 0"),
        ({"pos": put((7, 1), 1e6)}, "pos must be finite and within 100000 Å; got .*1000000"),
        ({"pos": put((7, 1), np.nan)}, "pos must be finite"),
        ({"pos_relaxed": put((7, 1), 0)}, "pos_relaxed must be .* NaN for all atoms; got"),
        ({"pos_relaxed": put(7, np.inf)}, "pos_relaxed must be finite"),
        ({"pos_relaxed": put(7, 1e30)}, "pos_relaxed must be finite and within"),
    ],
)
def test_atoms_that_no_record_has(store, changes, message):
    """Atom 7 is the only one of the second structure, sid -3, which has no relaxed positions."""
    damage(store, **changes)
    dataset = open_dataset(store)
    assert [dataset[i].sid for i in (0, 2, 3)] == [1000, 1001, 1002]
    with pytest.raises(ValueError, match=r"train\.safetensors: sid -3: " + message) as caught:
        dataset[1]
    assert "\n" not in str(caught.value)
    kept = open_dataset(store, skip_bad=True)
    ((name, reason),) = kept.bad
    assert name == "-3" and re.search(message, reason) and len(kept) == 4


def test_relaxed_positions_of_some_atoms(store):
    damage(store, pos_relaxed=put(3, np.nan))
    with pytest.raises(ValueError, match="sid 1000: pos_relaxed must be .* for atom 3"):
        open_dataset(store)[0]


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


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8"])
def test_other_byte_types_are_refused_as_tags(store, dtype):
    """Of one byte each, in a file whose digest was made for it."""
    columns, header = load_file(store), {"format": "molflt-structures", "version": "1"}
    save_file(columns, store, metadata=header)
    content = store.read_bytes()
    was = re.search(rb'"tags":{"dtype":"U8"', content)[0]
    size, more = int.from_bytes(content[:8], "little"), len(dtype) - len("U8")
    begin = content[8:].replace(was, was.replace(b"U8", dtype.encode()), 1)
    store.write_bytes((size + more).to_bytes(8, "little") + begin)
    with pytest.raises(ValueError, match="train.safetensors: key 'tags' must be uint8"):
        StructureStore(store)


@pytest.mark.parametrize("place", ["reading", "writing"])
def test_a_killed_conversion_leaves_no_part_of_a_store(tmp_path, place):
    """SIGKILL between two records, or before the store takes its name; then a second run."""
    source = write_lmdb(tmp_path / "data.lmdb", {str(i): old_record(i) for i in range(6)})
    whole, path = tmp_path / "whole.safetensors", tmp_path / "out" / "a.safetensors"
    convert(source, whole)
    target = {
        "reading": "molflt.data.structures.oc20_lmdb.Oc20Lmdb.with_unwrapped",
        "writing": "molflt.files.os.replace",
    }[place]
    code = (
        "import os, signal, sys\nfrom unittest import mock\n"
        "from molflt.commands.cli import main\nimport molflt.data.structures.oc20_lmdb as oc20\n"
        "original, calls = oc20.Oc20Lmdb.with_unwrapped, []\n"
        "def stop(*arguments):\n"
        "    calls.append(0)\n"
        f"    if len(calls) == 4 or {place == 'writing'}:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return original(*arguments)\n"
        f"with mock.patch({target!r}, stop):\n"
        "    main(['data', 'convert', *sys.argv[1:]])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, source, path], check=False)
    assert done.returncode == -signal.SIGKILL and not path.exists()
    convert(source, path)
    assert path.read_bytes() == whole.read_bytes()
    assert list(path.parent.iterdir()) == [path]
