"""Training within a budget of CPU time."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from molflt.training.checkpoint import read_plain, write_checkpoint


class CpuBudget:
    """CPU seconds of a training run; only the time inside `running` counts.

    Attributes:
        used: seconds so far.
        longest: seconds of the longest block.
        steps: number of blocks of `resumed_steps`.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.process_time) -> None:
        self.seconds, self.clock = seconds, clock
        self.used = self.longest = 0.0
        self.steps = 0

    @property
    def share(self) -> float:
        """Used share, 0 to 1."""
        return min(1.0, self.used / self.seconds)

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


def resumed_steps(
    path: Path, parts: Mapping[str, Any], budget: CpuBudget, save_every: float = 60.0
) -> Iterator[int]:
    """Yields the number of each step until the budget is spent.

    The state of the parts, which have a `state_dict`, is saved in a file every `save_every` CPU
    seconds and at the end. A later call with the same file continues.
    """
    if path.exists():
        kept = read_plain(path)
        for name, part in parts.items():
            part.load_state_dict(kept[name])
        budget.steps, budget.used = kept["step"], kept["spent"]
    saved = budget.used
    while budget.used < budget.seconds:
        with budget.running():
            yield budget.steps
        budget.steps += 1
        if budget.used - saved > save_every or budget.used >= budget.seconds:
            state = {name: part.state_dict() for name, part in parts.items()}
            write_checkpoint(path, {**state, "step": budget.steps, "spent": budget.used})
            saved = budget.used
