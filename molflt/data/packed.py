"""Files compressed with gzip or xz."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["Unpacked", "unpacked"]

_OPEN: dict[str, Callable[[BinaryIO], gzip.GzipFile | lzma.LZMAFile]] = {
    "gzip": lambda file: gzip.GzipFile(fileobj=file),
    "xz": lzma.LZMAFile,
}


class Unpacked:
    """Decompressed content of an open file.

    Args:
        path: path of the file, for messages.
        kind: "gzip" or "xz".
        packed: the open file.
        advice: end of the message about a damaged file.
    """

    def __init__(self, path: Path, kind: str, packed: BinaryIO, advice: str) -> None:
        self._path, self._kind, self._advice = path, kind, advice
        self._file = _OPEN[kind](packed)

    def read(self, size: int = -1) -> bytes:
        """Returns the next `size` bytes, fewer at the end of the file; all of them if -1."""
        try:
            return self._file.read(size)
        except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
            raise ValueError(
                f"{self._path}: expected a whole {self._kind} file; got a damaged or truncated "
                f"one ({error}); {self._advice}"
            ) from None


@contextmanager
def unpacked(path: Path, kind: str) -> Iterator[Unpacked]:
    """Opens a compressed file for reading."""
    with open(path, "rb") as file:
        yield Unpacked(path, kind, file, "get it again")
