"""The package `datasets` of Hugging Face, where it is installed."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, overload

from molflt.files import shown

__all__ = ["dataset_loader"]

_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*){1,2}")  # OWNER/NAME, OWNER/NAME/CONFIG


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
    """Return `datasets.load_dataset`, to read a source called hf:OWNER/NAME[/CONFIG][:SPLIT].

    Other names, and those of folders that exist here, are refused: `datasets` would read them
    from the disk.
    """
    name = source.removeprefix("hf:").partition(":")[0]
    if not _NAME.fullmatch(name) or Path(name).exists():
        raise ValueError(
            f"{source}: expected hf:OWNER/NAME, a data set on the Hugging Face Hub; got "
            f"{'a path on this machine' if Path(name).exists() else shown(name)}; name files and "
            "folders without hf:"
        )
    loader: Callable[..., _HubRows] | None = None
    with contextlib.suppress(ImportError):
        loader = getattr(importlib.import_module("datasets"), "load_dataset", None)
    if loader is None:
        raise ModuleNotFoundError(
            f"{source}: needs the package datasets; got none; run: pip install molflt[hub], or "
            "give files"
        )
    return loader
