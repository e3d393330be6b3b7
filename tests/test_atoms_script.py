"""scripts/atoms.py: every layer runs, memory is as it should be, and the report holds the rows."""

import csv
import os
from pathlib import Path

import pytest
import torch
from script_files import load_script

ATOMS = (500, 1000)

pytestmark = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="peak memory is read from Linux's /proc"
)


@pytest.fixture(scope="module")
def script():
    return load_script("atoms")


@pytest.fixture(scope="module")
def out(script, tmp_path_factory) -> Path:
    threads = torch.get_num_threads()
    folder = tmp_path_factory.mktemp("atoms")
    words = ["--atoms", *map(str, ATOMS), "--rounds", "1", "--out", str(folder)]
    assert script.main(words) == 0
    torch.set_num_threads(threads)
    return folder


@pytest.fixture(scope="module")
def rows(out) -> list[dict[str, str]]:
    with (out / "atoms.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_mechanism_at_every_size(script, rows) -> None:
    found = [(row["mechanism"], int(row["length"])) for row in rows]
    assert sorted(found) == sorted((name, n) for name in script.MECHANISMS for n in ATOMS)
    assert all(float(row["median_s"]) > 0 and not row["note"] for row in rows)


def test_only_the_exact_mask_takes_quadratic_memory(script, rows) -> None:
    for name, mechanism in script.MECHANISMS.items():
        own = [row for row in rows if row["mechanism"] == name]
        points = [(int(row["length"]), float(row["peak_MiB"])) for row in own]
        slope = script.exponent(points)
        assert (slope < 1.4) == mechanism.linear, (name, slope)


def test_report_has_table_picture_and_verdicts(script, out) -> None:
    text = (out / "atoms.md").read_text()
    assert 10_000 < (out / "atoms.png").stat().st_size < 100_000
    assert all(f"| {name} |" in text for name in script.MECHANISMS)
    assert text.count("PASS") == len(script.PROMISED)


def test_the_promise_counts_the_whole_process_and_fails_what_was_skipped(script) -> None:
    costs = {
        ("performer", False, 10, script.TRAINING): {"MiB": 1.0, "process": 16_000.0},
        ("additive", False, 10, script.TRAINING): {"note": "skipped: would need about 18 GB"},
    }
    assert [target.passed for target in script.targets(costs)] == [False, False]
    costs["performer", False, 10, script.TRAINING]["process"] = 15_000.0
    assert script.targets(costs)[0].passed


def test_ours_sees_the_positions_and_a_pass_leaves_no_gradient(script) -> None:
    torch.manual_seed(0)
    layer = script.MECHANISMS["additive"].build(50, False)
    x = torch.randn(50, script.CHANNELS)
    before = layer(x)
    layer.pos.mul_(0.5)
    assert (layer(x) - before).abs().max() > 1e-6
    script.prepare("performer", False, 20, script.TRAINING)()
