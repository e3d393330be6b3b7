"""The model of torch-sim, compared with the calculator."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from ase.build import add_adsorbate, fcc111

from molflt.graph.potential import Potential
from molflt.pretrained.calculator import Calculator


def test_an_error_without_torch_sim_names_the_extra():
    code = "import sys; sys.modules['torch_sim'] = None; import molflt.pretrained.torch_sim"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install molflt[torch-sim]" in done.stderr.splitlines()[-1]


def potential() -> Potential:
    torch.manual_seed(0)
    made = Potential(16, 2, layers=1, ffn_dim=16, num_features=8, radial_basis=4)
    made.trained_elements[:] = True
    return made


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_outputs_are_valid(dtype):
    pytest.importorskip("torch_sim")
    from torch_sim.models.interface import validate_model_outputs

    from molflt.pretrained.torch_sim import TorchSimModel

    model = TorchSimModel(potential(), device="cpu", dtype=dtype)
    validate_model_outputs(model, torch.device("cpu"), getattr(torch, dtype))


def test_results_are_those_of_the_calculator():
    """For two slabs in a batch, periodic along two axes."""
    ts = pytest.importorskip("torch_sim")
    from molflt.pretrained.torch_sim import TorchSimModel

    model, pair = TorchSimModel(potential(), device="cpu"), []
    for size in (1, 2):
        pair.append(fcc111("Cu", (1, size, 3), vacuum=5.0))
        add_adsorbate(pair[-1], "O", 1.2, "fcc")
    found = model(ts.initialize_state(pair, torch.device("cpu"), torch.float64))
    calculator = Calculator(model.model, device="cpu")
    forces = found["forces"].split([len(atoms) for atoms in pair])
    for atoms, energy, own in zip(pair, found["energy"], forces, strict=True):
        assert abs(float(energy) - calculator.get_potential_energy(atoms)) < 1e-10
        assert np.abs(own.numpy() - calculator.get_forces(atoms)).max() < 1e-10
