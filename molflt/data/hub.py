"""The package `datasets` of Hugging Face, where it is installed."""

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

__all__ = ["dataset_loader"]


def dataset_loader(source: str) -> Callable[..., Any]:
    """`datasets.load_dataset`, to read `source` with.

    Raises:
        ModuleNotFoundError: without the package, also where a folder has its name.
    """
    loader: Callable[..., Any] | None = None
    with contextlib.suppress(ImportError):
        loader = getattr(importlib.import_module("datasets"), "load_dataset", None)
    if loader is None:
        raise ModuleNotFoundError(
            f"{source}: needs the package datasets; got none; run: pip install molflt[hub], or "
            "give files"
        )
    return loader
