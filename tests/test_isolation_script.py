"""scripts/isolation.py: no graph sees another with molflt, and the measure sees where one does."""

import csv

import pytest
import torch
from script_files import load_script


@pytest.fixture(scope="module")
def script():
    return load_script("isolation")


def test_table_and_numbers(script, tmp_path, capsys):
    assert script.main(["--quick", "--out", str(tmp_path)]) == 0
    assert torch.get_default_dtype() == torch.float32
    lines = capsys.readouterr().out.splitlines()
    with (tmp_path / "isolation.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(lines) == len(rows) + 2 and lines[0].startswith("| mechanism | in a batch |")
    assert [row["mechanism"] for row in rows] == list(script.mechanisms())
    for row in rows:
        assert float(row["order"]) < 1e-10
        if row["mechanism"].startswith("molflt"):
            assert max(float(row["batch"]), float(row["padding"])) < 1e-10
            assert float(row["gradient"]) == 0
    changed = {row["mechanism"]: float(row["padding"]) for row in rows}
    assert changed["PyG SGFormerAttention"] > 0.01
    assert changed["PyG PerformerAttention, qkv_bias=True"] > 1e-4


class Leaky(torch.nn.Module):
    """Each atom sees the mean of the whole batch."""

    def forward(self, x, **_):
        return x + 0.5 * x.mean(dim=0)


def test_the_measure_finds_leaks(script):
    row = script.measured("leaky", Leaky, cases=1, large=40)
    assert min(row.batch, row.padding, row.gradient) > 1e-3
