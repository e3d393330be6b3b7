"""CPU time of a training run."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class CpuBudget:
    """Budget of CPU time for a training run; only blocks inside `running` are counted.

    `seconds` (in total), `used` and `longest` (of one block) are CPU times in s, and `steps` is the
    number of training steps.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.used, self.longest, self.steps = seconds, 0.0, 0.0, 0

    @property
    def share(self) -> float:
        """Fraction of the budget that is used, from 0 to 1."""
        return min(1.0, self.used / self.seconds)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Adds the CPU time of the block to `used`."""
        start = time.process_time()
        yield
        took = time.process_time() - start
        self.used += took
        self.longest = max(self.longest, took)
