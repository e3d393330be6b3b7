"""scripts/patches.py: its forms are one function, and their memory is what their names say."""

import csv
import os
from pathlib import Path

import pytest
import torch
from script_files import load_script

PATCHES = (64, 256)

pytestmark = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="peak memory is read from Linux's /proc"
)


@pytest.fixture(scope="module")
def script():
    return load_script("patches")


@pytest.fixture(scope="module")
def out(script, tmp_path_factory) -> Path:
    threads = torch.get_num_threads()
    folder = tmp_path_factory.mktemp("patches")
    names = [name for name in script.MECHANISMS if name != "log-linear, FFT"]  # the slowest
    words = ["--patches", *map(str, PATCHES), "--rounds", "1", "--mechanisms", *names]
    assert script.main([*words, "--gigabytes", "0.4", "--out", str(folder)]) == 0
    torch.set_num_threads(threads)
    return folder


@pytest.fixture(scope="module")
def rows(out) -> dict[tuple[str, int], dict[str, str]]:
    with (out / "patches.csv").open(newline="") as file:
        return {(row["mechanism"], int(row["length"])): row for row in csv.DictReader(file)}


def test_every_mechanism_at_every_size(script, rows) -> None:
    names = set(script.MECHANISMS) - {"log-linear, FFT"}
    assert set(rows) == {(name, n) for name in names for n in PATCHES}
    for key, row in rows.items():
        if key == ("log-linear, FFT at once", 256):
            assert row["note"].startswith("skipped: would need about") and not row["median_s"]
        else:
            assert float(row["median_s"]) > 0 and float(row["peak_MiB"]) > 1 and not row["note"]


def test_memory_is_what_the_forms_need(rows) -> None:
    """All products phi(k) v at once need many times FLT's memory, blocks of rows do not."""
    memory = {key: float(row["peak_MiB"] or "nan") for key, row in rows.items()}
    assert memory["log-linear, FFT at once", 64] > 8 * memory["flt", 64]
    assert memory["log-linear", 256] < 2 * memory["flt", 256]
    assert memory["flt", 256] < 2.5 * memory["performer", 256]
    # 12 heads of 256 x 256 numbers are 3 MiB, of which backward keeps at least one set.
    assert memory["softmax, 2-D bias", 256] > memory["softmax", 256] + 3


def test_report_says_over_the_limit(script, out) -> None:
    lines = (out / "patches.md").read_text().splitlines()
    row = next(line for line in lines if line.startswith("| log-linear, FFT at once |"))
    assert row.split(" | ")[2:3] == ["over 0.4 GB"]
    assert sum(line.startswith("| flt |") for line in lines) == 2
    assert sum(line.startswith("| performer |") for line in lines) == 3
    assert lines[-1].startswith("- log-linear, FFT at once, 256 patches: skipped: would need")
    assert 10_000 < (out / "patches.png").stat().st_size < 150_000


def test_the_forms_of_log_linear_are_one_function(script) -> None:
    """Blocks, pieces of transforms and transforms at once agree, gradients included."""
    results = []
    for name in ("log-linear", "log-linear, FFT", "log-linear, FFT at once"):
        torch.manual_seed(0)
        block = script.MECHANISMS[name].build(36, False).double()
        torch.manual_seed(1)
        x = torch.randn(1, 36, script.DIM, dtype=torch.float64, requires_grad=True)
        out = block(x)
        out.square().sum().backward()
        results.append((out, x.grad, block.position.table.grad))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
            assert not torch.equal(a, b)  # they are computed in different ways
    assert script.import_module("molflt.attention.layer").toeplitz.__name__ == "toeplitz"


@pytest.mark.parametrize("name", ["flt", "log-linear", "softmax, 2-D bias", "performer"])
def test_encodings_see_row_and_column(script, name) -> None:
    """Outputs depend on where a patch is, except the Performer's; and a pass leaves no gradient."""
    torch.manual_seed(0)
    block = script.MECHANISMS[name].build(25, False).double()
    if block.position is not None and hasattr(block.position, "table"):
        torch.nn.init.normal_(block.position.table)
    x = torch.randn(1, 25, script.DIM, dtype=torch.float64)
    turned = x.view(1, 5, 5, -1).transpose(1, 2).reshape(1, 25, -1)
    there = block(turned).view(1, 5, 5, -1).transpose(1, 2).reshape(1, 25, -1)
    assert ((there - block(x)).abs().max() > 1e-4) == (name != "performer")
    script.prepare(name, False, 16, script.TRAINING)()


def test_ratios_and_cells(script) -> None:
    costs = {
        ("flt", False, 100, script.TRAINING): {"MiB": 2.0, "seconds": 1.0},
        ("flt", False, 400, script.TRAINING): {"MiB": 8.0, "seconds": 1.0},
        ("log-linear", False, 100, script.TRAINING): {"MiB": 6.0, "seconds": 1.0},
        ("log-linear", False, 400, script.TRAINING): {"note": "skipped: would need about 9 GB"},
    }
    flt, other, log, none = costs
    times = {flt: [1.0, 10.0, 2.0], other: [4.0], log: [3.0, 50.0, 8.0]}
    assert script.against_flt(costs, times, "log-linear") == [(100, 4.0, 3.0)]
    assert script.cell(costs, times, log, "seconds", 6.0) == "8"
    # Judged in proportion, 400 patches need 24 MiB: over 0.02 GB, and not over 0.03.
    assert script.cell(costs, times, none, "MiB", 0.02) == "over 0.02 GB"
    assert script.cell(costs, times, none, "MiB", 0.03) == "too slow"
    costs[none] = {"note": "RuntimeError: not enough memory"}
    assert script.cell(costs, times, none, "MiB", 6.0) == "RuntimeError: not enough memory"
    text = script.table(costs, times, 6.0)
    assert "| flt | 2 | 4 | 0.50 |" in text  # medians 2 and 4 s: half a power of the patches
    assert "| log-linear | 4.00, 3.00 |  |" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mechanisms", "flash"], "mechanism 'flash' is unknown; expected some of performer;"),
        (["--patches", "196", "200"], "patches must be square numbers, such as 196 of 14 x 14"),
        (["--patches", "400", "196"], "patches must increase; got 400 196; sort them"),
        (["--rounds", "0"], "rounds must be at least 1; got 0"),
    ],
)
def test_errors_are_one_line(script, words, message, capsys, tmp_path) -> None:
    assert script.main([*words, "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.err.startswith("patches.py: error: ")
    assert message in captured.err
    assert not captured.out and not (tmp_path / "out").exists()
