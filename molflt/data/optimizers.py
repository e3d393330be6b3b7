"""Data for learned optimizers: seeds from which problems are drawn."""

import hashlib

import numpy as np
import torch

from molflt.data.batches import BatchedData

_FIRST = {"val": 0, "test": 2**31, "train": 2**32}  # first seed of each use


def problem_seeds(use: str, count: int) -> range:
    """Returns up to 2^31 consecutive seeds of problems; see `generator_of`.

    The seeds of different uses, "train", "val" and "test", are disjoint.
    """
    return range(_FIRST[use], _FIRST[use] + count)


class ProblemData(BatchedData[range]):
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

    def open(self, use: str) -> range:
        return problem_seeds(use, int(self.sources[use]))

    def _digest(self, use: str, most: int | None = None) -> str:
        seeds = self.datasets[use]
        return hashlib.sha256(f"{seeds.start}+{len(seeds)}".encode()).hexdigest()


def generator_of(seed: int, *purpose: int) -> torch.Generator:
    """Returns the generator of a problem, independent of generators for other seeds or purposes.

    The numbers in `purpose` distinguish several generators of the same problem.
    """
    words = np.random.SeedSequence([seed, *purpose]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(words[0] >> np.uint64(1)))
