"""Which texts an evaluation is about: those that the run names, or another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from molflt.data.images.base import LabeledImages
from molflt.data.images.datamodule import ImageData

__all__ = ["named_images", "named_sources"]

_Images = TypeVar("_Images", bound=ImageData)


def named_sources(
    data: Mapping[str, object], splits: Sequence[str] | None, other: Path | None
) -> dict[str, str]:
    """Name -> file or hf: name.

    Args:
        data: options of the run's data, with train, val and test.
        splits: some of these; None for all but train that there are.
        other: another text instead.
    """
    if other is not None:
        if splits:
            raise ValueError("give either --splits or --data; got both")
        return {Path(other).name: str(other)}
    named = {name: str(data[name]) for name in ("train", "val", "test") if data[name]}
    wanted = list(dict.fromkeys(splits or [name for name in named if name != "train"]))
    for name in wanted:
        if name not in named:
            raise ValueError(f"the run has no split {name!r}; expected some of {', '.join(named)}")
    return {name: named[name] for name in wanted}


def named_images(
    kind: type[_Images],
    options: Mapping[str, object],
    splits: Sequence[str] | None,
    other: Path | None,
) -> tuple[_Images, dict[str, LabeledImages]]:
    """The data of a run of images, and name -> images as its validation takes them.

    Args:
        kind: class of the data.
        options: the run's options of it.
        splits: some of train and val; None for val.
        other: other images instead, which the data then have for both.
    """
    if other is not None:
        if splits:
            raise ValueError("give either --splits or --data; got both")
        options = {**options, "train": other, "val": other, "val_fraction": None}
        options |= {"train_labels": None, "val_labels": None}
    wanted = list(dict.fromkeys(splits or ["val"]))
    if unknown := sorted(set(wanted) - {"train", "val"}):
        raise ValueError(f"the run has no split {unknown[0]!r}; expected some of train, val")
    data = kind(**options)  # type: ignore[arg-type]  # of a configuration that was checked
    data.setup()
    if other is not None:
        return data, {Path(other).name: data.judged("val")}
    return data, {name: data.judged(name) for name in wanted}
