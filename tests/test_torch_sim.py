"""torch-sim's own check of models, where it is installed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from molflt.graph.potential import Potential


def test_without_it_one_line_says_what_to_install():
    code = "import sys; sys.modules['torch_sim'] = None; import molflt.pretrained.torch_sim"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install molflt[torch-sim]" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_validates(dtype):
    pytest.importorskip("torch_sim")
    from torch_sim.models.interface import validate_model_outputs

    from molflt.pretrained.torch_sim import TorchSimModel

    torch.manual_seed(0)
    made = Potential(16, 2, layers=1, ffn_dim=16, num_features=8, radial_basis=4)
    made.trained_elements[:] = True
    model = TorchSimModel(made, device="cpu", dtype=dtype)
    validate_model_outputs(model, torch.device("cpu"), getattr(torch, dtype))
