"""``molflt merge``: joins the predictions of several processes."""

from __future__ import annotations

from pathlib import Path

from molflt.evaluation.shards import merge_shards

__all__ = ["merge"]


def merge(out: Path) -> None:
    """Joins the files of all N calls of molflt predict --shard I/N, and keeps them.

    The result is equal to the file that a single process would have written. An error names a shard
    that is missing or damaged, and the command that makes it again.

    Args:
        out: the --out of the calls; .csv, .json or .extxyz.
    """
    count = merge_shards(Path(out))
    print(f"{out}: {count:,} structures")
