"""The package `datasets` of Hugging Face, where it is installed."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, overload

__all__ = ["dataset_loader"]


class _HubRows(Protocol):
    """One split of a data set, as far as it is used here."""

    features: Mapping[str, object]
    column_names: Sequence[str]

    def __iter__(self) -> Iterator[Mapping[str, object]]: ...

    @overload
    def __getitem__(self, key: int) -> Mapping[str, object]: ...
    @overload
    def __getitem__(self, key: str) -> Sequence[object]: ...


def dataset_loader(source: str) -> Callable[..., _HubRows]:
    """`datasets.load_dataset`, to read `source` with.

    Raises:
        ModuleNotFoundError: without the package, also where a folder has its name.
    """
    loader: Callable[..., _HubRows] | None = None
    with contextlib.suppress(ImportError):
        loader = getattr(importlib.import_module("datasets"), "load_dataset", None)
    if loader is None:
        raise ModuleNotFoundError(
            f"{source}: needs the package datasets; got none; run: pip install molflt[hub], or "
            "give files"
        )
    return loader
