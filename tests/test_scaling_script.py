"""scripts/scaling.py: what it measures as memory is memory, and its table is what it measured."""

import csv
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from script_files import SCRIPTS, load_script

NAMES = ["softmax, Toeplitz bias", "performer", "flt", "fnet", "elu"]

pytestmark = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="peak memory is read from Linux's /proc"
)


@pytest.fixture(scope="module")
def script():
    return load_script("scaling")


@pytest.fixture(scope="module")
def out(script, tmp_path_factory) -> Path:
    threads = torch.get_num_threads()
    folder = tmp_path_factory.mktemp("scaling")
    assert script.main(["--quick", "--mechanisms", *NAMES, "--out", str(folder)]) == 0
    torch.set_num_threads(threads)
    return folder


@pytest.fixture(scope="module")
def rows(out) -> list[dict[str, str]]:
    with (out / "scaling.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_growth_is_what_was_allocated(script) -> None:
    """In a process of its own: 3 blocks of 40 MiB, of which at most 2 live at a time."""
    code = (
        "import scaling, torch\n"
        "def work():\n"
        "    blocks = [torch.ones(10 * 2**20) for _ in range(2)]\n"
        "    blocks.pop()\n"
        "    blocks.append(torch.ones(10 * 2**20))\n"
        "print(scaling.growth(work))"
    )
    environment = {**os.environ, **script.ALLOCATOR, "PYTHONPATH": str(SCRIPTS)}
    command = [sys.executable, "-c", code]
    grown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert 79 < float(grown.stdout) < 90


def test_every_mechanism_at_every_length(script, rows) -> None:
    found = [(row["mechanism"], row["causal"], int(row["length"])) for row in rows]
    expected = {
        (name, str(causal), length)
        for name in NAMES
        for causal in script.MECHANISMS[name].causal
        for length in script.QUICK_LENGTHS
    }
    assert len(found) == len(expected) and set(found) == expected
    assert all(float(row["median_s"]) > 0 and not row["note"] for row in rows)


def test_memory_of_linear_mechanisms_is_linear(script, rows) -> None:
    for name in NAMES:
        points = [
            (int(row["length"]), float(row["peak_MiB"]))
            for row in rows
            if (row["mechanism"], row["causal"]) == (name, "False")
        ]
        slope = script.exponent(points[-2:])
        assert (slope < 1.25) == script.MECHANISMS[name].linear, (name, slope)


def test_report_has_table_picture_and_targets(out) -> None:
    text = (out / "scaling.md").read_text()
    assert (out / "scaling.png").stat().st_size > 10_000
    assert all(f"| {name} |" in text for name in NAMES)
    assert "flt / performer" in text


def test_exponent(script) -> None:
    assert script.exponent([(n, 3.0 * n**1.5) for n in (1, 10, 100)]) == pytest.approx(1.5)
    assert math.isnan(script.exponent([(5, 1.0)]))


def test_what_would_need_too_much_is_skipped_and_says_so(script, monkeypatch) -> None:
    monkeypatch.setattr(script, "MAX_MIB", 10.0)
    costs, times = script.measure(["fnet"], [512, 4096], 1, script.PASSES[1:])
    notes = [found.get("note", "") for found in costs.values()]
    assert notes[0] == "" and notes[1].startswith("skipped: would need about 0.0 GB and")
    assert list(times) == [key for key in costs if key[2] == 512]
