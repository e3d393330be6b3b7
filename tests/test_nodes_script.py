"""scripts/nodes.py: at tiny sizes it writes what it promises, and shells are the better rule."""

import csv

import pytest
from script_files import load_script


@pytest.fixture(scope="module")
def script():
    return load_script("nodes")


def test_table_picture_and_numbers(script, tmp_path, capsys):
    assert script.main(["--quick", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (tmp_path / "nodes.png").stat().st_size > 10_000
    with (tmp_path / "nodes.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(lines) == len(rows) + 2 and lines[0].startswith("| 2R / s | rule | nodes r |")
    errors, scatters = (
        {(float(row["ratio"]), row["rule"], int(row["nodes"])): float(row[column]) for row in rows}
        for column in ("error", "scatter")
    )
    for ratio in script.RATIOS:
        for numbers in (errors, scatters):
            own = {rule: numbers[ratio, rule, 256] for rule in script.RANDOM}
            assert own["sobol"] < own["gaussian"]
            shells = min(v for key, v in numbers.items() if key[:2] == (ratio, "shells"))
            assert shells < 0.7 * own["sobol"]
            assert numbers[ratio, "gaussian", 256] < 0.5 * numbers[ratio, "gaussian", 16]


def test_scatter_is_the_part_of_the_error_that_directions_make(script):
    """Squared error over all pairs >= squared scatter; 0.5 / r is the variance of far pairs."""
    sizes = script.QUICK._replace(pairs=1000, draws=64, distances=32)
    nodes = script.NODES["gaussian"](heads=64, num_nodes=50, sigma=script.OWN_SIGMA).double()
    error, scatter = script.measured(nodes, 10.0, sizes, 64, 0)
    assert error == pytest.approx((0.5 / 50) ** 0.5, rel=0.1)
    assert 0.8 * error < scatter < 1.05 * error
