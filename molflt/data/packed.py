"""Files compressed with gzip or xz."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

__all__ = ["unpacked"]


@contextmanager
def unpacked(path: Path, kind: str) -> Iterator[BinaryIO]:
    """Opens a compressed file ("gzip" or "xz") for reading; ValueError if it is damaged."""
    try:
        with gzip.open(path) if kind == "gzip" else lzma.open(path) as file:
            yield cast(BinaryIO, file)
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
        raise ValueError(
            f"{path}: expected a whole {kind} file; got a damaged or truncated one ({error}); get "
            "it again"
        ) from None
