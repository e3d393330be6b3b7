"""Packed files, read as far as they can be what they say they are."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["Unpacked", "unpacked"]

_UNPACK: dict[str, Callable[[BinaryIO], gzip.GzipFile | lzma.LZMAFile]] = {
    "gzip": lambda file: gzip.GzipFile(fileobj=file),
    "xz": lzma.LZMAFile,
}
_BLOCK = 2**20  # bytes that are unpacked at once
_RATIO = 100  # texts and structures shrink to a 3rd or a 15th, zeros to a 1,000th (gzip) or 7,000th
_FREE = 2**24  # bytes before the ratio counts


class Unpacked:
    """The content of a packed file, from its beginning on.

    Args:
        path: of the file, for messages.
        kind: "gzip" or "xz".
        packed: the open file.
        advice: what to do with a file that is damaged.
    """

    def __init__(self, path: Path, kind: str, packed: BinaryIO, advice: str) -> None:
        self._path, self._kind, self._packed, self._advice = path, kind, packed, advice
        self._file = _UNPACK[kind](packed)
        self._done = 0

    def read(self, size: int) -> bytes:
        """The next `size` bytes, fewer at the end of the file."""
        found = bytearray()
        while (wanted := min(size - len(found), _BLOCK)) > 0 and (block := self._block(wanted)):
            found += block
            self._done += len(block)
            if self._done > _FREE + _RATIO * self._packed.tell():
                raise ValueError(
                    f"{self._path}: expected to unpack to at most {_RATIO} times its size; got "
                    "more; if you trust it, unpack it yourself"
                )
        return bytes(found)

    def _block(self, size: int) -> bytes:
        try:
            return self._file.read(size)
        except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
            raise ValueError(
                f"{self._path}: expected a whole {self._kind} file; got a damaged or truncated one "
                f"({error}); {self._advice}"
            ) from None


@contextmanager
def unpacked(path: Path, kind: str) -> Iterator[Unpacked]:
    """Opens a packed file; see `Unpacked`."""
    with open(path, "rb") as file:
        yield Unpacked(path, kind, file, "get it again")
