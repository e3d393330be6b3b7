"""The package `datasets` of Hugging Face, where it is installed."""

import importlib
from collections.abc import Callable
from typing import Any

__all__ = ["dataset_loader"]


def dataset_loader() -> Callable[..., Any] | None:
    """`datasets.load_dataset`; None without the package, also where a folder has its name."""
    try:
        module = importlib.import_module("datasets")
    except ImportError:
        return None
    loader: Callable[..., Any] | None = getattr(module, "load_dataset", None)
    return loader
