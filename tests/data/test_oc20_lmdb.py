"""The OC20 LMDB: layouts, workers, damaged files and records, and the 20 genuine records."""

from __future__ import annotations

import io
import pickle
import struct

import lmdb
import numpy as np
import pytest
import torch
from ase.geometry import find_mic
from oc20_files import fields, old_record, same, write_lmdb

from molflt.data.structures import open_dataset
from molflt.data.structures.oc20_lmdb import Oc20Lmdb
from molflt.data.structures.records import make_record

NAN = float("nan")


def numbered(count, start=0):
    return {str(i): old_record(start + i) for i in range(count)}


def test_keys_are_numbers_not_words(tmp_path):
    path = write_lmdb(tmp_path / "data.lmdb", numbered(12))
    dataset = open_dataset(path)
    assert isinstance(dataset, Oc20Lmdb)
    assert [item.sid for item in dataset] == [1000 + i for i in range(12)]
    (tmp_path / "link.lmdb").symlink_to(path)  # one file under two names, opened twice
    for a, b in zip(dataset, open_dataset(tmp_path / "link.lmdb"), strict=True):
        same(a, b)


@pytest.mark.parametrize("length", [pickle.dumps(2), b"2", pickle.dumps(np.int64(2))])
def test_length_key(tmp_path, length):
    path = write_lmdb(tmp_path / "data.lmdb", {**numbered(3), "length": length})
    assert len(open_dataset(path)) == 2


def test_length_key_that_runs_code_or_lies(tmp_path):
    evil = b"\x80\x03cposix\nsystem\n" + pickle.dumps("true", 3)[2:-1] + b"\x85R."
    path = write_lmdb(tmp_path / "evil.lmdb", {**numbered(1), "length": evil})
    with pytest.raises(ValueError, match=r"evil\.lmdb: key 'length': refused .* posix\.system"):
        open_dataset(path)
    path = write_lmdb(tmp_path / "more.lmdb", {**numbered(2), "length": pickle.dumps(9)})
    assert len(open_dataset(path)) == 2  # what is there counts


def test_other_keys_and_gaps(tmp_path):
    content = {"3": old_record(3), "11": old_record(11), "metadata": b"?", "nextid": b"12"}
    path = write_lmdb(tmp_path / "data.lmdb", content)
    assert [item.sid for item in open_dataset(path)] == [1003, 1011]
    hole = {k: v for k, v in numbered(4).items() if k != "1"}
    path = write_lmdb(tmp_path / "hole.lmdb", {**hole, "length": pickle.dumps(4)})
    with pytest.raises(ValueError, match=r"hole\.lmdb: key '1': missing"):
        list(open_dataset(path))


def test_folder_of_shards_in_order_of_name(tmp_path):
    for shard, start in (("data.0001.lmdb", 20), ("data.0000.lmdb", 0), ("data.0002.lmdb", 40)):
        write_lmdb(tmp_path / "train" / shard, numbered(3, start))
    (tmp_path / "train" / "data.0000.lmdb-lock").write_bytes(b"")
    dataset = open_dataset(tmp_path / "train")
    expected = [1000 + start + i for start in (0, 20, 40) for i in range(3)]
    assert [item.sid for item in dataset] == expected
    assert dataset.natoms.tolist() == [7] * 9


def test_natoms_beside(tmp_path):
    records = {str(i): old_record(i, atoms=3 + i) for i in range(4)}
    path = write_lmdb(tmp_path / "data.lmdb", records)
    assert open_dataset(path).natoms.tolist() == [3, 4, 5, 6]
    np.savez(tmp_path / "metadata.npz", natoms=np.array([3, 99, 5, 6], dtype=np.int32))
    trusted = open_dataset(path).natoms  # 99 shows that the records were not read
    assert trusted.tolist() == [3, 99, 5, 6] and trusted.dtype == np.int64
    assert open_dataset(tmp_path).natoms.tolist() == [3, 99, 5, 6]
    for other in ([3, 4, 5], [9, 4, 5, 6], [3, 4, 5, 9]):  # about other records: not believed
        np.savez(tmp_path / "metadata.npz", natoms=np.array(other))
        assert open_dataset(path).natoms.tolist() == [3, 4, 5, 6]
    (tmp_path / "metadata.npz").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"metadata\.npz: expected an npz with natoms"):
        _ = open_dataset(path).natoms


def test_file_replaced_by_another_of_the_same_name(tmp_path):
    path = tmp_path / "data.lmdb"
    write_lmdb(path, numbered(1, 1))
    assert open_dataset(path)[0].sid == 1001
    path.unlink()
    write_lmdb(path, numbered(2, 2))
    assert [item.sid for item in open_dataset(path)] == [1002, 1003]


def test_open_elsewhere_in_this_process(tmp_path):
    path = write_lmdb(tmp_path / "data.lmdb", numbered(1))
    opened = lmdb.open(str(path), subdir=False, readonly=True, lock=False)
    with opened, pytest.raises(ValueError, match="other code in this process has the LMDB open"):
        open_dataset(path)


@pytest.mark.parametrize("size", [0, 10, 5000, 20000])
def test_empty_and_truncated_files(tmp_path, size):
    path = write_lmdb(tmp_path / "data.lmdb", numbered(10))
    content = path.read_bytes()
    assert len(content) > 20000
    broken = tmp_path / "broken.lmdb"
    broken.write_bytes(content[:size])
    match = {0: "the file is empty", 10: "not an LMDB file"}.get(size, "the LMDB is truncated")
    with pytest.raises(ValueError, match=match) as caught:
        open_dataset(broken)
    assert str(broken) in str(caught.value) and "\n" not in str(caught.value)


def test_things_that_are_no_lmdb(tmp_path):
    (tmp_path / "text.lmdb").write_text("not an lmdb " * 2000)
    with pytest.raises(ValueError, match=r"text\.lmdb: not an LMDB file"):
        open_dataset(tmp_path / "text.lmdb")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match=r"nothing: expected a folder with data\.lmdb"):
        open_dataset(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        open_dataset(tmp_path / "absent.lmdb")
    empty = write_lmdb(tmp_path / "empty.lmdb", {"metadata": b"1"})
    with pytest.raises(ValueError, match=r"empty\.lmdb: the LMDB holds no records"):
        open_dataset(empty)


BAD_RECORDS = [
    ({"pos": torch.full((7, 3), NAN)}, "sid 1000: pos must be finite"),
    ({"y_relaxed": NAN}, "sid 1000: y_relaxed must be a finite energy"),
    ({"natoms": 8}, "sid 1000: natoms must be 7, the rows of pos; got 8"),
    ({"pos": None}, "pos is missing"),
    ({"atomic_numbers": None}, "atomic_numbers is missing"),
    ({"pos": "text"}, "pos must be a tensor"),
]


@pytest.mark.parametrize(("change", "message"), BAD_RECORDS)
def test_bad_records_are_named_or_left_out(tmp_path, change, message):
    content = {"0": old_record(5), "1": old_record(0, **change), "2": old_record(6, atoms=4)}
    path = write_lmdb(tmp_path / "data.lmdb", content)
    dataset = open_dataset(path)
    with pytest.raises(ValueError) as caught:
        dataset[1]
    assert str(caught.value).startswith(f"{path}: key '1': ")
    assert message in str(caught.value)
    kept = open_dataset(path, skip_bad=True)
    assert [item.sid for item in kept] == [1005, 1006] and kept.natoms.tolist() == [7, 4]
    (name, reason), *rest = kept.bad
    assert name == f"{path}: key '1'" and message in reason and not rest


def test_what_users_leave_out(tmp_path):
    absent = dict.fromkeys(("tags", "y_init", "y_relaxed", "pos_relaxed", "sid", "fixed", "cell"))
    path = write_lmdb(tmp_path / "data.lmdb", {"0": old_record(0), "1": old_record(1, **absent)})
    pos, numbers = (fields(1)[key] for key in ("pos", "atomic_numbers"))
    same(open_dataset(path)[1], make_record(pos=pos, atomic_numbers=numbers, sid=1))  # the key


# --- an independent reading of the genuine records -------------------------------------------

STORAGES = {"FloatStorage": "<f4", "LongStorage": "<i8", "IntStorage": "<i4"}


class Reader(pickle.Unpickler):
    """Knows six names and decodes torch's legacy storage bytes with numpy alone."""

    def find_class(self, module, name):
        known = {
            ("torch_geometric.data.data", "Data"): Holder,
            ("torch._utils", "_rebuild_tensor_v2"): rebuild,
            ("torch.storage", "_load_from_bytes"): numbers,
            ("collections", "OrderedDict"): dict,
        }
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        return known[module, name]

    def persistent_load(self, pid):
        return pid[1]  # ("storage", type, key, location, size)


class Holder:
    pass


def numbers(content):
    file = io.BytesIO(content)
    for _ in range(3):  # magic number, protocol, sizes of types
        Reader(file).load()
    dtype = Reader(file).load()
    Reader(file).load()  # keys
    (count,) = struct.unpack("<q", file.read(8))
    return np.frombuffer(file.read(), dtype, count)


def rebuild(flat, offset, size, stride, *_):
    steps = [step * flat.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(flat[offset:], size, steps).copy()


def independent(path):
    # a copy: the process may open the original only once
    environment = lmdb.open(str(path), subdir=False, readonly=True, lock=False)
    with environment, environment.begin() as transaction:
        content = [transaction.get(str(i).encode()) for i in range(20)]
    return [Reader(io.BytesIO(raw)).load().__dict__ for raw in content]


def test_genuine_records_equal_an_independent_reading(real_lmdb, tmp_path):
    copy = tmp_path / "copy.lmdb"
    copy.write_bytes(real_lmdb.read_bytes())
    dataset = open_dataset(real_lmdb)
    assert len(dataset) == 20
    free = moved = claimed = 0
    for index, raw in enumerate(independent(copy)):
        ours, unwrapped = dataset.with_unwrapped(index)
        for name in ("pos", "cell"):
            assert ours[name].numpy().tobytes() == raw[name].tobytes(), name
        for name in ("atomic_numbers", "tags", "fixed"):
            assert np.array_equal(ours[name].numpy(), raw[name]), name
        assert (ours.natoms, ours.sid) == (raw["natoms"], raw["sid"])
        assert (float(ours.y_init), float(ours.y_relaxed)) == (raw["y_init"], raw["y_relaxed"])
        jump = raw["pos_relaxed"].astype(float) - raw["pos"]
        shortest, length = find_mic(jump, raw["cell"][0].astype(float))
        np.testing.assert_allclose(ours.pos_relaxed - ours.pos, shortest, atol=2e-5)
        wrapped = np.abs(jump - shortest).max(axis=1) > 1e-3
        kept = ours.pos_relaxed.numpy()[~wrapped]
        assert np.array_equal(kept, raw["pos_relaxed"][~wrapped])
        mobile = raw["fixed"] == 0
        free += int(mobile.sum())
        moved += int((wrapped & mobile).sum())
        claimed += unwrapped
        assert length[mobile].max() < 4.2
    assert (free, moved, claimed) == (506, 47, 47)
    assert dataset.natoms.sum() == 1695


def test_fixture_wraps(tmp_path):
    """The hand-made records do have wrapped relaxed positions, and reading undoes it."""
    jumps = np.linalg.norm(fields(0)["pos_relaxed"] - fields(0)["pos"], axis=1)
    assert jumps.max() > 4
    path = write_lmdb(tmp_path / "data.lmdb", {"0": old_record(0)})
    item, count = open_dataset(path).with_unwrapped(0)
    assert (item.pos_relaxed - item.pos).norm(dim=1).max() < 1.5
    assert count == int(((jumps > 2) & ~item.fixed.numpy()).sum()) > 0
