import copy
import itertools
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_cases import (
    ALL,
    DIM,
    FEW,
    HEADS,
    PBC,
    TRICLINIC,
    Graph,
    close,
    collated,
    graph,
    kinds,
    mixed,
    run,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch_geometric.utils import to_dense_batch

from molflt.graph import GraphAttention, dense


@pytest.mark.parametrize("kind", ALL, ids=str)
def test_a_graph_does_not_see_its_batch(kind):
    """The outputs of a graph are the same alone, in batches and in any order.

    Gradients with respect to other graphs are exactly 0. With "auto", the form may depend on the
    batch.
    """
    layer, graphs = kind.build(), mixed()
    together = run(layer, graphs)
    close([run(layer, [each])[0] for each in graphs], together)
    close(run(layer, [*graphs, graph("crystal", 20)])[:-1], together)
    close(run(layer, graphs[::-1])[::-1], together)
    arguments = collated(graphs)
    leaves = [arguments[name].requires_grad_() for name in ("x", "pos")]
    out, batch = layer(**arguments), arguments["batch"]
    for index in (0, 2, 4):
        own = batch == index
        for grad in torch.autograd.grad(out[own].square().sum(), leaves, retain_graph=True):
            assert (grad[~own] == 0).all()
            assert torch.isfinite(grad).all() and (grad[own] != 0).any()


@pytest.mark.parametrize("kind", kinds("linear", "softmax"), ids=str)
def test_symmetries(kind):
    """Tests permutations of atoms, translations and, for exact masks, rotations.

    With a mesh, or an additive position with nodes, translations along the lattice are not exact.
    With "reciprocal", molecules rotate in a box of finite size.
    """
    layer, graphs = kind.build(), mixed()
    exact, lattice = kind.mixing == "softmax", kind.periodic in ("reciprocal", "mesh")
    moves = kind.periodic != "mesh" and (kind.position != "spectral" or exact or not lattice)
    here = run(layer, graphs)
    orders = [torch.randperm(len(each.x), generator=torch.manual_seed(2)) for each in graphs]
    permuted = [
        each._replace(x=each.x[order], pos=each.pos[order])
        for each, order in zip(graphs, orders, strict=True)
    ]
    close(run(layer, permuted), [out[order] for out, order in zip(here, orders, strict=True)])
    shift = torch.tensor([1.0, -0.3, 2.2])
    moved = [each._replace(pos=each.pos + n * shift) for n, each in enumerate(graphs, start=1)]
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=torch.manual_seed(5))).Q
    turned = [each._replace(pos=each.pos @ turn, cell=each.cell @ turn) for each in graphs]
    stretched = [each._replace(pos=1.3 * each.pos) for each in graphs]
    there, around, other = (run(layer, each) for each in (moved, turned, stretched))
    for n, each in enumerate(graphs):
        if moves or not each.pbc.any():
            close([there[n]], [here[n]])
        if exact and (not lattice or each.pbc.any()):
            close([around[n]], [here[n]])
        if len(each.x) > 1:
            assert (other[n] - here[n]).abs().max() > 1e-4


@pytest.mark.parametrize("kind", kinds("linear"), ids=str)
def test_linear_equals_quadratic(kind):
    layers = (kind._replace(mixing=mixing).build() for mixing in ("linear", "quadratic"))
    linear, quadratic = (with_gradients(layer, mixed()) for layer in layers)
    assert all(torch.isfinite(each).all() for each in linear)
    torch.testing.assert_close(linear, quadratic, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", FEW, ids=str)
def test_defaults_of_batch_cell_and_pbc(kind):
    """A single graph needs no `batch`; cells (3, 3) apply to all graphs, and imply periodicity."""
    layer, crystals = kind.build(), [graph("crystal", 7), graph("crystal", 4)]
    expected = run(layer, crystals)
    arguments = collated(crystals)
    one = {"cell": TRICLINIC, "pbc": torch.tensor([True, True, True])}
    close([layer(**{**arguments, **one, "batch_size": None})], [torch.cat(expected)])
    first = crystals[0]
    close([layer(first.x, first.pos, cell=first.cell)], expected[:1])
    molecule = graph("molecule", 5)
    alone = layer(molecule.x, molecule.pos, pbc=molecule.pbc)
    close([alone], run(layer, [molecule]))


@pytest.mark.parametrize("kind", [kind for kind in FEW if kind.near], ids=str)
def test_gradients_by_torch_func(kind):
    layer, given = kind.build(), collated([graph("crystal", 5)])

    def energy(pos: Tensor) -> Tensor:
        return layer(**{**given, "pos": pos}).square().sum()

    pos = given["pos"].clone().requires_grad_()
    expected = torch.autograd.grad(energy(pos), pos)[0]
    close([torch.func.grad(energy)(given["pos"])], [expected])


@pytest.mark.parametrize("kind", [*FEW, kinds("softmax")[0]], ids=str)
def test_redraw_load_and_copy(kind):
    layer, graphs = kind.build(), mixed()
    twin, before = kind.build(seed=1), torch.cat(run(layer, graphs))
    assert (torch.cat(run(twin, graphs)) - before).abs().max() > 1e-3
    twin.load_state_dict(layer.state_dict())
    for other in (twin, copy.deepcopy(layer)):
        assert torch.equal(torch.cat(run(other, graphs)), before)

    learned = {name: value.clone() for name, value in layer.named_parameters()}
    for other in (layer, twin):
        other.redraw_(torch.Generator().manual_seed(3))
    redrawn = torch.cat(run(layer, graphs))
    assert ((redrawn - before).abs().max() > 1e-6) == (kind.mixing != "softmax")
    assert torch.equal(torch.cat(run(twin, graphs)), redrawn)
    assert all((value == learned[name]).all() for name, value in layer.named_parameters())
    layer.reset_parameters()
    assert (torch.cat(run(layer, graphs)) - redrawn).abs().max() > 1e-6


@pytest.mark.parametrize("kind", [*FEW, *kinds("softmax")[:2]], ids=str)
def test_float32_and_autocast(kind):
    layer, arguments = kind.build(), collated(mixed())
    exact = layer(**arguments)
    single = copy.deepcopy(layer).float()
    floats = dict(arguments)
    floats |= {name: arguments[name].float() for name in ("x", "pos", "cell")}
    got = single(**floats)
    assert got.dtype == torch.float32 and (got - exact).abs().max() < 2e-3
    # positions in float64, as in ASE, with atoms in float32
    double = {**floats, "pos": arguments["pos"], "cell": arguments["cell"]}
    assert (single(**double) - exact).abs().max() < 2e-3
    floats["x"].requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = single(**floats)
    assert torch.isfinite(torch.autograd.grad(out.float().square().sum(), floats["x"])[0]).all()
    assert 0 < (out - exact).abs().mean() < 0.03 * exact.abs().mean()


def test_the_documented_layer_is_that_of_pyg():
    """With PyG's attention, the class in docs/graph.md gives the results of GPSConv."""
    page = Path(__file__).resolve().parents[2] / "docs" / "graph.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    names: dict[str, Any] = {}
    exec(next(block for block in blocks if "GPSConv" in block), names)
    theirs = names["GPSConv"](64, names["layer"].conv, heads=4).double()
    ours = names["SpatialGPSConv"](64, theirs.conv, heads=4).double()
    ours.load_state_dict(theirs.state_dict())

    def attend_padded(x: Tensor, pos: Tensor, batch: Tensor, *_: object) -> Tensor:
        h, mask = to_dense_batch(x, batch)
        return theirs.attn(h, h, h, key_padding_mask=~mask, need_weights=False)[0][mask]

    ours.attn.forward = attend_padded
    edges = {"edge_attr": names["edge_attr"].double()}
    x, batch = names["x"].double(), names["batch"]
    found = []
    for layer, more in ((theirs, ()), (ours, (names["pos"].double(),))):
        leaf = x.clone().requires_grad_()
        out = layer(leaf, names["edge_index"], batch, *more, **edges)
        found.append([out, torch.autograd.grad(out.square().sum(), leaf)[0]])
    close(*found)


def test_a_layer_without_positions_mixes_each_graph():
    layer, graphs = GraphAttention(DIM, HEADS, position="none").double(), mixed()
    given = collated(graphs)
    out = layer(given["x"], batch=given["batch"], batch_size=len(graphs))
    close([out], [torch.cat([layer(each.x) for each in graphs])])
    layer.redraw_(torch.Generator().manual_seed(1))
    assert (layer(graphs[0].x) - out[: len(graphs[0].x)]).abs().max() > 1e-6


NEAR = {"position": "multiplicative", "near_field": 3.0}
FORMS = {
    "spectral": {"position": "spectral"},
    "reciprocal": {**NEAR, "periodic": "reciprocal", "mixing": "linear"},
    "images": {"position": "spectral", "periodic": "images", "image_cutoff": 3.0},
}
# Inductor takes minutes, and compiled gradients of images 40 s; the weekly workflow uses both.
BACKENDS = {"spectral": "aot_eager"}  # compiles gradients as well
if os.environ.get("MOLFLT_FULL"):
    BACKENDS = {"spectral": "inductor", "images": "aot_eager"}
SHAPES = [[5, 7], [3, 4, 9], [2, 2], [11, 1, 2, 6], [8, 3, 2, 5, 4], [1, 1, 1]]


@pytest.mark.parametrize("form", FORMS)
@torch._dynamo.config.patch(specialize_float=True)  # otherwise, gradients are compiled twice
def test_one_compiled_graph_for_all_sizes(form):
    torch.compiler.reset()
    layer = GraphAttention(DIM, HEADS, num_features=4, **FORMS[form]).double()
    count = CompileCounterWithBackend(BACKENDS.get(form, "eager"))
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=count)
    names = ["x", "pos", "batch", *(("cell", "pbc") if "periodic" in FORMS[form] else ())]
    for shape in SHAPES:
        graphs = [graph(kind, n) for kind, n in zip(itertools.cycle(PBC), shape, strict=False)]
        given = {name: tensor for name, tensor in collated(graphs).items() if name in names}
        leaves = [given[name].requires_grad_() for name in ("x", "pos")]
        found = []
        for call in (layer, compiled):
            out = call(**given)
            found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        close(found[1], found[0])
    assert count.frame_count == 1


@pytest.mark.skipif(not os.environ.get("MOLFLT_FULL"), reason="Inductor takes minutes")
def test_inductor_computes_outputs_with_reciprocal_nodes():
    torch.compiler.reset()
    form = {"position": "multiplicative", "periodic": "reciprocal"}
    layer = GraphAttention(DIM, HEADS, num_features=4, **form).double()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for shape in SHAPES[:2]:
        given = collated([graph(kind, n) for kind, n in zip(PBC, shape, strict=False)])
        with torch.no_grad():
            close([compiled(**given)], [layer(**given)])


def with_gradients(layer: GraphAttention, graphs: list[Graph]) -> list[Tensor]:
    """Returns outputs and gradients for atoms, positions, parameters and, if possible, cells."""
    arguments = collated(graphs)
    by_cell = layer.encoding.frequency_projection is None
    leaves = [arguments[name].requires_grad_() for name in ("x", "pos", "cell")[: 2 + by_cell]]
    out = layer(**arguments)
    loss = (out * out.detach().cos()).sum()
    grads = torch.autograd.grad(
        loss, [*leaves, *layer.parameters()], allow_unused=True, materialize_grads=True
    )
    return [out.detach(), *grads]


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind.nodes == "gaussian"], ids=str)
def test_classes_are_the_padded_batch(kind, monkeypatch):
    """Graphs in mixed order, two of which have the same size, are in one class or in several."""
    layer, graphs = kind.build(), [*mixed(), graph("slab", 9), graph("crystal", 12)]
    found = []
    for start in (torch.inf, 0):
        monkeypatch.setattr(dense, "_START", {"cpu": start})
        found.append(with_gradients(layer, graphs))
    for one, other in zip(*found, strict=True):
        scale = max(1.0, float(other.nan_to_num().abs().max()))
        torch.testing.assert_close(one / scale, other / scale, rtol=1e-12, atol=1e-12)
