"""Pickles that try to run code are refused by name, and their code does not run."""

import io
import pickle
import pickletools

import numpy as np
import pytest
import torch
from oc20_files import Evil, fields, old_pickle, old_record, opcodes, write_lmdb
from torch_geometric.data import Data

from molflt.data.structures import open_dataset
from molflt.data.structures.oc20 import _decode_record

STORAGE = b"ctorch.storage\n_load_from_bytes\n"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
DATA = b"ctorch_geometric.data.data\nData\n"
POS = b"X\x03\x00\x00\x00pos"


def saved(thing):
    file = io.BytesIO()
    torch.save(thing, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def viewed(storage, offset=0, size=(2, 3), stride=(3, 1)):
    """Returns a record whose pos is a tensor with these bytes as its storage."""
    load = STORAGE + opcodes(storage) + b"\x85R"
    shape = opcodes(offset) + opcodes(size) + opcodes(stride)
    return old_pickle(b"}" + POS + REBUILD + b"(" + load + shape + b"\x89NtRs")


REFUSED = {
    "old Data": (lambda evil: old_pickle(b"}" + POS + opcodes(evil) + b"s"), "posix.system"),
    "new Data": (lambda evil: pickle.dumps(Data(pos=evil)), "posix.system"),
    "nested legacy": (lambda evil: viewed(saved(evil)), "posix.system"),
}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(("build", "name"), REFUSED.values(), ids=REFUSED)
def test_code_is_refused_by_name_and_does_not_run(tmp_path, build, name):
    sentinel = tmp_path / "it-ran"
    payload = build(Evil(sentinel))
    # the attack is real: the payload names a callable and requests a call
    assert {"REDUCE", "BUILD"} & {op.name for op, _, _ in pickletools.genops(payload)}
    assert b"system" in payload
    path = write_lmdb(tmp_path / "data.lmdb", {"0": old_record(0), "1": payload})
    dataset = open_dataset(path)
    assert dataset[0].sid == 1000
    with pytest.raises(ValueError, match=f"key '1': .*{name}"):
        dataset[1]
    kept = open_dataset(path, skip_bad=True)
    assert len(kept) == 1 and kept.bad[0][0] == f"{path}: key '1'"
    assert not sentinel.exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_records_of_protocol_2_are_read():
    """They contain bytes as text."""
    again = _decode_record(pickle.dumps(Data(**fields(3)), protocol=2), "f: key '0'")
    assert torch.equal(again["pos"], fields(3)["pos"]) and again["sid"] == 1003


TAMPERING = {
    "dict of the Data class": DATA + b"}X\x07\x00\x00\x00__new__" + STORAGE + b"sb.",
    "hook on a Data": DATA + b")\x81N}X\x0c\x00\x00\x00__setstate__" + STORAGE + b"s\x86b.",
    "deep lists": b"]" * 50_000 + b"a" * 49_999 + b".",
}


@pytest.mark.parametrize("payload", TAMPERING.values(), ids=TAMPERING)
def test_stand_ins_cannot_be_changed_by_pickles(payload):
    with pytest.raises(ValueError, match=r"^f: key '0': (cannot be read|refused)"):
        _decode_record(b"\x80\x03" + payload, "f: key '0'")
    again = _decode_record(old_record(3), "f: key '1'")
    assert torch.equal(again["pos"], fields(3)["pos"])


FOUR = saved(torch.zeros(4).storage())


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [(0, (2, 2), (1, 2)), (1, (3,), (1,)), (3, (), ())],
)
def test_views_are_those_of_torch(offset, size, stride):
    found = _decode_record(viewed(FOUR, offset, size, stride), "f")["pos"]
    assert torch.equal(found, torch.zeros(4).as_strided(size, stride, offset))
    for beyond, steps, message in (
        ((2, 2), (3, 1), "out of bounds for storage"),
        ((400_000_000, 3), (0, 1), "repeats its 4 numbers"),
    ):
        with pytest.raises(ValueError, match=f"f: cannot be read; .*{message}"):
            _decode_record(viewed(FOUR, 0, beyond, steps), "f")


@pytest.mark.parametrize("dtype", ["float64", "int32"])
def test_types_of_tensors(dtype):
    pos = torch.arange(-3, 9).to(getattr(torch, dtype)).reshape(4, 3)
    numbers = {"pos": pos.T, "mask": pos > 2, "one": pos[2, 1], "part": pos[1:3]}
    found = _decode_record(old_pickle(opcodes(numbers)), "f")
    assert found.keys() == numbers.keys()
    for name, tensor in numbers.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype


def test_numpy_scalars_and_new_pyg_records_are_read():
    changes = {"y_relaxed": np.float64(-1.25), "y_init": np.float32(0.5)}
    changes |= {"natoms": np.int64(7), "sid": np.int32(5)}
    decoded = _decode_record(old_record(0, **changes), "f")
    for name, value in changes.items():
        assert decoded[name] == value and decoded[name].dtype == value.dtype
    decoded = _decode_record(old_record(0, sid=np.array(9, dtype=">i4")[()]), "f")
    assert decoded["sid"] == 9
    decoded = _decode_record(pickle.dumps(Data(**fields(2))), "f")
    assert sorted(decoded) == sorted(fields(2))
    for name, value in fields(2).items():
        assert torch.equal(torch.as_tensor(decoded[name]), torch.as_tensor(value)), name


@pytest.mark.parametrize(
    ("name", "value"), [("y_relaxed", [1.0]), ("pos_relaxed", ()), ("sid", b"\0")]
)
def test_a_field_that_is_read_is_never_left_out_for_its_type(name, value):
    with pytest.raises(ValueError, match=f"x: .*{name} must be a tensor or a number; got"):
        _decode_record(old_pickle(opcodes(fields() | {name: value})), "x")
    assert name not in _decode_record(old_pickle(opcodes(fields() | {name: None})), "x")
    other = _decode_record(old_pickle(opcodes(fields() | {"other": value})), "x")
    assert name in other and "other" not in other
