"""CPU time that a job may use, and how much of it is gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CpuBudget:
    """Counts the CPU time of this process inside of `running` alone.

    Args:
        seconds: how much there is.
        clock: seconds so far; by default the CPU time of all threads of this process.

    Attributes:
        used: seconds so far.
        longest: seconds of the longest block.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.process_time) -> None:
        self.seconds = seconds
        self.clock = clock
        self.used = self.longest = 0.0

    @property
    def share(self) -> float:
        """Used share, 0 to 1."""
        return min(1.0, self.used / self.seconds)

    @property
    def spent(self) -> bool:
        """True if it is used up."""
        return self.used >= self.seconds

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts the time of the block."""
        start = self.clock()
        try:
            yield
        finally:
            took = self.clock() - start
            self.used += took
            self.longest = max(self.longest, took)
