"""What people pass from Python: it works, or one line says what is wrong and what to do."""

import ase.build
import numpy as np
import pytest
import torch
from torch_geometric.data import Batch, Data

from molflt.data.structures.records import make_record
from molflt.graph import EnergyRegressor, GraphAttention, PBCRadiusGraph, Potential

ATOMS = 6
SMALL = {"dim": 16, "heads": 2, "layers": 1, "ffn_dim": 16, "num_features": 8}
META = torch.device("meta")  # another device that every machine has


def data(**change) -> Data:
    """A small slab; None leaves an attribute out."""
    generator = torch.Generator().manual_seed(0)
    whole = {
        "pos": 4 * torch.rand(ATOMS, 3, generator=generator),
        "atomic_numbers": torch.tensor([1, 8, 29, 29, 29, 78]),
        "tags": torch.tensor([2, 2, 1, 1, 0, 0]),
        "cell": 6 * torch.eye(3)[None],
        "pbc": torch.tensor([[True, True, False]]),
        "fixed": torch.zeros(ATOMS, dtype=torch.bool),
    }
    return Data(**{key: value for key, value in {**whole, **change}.items() if value is not None})


@pytest.fixture(scope="module")
def model() -> EnergyRegressor:
    torch.manual_seed(0)
    net = EnergyRegressor(**SMALL, readout="all").eval()
    torch.nn.init.normal_(net.position_head.weight.weight)
    return net


def energy(model: EnergyRegressor, given: Data) -> torch.Tensor:
    with torch.no_grad():
        return model(given)["energy"]


def refused(error: type[Exception], call, *parts: str) -> None:
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 300
    assert all(part in message for part in parts), message


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


def test_ase_atoms_convert_as_the_message_advises(model) -> None:
    atoms = ase.build.molecule("H2O")
    refused(TypeError, lambda: model(atoms), "got Atoms", "make_record(pos=atoms.positions")
    record = make_record(
        pos=atoms.positions,
        atomic_numbers=atoms.numbers,
        cell=atoms.cell.array,
        pbc=atoms.pbc,
    )
    with pytest.warns(UserWarning, match="atom with tag > 0"):
        assert energy(model, record).isfinite().all()


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ([data()], ["got list", "Batch.from_data_list"]),
        (data().to_dict(), ["got dict", "Data(**"]),
        (None, ["got NoneType"]),
        (torch.zeros(3, 3), ["got Tensor"]),
        ("water.xyz", ["got str"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_data(model, given, parts) -> None:
    for call in (model, PBCRadiusGraph(5.0).forward):
        refused(TypeError, lambda call=call: call(given), "expected Data or a Batch of PyG", *parts)


ONE = torch.ones(ATOMS, dtype=torch.long)
NAN = float("nan")
WRONG = {
    "z": ({"atomic_numbers": None, "z": ONE}, "atomic_numbers", "data.atomic_numbers = data.z"),
    "no numbers": ({"atomic_numbers": None}, "atomic_numbers", "got cell, fixed, pbc, pos, tags"),
    "float numbers": ({"atomic_numbers": ONE.float()}, "atomic_numbers", "torch.float32"),
    "number 0": ({"atomic_numbers": 0 * ONE}, "atomic_numbers must be 1 to 118", "got 0"),
    "number 119": ({"atomic_numbers": 119 * ONE}, "atomic_numbers must be 1 to 118", "got 119"),
    "few numbers": ({"atomic_numbers": ONE[:3]}, "atomic_numbers must have shape (6,)", "(3,)"),
    "column of numbers": ({"atomic_numbers": ONE[:, None]}, "atomic_numbers", "(6, 1)"),
    "numbers elsewhere": ({"atomic_numbers": ONE.to(META)}, "atomic_numbers", "on meta"),
    "tag 3": ({"tags": 3 * ONE}, "tags must be 0 to 2", "got 3"),
    "negative tag": ({"tags": -ONE}, "tags must be 0 to 2", "got -1"),
    "float tags": ({"tags": ONE.float()}, "tags must be whole numbers"),
    "few tags": ({"tags": ONE[:2]}, "tags must have shape (6,)"),
    "fixed numbers": ({"fixed": ONE.float()}, "fixed must be bool"),
    "few fixed": ({"fixed": ONE[:2].bool()}, "fixed must have shape (6,)"),
    "nan": ({"pos": torch.full((ATOMS, 3), NAN)}, "pos must be finite", "atom 0"),
    "plane": ({"pos": torch.rand(ATOMS, 2)}, "pos must have shape (atoms, 3)", "(6, 2)"),
    "no positions": ({"pos": None}, "pos must have shape"),
    "whole positions": ({"pos": torch.zeros(ATOMS, 3).long()}, "pos must be real", "torch.int64"),
    "batch unsorted": ({"batch": torch.tensor([0, 1, 0, 1, 0, 1])}, "batch must be ascending"),
    "float batch": ({"batch": torch.zeros(ATOMS)}, "batch must be whole numbers", "torch.float32"),
    "short batch": ({"batch": torch.zeros(2).long()}, "batch must have shape (6,)", "(2,)"),
    "axes": ({"pbc": torch.ones(2).bool()}, "pbc must have shape (1, 3) or (3,)", "(2,)"),
    "float axes": ({"pbc": torch.ones(1, 3)}, "pbc must be bool", "torch.float32"),
    "no cell": ({"cell": None}, "pbc is True, which needs cell", "pbc to False"),
    "nan cell": ({"cell": torch.full((1, 3, 3), NAN)}, "cell must be finite"),
    "complex cell": ({"cell": torch.ones(1, 3, 3).to(torch.complex64)}, "cell must be real"),
}
NO_TENSOR = {
    "pos": np.zeros((ATOMS, 3)),
    "cell": np.eye(3),
    "pbc": [True, True, False],
    "tags": [0] * ATOMS,
    "batch": (0,) * ATOMS,
    "atomic_numbers": [1] * ATOMS,
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_data_are_one_line(model, case) -> None:
    change, *parts = WRONG[case]
    refused(ValueError, lambda: model(data(**change)), *parts)


@pytest.mark.parametrize("name", NO_TENSOR)
def test_no_tensor(model, name) -> None:
    given = data(**{name: NO_TENSOR[name]})
    refused(TypeError, lambda: model(given), f"{name} must be a torch.Tensor", "torch.as_tensor")


def test_nothing_is_read_along_open_axes(model) -> None:
    """Molecules may carry any cell."""
    open_axes = {"pbc": torch.zeros(1, 3, dtype=torch.bool)}
    found = energy(model, data(cell=torch.full((1, 3, 3), NAN), **open_axes))
    torch.testing.assert_close(found, energy(model, data(cell=None, **open_axes)))


def test_a_wrong_batch_marks_no_element_as_trained() -> None:
    model = EnergyRegressor(**SMALL)
    with pytest.raises(ValueError, match="tags must be"):
        model.train()(data(tags=3 * ONE))
    assert not model.trained_elements.any()


FORGOTTEN = {
    "cells": {"cell": 5 * torch.eye(3).repeat(2, 1, 1)},
    "axes": {"pbc": torch.zeros(2, 3, dtype=torch.bool)},
    "more axes than cells": {"cell": torch.eye(3), "pbc": torch.ones(2, 3).bool()},
    "number": {"batch_size": 2, "pbc": torch.zeros(3, dtype=torch.bool)},
    "cells and their number": {"cell": 5 * torch.eye(3).repeat(2, 1, 1), "batch_size": 2},
}


@pytest.mark.parametrize("position", ["none", "spectral", "multiplicative"])
@pytest.mark.parametrize("case", FORGOTTEN)
def test_a_forgotten_batch_mixes_no_graphs(case, position) -> None:
    layer = GraphAttention(16, 2, position=position, periodic=PERIODIC[position], num_features=8)
    given = {"x": X, "pos": POS, **FORGOTTEN[case]}
    refused(ValueError, lambda: layer(**given), "batch is missing", "got 2", "pass batch")
    assert layer(**given, batch=(ONE.cumsum(0) > 3).long()).shape == X.shape


def test_a_forgotten_batch_of_data(model) -> None:
    whole = Batch.from_data_list([data(), data()])
    joined = Data(**{key: whole[key] for key in ("pos", "atomic_numbers", "cell", "pbc")})
    for call in (model, Potential(**SMALL), PBCRadiusGraph(3.0)):
        refused(ValueError, lambda call=call: call(joined), "batch is missing", "pass batch")
        assert call(joined.clone().update({"batch": whole.batch})) is not None


PERIODIC = {"none": None, "spectral": "images", "multiplicative": "reciprocal"}
X, POS = torch.randn(ATOMS, 16), data().pos
LAYER_INPUT = {
    "float64": ({"x": X.double()}, "x is torch.float64, but the weights are torch.float32"),
    "half": ({"x": X.half()}, "x is torch.float16, but the weights are torch.float32"),
    "whole": ({"x": X.long()}, "x is torch.int64"),
    "x elsewhere": ({"x": X.to(META)}, "x is on meta, but the weights are on cpu"),
    "pos elsewhere": ({"pos": POS.to(META)}, "pos is on meta, but the weights are on cpu"),
    "batch elsewhere": ({"batch": (0 * ONE).to(META)}, "batch is on meta, but pos on cpu"),
    "float batch": ({"batch": torch.zeros(ATOMS)}, "batch must be whole numbers"),
    "bool batch": ({"batch": torch.zeros(ATOMS).bool()}, "batch must be whole numbers"),
    "edge_index": ({"pos": torch.zeros(2, 9).long()}, "pos must have shape (6, 3), Å; got (2, 9)"),
    "indices": ({"pos": torch.zeros(ATOMS, 3).long()}, "pos must be real numbers", "no indices"),
    "complex": ({"pos": POS.to(torch.complex64)}, "pos must be real numbers"),
    "nan": ({"pos": POS / 0 * 0}, "pos must be finite"),
    "far away": ({"pos": 1e8 * POS}, "pos must be finite and within 100000 Å; got", "atom 0"),
    "no graphs": ({"batch_size": 0}, "batch_size", "got 0"),
    "fewer than none": ({"batch_size": -1}, "batch_size", "got -1"),
}


@pytest.mark.parametrize("case", LAYER_INPUT)
def test_wrong_input_of_the_layer(case) -> None:
    layer = GraphAttention(16, 2, num_features=8)
    change, *parts = LAYER_INPUT[case]
    refused(ValueError, lambda: layer(**{"x": X, "pos": POS, **change}), *parts)


BATCHED = {
    "joined cells": ({"cell": torch.zeros(6, 3)}, "cell must", "(6, 3)", "store (1, 3, 3) in the"),
    "joined axes": ({"pbc": torch.ones(6).bool()}, "pbc must", "(6,)", "store (1, 3) in the Data"),
    "turned cells": ({"cell": torch.zeros(3, 6)}, "(3, 6); give every graph its own"),
    "too few": ({"cell": torch.zeros(1, 3, 3)}, "(1, 3, 3); give every graph its own"),
    "last without atoms": ({"cell": torch.zeros(3, 3, 3)}, "batch_size=3"),
}


@pytest.mark.parametrize("case", BATCHED)
def test_pyg_batches_join_graphs(case) -> None:
    layer = GraphAttention(16, 2, num_features=8, periodic="reciprocal")
    given = {"x": X, "pos": POS, "batch": ONE.cumsum(0) // 4, "cell": torch.eye(3)}
    assert layer(**given).shape == X.shape
    change, *parts = BATCHED[case]
    refused(ValueError, lambda: layer(**{**given, **change}), *parts)


@pytest.mark.parametrize("position", ["none", "spectral"])
@pytest.mark.parametrize("name", ["x", "pos", "batch", "cell", "pbc"])
def test_no_tensor_for_the_layer(name, position) -> None:
    layer = GraphAttention(16, 2, num_features=8, position=position)
    given = {"x": X, "pos": POS, name: [[1.0, 2.0]]}
    refused(TypeError, lambda: layer(**given), f"{name} must be a torch.Tensor; got list")


def test_half_precision_inputs_are_accepted_under_autocast() -> None:
    layer = GraphAttention(16, 2, num_features=8)
    expected = layer(X, POS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(X.bfloat16(), POS)
        refused(ValueError, lambda: layer(X.double(), POS), "x is torch.float64")
    torch.testing.assert_close(found.float(), expected, rtol=0.1, atol=0.1)
    with pytest.raises(ValueError, match="x is torch.bfloat16"):
        layer(X.bfloat16(), POS)
    own = GraphAttention(16, 2, num_features=8).bfloat16()
    assert own(X.bfloat16(), POS.double()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("build", "options", "parts"),
    [
        (GraphAttention, {"num_feature": 3}, ["'num_feature'", "did you mean num_features?"]),
        (GraphAttention, {"near_feild": 3.0}, ["did you mean near_field?"]),
        (GraphAttention, {"drop_out": 0.1}, ["did you mean dropout?"]),
        (GraphAttention, {"xyz": 1}, ["GraphAttention", "'xyz'", "help("]),
        (EnergyRegressor, {"layer": 3}, ["did you mean layers?"]),
        (EnergyRegressor, {"radial_bases": 3}, ["did you mean radial_basis?"]),
        (EnergyRegressor, {"causal": True}, ["EnergyRegressor", "'causal'"]),
    ],
)
def test_misspelt_arguments(build, options, parts) -> None:
    refused(TypeError, lambda: build(dim=16, heads=2, **options), *parts)


@pytest.mark.parametrize(
    ("build", "options", "part"),
    [
        (GraphAttention, {"dim": 0}, "dim must be at least 1; got 0"),
        (GraphAttention, {"dim": -2}, "dim must be at least 1; got -2"),
        (GraphAttention, {"heads": 0}, "heads must be at least 1; got 0"),
        (EnergyRegressor, {"dim": -2}, "dim must be at least 1; got -2"),
        (EnergyRegressor, {"radial_basis": -1}, "radial_basis must be at least 0; got -1"),
        (EnergyRegressor, {"neighbor_cutoff": 0.0}, "neighbor_cutoff must be positive"),
        (EnergyRegressor, {"neighbor_cutoff": NAN}, "neighbor_cutoff must be positive"),
    ],
)
def test_numbers_out_of_range(build, options, part) -> None:
    refused(ValueError, lambda: build(**{"dim": 16, "heads": 2, **options}), part)


def test_every_argument_that_is_handed_on_is_known() -> None:
    """What the core takes is not refused."""
    layer = GraphAttention(16, 2, normalize_qk=True, normalize="unmasked", projection="iid")
    assert layer.attention.scaling.normalize and layer.attention.normalize == "unmasked"
    assert (
        EnergyRegressor(**SMALL, dropout=0.1, attention_dropout=0.1, norm="post").stack is not None
    )


@pytest.mark.parametrize("r", [0.0, -1.0, NAN, float("inf")])
def test_radius_graph_wants_a_radius(r) -> None:
    refused(ValueError, lambda: PBCRadiusGraph(r), "r must be positive")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("make", [EnergyRegressor, Potential])
def test_positions_of_any_precision_are_those_numbers(make, dtype) -> None:
    torch.manual_seed(0)
    net = make(**SMALL).double().eval()
    pos = data().pos.to(dtype)
    found, expected = net(data(pos=pos)), net(data(pos=pos.double()))
    assert found["energy"].dtype == torch.float64
    torch.testing.assert_close(found["energy"], expected["energy"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("make", [EnergyRegressor, Potential])
def test_positions_of_whole_numbers_are_refused(make) -> None:
    net, whole = make(**SMALL).eval(), torch.tensor([[0, 0, 0], [0, 0, 2], [0, 2, 0]] * 2)
    refused(ValueError, lambda: net(data(pos=whole)), "pos must be real numbers", "torch.int64")
    refused(TypeError, lambda: net(data(pos=whole.numpy())), "pos must be a torch.Tensor")


@pytest.mark.parametrize("name", ["atomic_numbers", "pos"])
def test_missing_inputs_of_a_potential_are_named(name) -> None:
    refused(ValueError, lambda: Potential(**SMALL)(data(**{name: None})), name)


DEVICES = {
    "near": (EnergyRegressor, {}),
    "linear": (EnergyRegressor, {"mixing": "linear"}),
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
