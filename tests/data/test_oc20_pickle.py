"""Pickles that try to run code are refused by name, and nothing of them has run."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import tracemalloc

import numpy as np
import pytest
import torch
from oc20_files import fields, old_pickle, old_record, opcodes, write_lmdb
from torch_geometric.data import Data

from molflt.data.structures import open_dataset
from molflt.data.structures.oc20_pickle import _decode_count, _decode_record

STORAGE = b"ctorch.storage\n_load_from_bytes\n"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
ENCODE = b"c_codecs\nencode\n"
OBJECT = b"c__builtin__\nobject\n"
SCALAR = b"cnumpy.core.multiarray\nscalar\ncnumpy\ndtype\n" + opcodes("f8") + b"\x85R"
DATA = b"ctorch_geometric.data.data\nData\n"
POS = b"X\x03\x00\x00\x00pos"


class Evil:
    """Touches a file when unpickled."""

    def __init__(self, sentinel):
        self.sentinel = sentinel

    def __reduce__(self):
        return os.system, (f"touch {self.sentinel}",)


def saved(thing, zipped):
    file = io.BytesIO()
    torch.save(thing, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def nested(payload):
    """A record whose pos is a tensor on the storage that ``payload`` is said to be."""
    load = STORAGE + opcodes(payload) + b"\x85R"
    tensor = REBUILD + b"(" + load + b"K\x00K\x02K\x03\x86K\x03K\x01\x86\x89NtR"
    return old_pickle(b"}" + POS + tensor + b"s")


def reconstructed(evil):
    return np.array([evil], dtype=object)


def planted(evil):
    """The evil callable as the instance's __setstate__, and a second state for it."""
    plant = b"}X\x0c\x00\x00\x00__setstate__cposix\nsystem\nsb"
    return b"\x80\x03" + DATA + b")\x81" + plant + opcodes(f"touch {evil.sentinel}") + b"b."


def evaluates(evil):
    code = opcodes(f"open({str(evil.sentinel)!r}, 'w')")
    return b"\x80\x03cbuiltins\neval\n" + code + b"\x85R."


NESTED = "posix.system, nested in a tensor's storage"
REFUSED = {
    "direct": (pickle.dumps, "posix.system"),
    "old Data": (lambda evil: old_pickle(b"}" + POS + opcodes(evil) + b"s"), "posix.system"),
    "new Data": (lambda evil: pickle.dumps(Data(pos=evil)), "posix.system"),
    "nested plain": (lambda evil: nested(pickle.dumps(evil)), NESTED),
    "nested legacy": (lambda evil: nested(saved(evil, zipped=False)), NESTED),
    "nested zip": (
        lambda evil: nested(saved({"a": evil}, zipped=True)),
        "a zip archive, nested in a tensor's storage",
    ),
    "numpy": (lambda evil: pickle.dumps(reconstructed(evil)), "_reconstruct"),
    "numpy in Data": (lambda evil: pickle.dumps(Data(pos=reconstructed(evil))), "_reconstruct"),
    "state of Data": (
        lambda evil: old_pickle(opcodes({"pos": 1}) + b"\x86" + opcodes(evil)),
        "posix.system",
    ),
    "planted __setstate__": (planted, "posix.system"),
    "eval": (evaluates, "builtins.eval"),
}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(("build", "name"), REFUSED.values(), ids=REFUSED)
def test_code_is_refused_by_name_and_does_not_run(tmp_path, build, name):
    sentinel = tmp_path / "it-ran"
    payload = build(Evil(sentinel))
    # the attack is real: the payload names a callable and asks for it to be called
    assert {"REDUCE", "BUILD"} & {op.name for op, _, _ in pickletools.genops(payload)}
    assert b"system" in payload or b"eval" in payload
    path = write_lmdb(tmp_path / "data.lmdb", {"0": old_record(0), "1": payload})
    dataset = open_dataset(path)
    assert dataset[0].sid == 1000
    with pytest.raises(ValueError) as caught:
        dataset[1]
    message = str(caught.value)
    assert message.startswith(f"{path}: key '1': refused to read the pickle: it wants ")
    assert name in message and "\n" not in message
    kept = open_dataset(path, skip_bad=True)
    assert len(kept) == 1 and kept.bad[0][0] == f"{path}: key '1'"
    assert not sentinel.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch_geometric.data.data", "Data.__init__.__globals__"),
        ("torch_geometric.data.data", "Data.__reduce__"),
        ("torch_geometric.data.data", "os"),
        ("torch_geometric.data.storage", "GlobalStorage.__class__"),
        ("torch.storage", "_load_from_bytes.__globals__"),
        ("torch.storage", "io"),
        ("torch", "load"),
        ("torch._utils", "_rebuild_parameter"),
        ("collections", "OrderedDict.__init_subclass__"),
        ("numpy", "load"),
        ("numpy.core.multiarray", "_reconstruct"),
        ("copyreg", "_reconstructor"),
        ("builtins", "getattr"),
    ],
)
def test_names_beyond_the_list(module, name):
    payload = b"\x80\x04" + opcodes(module) + opcodes(name) + b"\x93."
    with pytest.raises(ValueError, match="it wants the global ") as caught:
        _decode_record(payload, "f: key '0'")
    assert f"{module}.{name};" in str(caught.value)


TAMPERING = {
    "attribute of the Data class": DATA + b"N}X\x07\x00\x00\x00__new__" + STORAGE + b"s\x86b.",
    "dict of the Data class": DATA + b"}X\x07\x00\x00\x00__new__" + STORAGE + b"sb.",
    "attribute of a function": REBUILD + b"N}X\x08\x00\x00\x00__call__" + STORAGE + b"s\x86b.",
    "dict of a function": STORAGE + b"}X\x08\x00\x00\x00__call__" + REBUILD + b"sb.",
    "attribute of OrderedDict": b"ccollections\nOrderedDict\nN}X\x01\x00\x00\x00aK\x01s\x86b.",
    "hook on a Data": DATA + b")\x81N}X\x0c\x00\x00\x00__setstate__" + STORAGE + b"s\x86b.",
    "call of a Data": DATA + b")\x81)R.",
    "Data with arguments": DATA + b"K\x01\x85\x81.",
    "new from a function": STORAGE + b")\x81.",
    "append to a Data": DATA + b")\x81(K\x01e.",
    "another codec": ENCODE + opcodes("61") + opcodes("hex") + b"\x86R.",
    "bytes as text": ENCODE + opcodes(b"61") + opcodes("latin1") + b"\x86R.",
    "object of a function": b"ccopy_reg\n_reconstructor\n(" + STORAGE + OBJECT + b"NtR.",
    "object with a base's state": b"ccopy_reg\n_reconstructor\n(" + DATA + OBJECT + b"K\x01tR.",
    "call of the base": OBJECT + b")R.",
    "state of a number": SCALAR + opcodes(b"\0" * 8) + b"\x86R}b.",
    "call of a tensor": b"K\x01)R.",
    "persistent id": b"K\x01Q.",
    "extension code": b"\x82\x01.",
}


@pytest.mark.parametrize("payload", TAMPERING.values(), ids=TAMPERING)
def test_stand_ins_cannot_be_changed_by_pickles(payload):
    with pytest.raises(ValueError, match=r"f: key '0': (cannot be read|refused)"):
        _decode_record(b"\x80\x03" + payload, "f: key '0'")
    again = _decode_record(old_record(3), "f: key '1'")
    assert torch.equal(again["pos"], fields(3)["pos"])


def test_planted_hook_is_data_not_behaviour():
    state = b"}X\x0c\x00\x00\x00__setstate__" + STORAGE + b"sb}" + POS + b"K\x05s"
    decoded = _decode_record(old_pickle(state), "f")  # built twice: the second state counts
    assert decoded == {"pos": 5}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_tensor_cannot_reach_beyond_its_storage():
    content = io.BytesIO()
    torch.save(torch.zeros(4).storage(), content, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="reaches beyond its 4 numbers"):
        _decode_record(nested(content.getvalue()), "f")


def view(offset, size, stride):
    """A record whose pos is a view of four numbers."""
    content = io.BytesIO()
    torch.save(torch.zeros(4).storage(), content, _use_new_zipfile_serialization=False)
    load = STORAGE + opcodes(content.getvalue()) + b"\x85R"
    shape = opcodes(offset) + opcodes(size) + opcodes(stride)
    return old_pickle(b"}" + POS + REBUILD + b"(" + load + shape + b"\x89NtRs")


TUPLES = b")" + b"2\x86" * 60  # () in a tuple, twice, and that again, ...: 2^60 to hash or print
SHARED = b")q\x00" + b"h\x00h\x00\x86q\x00" * 60  # the same without DUP
LARGE = b"\x8b\x00\x00\x10\x00" + b"\x7f" * 2**20  # an integer of 2^23 bits
HOSTILE = {
    "tuples as a key": b"}(" + TUPLES + b"K\x01u",
    "remembered tuples as a key": b"}(" + SHARED + b"K\x01u",
    "tuples as one key": b"}" + SHARED + b"K\x01s",
    "tuples in a set": b"\x8f(" + SHARED + b"\x90",
    "tuples in a frozenset": b"(" + SHARED + b"\x91",
    "tuples in an ordered dict": b"ccollections\nOrderedDict\n" + SHARED + b"K\x01\x86\x85\x85R",
    "tuples as a dtype": b"cnumpy\ndtype\n" + SHARED + b"\x85R",
    "tuples as a byte order": (
        b"cnumpy\ndtype\n" + opcodes("f8") + b"\x85RK\x03" + SHARED + b"\x86b"
    ),
    "tuples as a storage": STORAGE + SHARED + b"\x85R",
    "tuples as a size": REBUILD + b"(" + SHARED * 4 + b"tR",
    "tuples as a persistent id": SHARED + b"Q",
    "far place of the memo": b"Nr\xff\xff\xff\xff",
    "far place of the memo in text": b"Np9999999999999\n",
    "frame beyond the end": b"\x95" + b"\xff" * 7 + b"\x00" + b"N",
    "text beyond the end": b"\x8d" + b"\xff" * 7 + b"\x00abc",
    "bytes beyond the end": b"B\xff\xff\xff\x7fabc",
    "bytearray beyond the end": b"\x96" + b"\xff" * 7 + b"\x00abc",
    "large integer": LARGE,
    "large integer as a size": REBUILD + b"(NK\x00" + LARGE + b"\x85" + LARGE + b"\x85tR",
    "many dicts": b"(" + b"}" * 10**6 + b"t",
    "many marks": b"(" * 10**6 + b"t",
    "deep lists": b"]" * 50_000 + b"a" * 49_999,
    "text of many digits": b"L" + b"9" * 10**6 + b"L\n",
    "stack of nothing": b"0000ttt\x86\x87",
    "one text again and again": (
        opcodes("a" * 10**6) + b"q\x00" + (ENCODE + b"h\x00" + opcodes("latin1") + b"\x86R") * 2000
    ),
    "tuples in a dict of marks": b"(" + TUPLES + b"K\x01d",
    "one header again and again": (
        opcodes(b"\x80\x02K\x01" + b"K\x01a" * 1000 + b".") + b"q\x00" + b"h\x00\x85R" * 20_000
    ),
    "one storage again and again": (
        opcodes(b"\x80\x02" + b"N0" * 2000 + b".") + b"q\x00" + (STORAGE + b"h\x00\x85R") * 20_000
    ),
}


@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE)
def test_time_and_memory_are_bounded(payload):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"^f: key '0': .*(cannot be read|refused)") as caught:
            _decode_record(b"\x80\x03" + payload + b".", "f: key '0'")
        assert tracemalloc.get_traced_memory()[1] < 4 * len(payload) + 50_000_000
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("offset", "size", "stride", "message"),
    [
        (0, (400_000_000, 3), (0, 1), "repeats its 4 numbers"),
        (0, (2**50, 3), (0, 1), "repeats its 4 numbers"),
        (0, (3, 3), (0, 1), "repeats its 4 numbers"),
        (0, (3, 2), (1, 1), "repeats its 4 numbers"),
        (0, (2, 3), (3, 1), "reaches beyond its 4 numbers"),
        (4, (1,), (1,), "reaches beyond its 4 numbers"),
        (0, (2**64,), (1,), "expected the sizes and strides of a tensor"),
        (-1, (1,), (1,), "expected the sizes"),
        (0, (-1,), (1,), "expected the sizes"),
        (0, (True,), (1,), "expected the sizes"),
        (0, (1.0,), (1,), "expected the sizes"),
        (0, (2,), (1, 1), "has 1 sizes and 2 strides"),
        (0, (1,) * 9, (1,) * 9, "has 9 sizes"),
        (0, [2], [1], "expected the sizes"),
    ],
)
def test_invalid_views_are_refused(offset, size, stride, message):
    with pytest.raises(ValueError, match="f: cannot be read; .*" + message):
        _decode_record(view(offset, size, stride), "f")


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [(0, (2, 2), (1, 2)), (1, (3,), (1,)), (3, (), ()), (1, (2, 1), (2, 0)), (4, (0, 3), (3, 1))],
)
def test_views_are_those_of_torch(offset, size, stride):
    found = _decode_record(view(offset, size, stride), "f")["pos"]
    assert torch.equal(found, torch.zeros(4).as_strided(size, stride, min(offset, 3)))


def test_tensors_that_share_their_numbers_are_not_multiplied():
    """A thousand fields of one tensor, which would be copied a thousand times."""
    pos = torch.zeros(30_000, 3)
    shared = {f"field{i}": pos for i in range(1000)}
    with pytest.raises(ValueError, match="its tensors share numbers"):
        _decode_record(old_pickle(opcodes(shared)), "f")


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int32", "int16", "int8"])
def test_types_of_tensors(dtype):
    pos = torch.arange(-3, 9).to(getattr(torch, dtype)).reshape(4, 3)
    numbers = {"pos": pos.T, "mask": pos > 2, "one": pos[2, 1], "part": pos[1:3]}
    numbers |= {"complex": pos.to(torch.complex64)}
    found = _decode_record(old_pickle(opcodes(numbers)), "f")
    assert found.keys() == numbers.keys()
    for name, tensor in numbers.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype


@pytest.mark.parametrize(
    "dtype", ["O", "O8", "V8", "M8", "f8,O", "U4", "f16"], ids=lambda d: f"dtype {d}"
)
def test_numpy_scalars_of_other_kinds(dtype):
    scalar = b"cnumpy.core.multiarray\nscalar\ncnumpy\ndtype\n" + opcodes(dtype) + b"\x85R"
    with pytest.raises(ValueError, match="dtype of a plain number"):
        _decode_record(old_pickle(b"}" + POS + scalar + opcodes(b"\0" * 8) + b"\x86Rs"), "f")


def test_plain_numpy_scalars_are_read():
    changes = {"y_relaxed": np.float64(-1.25), "y_init": np.float32(0.5)}
    changes |= {"natoms": np.int64(7), "sid": np.int32(5)}
    decoded = _decode_record(old_record(0, **changes), "f")
    for name, value in changes.items():
        assert decoded[name] == value and decoded[name].dtype == value.dtype
    decoded = _decode_record(old_record(0, sid=np.array(9, dtype=">i4")[()]), "f")
    assert decoded["sid"] == 9


@pytest.mark.parametrize("protocol", range(6))
def test_new_pyg_records(protocol):
    decoded = _decode_record(pickle.dumps(Data(**fields(2)), protocol=protocol), "f")
    assert sorted(decoded) == sorted(fields(2))
    for name, value in fields(2).items():
        assert torch.equal(torch.as_tensor(decoded[name]), torch.as_tensor(value)), name


@pytest.mark.parametrize("content", [b"", b"\x80", b"garbage", old_record(0)[:200]])
def test_damaged_pickles(content):
    with pytest.raises(ValueError, match="f: key '7': cannot be read; expected a pickled") as found:
        _decode_record(content, "f: key '7'")
    assert "\n" not in str(found.value)


def test_other_objects():
    with pytest.raises(ValueError, match="expected a pickled torch_geometric Data; got dict"):
        _decode_record(pickle.dumps({"pos": 1}), "f")
    assert _decode_count(pickle.dumps(12), "f") == 12
    for wrong in (-1, 1.5, "12"):
        with pytest.raises(ValueError, match="expected a pickled whole number"):
            _decode_count(pickle.dumps(wrong), "f")


@pytest.mark.parametrize("name", ["y_init", "y_relaxed", "pos_relaxed", "tags", "sid", "natoms"])
@pytest.mark.parametrize("value", [b"\0", [1.0], (), {}])
def test_a_field_that_is_read_is_never_left_out_for_its_type(name, value):
    with pytest.raises(ValueError, match=f"x: .*{name} must be a tensor or a number; got"):
        _decode_record(old_pickle(opcodes(fields() | {name: value})), "x")
    assert name not in _decode_record(old_pickle(opcodes(fields() | {name: None})), "x")
    other = _decode_record(old_pickle(opcodes(fields() | {"other": value})), "x")
    assert name in other and "other" not in other
