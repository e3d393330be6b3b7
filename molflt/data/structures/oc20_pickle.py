"""Reader of OC20's pickled records that does not run code from them.

Python's unpickler follows an allow-list of instructions, and each allowed name becomes an inert
object of this module. Time and memory are bounded by the size of the record.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

_T = TypeVar("_T")
_Field: TypeAlias = Tensor | np.number | np.bool_ | int | float | str
_FIELDS = (
    "pos", "atomic_numbers", "cell", "pbc", "tags", "fixed", "y_init", "y_relaxed", "pos_relaxed"
)  # fmt: skip

_SINGLE_POINT = {"y": "energy", "force": "forces"}  # S2EF's names for labels at `pos`

_MOST_READS = 200_000  # each instruction takes one to three; OC20's records have about 300
_HEADER = 4096  # bytes; the header of a tensor has about 500
_ZIP = b"PK\x03\x04"
_MOST_AXES = 8
_MAGIC = 0x1950A86A20F9469CFC6C  # magic number of a tensor's storage in torch's older format
_STORAGES = {  # name in torch -> numpy's type of its numbers
    "Float": "<f4", "Double": "<f8", "Half": "<f2", "BFloat16": "<i2", "Long": "<i8", "Int": "<i4",
    "Short": "<i2", "Char": "|i1", "Byte": "|u1", "Bool": "|u1",
    "ComplexFloat": "<c8", "ComplexDouble": "<c16",
}  # fmt: skip


class _Refused(ValueError):
    """A pickle needs something outside the allow-list."""


class _Damaged(ValueError):
    """A pickle is damaged, or not a record."""


class _Instance:
    """An object of PyG: its state, without behavior."""

    state: object = None


class _Data(_Instance):
    pass


class _Dtype(_Instance):
    """``numpy.dtype`` of a plain number; its state holds the byte order."""

    def __init__(self, code: object, align: object = False, copy: object = True) -> None:
        if not isinstance(code, str) or not re.fullmatch(r"[<>|=]?([iu][1248]|f[248]|b1)", code):
            raise _Damaged("expected the dtype of a plain number")
        self.code = code

    @property
    def kind(self) -> np.dtype[Any]:
        match self.state:
            case None:
                return np.dtype(self.code)
            case (_, "<" | ">" | "|" | "=" as order, *_):
                return np.dtype(self.code).newbyteorder(order)
        raise _Damaged("expected a byte order in a dtype")


class _Storage(NamedTuple):
    """Numbers of tensors in the bytes of the record."""

    kind: str
    numbers: np.ndarray


class _View(NamedTuple):
    """A tensor in a storage: offset, size and stride."""

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
        raise _Damaged("expected a numpy scalar of a plain number")
    if len(content) != dtype.kind.itemsize:
        raise _Damaged(f"a numpy {dtype.kind} scalar has {len(content)} bytes")
    value: np.generic = np.frombuffer(content, dtype.kind)[0]
    return value


def _view(storage: object, offset: object, size: object, stride: object, *_hooks: object) -> _View:
    """``torch._utils._rebuild_tensor_v2`` within the bounds of the storage and without hooks."""
    if not isinstance(storage, _Storage):
        raise _Damaged("expected the storage of a tensor")
    sizes, steps = _counts(size), _counts(stride)
    (first,) = _counts((offset,))
    if len(sizes) != len(steps) or len(sizes) > _MOST_AXES:
        raise _Damaged(f"a tensor has {len(sizes)} sizes and {len(steps)} strides")
    held = len(storage.numbers)
    extent = sum((n - 1) * step for n, step in zip(sizes, steps, strict=True)) + 1
    if 0 not in sizes and first + extent > held:
        raise _Damaged(f"a tensor reaches beyond its {held} numbers")
    repeats = any(n > 1 and step == 0 for n, step in zip(sizes, steps, strict=True))
    if 0 not in sizes and (repeats or math.prod(sizes) > held):
        raise _Damaged(f"a tensor repeats its {held} numbers")
    return _View(storage, first, sizes, steps)


def _counts(value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(n) is int and 0 <= n < 2**63 for n in value):
        raise _Damaged("expected the sizes and strides of a tensor")
    return cast("tuple[int, ...]", value)


def _no_hooks() -> dict[str, object]:
    """``collections.OrderedDict`` of the hooks of a tensor."""
    return {}


def _made(cls: object, base: object, state: object) -> _Instance:
    """``copyreg._reconstructor``, which makes objects in protocols 0 and 1."""
    if not isinstance(cls, type) or (base, state) != ("object", None):
        raise _Damaged("it makes an object of no class")
    made: _Instance = cls()
    return made


class _Bytes(io.BytesIO):
    """Bytes that can be read a limited number of times."""

    def __init__(self, content: bytes, reads: Iterator[int]) -> None:
        super().__init__(content)
        self.reads = reads

    def read(self, size: int | None = -1) -> bytes:
        if next(self.reads, None) is None:
            raise _Damaged("it has too many instructions")
        return super().read(size)


class _Instructions(dict[int, Callable[[Any], None]]):
    def __missing__(self, code: int) -> Callable[[Any], None]:
        raise _Damaged(f"it has the instruction {bytes([code])!r}")


def _call(reader: Any) -> None:
    arguments, function = reader.stack.pop(), reader.stack.pop()
    if not isinstance(arguments, tuple) or len(arguments) > _MOST_AXES:
        raise _Damaged("it calls something with other arguments")
    reader.stack.append(function(*arguments))


def _build(reader: Any) -> None:
    state = reader.stack.pop()
    if not isinstance(reader.stack[-1], _Instance):
        raise _Damaged("it changes something that cannot change")
    reader.stack[-1].state = state


def _set_items(reader: Any, items: list[object]) -> None:
    # nested tuples could take forever to hash
    if not isinstance(reader.stack[-1], dict) or not all(isinstance(k, str) for k in items[::2]):
        raise _Damaged("expected a dict with text as keys")
    reader.stack[-1].update(zip(items[::2], items[1::2], strict=True))


def _dict(reader: Any) -> None:
    items = reader.pop_mark()
    reader.stack.append({})
    _set_items(reader, items)


_AS_IN_PYTHON = """PROTO STOP MARK NONE NEWTRUE NEWFALSE INT LONG LONG1 LONG4 BININT BININT1 BININT2
FLOAT BINFLOAT UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8
EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 LIST APPEND APPENDS PUT BINPUT
LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL BINPERSID"""
_OTHERS: dict[str, Callable[[Any], None]] = {
    "FRAME": lambda reader: reader.read(8),  # read size; does not affect the result
    "REDUCE": _call,
    "NEWOBJ": _call,
    "BUILD": _build,
    "DICT": _dict,
    "SETITEM": lambda reader: _set_items(reader, [reader.stack.pop(-2), reader.stack.pop()]),
    "SETITEMS": lambda reader: _set_items(reader, reader.pop_mark()),
}


class _Reader(pickle._Unpickler):
    """The unpickler written in Python, whose memo uses only the memory that it needs.

    Args:
        file: file at the start of the pickle.
        names: name in the pickle -> its substitute.
        refer: function that returns the substitute of an object outside the pickle.
    """

    dispatch = _Instructions()

    def __init__(
        self, file: _Bytes, names: Mapping[str, object], refer: Callable[[object], object]
    ) -> None:
        super().__init__(file)
        self.names, self.refer = names, refer

    def find_class(self, module: str, name: str) -> Any:
        if (text := f"{module}.{name}") not in self.names:
            raise _Refused(f"the global {text[:200]}")
        return self.names[text]

    def persistent_load(self, pid: object) -> object:
        return self.refer(pid)


for _code in [getattr(pickle, name)[0] for name in _AS_IN_PYTHON.split()]:
    _Reader.dispatch[_code] = pickle._Unpickler.dispatch[_code]
_Reader.dispatch.update((getattr(pickle, name)[0], follow) for name, follow in _OTHERS.items())


def _outside(_: object) -> object:
    raise _Refused("a persistent id, an object outside the record")


_NAMES: dict[str, object] = {
    "torch_geometric.data.data.Data": _Data,
    "torch_geometric.data.storage.GlobalStorage": _Instance,
    "torch_geometric.data.storage.BaseStorage": _Instance,
    "torch_geometric.data.data.DataEdgeAttr": _Instance,
    "torch_geometric.data.data.DataTensorAttr": _Instance,
    "copy_reg._reconstructor": _made,
    "__builtin__.object": "object",
    "collections.OrderedDict": _no_hooks,
    "torch._utils._rebuild_tensor_v2": _view,
    "numpy.dtype": _Dtype,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
}
_STORAGE_NAMES = {f"torch.{kind}Storage": kind for kind in _STORAGES}


def _storage(reads: Iterator[int], content: object) -> _Storage:
    """``torch.storage._load_from_bytes``: five small pickles, a count, and the numbers."""
    if not isinstance(content, bytes):
        raise _Damaged("expected the bytes of a tensor's storage")
    if content.startswith(_ZIP):
        raise _Refused("a zip archive, nested in a tensor's storage")
    file = _Bytes(content[:_HEADER], reads)
    try:
        found = [_Reader(file, _STORAGE_NAMES, lambda itself: itself).load() for _ in range(5)]
    except _Refused as error:
        raise _Refused(f"{error}, nested in a tensor's storage") from None
    match found:
        case [magic, 1001, dict(), ("storage", str(kind), _, str(), int(), None), list()] if (
            magic == _MAGIC
        ):
            numbers = np.dtype(_STORAGES[kind])
        case _:
            raise _Damaged("expected a tensor's storage")
    start = file.tell() + 8
    (count,) = struct.unpack_from("<q", content, start - 8)
    if count < 0 or count * numbers.itemsize != len(content) - start:
        raise _Damaged(f"a tensor's storage of {count} numbers has {len(content) - start} bytes")
    return _Storage(kind, np.frombuffer(content, numbers, count, start))


def _load(content: bytes) -> object:
    """Loads a pickle as an object of inert parts."""
    reads, left = iter(range(_MOST_READS)), len(content)

    def encoded(text: object, encoding: object) -> bytes:  # bytes in protocols 0 to 2
        nonlocal left
        if not isinstance(text, str) or encoding != "latin1":
            raise _Damaged("expected bytes as latin1")
        left -= len(text)
        if left < 0:
            raise _Damaged("it encodes the same text several times")
        return text.encode("latin1")

    calls = {
        "_codecs.encode": encoded,
        "torch.storage._load_from_bytes": partial(_storage, reads),
    }
    return _Reader(_Bytes(content, reads), _NAMES | calls, _outside).load()


def _fields(content: bytes) -> dict[str, _Field]:
    data = _load(content)
    if not isinstance(data, _Data):
        raise _Damaged(f"got {type(data).__name__.strip('_')}")
    match data.state:
        case {"_store": _Instance(state={"_mapping": dict(fields)})} | dict(fields):
            pass  # PyG >= 2 keeps the fields one level down
        case _:
            raise _Damaged("got no fields")
    views = [value for value in fields.values() if isinstance(value, _View)]
    if sum(math.prod(v.size) * v.storage.numbers.itemsize for v in views) > len(content):
        raise _Damaged("its tensors share numbers")
    found = {
        key: value.tensor() if isinstance(value, _View) else value for key, value in fields.items()
    }
    for name in (*_FIELDS, *_SINGLE_POINT, "sid", "natoms"):
        if not isinstance(found.get(name), _Field | None):  # otherwise a label would seem absent
            raise _Damaged(f"{name} must be a tensor or a number; got {type(found[name]).__name__}")
    return {key: value for key, value in found.items() if isinstance(value, _Field)}


def _decode_record(content: bytes, where: str) -> dict[str, _Field]:
    """Returns the fields of one pickled ``torch_geometric.data.Data``, of PyG 1.x or later.

    Fields that are None are omitted. Raises ValueError for names other than tensors and plain
    numbers, and for damaged records.
    """
    return _guarded(_fields, content, where, "a pickled torch_geometric Data")


def _decode_count(content: bytes, where: str) -> int:
    """Returns a pickled integer, such as the ``length`` of an LMDB; ValueError for anything
    else."""
    return _guarded(_count, content, where, "a pickled whole number")


def _count(content: bytes) -> int:
    value = _load(content)
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise _Damaged(f"got {type(value).__name__}")
    if not 0 <= value < 2**63:
        raise _Damaged("got one that is negative or has more than 63 bits")
    return int(value)


def _guarded(read: Callable[[bytes], _T], content: bytes, where: str, expected: str) -> _T:
    try:
        return read(content)
    except _Refused as error:
        raise ValueError(
            f"{where}: refused to read the pickle: it wants {error}; expected {expected} of "
            "tensors and plain numbers; nothing was run, do not use this file"
        ) from None
    except Exception as error:  # a damaged pickle can raise anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ValueError(
            f"{where}: cannot be read; expected {expected}; {reason}; the file is damaged or of "
            "another kind"
        ) from None
