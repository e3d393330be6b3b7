"""Reading OC20's pickled records without running anything that is in the file.

A pickle is a program. The reader below knows the few names an OC20 record needs and maps each to
an object of this module that holds data and does nothing else; every other name ends the reading.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import NoReturn, TypeAlias

import numpy as np
import torch
from torch import Tensor

_Field: TypeAlias = Tensor | np.number | np.bool_ | int | float | str


class _Inert:
    """Stand-in for PyG's Data and storage classes: keeps the state it is given, has no behaviour.

    Without a ``__dict__`` a pickle cannot plant a hook on an instance, and because the class has
    ``__setstate__`` the pickle's BUILD never sets attributes, be it on an instance or the class.
    """

    __slots__ = ("state",)
    state: dict[object, object]

    def __new__(cls) -> _Inert:
        self = super().__new__(cls)
        self.state = {}
        return self

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, dict):
            raise pickle.UnpicklingError(f"expected a dict of fields; got {type(state).__name__}")
        self.state = state


class _Data(_Inert):
    __slots__ = ()


class _Storage(_Inert):
    __slots__ = ()


class _Attribute(_Inert):
    __slots__ = ()


class _Dtype:
    """Stand-in for ``numpy.dtype`` of a plain number."""

    __slots__ = ("code",)
    code: str

    def __new__(cls, code: object, *_: object) -> _Dtype:
        if not isinstance(code, str) or not re.fullmatch(r"[<>|=]?([iu][1248]|f[248]|b1)", code):
            raise pickle.UnpicklingError(f"expected the dtype of a plain number; got {code!r}")
        self = super().__new__(cls)
        self.code = code
        return self

    def __setstate__(self, state: object) -> None:
        order = state[1] if isinstance(state, tuple) and len(state) > 1 else None
        if order not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError(f"expected a byte order in a dtype; got {order!r}")
        self.code = order + self.code.lstrip("<>|=")


class _Function:
    """Base of the callables; instances have no ``__dict__`` to tamper with."""

    __slots__ = ()


class _Scalar(_Function):
    """``numpy.core.multiarray.scalar`` for plain numbers."""

    __slots__ = ()

    def __call__(self, dtype: object, content: object) -> np.generic:
        if not isinstance(dtype, _Dtype) or not isinstance(content, bytes):
            raise pickle.UnpicklingError("expected a numpy scalar of a plain number")
        kind = np.dtype(dtype.code)
        if len(content) != kind.itemsize:
            raise pickle.UnpicklingError(f"a numpy {kind} scalar has {len(content)} bytes")
        value: np.generic = np.frombuffer(content, kind)[0]
        return value


class _LoadFromBytes(_Function):
    """``torch.storage._load_from_bytes``, which itself unpickles: restricted to weights."""

    __slots__ = ()

    def __call__(self, content: object) -> torch.storage.TypedStorage:
        if not isinstance(content, bytes):
            raise pickle.UnpicklingError("expected the bytes of a tensor's storage")
        try:
            with io.BytesIO(content) as file:
                storage = torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            named = re.search(r"GLOBAL ([\w.]+\.[\w.]+)", str(error))
            name = named.group(1) if named else _first_global(content)
            raise _Refused(f"the global {name}, nested in a tensor's storage") from None
        if not isinstance(storage, torch.storage.TypedStorage):
            raise pickle.UnpicklingError(
                f"expected a tensor's storage; got {type(storage).__name__}"
            )
        return storage


class _RebuildTensor(_Function):
    """``torch._utils._rebuild_tensor_v2`` that stays inside the storage and takes no hooks."""

    __slots__ = ()

    def __call__(
        self, storage: object, offset: int, size: Sequence[int], stride: Sequence[int], *_: object
    ) -> Tensor:
        if not isinstance(storage, torch.storage.TypedStorage):
            raise pickle.UnpicklingError(f"a tensor on {type(storage).__name__}, not a storage")
        numbers = [offset, *size, *stride]
        if len(size) != len(stride) or any(type(n) is not int or n < 0 for n in numbers):
            raise pickle.UnpicklingError(f"a tensor of size {size} and stride {stride}")
        extent = sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1
        content = storage._untyped_storage  # the public accessor warns of TypedStorage itself
        held = content.nbytes() // storage.dtype.itemsize
        # set_ would enlarge the storage and show memory that is not the file's
        if 0 not in size and offset + extent > held:
            raise pickle.UnpicklingError(
                f"a tensor of size {tuple(size)} reaches beyond its {held} numbers"
            )
        return torch.empty(0, dtype=storage.dtype).set_(content, offset, size, stride)


_ALLOWED: dict[tuple[str, str], object] = {
    ("torch_geometric.data.data", "Data"): _Data,
    ("torch_geometric.data.storage", "GlobalStorage"): _Storage,
    ("torch_geometric.data.storage", "BaseStorage"): _Storage,
    ("torch_geometric.data.data", "DataEdgeAttr"): _Attribute,
    ("torch_geometric.data.data", "DataTensorAttr"): _Attribute,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _RebuildTensor(),
    ("torch.storage", "_load_from_bytes"): _LoadFromBytes(),
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "scalar"): _Scalar(),
    ("numpy._core.multiarray", "scalar"): _Scalar(),
}


class _Refused(ValueError):
    """A pickle asks for something that is not on the list."""


class _RecordUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise _Refused(f"the global {module}.{name}") from None

    def persistent_load(self, pid: object) -> NoReturn:
        raise _Refused("a persistent id, an object outside the record")


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
    data = _unpickle(content, where, "a pickled torch_geometric Data")
    if not isinstance(data, _Data):
        raise ValueError(
            f"{where}: expected a pickled torch_geometric Data; got {type(data).__name__}"
        )
    fields: object = data.state
    store = data.state.get("_store")
    if isinstance(store, _Storage):  # PyG >= 2 keeps the fields one level down
        fields = store.state.get("_mapping", {})
    return {
        key: value
        for key, value in (fields.items() if isinstance(fields, dict) else ())
        if isinstance(key, str) and isinstance(value, _Field)
    }


def _decode_count(content: bytes, where: str) -> int:
    """A pickled whole number, such as the ``length`` of an LMDB; ValueError for anything else."""
    value = _unpickle(content, where, "a pickled whole number")
    if not isinstance(value, int | np.integer) or value < 0:
        raise ValueError(f"{where}: expected a pickled whole number; got {type(value).__name__}")
    return int(value)


def _unpickle(content: bytes, where: str, expected: str) -> object:
    try:
        return _RecordUnpickler(io.BytesIO(content)).load()
    except _Refused as error:
        raise ValueError(
            f"{where}: refused to read the pickle: it wants {error}; expected {expected} of "
            "tensors and plain numbers; nothing was run, do not use this file"
        ) from None
    except Exception as error:  # a damaged pickle fails in as many ways as there are opcodes
        raise ValueError(
            f"{where}: cannot be read; expected {expected}; {_first_line(error)}; "
            "the file is damaged or of another kind"
        ) from None


def _first_global(content: bytes) -> str:
    """Name that a pickle looks up first, for a message; found without running the pickle."""
    strings = [""]
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name == "GLOBAL":
                return str(argument).replace(" ", ".")
            if opcode.name == "STACK_GLOBAL":
                return ".".join(strings[-2:])
            if isinstance(argument, str):
                strings.append(argument)
    except ValueError:
        pass
    return "(unnamed)"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
