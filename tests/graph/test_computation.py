"""Energies as a function of tensors alone, also exported, are those of the model."""

import pytest
import torch
from graph.test_regressor import FLT, KERNEL, PERFORMER, STRUCTURES, model, structure
from torch._dynamo.testing import CompileCounterWithBackend
from torch_geometric.data import Batch

from molflt.graph.computation import EnergyComputation, EnergyInputs, export_energies

EXACT = {"rtol": 0.0, "atol": 1e-10}
VARIANTS = {
    "default": {},
    "surface": {"subsurface": False, "descriptors": True, "radial_basis": 4},
    "messages": {"messages": 2, "message_pairs": "adsorbate"},
    "contact": {"readout": "contact", "position_head": False, "far_field": False},
    "all": {"readout": "all"},
    "flt": FLT,
    "flt-reciprocal": {**FLT, "periodic": "reciprocal"},
    "kernel": {**KERNEL, "near_field": 0.0, "periodic": "none"},
    "performer": PERFORMER,
}


def batches(untagged: bool) -> list[Batch]:
    """Of 1 to 5 graphs, the first of one atom; small ones may have no tags."""
    sizes = ([1], [7, 4], [9], [3, 12, 5, 8, 2])
    return [
        Batch.from_data_list([structure(n, 10 + n, tags=n > 3 or not untagged) for n in batch])
        for batch in sizes
    ]


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_computation_from_tensors_equals_the_model(variant):
    """Whatever the sizes, a single atom too; with energies of elements."""
    net = model(**VARIANTS[variant]).eval()
    net.element_energies.normal_()
    compute = EnergyComputation(net)
    for batch in batches(untagged=variant == "all"):
        found = compute(*EnergyInputs.of(net, batch))
        torch.testing.assert_close(found, net(batch)["energy"], **EXACT)


@pytest.mark.parametrize("variant", ["surface", "flt-reciprocal"])
@torch.no_grad()
def test_one_compiled_graph_for_all_sizes(variant):
    """Of two atoms, graphs and nodes and more: compilers treat a size of 1 on its own.

    They also take sizes that are equal at first for one size, so there are 5 graphs at first.
    """
    net = model(**{**VARIANTS[variant], "layers": 1}).eval()
    torch.compiler.reset()
    count = CompileCounterWithBackend("eager")
    compute = torch.compile(EnergyComputation(net), fullgraph=True, dynamic=True, backend=count)
    for sizes in ([9, 12, 7, 5, 8], [20, 13, 15, 8], [30, 14]):
        batch = Batch.from_data_list([structure(n, n) for n in sizes])
        found = compute(*EnergyInputs.of(net, batch))
        torch.testing.assert_close(found, net(batch)["energy"], **EXACT)
    assert count.frame_count == 1


@torch.no_grad()
def test_one_exported_program_for_all_sizes():
    """Reciprocal nodes, near pairs, radial summary and all, from a single atom on."""
    net = model(**{**VARIANTS["surface"], "layers": 1}).eval()
    run = export_energies(net, Batch.from_data_list(STRUCTURES)).module()
    for batch in batches(untagged=False):
        found = run(*EnergyInputs.of(net, batch))
        torch.testing.assert_close(found, net(batch)["energy"], **EXACT)
