"""Compressed files and optional packages."""

from __future__ import annotations

import gzip
import importlib
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from molflt.files import shown

__all__ = ["dataset_loader", "require", "unpacked"]

_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*){1,2}")  # OWNER/NAME, OWNER/NAME/CONFIG


@contextmanager
def unpacked(path: Path, kind: str) -> Iterator[BinaryIO]:
    """Opens a compressed file ("gzip" or "xz") for reading; raises ValueError if it is damaged."""
    try:
        with gzip.open(path) if kind == "gzip" else lzma.open(path) as file:
            yield cast(BinaryIO, file)
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
        raise ValueError(
            f"{path}: expected a complete {kind} file; got a damaged or truncated one ({error}); "
            "get a new copy"
        ) from None


def require(module: str, use: str, extra: str) -> Any:
    """Imports a module of an optional package; `use` and `extra` are for the error message."""
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
            f"{'a local path' if Path(name).exists() else shown(name)}; give files without hf:"
        )
    load: Callable[..., Any] = require("datasets", source, "hub").load_dataset
    return load
