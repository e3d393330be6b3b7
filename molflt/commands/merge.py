"""``molflt merge``: predictions that several processes have made, as one file."""

from __future__ import annotations

from pathlib import Path

from molflt.evaluation.shards import merge_shards

__all__ = ["merge"]


def merge(out: Path) -> None:
    """Join the files of molflt predict --shard I/N, once all N are there; they stay.

    The file is the one that a single process would have written. A shard that is missing or damaged
    is named, with what repeats it.

    Args:
        out: what was given as --out with each --shard; .csv, .json or .extxyz.
    """
    count = merge_shards(Path(out))
    print(f"{out}: {count:,} structures")
