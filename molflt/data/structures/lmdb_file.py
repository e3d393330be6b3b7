"""Reader for LMDB files without the LMDB library, which can crash on a damaged page.

The format is described in mdb.c of LMDB 0.9 (https://git.openldap.org/openldap/openldap), from the
section "Page headers" onward. Offsets beyond the end of the file raise ValueError.
"""

import mmap
import struct
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_HEADER = struct.Struct("<QHHHH")  # page number, padding, flags, ends of pointers and of free space
_TABLE = struct.Struct("<IHHQQQQQ")  # page size, flags, depth, pages of 3 kinds, entries, root
_META = struct.Struct("<II16x")  # magic, version; then the address and size of the map
_NODE = struct.Struct("<HHHH")  # two parts of a size or page number, flags, size of the key
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE = 1, 2, 4, 8
_DIRTY = 0x10  # flag that writers may leave on a page
_BIG = 1  # flag: the value of a node is in separate pages
_NO_PAGE = 2**64 - 1
_BROKEN = (ValueError, struct.error, OverflowError)  # raised for damaged pages


class _Root(NamedTuple):
    """Root of the table, from the newer of the two meta pages."""

    page_size: int
    depth: int
    entries: int
    root: int  # page number
    last_page: int


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
        expected = (self._root.last_page + 1) * self._root.page_size
        if size < expected:
            raise ValueError(
                f"{path}: truncated LMDB; expected {expected} bytes; got {size}; download "
                "or copy it again"
            )

    def __len__(self) -> int:
        return self._root.entries

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path}  # each process maps the file itself

    def get(self, key: bytes) -> bytes | None:
        """Returns the value of a key; None if the key does not exist."""
        try:
            return self._find(key)
        except _BROKEN as error:
            raise ValueError(f"{self.path}: key {key.decode()!r}: {_damaged(error)}") from None

    def __iter__(self) -> Iterator[bytes]:
        """Yields all keys in order."""
        try:
            yield from self._keys_below(self._root.root, 1, set())
        except _BROKEN as error:
            raise ValueError(f"{self.path}: {_damaged(error)}") from None

    @cached_property
    def _content(self) -> mmap.mmap:
        with open(self.path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @cached_property
    def _root(self) -> _Root:
        first = self._meta(0)
        second = first and self._meta(first[1].page_size)
        if not first or not second:
            raise ValueError(
                f"{self.path}: expected an LMDB file; got {len(self._content)} bytes with a "
                "different beginning; download or copy the file again"
            )
        return max(first, second, key=lambda meta: meta[0])[1]  # if equal, the first, as in LMDB

    def _meta(self, page: int) -> tuple[int, _Root] | None:
        """Reads the transaction number and the root from a meta page; returns None if invalid."""
        content, start = self._content, page + _HEADER.size
        end = start + _META.size + 2 * _TABLE.size
        if len(content) < end + 16:
            return None
        flags = _HEADER.unpack_from(content, page)[2]
        if not flags & _META_PAGE or _META.unpack_from(content, start) != (_MAGIC, _VERSION):
            return None
        page_size = _TABLE.unpack_from(content, start + _META.size)[0]
        table = _TABLE.unpack_from(content, start + _META.size + _TABLE.size)
        last_page, transaction = struct.unpack_from("<QQ", content, end)
        _, flags, depth, _, _, _, entries, root = table
        if flags or entries > (last_page + 1) * page_size // _NODE.size:
            return None
        return transaction, _Root(page_size, depth, entries, root, last_page)

    def _page(self, number: int) -> tuple[int, int, int]:
        """Returns the offset of a page in the file, its kind, and its number of nodes."""
        size = self._root.page_size
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
        number = self._root.root
        if number == _NO_PAGE:
            return None
        for _ in range(self._root.depth):
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
        content, size = self._content, self._root.page_size
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
        if depth > self._root.depth or number in seen:
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
