"""Data for learned optimizers: seeds from which problems are drawn."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from molflt.data.batches import BatchedData

_FIRST = {"val": 0, "test": 2**31, "train": 2**32}  # first seed of each use


class ProblemSeeds(Dataset[Tensor]):
    """Data set of up to 2^31 consecutive seeds of problems; see `generator_of`.

    The seeds of different uses, "train", "val" and "test", are disjoint.
    """

    def __init__(self, use: str, count: int) -> None:
        self.first = _FIRST[use]
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        """Returns a seed as a scalar int64 tensor."""
        return torch.tensor(range(self.first, self.first + self.count)[index])


class ProblemData(BatchedData[ProblemSeeds]):
    """Batches of problem seeds: int64 tensors of shape (batch,).

    An epoch contains every training problem once, in an order that depends on the seed of the run.
    The validation problems are the same in every run.

    Args:
        batch_size: number of problems in a meta-step, per device.
        problems: number of training problems.
        val_problems: number of validation problems.
    """

    items = "problems"

    def __init__(
        self, batch_size: int = 8, problems: int = 100_000, val_problems: int = 32
    ) -> None:
        super().__init__(batch_size, sources={"train": problems, "val": val_problems})

    def open(self, use: str) -> ProblemSeeds:
        return ProblemSeeds(use, int(self.sources[use]))

    def _digest(self, use: str, most: int | None = None) -> str:
        seeds = self.datasets[use]
        return hashlib.sha256(f"{seeds.first}+{len(seeds)}".encode()).hexdigest()


def generator_of(seed: int, *purpose: int) -> torch.Generator:
    """Returns the generator of a problem, independent of generators for other seeds or purposes.

    The numbers in `purpose` distinguish several generators of the same problem.
    """
    words = np.random.SeedSequence([seed, *purpose]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(words[0] >> np.uint64(1)))
