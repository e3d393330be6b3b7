import math
import os
import subprocess
import sys

import pytest
from script_files import SCRIPTS, benchmark
from test_benchmarks import needs_linux

from kit import layers, rows, turns  # isort: skip

NAMES = ["softmax", "performer", "rfa-gate-gaussian", "flt-local"]


@needs_linux
def test_growth_measures_allocated_memory() -> None:
    """A separate process allocates 3 blocks of 40 MiB, at most 2 of them at a time."""
    code = (
        "import kit.layers, torch\n"
        "def work():\n"
        "    blocks = [torch.ones(10 * 2**20) for _ in range(2)]\n"
        "    blocks.pop()\n"
        "    blocks.append(torch.ones(10 * 2**20))\n"
        "print(kit.layers.growth(work))"
    )
    path = os.pathsep.join([str(SCRIPTS), str(SCRIPTS.parent)])
    environment = {**os.environ, **layers.ALLOCATOR, "PYTHONPATH": path}
    command = [sys.executable, "-c", code]
    grown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert 79 < float(grown.stdout) < 90


def test_works_take_turns_and_ratios_are_within_rounds() -> None:
    seen: list[str] = []
    ticks = iter(range(100))
    works = {"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}
    times = turns.turns(works, {"a": 2, "b": 1}, lambda: float(next(ticks)))
    assert seen == ["a", "a", "b", "a"] and times == {"a": [1.0, 1.0], "b": [1.0]}
    assert turns.paired([1.0, 10.0, 2.0], [2.0, 20.0, 1.0]) == 0.5
    assert rows.exponent([(n, 3.0 * n**1.5) for n in (1, 10, 100)]) == pytest.approx(1.5)
    assert math.isnan(rows.exponent([(5, 1.0)]))


def test_bytes_are_those_of_the_states_and_only_softmax_has_more_for_more_tokens() -> None:
    """States contain float32 sums (m, d + 1) and scales (m or 1) per head and layer, or K and V.

    The last position is also kept if an encoding reads it.
    """
    width, sums = 16, 4 * 4 * 8 * 64
    expected = {
        "performer": lambda n: sums * (width + 1 + 1),
        "flt-local": lambda n: 4 + sums * (width + 1 + 1),
        "rfa-gate-gaussian": lambda n: 4 * 4 * 8 * (128 * (width + 1) + 1),
        "softmax": lambda n: 4 * n * 4 * 2 * 128,
    }
    for row in benchmark("decoding").measure((6, 12, 24), tuple(NAMES), rounds=1):
        assert row["state_bytes"] == expected[row["mechanism"]](row["position"]), row
        assert row["rounds"] == 1 and row["median_ms"] > 0


def test_growth_of_a_token_is_that_of_ratios() -> None:
    """The machine is 10 times slower in the second round, and time grows as n^2 from n = 10 on."""
    script = benchmark("decoding")
    times = {
        (name, n): [[slow * cost * n**2] * 3 for slow in (1, 10)]
        for name, cost in (("softmax", 3.0), ("linear", 1.0))
        for n in (10, 20, 40)
    }
    found = script.rows_of(times, dict.fromkeys(times, 2048))
    own = rows.pick(found, mechanism="linear")
    assert script.growth(own) == pytest.approx(2)
    assert [row["ratio"] for row in own] == [1, 4, 16]
    assert [row["softmax_ratio"] for row in own] == [3, 3, 3]
