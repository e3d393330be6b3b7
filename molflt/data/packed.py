"""Compressed files and optional packages."""

from __future__ import annotations

import bz2
import gzip
import importlib
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from molflt.files import shown

__all__ = ["PACKED", "dataset_loader", "opened", "require", "unpacked", "without_packing"]

_OPENERS: dict[str, Callable[..., IO[Any]]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
PACKED = tuple(_OPENERS)
"""extensions of compressed files"""
_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*){1,2}")  # OWNER/NAME, OWNER/NAME/CONFIG


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


def dataset_loader(source: str) -> Callable[..., Any]:
    """Returns `datasets.load_dataset` for a source hf:OWNER/NAME[/CONFIG][:SPLIT].

    Raises ValueError for local folders, which `datasets` would read instead.
    """
    name = source.removeprefix("hf:").partition(":")[0]
    if not _NAME.fullmatch(name) or Path(name).exists():
        raise ValueError(
            f"{source}: expected hf:OWNER/NAME, a data set on the Hugging Face Hub; got "
            f"{'a local path' if Path(name).exists() else shown(name)}; pass files without hf:"
        )
    load: Callable[..., Any] = require("datasets", source, "hub").load_dataset
    return load
