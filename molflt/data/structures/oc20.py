"""LMDB files of pickled records, as OC20 publishes them, read without running code.

The LMDB library can crash on a damaged page. `LmdbFile` reads the format that is described in
mdb.c of LMDB 0.9 (https://git.openldap.org/openldap/openldap), from the section "Page headers"
onward; offsets beyond the end of the file raise ValueError. For names on an allow-list, Python's
unpickler receives inert objects from this module.
"""

import io
import itertools
import math
import mmap
import operator
import pickle
import re
import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from molflt.atoms import Data
from molflt.data.structures.ase_fields import charge_in
from molflt.data.structures.base import Structures, locate
from molflt.data.structures.records import make_record

_Storage: TypeAlias = tuple[str, np.ndarray]  # kind and values of tensors
_Field: TypeAlias = Tensor | np.number | np.bool_ | int | float | str
_FIELDS = (
    "pos", "atomic_numbers", "cell", "pbc", "tags", "fixed", "y_init", "y_relaxed", "pos_relaxed",
    "y_baseline", "charge", "energy", "forces", "stress",
)  # fmt: skip
# Labels at `pos`, by name in fairchem 1; ocp's names for S2EF, y and force, take precedence
_SINGLE_POINT = {
    "energy": "energy", "forces": "forces", "stress": "stress", "y": "energy", "force": "forces",
}  # fmt: skip
_S2EF = (
    "the energy and forces belong to single geometries, as in S2EF; expected IS2RE with y_relaxed, "
    "the energy after relaxation; train on these with --recipe potential"
)

_MAGIC = 0x1950A86A20F9469CFC6C  # magic number of a tensor's storage in torch's older format
_STORAGES = {  # name in torch -> type in numpy
    "Float": "<f4", "Double": "<f8", "Half": "<f2", "Long": "<i8", "Int": "<i4", "Short": "<i2",
    "Char": "|i1", "Byte": "|u1", "Bool": "|u1",
}  # fmt: skip

_LMDB = 0xBEEFC0DE, 1  # magic number and version of LMDB files
_HEADER = struct.Struct("<QHHHH")  # page number, padding, flags, ends of pointers and of free space
_TABLE = struct.Struct("<IHHQQQQQ")  # page size, flags, depth, pages of 3 kinds, entries, root
_META = struct.Struct("<II16x")  # magic, version; then the address and size of the map
_NODE = struct.Struct("<HHHH")  # two parts of a size or page number, flags, size of the key
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE = 1, 2, 4, 8
_DIRTY = 0x10  # flag that writers may leave on a page
_BIG = 1  # flag: the value of a node is in separate pages
_NO_PAGE = 2**64 - 1
_BROKEN = (ValueError, struct.error, OverflowError)  # raised for damaged pages


class _Node(NamedTuple):
    size: int  # of the value; in a branch, the lower 32 bits of the page number
    flags: int  # of the value; in a branch, the upper 16 bits of the page number
    key: bytes
    value: int  # offset of the value in the file

    @property
    def child(self) -> int:
        """Number of the page below a branch."""
        return self.size | self.flags << 32


class LmdbFile:
    """Unnamed table of an LMDB file, mapped to memory on first use in each process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        if size == 0:
            raise ValueError(
                f"{path}: the file is empty; expected an LMDB file; download or copy it again"
            )
        first = self._meta(0)
        second = first and self._meta(first[1])
        if not first or not second:
            raise ValueError(
                f"{path}: expected an LMDB file; got {size} bytes with a different beginning; "
                "download or copy the file again"
            )
        # if the transactions are equal, the first page counts, as in LMDB
        newest = max(first, second, key=operator.itemgetter(0))
        _, self._page_size, self._depth, self._entries, self._root, last_page = newest
        expected = (last_page + 1) * self._page_size
        if size < expected:
            raise ValueError(
                f"{path}: truncated LMDB; expected {expected} bytes; got {size}; download "
                "or copy it again"
            )

    def __len__(self) -> int:
        return self._entries

    def __getstate__(self) -> dict[str, object]:
        # each process maps the file itself
        return {name: value for name, value in vars(self).items() if name != "_content"}

    def get(self, key: bytes) -> bytes | None:
        """Returns the value of a key; None if the key does not exist."""
        try:
            return self._find(key)
        except _BROKEN as error:
            raise ValueError(f"{self.path}: key {key.decode()!r}: {_damaged(error)}") from None

    def __iter__(self) -> Iterator[bytes]:
        """Yields all keys in order."""
        try:
            yield from self._keys_below(self._root, 1, set())
        except _BROKEN as error:
            raise ValueError(f"{self.path}: {_damaged(error)}") from None

    @cached_property
    def _content(self) -> mmap.mmap:
        with open(self.path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def _meta(self, page: int) -> tuple[int, int, int, int, int, int] | None:
        """Reads the transaction, page size, depth, entries, root and last page; None if invalid."""
        content, start = self._content, page + _HEADER.size
        end = start + _META.size + 2 * _TABLE.size
        if len(content) < end + 16:
            return None
        flags = _HEADER.unpack_from(content, page)[2]
        if not flags & _META_PAGE or _META.unpack_from(content, start) != _LMDB:
            return None
        page_size = _TABLE.unpack_from(content, start + _META.size)[0]
        table = _TABLE.unpack_from(content, start + _META.size + _TABLE.size)
        last_page, transaction = struct.unpack_from("<QQ", content, end)
        _, flags, depth, _, _, _, entries, root = table
        if flags or entries > (last_page + 1) * page_size // _NODE.size:
            return None
        return transaction, page_size, depth, entries, root, last_page

    def _page(self, number: int) -> tuple[int, int, int]:
        """Returns the offset of a page in the file, its kind, and its number of nodes."""
        size = self._page_size
        start = number * size
        stored_number, _, flags, lower, _ = _HEADER.unpack_from(self._content, start)
        kind, nodes = flags & ~_DIRTY, (lower - _HEADER.size) // 2
        if stored_number != number or kind not in (_BRANCH, _LEAF) or not 0 < nodes <= size // 2:
            raise ValueError(f"page {number} does not contain keys")
        return start, kind, nodes

    def _node(self, start: int, index: int) -> _Node:
        """Reads a node of the page at offset `start`."""
        content = self._content
        (offset,) = struct.unpack_from("<H", content, start + _HEADER.size + 2 * index)
        low, high, flags, length = _NODE.unpack_from(content, start + offset)
        key = start + offset + _NODE.size
        return _Node(low | high << 16, flags, content[key : key + length], key + length)

    def _find(self, key: bytes) -> bytes | None:
        """Searches the tree for a key; returns its value, or None if the key does not exist."""
        number = self._root
        if number == _NO_PAGE:
            return None
        for _ in range(self._depth):
            start, kind, nodes = self._page(number)
            # last node whose key is at most `key`, or node 0, which covers all lower keys
            others = range(1, nodes)
            index = bisect_right(others, key, key=lambda i: self._node(start, i).key)
            node = self._node(start, index)
            if kind == _LEAF:
                return self._value(start, node) if node.key == key else None
            number = node.child
        raise ValueError("its tree is deeper than declared")

    def _value(self, start: int, node: _Node) -> bytes:
        """Returns the value of a node, in the page at `start` or, if it is big, in others."""
        content, size = self._content, self._page_size
        if node.flags == 0 and node.value + node.size <= start + size:
            return content[node.value : node.value + node.size]
        if node.flags != _BIG:
            raise ValueError(f"a value of page {start // size} is outside the page")
        (number,) = struct.unpack_from("<Q", content, node.value)
        begin = number * size + _HEADER.size
        stored_number, _, kind, _, _ = _HEADER.unpack_from(content, number * size)
        if stored_number != number or kind & ~_DIRTY != _OVERFLOW:
            raise ValueError(f"page {number} does not contain a value")
        return content[begin : begin + node.size]

    def _keys_below(self, number: int, depth: int, seen: set[int]) -> Iterator[bytes]:
        """Yields the keys in the subtree of a page; `seen` contains the pages visited so far."""
        if number == _NO_PAGE:
            return
        if depth > self._depth or number in seen:
            raise ValueError(f"page {number} occurs twice")
        seen.add(number)
        start, kind, nodes = self._page(number)
        for node in (self._node(start, index) for index in range(nodes)):
            if kind == _LEAF:
                yield node.key
            else:
                yield from self._keys_below(node.child, depth + 1, seen)


def _damaged(error: Exception) -> str:
    return f"the LMDB is damaged: {error}; download or copy the file again"


class _Instance:
    """State of a PyG object."""

    state: Any = None


class _Data(_Instance):
    pass


class _Dtype(_Instance):
    """Replaces ``numpy.dtype`` for plain numbers; its state contains the byte order."""

    def __init__(self, code: str, align: object = False, copy: object = True) -> None:
        self.code = code

    @property
    def kind(self) -> np.dtype[Any]:
        order: Any = "=" if self.state is None else self.state[1]
        return np.dtype(self.code).newbyteorder(order)


def _scalar(dtype: _Dtype, content: bytes) -> np.generic:
    """Replaces ``numpy.core.multiarray.scalar`` for plain numbers."""
    (value,) = np.frombuffer(content, dtype.kind)
    return cast("np.generic", value)


def _tensor(
    storage: _Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_hooks: object
) -> Tensor:
    """Replaces ``torch._utils._rebuild_tensor_v2``; ignores hooks. torch checks the bounds."""
    kind, numbers = storage
    if math.prod(size) > len(numbers):
        raise ValueError(f"a tensor repeats its {len(numbers)} numbers")
    tensor = torch.from_numpy(numbers.copy()).as_strided(size, stride, offset)
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.bool() if kind == "Bool" else tensor


def _build(reader: Any) -> None:
    """Sets the state of an instance; nothing else can be changed."""
    state = reader.stack.pop()
    if not isinstance(reader.stack[-1], _Instance):
        raise ValueError("it changes an immutable object")
    reader.stack[-1].state = state


class _Reader(pickle._Unpickler):
    """Pure-Python unpickler; a pickle could make the memo of the C unpickler arbitrarily large."""

    dispatch = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _build}  # noqa: RUF012

    def __init__(self, file: io.BytesIO, names: Mapping[str, object]) -> None:
        super().__init__(file)
        self.names = names

    def find_class(self, module: str, name: str) -> Any:
        if (text := f"{module}.{name}") not in self.names:
            raise ValueError(f"the pickle needs {text[:200]}, which is not on the allow-list")
        return self.names[text]

    def persistent_load(self, pid: object) -> object:
        return pid  # the description of a storage


_STORAGE_NAMES = {f"torch.{kind}Storage": kind for kind in _STORAGES}


def _storage(content: bytes) -> _Storage:
    """Replaces ``torch.storage._load_from_bytes``: reads five pickles, a length and the values."""
    file = io.BytesIO(content)
    match [_Reader(file, _STORAGE_NAMES).load() for _ in range(5)]:
        case [magic, 1001, dict(), ("storage", str(kind), _, str(), int(), None), list()] if (
            magic == _MAGIC
        ):
            numbers = np.dtype(_STORAGES[kind])
        case _:
            raise ValueError("expected a tensor's storage")
    (count,) = struct.unpack("<q", file.read(8))
    return kind, np.frombuffer(content, numbers, count, file.tell())


_NAMES: dict[str, object] = {
    "torch_geometric.data.data.Data": _Data,
    "torch_geometric.data.storage.GlobalStorage": _Instance,
    "torch_geometric.data.storage.BaseStorage": _Instance,
    "torch_geometric.data.data.DataEdgeAttr": _Instance,
    "torch_geometric.data.data.DataTensorAttr": _Instance,
    "collections.OrderedDict": dict,  # hooks of a tensor
    "torch.storage._load_from_bytes": _storage,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "_codecs.encode": lambda text, encoding: str.encode(text, "latin1"),  # bytes in protocol 2
    "numpy.dtype": _Dtype,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
}


def _decode_record(content: bytes, where: str) -> dict[str, _Field]:
    """Returns the tensors, numbers and texts of a pickled PyG Data by name."""
    with _unpickling(where, "a pickled torch_geometric Data"):
        data = _Reader(io.BytesIO(content), _NAMES).load()
        if not isinstance(data, _Data):
            raise ValueError(f"got {type(data).__name__.strip('_')}")
        match data.state:
            case {"_store": _Instance(state={"_mapping": dict(fields)})} | dict(fields):
                pass  # PyG >= 2 stores the fields one level deeper
            case _:
                raise ValueError("got no fields")
        for name in (*_FIELDS, *_SINGLE_POINT, "sid"):
            value = fields.get(name)
            if not isinstance(value, _Field | None):  # otherwise a label would seem absent
                raise ValueError(f"{name} must be a tensor or a number; got {type(value).__name__}")
    return {key: value for key, value in fields.items() if isinstance(value, _Field)}


def _declared_length(shard: LmdbFile) -> int | None:
    """Returns the number of records according to the key "length"; None without this key."""
    content = shard.get(b"length")
    if content is None:
        return None
    if re.fullmatch(rb"[0-9]{1,19}", content):
        return int(content)  # some writers store text instead of a pickle
    with _unpickling(f"{shard.path}: key 'length'", "a pickled integer"):
        return operator.index(_Reader(io.BytesIO(content), _NAMES).load())


@contextmanager
def _unpickling(where: str, expected: str) -> Iterator[None]:
    """Raises ValueError with the place of the pickle if the block fails."""
    try:
        yield
    except Exception as error:  # a damaged pickle can raise anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ValueError(
            f"{where}: cannot be read; expected {expected}; {reason}; the file may be damaged"
        ) from None


def shards_in(folder: Path) -> list[Path]:
    """Returns the LMDB files in a folder, or an empty list for a file."""
    shards = sorted(p for p in folder.glob("*.lmdb") if p.is_file())
    return shards or [p for p in (folder / "data.mdb",) if p.is_file()]


class Oc20Lmdb(Structures):
    """LMDB of pickled OC20 records: one file, or a folder of ``*.lmdb`` shards sorted by name.

    Reading takes about 2 ms per record. Convert to a compact store before training.

    With `skip_bad`, missing records are listed in `bad`; reading an invalid one raises an error.
    """

    kind = "OC20 LMDB"
    suffixes = (".lmdb", ".mdb")

    def __init__(self, path: str | Path, skip_bad: bool = False) -> None:
        super().__init__(path, skip_bad)
        self.shards = [LmdbFile(shard) for shard in shards_in(self.path) or [self.path]]
        self._keys = [self._record_keys(shard) for shard in self.shards]
        self._ends = np.cumsum([len(keys) for keys in self._keys])

    @classmethod
    def takes(cls, path: Path) -> bool:
        return bool(shards_in(path)) if path.is_dir() else super().takes(path)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Data:
        (shard, key), where = self._locate(index), self.where(index)
        content = shard.get(str(key).encode())
        if content is None:
            raise ValueError(f"{where}: missing")
        fields = _decode_record(content, where)
        if missing := [name for name in ("pos", "atomic_numbers") if name not in fields]:
            raise ValueError(
                f"{where}: expected pos, atomic_numbers, cell, ...; {missing[0]} is missing; "
                f"got {', '.join(sorted(fields)) or 'no fields'}"
            )
        arguments = {name: fields[name] for name in _FIELDS if name in fields}
        arguments |= self._points_in(fields)
        try:
            if (charge := charge_in(fields)) is not None:
                arguments["charge"] = charge
            return make_record(sid=fields.get("sid", key), **arguments)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    def where(self, index: int) -> str:
        shard, key = self._locate(index)
        return f"{shard.path}: key '{key}'"

    def _record_keys(self, shard: LmdbFile) -> range | list[int]:
        """Returns the integer keys of one shard; lists missing records or raises an error."""
        length = _declared_length(shard)
        try:
            keys = sorted(int(name) for name in shard if re.fullmatch(rb"0|[1-9]\d{,18}", name))
        except ValueError:  # the keys cannot be listed, but may be found one by one
            if not self.skip_bad:
                raise
            return range(min(len(shard), length or len(shard)))
        end = length  # key after the last record; None if unknown
        if end is None and keys and keys[0] == 0:
            end = keys[-1] + 1
        expected = [key for key in keys if end is None or key < end]
        around_gaps = [] if end is None else [-1, *expected, end]
        gaps = [(a + 1, b - 1) for a, b in itertools.pairwise(around_gaps) if b - a > 1]
        missing = [f"key '{a}'" if a == b else f"keys '{a}' to '{b}'" for a, b in gaps]
        if missing and not self.skip_bad:
            declared = "" if length is None else f"key 'length' says {length} records; "
            raise ValueError(
                f"{shard.path}: {declared}got {len(keys)}; {missing[0]} missing; download or copy "
                "the file again, or read the existing records with --skip-bad"
            )
        self.bad += [(f"{shard.path}: {name}", "missing") for name in missing]
        if self.skip_bad:
            return keys
        beyond = keys[len(expected) :]
        self.bad += [(f"{shard.path}: key '{key}'", "beyond 'length'") for key in beyond]
        return expected

    def _locate(self, index: int) -> tuple[LmdbFile, int]:
        shard, place = locate(self._ends, self._stored(index))
        return self.shards[shard], self._keys[shard][place]

    def _points_in(self, fields: Mapping[str, _Field]) -> dict[str, Any]:
        """Returns the labels at `pos`, None if absent, and updates `labels` and `hint`."""
        labels = {name: label for name, label in _SINGLE_POINT.items() if name in fields}
        sources: dict[str, str] = {}  # label -> name in the record
        if {"energy", "forces"} <= {*labels.values()}:  # IS2RE may have only forces
            sources = {label: name for name, label in labels.items()}
        if sources and "y_relaxed" not in fields:
            self._hint = _S2EF
        for name, label in labels.items():
            self.labels[name] = label if sources.get(label) == name else None
        return {name: fields.get(sources.get(name, "")) for name in _SINGLE_POINT.values()}
