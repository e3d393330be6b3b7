"""Parts of a data set, for several processes or machines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from molflt.data.batches import SizeBucketedBatchSampler
from molflt.files import shown

__all__ = ["MOST_SHARDS", "Shard"]

MOST_SHARDS = 10_000


class Shard(NamedTuple):
    """One of several parts of a data set, equal up to one batch."""

    number: int
    """1 to total"""
    total: int

    @classmethod
    def of(cls, text: str) -> Shard:
        """Parses a text such as "2/8", the second of eight parts."""
        found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
        number, total = map(int, found.groups()) if found else (0, 0)
        if not 1 <= number <= total <= MOST_SHARDS:
            raise ValueError(
                f"option --shard; expected I/N with 1 <= I <= N <= {MOST_SHARDS}, such as 2/8; got "
                f"{shown(text)}"
            )
        return cls(number, total)

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"

    def path(self, out: Path) -> Path:
        """Returns the path that this shard of a file is written to."""
        return out.with_name(f"{out.stem}.{self.number}-of-{self.total}{out.suffix}")

    def indices(self, natoms: ArrayLike, batch_size: int) -> NDArray[np.int64]:
        """Returns the sorted indices of the structures in this shard: whole batches.

        Args:
            natoms: atoms of each structure of the data set, (structures,).
            batch_size: structures in a batch.
        """
        found = len(np.asarray(natoms))
        count = -(-found // batch_size)
        if self.total > count:  # in every shard, because the others could not be merged
            raise ValueError(
                f"option --shard {self}: expected at most as many shards as batches; got {count:,} "
                f"batches of {batch_size} for {found:,} structures; use fewer shards, or a smaller "
                "--batch_size"
            )
        batches = list(
            SizeBucketedBatchSampler(natoms, batch_size, rank=self.number - 1, world=self.total)
        )
        return np.sort(np.concatenate(batches)).astype(np.int64)
