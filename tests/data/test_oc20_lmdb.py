import io
import pickle
import random
import struct

import lmdb
import numpy as np
import pytest
import torch
from ase.geometry import find_mic
from oc20_files import fields, old_record, same, write_lmdb
from shared_files import shared
from tiny_run import error_of

from molflt.data.structures import open_dataset
from molflt.data.structures.oc20 import LmdbFile
from molflt.data.structures.records import make_record


def numbered(count, start=0):
    return {str(i): old_record(start + i) for i in range(count)}


@pytest.mark.parametrize("length", [pickle.dumps(2), b"2"])
def test_length_key(tmp_path, length):
    path = write_lmdb(tmp_path / "data.lmdb", {**numbered(3), "length": length})
    write_lmdb(tmp_path / "data.0001.lmdb", numbered(2, 10))  # shards in order of name
    assert [item.sid - 1000 for item in open_dataset(tmp_path)] == [10, 11, 0, 1]
    dataset = open_dataset(path)
    assert len(dataset) == 2 and "'2'" in dataset.skipped()
    assert len(open_dataset(path, skip_bad=True)) == 3
    write_lmdb(path, {"length": pickle.dumps(0)})
    assert len(open_dataset(path)) == 0


@pytest.mark.parametrize("length", [None, 6, 9])
def test_missing_records_are_listed(tmp_path, length):
    content = {str(i): old_record(i) for i in (0, 1, 2, 4, 5)}
    content |= {} if length is None else {"length": pickle.dumps(length)}
    path = write_lmdb(tmp_path / "data.lmdb", content)
    with pytest.raises(ValueError, match="key '3' missing"):
        open_dataset(path)
    kept = open_dataset(path, skip_bad=True)
    assert [item.sid - 1000 for item in kept] == [0, 1, 2, 4, 5]
    found = [name.removeprefix(f"{path}: key").lstrip("s ") for name, _ in kept.bad]
    assert found == ["'3'", "'6' to '8'"][: 1 + (length == 9)]


def test_damaged_pages_are_named_or_left_out(tmp_path, capsys):
    path = write_lmdb(tmp_path / "data.lmdb", numbered(200))
    content = bytearray(path.read_bytes())
    pages = range(2, len(content) // 4096)
    leaves = [p for p in pages if struct.unpack_from("<H", content, 4096 * p + 10)[0] == 2]
    assert len(leaves) > 1
    struct.pack_into("<H", content, 4096 * leaves[0] + 10, 8)
    path.write_bytes(content)
    line = error_of(capsys, "data", "convert", path, tmp_path / "a.safetensors")
    assert "the LMDB is damaged: page" in line
    kept = open_dataset(path, skip_bad=True)
    assert 0 < len(kept) < 200 and len(kept) + len(kept.bad) == 200
    assert all("the LMDB is damaged: page" in reason for _, reason in kept.bad)


def test_optional_fields_may_be_missing(tmp_path):
    absent = dict.fromkeys(("tags", "y_init", "y_relaxed", "pos_relaxed", "sid", "fixed", "cell"))
    path = write_lmdb(tmp_path / "data.lmdb", {"0": old_record(0), "1": old_record(1, **absent)})
    pos, numbers = (fields(1)[key] for key in ("pos", "atomic_numbers"))
    same(open_dataset(path)[1], make_record(pos=pos, atomic_numbers=numbers, sid=1))  # the key
    write_lmdb(tmp_path / "b.lmdb", {"0": old_record(0, y_baseline=-2.5)})
    assert open_dataset(tmp_path / "b.lmdb").y_baseline == [-2.5]


# --- pages of an LMDB ------------------------------------------------------------------------


def test_everything_is_read_as_by_the_library(tmp_path):
    """The file has two levels of pages, and values in nodes, on one page and on several."""
    path, draw = tmp_path / "data.lmdb", random.Random(0)
    content = {b"length": b"400", b"\xff" * 511: b""}
    content |= {b"%d" % i: draw.randbytes((0, 30, 1500, 9000)[i % 4]) for i in range(400)}
    with lmdb.open(str(path), subdir=False, map_size=1 << 26, lock=False) as environment:
        for part in range(4):  # each transaction leaves old pages behind
            with environment.begin(write=True) as transaction:
                for key in list(content)[part::4]:
                    transaction.put(key, content[key])
        with environment.begin(write=True) as transaction:
            for i in range(0, 400, 7):
                transaction.delete(b"%d" % i)
                del content[b"%d" % i]
    file = LmdbFile(path)
    assert list(file) == sorted(content) and len(file) == len(content)
    assert all(file.get(key) == value for key, value in content.items())
    assert not any(file.get(key) for key in (b"", b"0", b"4000", b"zzz", b"\xff" * 512))


# --- an independent reading of the genuine records -------------------------------------------


class Holder:
    """Replaces PyG's `Data`, whose attributes have changed since the records were written."""


class Reader(pickle.Unpickler):
    def find_class(self, module, name):
        return Holder if name == "Data" else super().find_class(module, name)


def independent(path):
    # a copy: the process may open the original only once
    environment = lmdb.open(str(path), subdir=False, readonly=True, lock=False)
    with environment, environment.begin() as transaction:
        content = [transaction.get(str(i).encode()) for i in range(20)]
    records = [Reader(io.BytesIO(raw)).load().__dict__ for raw in content]
    return [{key: np.asarray(value) for key, value in each.items()} for each in records]


def test_genuine_records_equal_an_independent_reading(tmp_path):
    real_lmdb = shared("oc20", "oc20_is2re_val20.lmdb")
    copy = tmp_path / "copy.lmdb"
    copy.write_bytes(real_lmdb.read_bytes())
    dataset = open_dataset(real_lmdb)
    assert len(dataset) == 20
    free = moved = 0
    for index, raw in enumerate(independent(copy)):
        ours = dataset[index]
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
        assert length[mobile].max() < 4.2
    assert (free, moved) == (506, 47)
    assert dataset.natoms.sum() == 1695


def test_charges_are_read_and_multiplicities_rejected(tmp_path):
    charged = {"0": old_record(0, charge=torch.tensor([-1.0]), multiplicity=1), "1": old_record(1)}
    first, second = open_dataset(write_lmdb(tmp_path / "a.lmdb", charged))
    assert first.charge.tolist() == [-1] and second.charge.isnan().all()
    for multiplicity, message in (
        ("triplet", "must be one number.*triplet"),
        (torch.tensor([3]), "must be 1.*3"),
    ):
        path = write_lmdb(tmp_path / "b.lmdb", {"0": old_record(0, multiplicity=multiplicity)})
        with pytest.raises(ValueError, match=f"key '0': multiplicity {message}"):
            open_dataset(path)[0]
