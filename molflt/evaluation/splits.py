"""Which texts an evaluation is about: those that the run names, or another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["named_sources"]


def named_sources(
    data: Mapping[str, object], splits: Sequence[str] | None, other: Path | None
) -> dict[str, str]:
    """Name -> file or hf: name.

    Args:
        data: options of the run's data, with train, val and test.
        splits: some of these; None for all but train that there are.
        other: another text instead.

    Raises:
        ValueError: for both, or a split that the run has not.
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
