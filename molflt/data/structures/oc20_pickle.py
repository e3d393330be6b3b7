"""Reader for OC20's pickled records that does not run code from them.

Python's unpickler gets inert objects of this module for the names on an allow-list.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

_T = TypeVar("_T")
_Field: TypeAlias = Tensor | np.number | np.bool_ | int | float | str
_FIELDS = (
    "pos", "atomic_numbers", "cell", "pbc", "tags", "fixed", "y_init", "y_relaxed", "pos_relaxed"
)  # fmt: skip

_SINGLE_POINT = {"y": "energy", "force": "forces"}  # names of labels at `pos` in S2EF

_MAGIC = 0x1950A86A20F9469CFC6C  # magic number of a tensor's storage in torch's older format
_STORAGES = {  # name in torch -> type in numpy
    "Float": "<f4", "Double": "<f8", "Half": "<f2", "BFloat16": "<i2", "Long": "<i8", "Int": "<i4",
    "Short": "<i2", "Char": "|i1", "Byte": "|u1", "Bool": "|u1",
    "ComplexFloat": "<c8", "ComplexDouble": "<c16",
}  # fmt: skip


class _Refused(Exception):
    """Raised if a pickle needs a name outside the allow-list."""


class _Instance:
    """State of an object of PyG."""

    state: object = None


class _Data(_Instance):
    pass


class _Dtype(_Instance):
    """Replaces ``numpy.dtype`` for plain numbers; its state contains the byte order."""

    def __init__(self, code: object, align: object = False, copy: object = True) -> None:
        if not isinstance(code, str) or not re.fullmatch(r"[<>|=]?([iu][1248]|f[248]|b1)", code):
            raise ValueError("expected the dtype of a plain number")
        self.code = code

    @property
    def kind(self) -> np.dtype[Any]:
        match self.state:
            case None:
                return np.dtype(self.code)
            case (_, "<" | ">" | "|" | "=" as order, *_):
                return np.dtype(self.code).newbyteorder(order)
        raise ValueError("expected a byte order in a dtype")


class _Storage(NamedTuple):
    """Values of tensors, read from the bytes of the record."""

    kind: str
    numbers: np.ndarray


def _scalar(dtype: _Dtype, content: bytes) -> np.generic:
    """Replaces ``numpy.core.multiarray.scalar`` for plain numbers."""
    (value,) = np.frombuffer(content, dtype.kind)
    return cast("np.generic", value)


def _tensor(
    storage: _Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_hooks: object
) -> Tensor:
    """Replaces ``torch._utils._rebuild_tensor_v2``; checks bounds and ignores hooks."""
    if not isinstance(storage, _Storage):
        raise ValueError("expected the storage of a tensor")
    kind, numbers = storage
    if not all(type(n) is int and n >= 0 for n in (offset, *size, *stride)):
        raise ValueError("expected the sizes and strides of a tensor")
    extent = sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1
    if 0 not in size and offset + extent > len(numbers):
        raise ValueError(f"a tensor reaches beyond its {len(numbers)} numbers")
    if math.prod(size) > len(numbers):
        raise ValueError(f"a tensor repeats its {len(numbers)} numbers")
    steps = [step * numbers.itemsize for step in stride]
    shown = np.lib.stride_tricks.as_strided(numbers[offset:], size, steps)
    tensor = torch.from_numpy(shown.copy())
    if kind == "BFloat16":
        return tensor.view(torch.bfloat16)
    return tensor.bool() if kind == "Bool" else tensor


def _no_hooks() -> dict[str, object]:
    """Replaces ``collections.OrderedDict`` for the hooks of a tensor."""
    return {}


def _build(reader: Any) -> None:
    """Sets the state of an instance; nothing else can be changed."""
    state = reader.stack.pop()
    if not isinstance(reader.stack[-1], _Instance):
        raise ValueError("it changes an immutable object")
    reader.stack[-1].state = state


class _Reader(pickle._Unpickler):
    """Unpickler in Python, because a pickle can make the memo of the one in C arbitrarily large."""

    dispatch = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _build}  # noqa: RUF012

    def __init__(self, file: io.BytesIO, names: Mapping[str, object]) -> None:
        super().__init__(file)
        self.names = names

    def find_class(self, module: str, name: str) -> Any:
        if (text := f"{module}.{name}") not in self.names:
            raise _Refused(f"the global {text[:200]}")
        return self.names[text]

    def persistent_load(self, pid: object) -> object:
        return pid  # the description of a storage


_STORAGE_NAMES = {f"torch.{kind}Storage": kind for kind in _STORAGES}


def _storage(content: bytes) -> _Storage:
    """Replaces ``torch.storage._load_from_bytes``: reads five pickles, a count, and numbers."""
    file = io.BytesIO(content)
    try:
        found = [_Reader(file, _STORAGE_NAMES).load() for _ in range(5)]
    except _Refused as error:
        raise _Refused(f"{error}, nested in the storage of a tensor") from None
    match found:
        case [magic, 1001, dict(), ("storage", str(kind), _, str(), int(), None), list()] if (
            magic == _MAGIC
        ):
            numbers = np.dtype(_STORAGES[kind])
        case _:
            raise ValueError("expected a tensor's storage")
    (count,) = struct.unpack("<q", file.read(8))
    start = file.tell()
    if count * numbers.itemsize != len(content) - start:
        raise ValueError(f"a tensor's storage of {count} numbers has {len(content) - start} bytes")
    return _Storage(kind, np.frombuffer(content, numbers, count, start))


_NAMES: dict[str, object] = {
    "torch_geometric.data.data.Data": _Data,
    "torch_geometric.data.storage.GlobalStorage": _Instance,
    "torch_geometric.data.storage.BaseStorage": _Instance,
    "torch_geometric.data.data.DataEdgeAttr": _Instance,
    "torch_geometric.data.data.DataTensorAttr": _Instance,
    "collections.OrderedDict": _no_hooks,
    "torch.storage._load_from_bytes": _storage,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "numpy.dtype": _Dtype,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
}


def _fields(content: bytes) -> dict[str, _Field]:
    data = _Reader(io.BytesIO(content), _NAMES).load()
    if not isinstance(data, _Data):
        raise ValueError(f"got {type(data).__name__.strip('_')}")
    match data.state:
        case {"_store": _Instance(state={"_mapping": dict(fields)})} | dict(fields):
            pass  # PyG >= 2 stores the fields one level deeper
        case _:
            raise ValueError("got no fields")
    for name in (*_FIELDS, *_SINGLE_POINT, "sid", "natoms"):
        if not isinstance(fields.get(name), _Field | None):  # otherwise a label would seem absent
            raise ValueError(
                f"{name} must be a tensor or a number; got {type(fields[name]).__name__}"
            )
    return {key: value for key, value in fields.items() if isinstance(value, _Field)}


def _decode_record(content: bytes, where: str) -> dict[str, _Field]:
    """Returns the fields of a pickled ``torch_geometric.data.Data`` that are not None."""
    return _guarded(_fields, content, where, "a pickled torch_geometric Data")


def _decode_count(content: bytes, where: str) -> int:
    """Returns a pickled integer, such as the ``length`` of an LMDB."""
    return _guarded(_count, content, where, "a pickled whole number")


def _count(content: bytes) -> int:
    value = _Reader(io.BytesIO(content), _NAMES).load()
    if not isinstance(value, int | np.integer) or not 0 <= value < 2**63:
        raise ValueError("got another object")
    return int(value)


def _guarded(read: Callable[[bytes], _T], content: bytes, where: str, expected: str) -> _T:
    try:
        return read(content)
    except _Refused as error:
        raise ValueError(
            f"{where}: refused to read the pickle: it needs {error}; expected {expected} of "
            "tensors and plain numbers; no code was run; do not use this file"
        ) from None
    except Exception as error:  # a damaged pickle can raise anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ValueError(
            f"{where}: cannot be read; expected {expected}; {reason}; the file is damaged or has "
            "another format"
        ) from None
