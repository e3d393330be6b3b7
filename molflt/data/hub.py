"""Access to the optional package `datasets` of Hugging Face."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from molflt.files import shown

__all__ = ["dataset_loader"]

_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*){1,2}")  # OWNER/NAME, OWNER/NAME/CONFIG


def dataset_loader(source: str) -> Callable[..., Any]:
    """Returns `datasets.load_dataset` for a source hf:OWNER/NAME[/CONFIG][:SPLIT].

    Names of local folders are refused: `datasets` would read them, and perhaps run a script there.
    """
    name = source.removeprefix("hf:").partition(":")[0]
    if not _NAME.fullmatch(name) or Path(name).exists():
        raise ValueError(
            f"{source}: expected hf:OWNER/NAME, a data set on the Hugging Face Hub; got "
            f"{'a local path' if Path(name).exists() else shown(name)}; give files without hf:"
        )
    loader: Callable[..., Any] | None = None
    with contextlib.suppress(ImportError):
        loader = getattr(importlib.import_module("datasets"), "load_dataset", None)
    if loader is None:
        raise ModuleNotFoundError(
            f"{source}: requires the package datasets; run pip install molflt[hub], or give files"
        )
    return loader
