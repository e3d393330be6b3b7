"""Inputs of several forms, precisions and devices give the same numbers."""

import pytest
import torch
from refusals.graph import SMALL, data
from torch_geometric.data import Batch, Data

from molflt.graph import EnergyRegressor, GraphAttention, PBCRadiusGraph, Potential


@pytest.fixture(scope="module")
def model() -> EnergyRegressor:
    torch.manual_seed(0)
    net = EnergyRegressor(**SMALL, readout="all").eval()
    torch.nn.init.normal_(net.position_head.weight.weight)
    return net


def energy(model: EnergyRegressor, given: Data) -> torch.Tensor:
    with torch.no_grad():
        return model(given)["energy"]


def test_forms_of_one_structure(model) -> None:
    """A cell of (3, 3), another precision or integer type, and defaults are no other structure."""
    expected = energy(model, data())
    cell, axes = 6 * torch.eye(3), torch.tensor([True, True, False])
    for same in (
        data(cell=cell, pbc=axes),
        data(pos=data().pos.double(), cell=cell[None].double()),
        data(atomic_numbers=data().atomic_numbers.int(), tags=data().tags.to(torch.uint8)),
        data(cell=6 * torch.eye(3, dtype=torch.long)[None]),
        data(fixed=None),
        Batch.from_data_list([data()]),
        Batch.from_data_list([data(cell=cell, pbc=axes)]),
    ):
        torch.testing.assert_close(energy(model, same), expected, rtol=0, atol=1e-6)
    half = energy(model, data(pos=data().pos.half()))
    torch.testing.assert_close(half, expected, rtol=0, atol=1e-2)
    two = energy(model, Batch.from_data_list([data(cell=cell, pbc=axes)] * 2))
    torch.testing.assert_close(two, expected.expand(2), rtol=0, atol=1e-6)


def test_a_molecule_needs_neither_cell_nor_tags(model) -> None:
    far = data(cell=100 * torch.eye(3)[None], pbc=torch.zeros(1, 3, dtype=torch.bool))
    expected = energy(model, far)
    for molecule in (
        data(cell=None, pbc=None),
        data(cell=None, pbc=torch.zeros(3, dtype=torch.bool)),
    ):
        torch.testing.assert_close(energy(model, molecule), expected, rtol=0, atol=1e-6)
    with pytest.warns(UserWarning, match="atom with tag > 0"):
        untagged = energy(model, data(tags=None))
    with pytest.warns(UserWarning, match="atom with tag > 0"):
        torch.testing.assert_close(untagged, energy(model, data(tags=0 * data().tags)))


def test_a_forgotten_batch_of_data(model) -> None:
    whole = Batch.from_data_list([data(), data()])
    joined = Data(**{key: whole[key] for key in ("pos", "atomic_numbers", "cell", "pbc")})
    for call in (model, Potential(**SMALL), PBCRadiusGraph(3.0)):
        with pytest.raises(ValueError, match="batch is missing"):
            call(joined)
        assert call(joined.clone().update({"batch": whole.batch})) is not None


X, POS = torch.randn(6, 16), data().pos


def test_half_precision_inputs_are_accepted_under_autocast() -> None:
    layer = GraphAttention(16, 2, num_features=8)
    expected = layer(X, POS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(X.bfloat16(), POS)
        with pytest.raises(ValueError, match=r"x is torch.float64"):
            layer(X.double(), POS)
    torch.testing.assert_close(found.float(), expected, rtol=0.1, atol=0.1)
    with pytest.raises(ValueError, match="x is torch.bfloat16"):
        layer(X.bfloat16(), POS)
    own = GraphAttention(16, 2, num_features=8).bfloat16()
    assert own(X.bfloat16(), POS.double()).dtype == torch.bfloat16


DEVICES = {
    "near": (EnergyRegressor, {}),
    "mesh": (EnergyRegressor, {"periodic": "mesh", "mixing": "linear"}),
    "images": (EnergyRegressor, {"periodic": "images", "position": "spectral"}),
    "moves": (EnergyRegressor, {"move_atoms": True, "refinements": 2}),
    "potential": (Potential, {"messages": 1}),
    "long range": (Potential, {"long_range": [1], "far_field": False}),
}


@pytest.mark.parametrize("case", DEVICES)
def test_another_default_device_changes_nothing(case) -> None:
    """Energies, and gradients of a step of training."""
    make, options = DEVICES[case]
    torch.manual_seed(0)
    net, found = make(**SMALL, **options), []
    batch = Batch.from_data_list([data(), data()])
    for device in ("cpu", "meta"):
        net.zero_grad()
        with torch.device(device):
            out = net.train()(batch)
            out["energy"].sum().backward()
        grads = [p.grad.flatten() for p in net.parameters() if p.grad is not None]
        found.append(torch.cat([out["energy"].flatten(), *grads]))
    assert torch.equal(*found)
