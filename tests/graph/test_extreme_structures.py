"""Equivalent descriptions of extreme structures give the same numbers or are all refused."""

from typing import Any

import numpy as np
import pytest
import torch
from ase.geometry import minkowski_reduce
from refusals.graph import SMALL, data
from tiny_run import random_potential
from torch import Tensor
from torch_geometric.data import Batch, Data

from molflt.atoms import reduced_cell
from molflt.attention.numerics import fade
from molflt.graph import EnergyRegressor, Potential
from molflt.graph import long_range as long_range_module
from molflt.graph.geometry import Geometry
from molflt.graph.long_range import inverse_power_sums
from molflt.graph.radial import radial_bumps, radial_waves, softened

CELL = torch.tensor([[4.2, 0.3, 0.1], [0.4, 5.1, 0.2], [0.2, 0.5, 6.0]], dtype=torch.float64)


def potential(dtype: torch.dtype = torch.float64, **options: Any) -> Potential:
    return random_potential(num_features=16, **options).to(dtype).eval()


def batch(pos: Tensor, cell: Tensor = CELL, pbc: bool | list[bool] = True) -> Batch:
    axes = torch.tensor(pbc).expand(1, 3)
    numbers = torch.tensor([6, 8, 1, 14])[: len(pos)]
    return Batch.from_data_list([Data(pos=pos, cell=cell[None], pbc=axes, atomic_numbers=numbers)])


OPTIONS = [
    {},
    {"messages": 2, "radial_basis": 0},
    {"long_range": [1, 6], "far_field": False},
    {"long_range": [1], "long_range_smearing": 0.0, "messages": 1},
]


def test_reduction_is_unimodular_and_that_of_ase():
    rng = np.random.default_rng(1)
    cells, pbc = 5 * rng.normal(size=(60, 3, 3)), rng.random((60, 3)) < 0.8
    cells[1::2, 0] += rng.integers(-100, 100, (30, 1)) * cells[1::2, 1]
    cells[::3, 2] += 77 * cells[::3, 0] - 12 * cells[::3, 1]
    short, steps = reduced_cell(cells, pbc)
    assert np.abs(np.abs(np.linalg.det(steps)) - 1).max() < 1e-6
    assert np.array_equal(steps, steps.round())
    for cell, axes, found in zip(cells, pbc, short, strict=True):
        if axes.any():
            expected, _ = minkowski_reduce(cell, axes)
            lengths = [np.sort(np.linalg.norm(x[axes], axis=1)) for x in (found, expected)]
            np.testing.assert_allclose(*lengths, rtol=2e-3)  # ties are not reduced


@pytest.mark.parametrize(("dtype", "gap"), [(torch.float32, 0.0), (torch.float64, 1e-17)])
@pytest.mark.parametrize("options", OPTIONS)
def test_atoms_at_one_place_train(options, dtype, gap):
    model = potential(dtype, **options).train()
    there = torch.tensor([[0, 0, 0], [gap, 0, 0], [1.5, 1, 0], [0, 2, 2]], dtype=torch.float64)
    out = model(batch(there.to(dtype), 6 * torch.eye(3).to(dtype)))
    del out["dipole" if "dipole" in out else "embedding"]  # undefined in a crystal
    assert all(x.isfinite().all() for x in out.values())
    (out["forces"].square().sum() + out["stress"].square().sum()).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert found and all(grad.isfinite().all() for grad in found)


@pytest.mark.parametrize("options", [*OPTIONS, {"near_exact": True}])
@pytest.mark.parametrize("pbc", [True, False])
def test_energy_is_continuous_as_atoms_approach(options, pbc):
    model, energies = potential(**options), []
    for gap in (1e-4, 1e-6, 1e-9, 0.0):
        pos = torch.tensor([[0, 0, 0], [gap, 0, 0], [1.5, 0, 0], [0.2, 1.4, 0.3]]).double()
        energies.append(float(model(batch(pos, 6 * torch.eye(3).double(), pbc))["energy"]))
    steps = np.abs(np.diff(energies))
    assert steps[0] < 1e-3 and steps[1] < 1e-5 and steps[2] < 1e-7


ENDS = {  # functions of x, and values of x where their formula changes
    "softened": (softened, [0.01]),  # (0.1 Å)²
    "fade": (fade, [0.0, 1.0]),
    "bumps": (lambda r: radial_bumps(r, 16, 5.0), [5.0]),
    "waves": (lambda r: radial_waves(r, 8, 4.0), [4.0]),
}


@pytest.mark.parametrize("name", ENDS)
def test_functions_and_two_derivatives_are_continuous(name):
    function, ends = ENDS[name]
    for end in ends:
        x = torch.tensor([end - 1e-7, end, end + 1e-7], dtype=torch.float64, requires_grad=True)
        found = [function(x).reshape(3, -1).sum(dim=1)]
        for _ in range(2):
            found += torch.autograd.grad(found[-1].sum(), x, create_graph=True)
        assert all(each.diff().abs().max() < 0.01 for each in found)


@pytest.mark.parametrize("options", OPTIONS)
def test_cells_of_any_size_hold_an_atom_and_a_molecule(options):
    model = potential(**options)
    pos = torch.tensor([[0, 0, 0], [1.1, 0, 0], [1.5, 1, 0]], dtype=torch.float64)
    for count in (1, 3):
        expected = model(batch(pos[:count], pbc=False))
        for side in (250.0,) if options.get("long_range") else (100.0, 250.0, 3000.0):
            box = side * torch.eye(3, dtype=torch.float64)
            found = model(batch((pos[:count] - 0.3) % side, box))  # across the boundary
            share = 2e-8 if not options.get("long_range") else 2 / side
            scale = float(expected["energy"].abs()) + 1
            assert abs(float(found["energy"] - expected["energy"])) < share * scale
            assert float((found["forces"] - expected["forces"]).abs().max()) < share * scale


@pytest.mark.parametrize("smearing", [0.0, 0.8])
@pytest.mark.parametrize(("pbc", "powers"), [([True] * 3, (1, 2, 6)), ([True, True, False], (1,))])
def test_the_split_of_large_cells_changes_nothing(monkeypatch, pbc, powers, smearing):
    pos, charges = 12 * torch.rand(9, 3).double(), torch.randn(9, len(powers), 1).double()
    found = []
    for largest in (550.0, 20.0, 2.0):
        monkeypatch.setattr(long_range_module, "_LARGEST", largest)
        place, cell = pos.clone().requires_grad_(), (40 * torch.eye(3).double()).requires_grad_()
        geometry = Geometry.of(place, cell=cell, pbc=torch.tensor(pbc))
        sums = sum(inverse_power_sums(charges, geometry, powers, smearing=smearing))
        found.append((sums, *torch.autograd.grad(sums.sum(), (place, cell))))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-7, atol=1e-6)


@pytest.mark.parametrize(
    ("cell", "pbc"),
    [
        (400.0 * torch.eye(3), [True, True, False]),
        (100.0 * (1 - torch.eye(3)), [True, True, True]),  # of a face-centered lattice
    ],
)
def test_large_slabs_and_skewed_cells_have_few_nodes(cell, pbc):
    pos, charges = 3 * torch.rand(4, 3).double(), torch.tensor([1.0, -1, 1, -1]).double()
    found = [
        sum(inverse_power_sums(charges[:, None, None], Geometry.of(pos, None, *box), (1,)))
        for box in ((), (cell.double(), torch.tensor(pbc)))
    ]
    assert abs(float(found[1] - found[0])) < 1e-5 + 1e-3 * float((charges @ pos).norm()) ** 2


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
    axes = torch.zeros(3, dtype=torch.bool)  # a molecule, which needs no cell
    expected = energy(model, data(cell=100 * torch.eye(3)[None], pbc=axes[None]))
    for molecule in (data(cell=None, pbc=None), data(cell=None, pbc=axes)):
        torch.testing.assert_close(energy(model, molecule), expected, rtol=0, atol=1e-6)


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
    make, options = DEVICES[case]
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


@pytest.mark.parametrize("case", DEVICES)
def test_an_empty_batch_has_empty_outputs(case) -> None:
    make, options = DEVICES[case]
    net, batch = make(**SMALL, **options), Batch.from_data_list([data()])
    for name in ("pos", "atomic_numbers", "tags", "cell", "pbc", "fixed", "batch"):
        batch[name] = batch[name][:0]
    batch.ptr, batch._num_graphs = batch.ptr[:1], 0
    for is_training in (False, True):
        out = net.train(is_training)(batch)
        assert all(0 in value.shape for value in out.values())
    out["energy"].sum().backward()
