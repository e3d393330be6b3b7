"""Reading OC20's pickled records without unpickling: nothing in the file is run.

The names that an OC20 record needs stand for objects of this module, which hold data and do nothing
else; any other name ends the reading. Time and memory are bounded by the size of the record.
"""

from __future__ import annotations

import io
import math
import re
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from molflt.data.structures.pickle_machine import Damaged, Machine, Name, Refused

_T = TypeVar("_T")
_Field: TypeAlias = Tensor | np.number | np.bool_ | int | float | str
_FIELDS = (
    "pos", "atomic_numbers", "cell", "pbc", "tags", "fixed", "y_init", "y_relaxed", "pos_relaxed"
)  # fmt: skip

_SINGLE_POINT = {"y": "energy", "force": "forces"}  # S2EF's names for labels at `pos`

_MOST_STEPS = 100_000  # instructions; OC20's records have some 1,000
_HEADER = 4096  # bytes; what stands before the numbers of a tensor has 500
_ZIP = b"PK\x03\x04"
_MOST_AXES = 8
_MAGIC = 0x1950A86A20F9469CFC6C  # of a tensor's storage in torch's older format
_STORAGES = {  # name in torch -> numpy's type of its numbers
    "Float": "<f4", "Double": "<f8", "Half": "<f2", "BFloat16": "<i2", "Long": "<i8", "Int": "<i4",
    "Short": "<i2", "Char": "|i1", "Byte": "|u1", "Bool": "|u1",
    "ComplexFloat": "<c8", "ComplexDouble": "<c16",
}  # fmt: skip


class _Instance:
    """An object of PyG: the state it is given, without behaviour."""

    def __init__(self) -> None:
        self.state: dict[str, object] = {}


class _Data(_Instance):
    pass


class _Dtype:
    """``numpy.dtype`` of a plain number."""

    def __init__(self, code: object, *_: object) -> None:
        if not isinstance(code, str) or not re.fullmatch(r"[<>|=]?([iu][1248]|f[248]|b1)", code):
            raise Damaged("expected the dtype of a plain number")
        self.kind = np.dtype(code)

    def set(self, state: object) -> None:
        match state:
            case (_, "<" | ">" | "|" | "=" as order, *_):
                self.kind = self.kind.newbyteorder(order)
            case _:
                raise Damaged("expected a byte order in a dtype")


class _Storage(NamedTuple):
    """The numbers of one or several tensors, in the bytes of the record."""

    kind: str
    numbers: np.ndarray


class _View(NamedTuple):
    """A tensor: where its numbers are in a storage, (size) with steps (stride) from offset."""

    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        """Copies the numbers."""
        kind, numbers = self.storage
        steps = [step * numbers.itemsize for step in self.stride]
        shown = np.lib.stride_tricks.as_strided(numbers[self.offset :], self.size, steps)
        tensor = torch.from_numpy(shown.copy())
        if kind == "BFloat16":
            return tensor.view(torch.bfloat16)
        return tensor.bool() if kind == "Bool" else tensor


def _scalar(dtype: object, content: object) -> np.generic:
    """``numpy.core.multiarray.scalar`` for plain numbers."""
    if not isinstance(dtype, _Dtype) or not isinstance(content, bytes):
        raise Damaged("expected a numpy scalar of a plain number")
    if len(content) != dtype.kind.itemsize:
        raise Damaged(f"a numpy {dtype.kind} scalar has {len(content)} bytes")
    value: np.generic = np.frombuffer(content, dtype.kind)[0]
    return value


def _view(storage: object, offset: object, size: object, stride: object, *_: object) -> _View:
    """``torch._utils._rebuild_tensor_v2`` that stays inside of the storage and takes no hooks."""
    if not isinstance(storage, _Storage):
        raise Damaged("expected the storage of a tensor")
    sizes, steps = _counts(size), _counts(stride)
    (first,) = _counts((offset,))
    if len(sizes) != len(steps) or len(sizes) > _MOST_AXES:
        raise Damaged(f"a tensor has {len(sizes)} sizes and {len(steps)} strides")
    held = len(storage.numbers)
    extent = sum((n - 1) * step for n, step in zip(sizes, steps, strict=True)) + 1
    if 0 not in sizes and first + extent > held:
        raise Damaged(f"a tensor reaches beyond its {held} numbers")
    repeats = any(n > 1 and step == 0 for n, step in zip(sizes, steps, strict=True))
    if 0 not in sizes and (repeats or math.prod(sizes) > held):
        raise Damaged(f"a tensor repeats its {held} numbers")
    return _View(storage, first, sizes, steps)


def _counts(value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(n) is int and 0 <= n < 2**63 for n in value):
        raise Damaged("expected the sizes and strides of a tensor")
    return cast("tuple[int, ...]", value)


def _storage(budget: Iterator[int], content: object) -> _Storage:
    """``torch.storage._load_from_bytes``: five small pickles, a count, and the numbers."""
    if not isinstance(content, bytes):
        raise Damaged("expected the bytes of a tensor's storage")
    if content.startswith(_ZIP):
        raise Refused("a zip archive, nested in a tensor's storage")
    file = io.BytesIO(content[:_HEADER])
    try:
        found = [
            Machine({}, _STORAGE_CLASSES, _set_state, lambda itself: itself, budget).load(file)
            for _ in range(5)
        ]
    except Refused as error:
        raise Refused(f"{error}, nested in a tensor's storage") from None
    match found:
        case [magic, 1001, dict(), ("storage", Name(text), _, str(), int(), None), list()] if (
            magic == _MAGIC
        ):
            kind = text.removeprefix("torch.").removesuffix("Storage")
        case _:
            raise Damaged("expected a tensor's storage")
    numbers = np.dtype(_STORAGES[kind])
    (count,) = struct.unpack_from("<q", content, file.tell())
    start = file.tell() + 8
    if count < 0 or count * numbers.itemsize != len(content) - start:
        raise Damaged(f"a tensor's storage of {count} numbers has {len(content) - start} bytes")
    return _Storage(kind, np.frombuffer(content, numbers, count, start))


def _set_state(target: object, state: object) -> None:
    if isinstance(target, _Dtype):
        target.set(state)
    elif isinstance(target, _Instance) and isinstance(state, dict):
        target.state = state
    else:
        raise Damaged("expected a dict of fields")


def _no_hooks() -> dict[str, object]:
    """``collections.OrderedDict``, of the hooks of a tensor, which has none."""
    return {}


def _not_here(_: object) -> object:
    raise Refused("a persistent id, an object outside the record")


_STORAGE_CLASSES = {f"torch.{kind}Storage": _Instance for kind in _STORAGES}
_CLASSES: dict[str, Callable[[], object]] = {
    "torch_geometric.data.data.Data": _Data,
    "torch_geometric.data.storage.GlobalStorage": _Instance,
    "torch_geometric.data.storage.BaseStorage": _Instance,
    "torch_geometric.data.data.DataEdgeAttr": _Instance,
    "torch_geometric.data.data.DataTensorAttr": _Instance,
}


def _load(content: bytes) -> object:
    """The object of a pickle, of inert parts."""
    budget = iter(range(_MOST_STEPS))
    calls: dict[str, Callable[..., object]] = {
        "collections.OrderedDict": _no_hooks,
        "torch._utils._rebuild_tensor_v2": _view,
        "torch.storage._load_from_bytes": partial(_storage, budget),
        "numpy.dtype": _Dtype,
        "numpy.core.multiarray.scalar": _scalar,
        "numpy._core.multiarray.scalar": _scalar,
    }
    return Machine(calls, _CLASSES, _set_state, _not_here, budget).load(io.BytesIO(content))


def _fields(content: bytes) -> dict[str, _Field]:
    data = _load(content)
    if not isinstance(data, _Data):
        raise Damaged(f"got {type(data).__name__.strip('_')}")
    fields: object = data.state
    store = data.state.get("_store")
    if isinstance(store, _Instance):  # PyG >= 2 keeps the fields one level down
        fields = store.state.get("_mapping")
    if not isinstance(fields, dict):
        raise Damaged("got no fields")
    views = [value for value in fields.values() if isinstance(value, _View)]
    if sum(math.prod(v.size) * v.storage.numbers.itemsize for v in views) > len(content):
        raise Damaged("its tensors share numbers")
    found = {
        key: value.tensor() if isinstance(value, _View) else value for key, value in fields.items()
    }
    for name in (
        *_FIELDS,
        *_SINGLE_POINT,
        "sid",
        "natoms",
    ):  # left out, a label would be taken for absent
        if not isinstance(found.get(name), _Field | None):
            raise Damaged(f"{name} must be a tensor or a number; got {type(found[name]).__name__}")
    return {key: value for key, value in found.items() if isinstance(value, _Field)}


def _decode_record(content: bytes, where: str) -> dict[str, _Field]:
    """Fields of one pickled ``torch_geometric.data.Data``, of PyG 1.x or later.

    Args:
        content: the pickle.
        where: file and key, for the messages.

    Returns:
        Field name -> tensor, number or string, without the fields that are None.

    Raises:
        ValueError: if the record is damaged, is something else, or names anything beyond tensors
            and plain numbers; the message says what, and none of it has been run.
    """
    return _guarded(_fields, content, where, "a pickled torch_geometric Data")


def _decode_count(content: bytes, where: str) -> int:
    """A pickled whole number, such as the ``length`` of an LMDB; ValueError for anything else."""
    return _guarded(_count, content, where, "a pickled whole number")


def _count(content: bytes) -> int:
    value = _load(content)
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise Damaged(f"got {type(value).__name__}")
    if not 0 <= value < 2**63:
        raise Damaged("got one that is negative or has more than 63 bits")
    return int(value)


def _guarded(read: Callable[[bytes], _T], content: bytes, where: str, expected: str) -> _T:
    try:
        return read(content)
    except Refused as error:
        raise ValueError(
            f"{where}: refused to read the pickle: it wants {error}; expected {expected} of "
            "tensors and plain numbers; nothing was run, do not use this file"
        ) from None
    except Exception as error:  # a damaged pickle fails in as many ways as there are opcodes
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ValueError(
            f"{where}: cannot be read; expected {expected}; {reason}; the file is damaged or of "
            "another kind"
        ) from None
