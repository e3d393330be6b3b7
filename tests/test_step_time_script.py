"""scripts/step_time.py: times the models of the comparison, one line each."""

import re
from pathlib import Path

import pytest
import torch
from script_files import load_script

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def script():
    return load_script("step_time")


def test_models_are_those_of_the_comparison(script) -> None:
    assert script.model_of("performer").encoding is None
    near = script.model_of("near-reciprocal").encoding
    assert near.near_field.cutoff == 5 and near.periodic == "reciprocal"
    assert script.model_of("softmax-mask").stack.mixings == ["softmax"]


def test_one_line_per_variant(script, capsys) -> None:
    threads = torch.get_num_threads()
    data = ROOT / "datasets" / "emt-sample" / "val_id.safetensors"
    words = ["--data", str(data), "--variants", "flt", "near", "--rounds", "1", "--batch_size", "2"]
    assert script.main(words) == 0
    torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\| flt \| \d+ \| 1\.00 \|", lines[2])
    assert re.fullmatch(r"\| near \| \d+ \| [\d.]+ \|", lines[3])
