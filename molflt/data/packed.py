"""Compressed files and optional packages."""

from __future__ import annotations

import bz2
import gzip
import importlib
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_OPENERS: dict[str, Callable[..., IO[Any]]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
PACKED = tuple(_OPENERS)
"""extensions of compressed files"""


def without_packing(path: Path) -> Path:
    """Removes the extension of a compressed file, such as .gz, from a path."""
    return path.with_suffix("") if path.suffix.lower() in _OPENERS else path


def opened(path: Path, mode: str = "rb", **options: Any) -> IO[Any]:
    """Opens a plain or compressed file for reading."""
    return _OPENERS.get(path.suffix.lower(), open)(path, mode, **options)


@contextmanager
def unpacked(path: Path) -> Iterator[IO[bytes]]:
    """Opens a plain or compressed file for reading; raises ValueError if it is damaged."""
    try:
        with opened(path) as file:
            yield file
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
        raise ValueError(
            f"{path}: expected a complete {path.suffix} file; the file is damaged or truncated "
            f"({error}); download or copy it again"
        ) from None


def require(module: str, use: str, extra: str) -> Any:
    """Imports a module of an optional package; the error message contains `use` and `extra`."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0].replace("sklearn", "scikit-learn")
        raise ModuleNotFoundError(
            f"{use} needs the package {package}, which is not installed; run: pip install "
            f"molflt[{extra}]"
        ) from None
