"""Times of functions that are called in turn, which exposes all of them to the same load."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

Key = TypeVar("Key")


def turns(
    works: Mapping[Key, Callable[[], object]],
    rounds: int | Mapping[Key, int],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Key, list[float]]:
    """Calls each function once per round and returns the times in seconds.

    An additional first round is not counted. It is skipped for functions with a single round.
    """
    most = {key: rounds if isinstance(rounds, int) else rounds[key] for key in works}
    times: dict[Key, list[float]] = {key: [] for key in works}
    for turn in range(-1, max(most.values(), default=0)):
        for key, work in works.items():
            if turn >= most[key] or (turn < 0 and most[key] == 1):
                continue
            start = clock()
            work()
            if turn >= 0:
                times[key].append(clock() - start)
    return times


def paired(one: Sequence[float], other: Sequence[float]) -> float:
    """Divides the times `one` by the times `other` in each round and returns the median."""
    return statistics.median(a / b for a, b in zip(one, other, strict=False))
