"""Batches in classes of graphs of similar size are what they are padded to the largest graph."""

from collections.abc import Callable

import pytest
import torch
from graph.test_potential import data, ethanol, potential, salt, slab
from graph.test_regressor import STRUCTURES, VARIANTS, model, structure
from graph_cases import Graph, Kind, collated, graph, kinds, mixed, run
from torch import Tensor
from torch_geometric.data import Batch

from molflt.graph import GraphAttention, sizes
from molflt.graph.geometry import Geometry

ROUNDING = {"rtol": 1e-12, "atol": 1e-12}
EACH = [
    kind for kind in kinds("linear", "quadratic", "softmax", "auto") if kind.nodes == "gaussian"
]


def in_classes(monkeypatch, compute: Callable[[], list[Tensor]]) -> list[list[Tensor]]:
    """Results in one class and in as many classes as there are sizes, which are equal."""
    found = []
    for start in (torch.inf, 0):
        monkeypatch.setattr(sizes, "_START", {"cpu": start})
        found.append(compute())
    for one, other in zip(*found, strict=True):
        scale = max(1.0, float(other.detach().nan_to_num().abs().max()))
        torch.testing.assert_close(one / scale, other / scale, **ROUNDING, equal_nan=True)
    return found


def batch() -> list[Graph]:
    """Also two of one size, and sizes that are not in order."""
    return [*mixed(), graph("slab", 9), graph("crystal", 12)]


def with_gradients(layer: GraphAttention, graphs: list[Graph]) -> list[Tensor]:
    """Outputs, and gradients in atoms, positions, perhaps cells, and all parameters."""
    arguments = collated(graphs)
    by_cell = layer.encoding.frequency_projection is None
    leaves = [arguments[name].requires_grad_() for name in ("x", "pos", "cell")[: 2 + by_cell]]
    out = layer(**arguments)
    loss = (out * out.detach().cos()).sum()
    grads = torch.autograd.grad(
        loss, [*leaves, *layer.parameters()], allow_unused=True, materialize_grads=True
    )
    return [out.detach(), *grads]


@pytest.mark.parametrize("kind", EACH, ids=str)
def test_classes_are_the_padded_batch(kind, monkeypatch):
    """To 1e-12, gradients too; and each graph alone."""
    layer, graphs = kind.build(), batch()
    found = in_classes(monkeypatch, lambda: with_gradients(layer, graphs))
    alone = torch.cat([run(layer, [each])[0] for each in graphs])
    torch.testing.assert_close(found[1][0], alone, **ROUNDING)


@pytest.mark.parametrize(
    "variant",
    ["default", "flt-images", "near-reciprocal-moving", "surface", "softmax-mask-images"],
)
def test_energies_and_displacements(variant, monkeypatch):
    """Of the regressor, with their gradients, atoms moved between passes or not."""
    net = model(**VARIANTS[variant])

    def compute() -> list[Tensor]:
        given = Batch.from_data_list([*STRUCTURES, structure(11, 3)])
        given.pos.requires_grad_()
        out = net(given)
        parts = [out["energy"], out["displacement"]]
        loss = sum((part * part.detach().cos()).sum() for part in parts)
        wanted = [given.pos, *net.parameters()]
        return [*parts, *torch.autograd.grad(loss, wanted, materialize_grads=True)]

    in_classes(monkeypatch, compute)


def test_forces_stress_and_training_on_them(monkeypatch):
    """Second derivatives, in molecules, which have all pairs in place of nodes, and crystals."""
    net = potential().train()

    def compute() -> list[Tensor]:
        out = net(Batch.from_data_list([data(atoms) for atoms in (salt(), ethanol(), slab())]))
        loss = (out["forces"] - 0.1).square().sum() + out["energy"].sum()
        grads = torch.autograd.grad(loss, net.parameters(), materialize_grads=True)
        return [out["energy"], out["forces"], out["stress"], *grads]

    in_classes(monkeypatch, compute)


def members(atoms: list[int], columns: Tensor | None = None, start: int = 64) -> list[list[int]]:
    """Atoms of the graphs of each class."""
    ptr = torch.tensor([0, *atoms]).cumsum(0)
    return [[atoms[graph] for graph in each] for each in sizes._members(ptr, columns, start)]


def test_size_classes_are_chosen_by_cost():
    assert members([7, 1, 12, 0, 5]) == [[12, 7, 5, 1]]
    assert members([20] * 40) == [[20] * 40]
    assert members([20, 2000, 20, 0]) == [[2000], [20, 20]]
    assert members([0, 0]) == [[]]
    nodes = torch.tensor([0, 1000, 0])  # as many atoms, but what each of them takes
    assert members([20, 20, 20], nodes) == [[20], [20, 20]]


def test_nodes_are_those_of_the_largest_cell_of_a_class(monkeypatch):
    """Not those of the largest cell of the batch, as they are where all graphs are padded."""
    layer = Kind("multiplicative", "reciprocal", False, "gaussian", "linear").build()
    large, small = graph("crystal", 12), graph("crystal", 5)
    given = collated([small, large._replace(cell=3 * large.cell)])
    geometry = Geometry.of(given["pos"], given["batch"], given["cell"], given["pbc"])
    widths = []
    for start in (torch.inf, 0):
        monkeypatch.setattr(sizes, "_START", {"cpu": start})
        classes = layer.encoding(geometry).classes
        widths.append([each.encoding.kernel[0].shape[-1] for each in classes])
    assert widths[0] == widths[1][:1] and widths[1][0] > 10 * widths[1][1]


@pytest.mark.parametrize("near", [False, True])
def test_errors_name_the_graph_of_the_batch(near, monkeypatch):
    """Not that of its class."""
    monkeypatch.setattr(sizes, "_START", {"cpu": 0})
    layer = Kind("multiplicative", "reciprocal", near, "gaussian", "linear").build()
    graphs = batch()
    graphs[5] = graphs[5]._replace(cell=1e-3 * graphs[5].cell)
    graphs[5].cell[1] = 2 * graphs[5].cell[0]
    with pytest.raises(ValueError, match="graph 5"):
        run(layer, graphs)
