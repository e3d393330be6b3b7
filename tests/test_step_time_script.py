"""scripts/step_time.py: times the models of the comparison, one line each."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def script():
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("step_time", ROOT / "scripts" / "step_time.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    patch.undo()


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
