"""Equal parts of a data set, for as many processes or machines."""

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
    """One of several equal parts of a data set."""

    number: int
    """1 to total"""
    total: int

    @classmethod
    def of(cls, text: str) -> Shard:
        """Reads "2/8", the second of eight.

        Raises:
            ValueError: if it is no such text.
        """
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
        """Where this shard of a file is written."""
        return out.with_name(f"{out.stem}.{self.number}-of-{self.total}{out.suffix}")

    def indices(self, natoms: ArrayLike, batch_size: int) -> NDArray[np.int64]:
        """Which structures it has, ascending: whole batches of the data set.

        Args:
            natoms: atoms of each structure of the data set, (structures,).
            batch_size: structures in a batch.

        Raises:
            ValueError: if one of the shards has none, whichever this is.
        """
        found = len(np.asarray(natoms))
        count = -(-found // batch_size)
        if self.total > count:  # in all shards alike: the others could never be merged
            raise ValueError(
                f"option --shard {self}; {found:,} structures are {count:,} batches of "
                f"{batch_size}, fewer than shards; take fewer shards, or a smaller --batch_size"
            )
        batches = list(
            SizeBucketedBatchSampler(natoms, batch_size, rank=self.number - 1, world=self.total)
        )
        return np.sort(np.concatenate(batches)).astype(np.int64)
