"""GraphAttention keeps its promises, whatever it is built from: batches, symmetries, errors."""

import copy
from functools import partial

import pytest
import torch
from graph_cases import (
    ALL,
    DIM,
    EXACT,
    FEW,
    HEADS,
    TRICLINIC,
    close,
    collated,
    graph,
    kinds,
    mixed,
    run,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export

from molflt.graph import GraphAttention


@pytest.mark.parametrize("kind", ALL, ids=str)
def test_a_graph_does_not_see_its_batch(kind):
    """Alone == in a batch == beside a larger graph == in another order; gradients are exactly 0.

    With "auto" the small graphs alone are computed by another form than in the batch.
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


@pytest.mark.parametrize("kind", ALL, ids=str)
def test_symmetries(kind):
    """Order of atoms, translation of each graph and, of the exact mask, rotation.

    Translations along lattices are exact with neither a mesh nor an additive position with nodes.
    Molecules of "reciprocal" turn in a box of finite size.
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
        if len(each.x) > 1:  # otherwise all of the above would hold for a Performer, too
            assert (other[n] - here[n]).abs().max() > 1e-4


@pytest.mark.parametrize("kind", kinds("linear"), ids=str)
def test_linear_equals_quadratic(kind):
    """Outputs, and gradients in all parameters, atoms and positions."""
    found = []
    for mixing in ("linear", "quadratic"):
        layer, arguments = kind._replace(mixing=mixing).build(), collated(mixed())
        exact = kind[:2] != ("spectral", "reciprocal")  # which has no gradient by the cell
        leaves = [arguments[name].requires_grad_() for name in ("x", "pos", "cell")[: 2 + exact]]
        out = layer(**arguments)
        loss = (out * out.detach().cos()).sum()
        grads = torch.autograd.grad(loss, [*leaves, *layer.parameters()], allow_unused=True)
        found.append([out, *(torch.zeros(()) if grad is None else grad for grad in grads)])
    for one, other in zip(*found, strict=True):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_performer_needs_no_positions():
    torch.manual_seed(0)
    layer = GraphAttention(DIM, HEADS, position="none", mixing="linear").double()
    arguments = {name: collated(mixed())[name] for name in ("x", "batch", "batch_size")}
    out = layer(**arguments)
    torch.testing.assert_close(layer(**arguments, pos=torch.zeros(25, 3)), out, **EXACT)
    x = arguments["x"]
    torch.testing.assert_close(layer(x[:7]), out[:7], **EXACT)


@pytest.mark.parametrize("kind", FEW, ids=str)
def test_defaults_of_batch_cell_and_pbc(kind):
    """One graph needs no batch; (3, 3) and (3,) serve all graphs; a cell alone is periodic."""
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


@pytest.mark.parametrize("kind", FEW, ids=str)
def test_no_atoms_at_all(kind):
    layer = kind.build()
    x = torch.zeros(0, DIM, dtype=torch.float64, requires_grad=True)
    for more in ({}, {"batch": torch.zeros(0, dtype=torch.long), "batch_size": 3}):
        out = layer(x, torch.zeros(0, 3), cell=TRICLINIC, **more)
        assert out.shape == (0, DIM)
        out.sum().backward()
    no_graphs = {"cell": torch.zeros(0, 3, 3), "batch": torch.zeros(0, dtype=torch.long)}
    assert layer(x, torch.zeros(0, 3), **no_graphs).shape == (0, DIM)


@pytest.mark.parametrize("kind", [*FEW, kinds("softmax")[0]], ids=str)
def test_reset_redraw_load_and_copy(kind):
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
    state = layer.state_dict()
    assert all(value.dtype == torch.float64 for value in layer.parameters())
    assert not torch.equal(state["attention.to_query.weight"], learned["attention.to_query.weight"])
    assert torch.isfinite(torch.cat(run(layer, graphs))).all()


@pytest.mark.parametrize("kind", [*FEW, *kinds("softmax")[:2]], ids=str)
def test_float32_and_autocast(kind):
    """Near float64: float32 to 2e-3, bfloat16 autocast to 3 percent of the outputs' size."""
    layer, arguments = kind.build(), collated(mixed())
    exact = layer(**arguments)
    single = copy.deepcopy(layer).float()
    floats = dict(arguments)
    floats |= {name: arguments[name].float() for name in ("x", "pos", "cell")}
    got = single(**floats)
    assert got.dtype == torch.float32 and (got - exact).abs().max() < 2e-3
    # Positions as they come from ASE, in float64, beside atoms in float32.
    double = {**floats, "pos": arguments["pos"], "cell": arguments["cell"]}
    assert (single(**double) - exact).abs().max() < 2e-3
    floats["x"].requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = single(**floats)
    assert torch.isfinite(torch.autograd.grad(out.float().square().sum(), floats["x"])[0]).all()
    assert 0 < (out - exact).abs().mean() < 0.03 * exact.abs().mean()


KERNEL = {"position": "multiplicative"}
FORMS = {
    "spectral": {"position": "spectral"},
    "near field": {**KERNEL, "near_field": 3.0},
    "reciprocal": {**KERNEL, "near_field": 3.0, "periodic": "reciprocal", "mixing": "linear"},
    "images": {"position": "spectral", "periodic": "images", "image_cutoff": 3.0},
}
SHAPES = [[5, 7], [3, 4, 9], [2, 2], [11, 1, 2, 6], [8, 3, 2, 5, 4]]


def arguments_of(sizes_of_graphs: list[int], periodic: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(sizes_of_graphs))
    graphs, atoms = len(sizes_of_graphs), sum(sizes_of_graphs)
    random = partial(torch.rand, generator=generator, dtype=torch.float64)
    given = {
        "x": random(atoms, DIM),
        "pos": 4 * random(atoms, 3),
        "batch": torch.arange(graphs).repeat_interleave(torch.tensor(sizes_of_graphs)),
    }
    if periodic:
        given["cell"] = 4 * torch.eye(3, dtype=torch.float64) + random(graphs, 3, 3)
        given["pbc"] = random(graphs, 3) > 0.3
    return given


@pytest.mark.parametrize("form", FORMS)
def test_one_compiled_graph_for_all_sizes(form):
    """Outputs and gradients of batches of two graphs and more, without a break."""
    torch.compiler.reset()
    torch.manual_seed(0)
    layer = GraphAttention(DIM, HEADS, num_features=4, **FORMS[form]).double()
    backend = "aot_eager" if form == "images" else "eager"  # whose gradients are compiled, too
    count = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=count)
    for shape in SHAPES:
        given = arguments_of(shape, "periodic" in FORMS[form])
        leaves = [given[name].requires_grad_() for name in ("x", "pos")]
        found = []
        for call in (layer, compiled):
            out = call(**given)
            found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        close(found[1], found[0])
    assert count.frame_count == (2 if backend == "aot_eager" else 1)  # forward and backward


@pytest.mark.parametrize("batch", [None, torch.zeros(6, dtype=torch.long)])
def test_one_cell_without_a_batch_size_compiles(batch):
    """One graph is known from `batch=None`; the last index is not below 0."""
    torch.compiler.reset()
    torch.manual_seed(0)
    layer = GraphAttention(DIM, HEADS, num_features=4, **FORMS["reciprocal"]).double().eval()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    given = (
        torch.randn(6, DIM).double(),
        5 * torch.rand(6, 3).double(),
        batch,
        6 * torch.eye(3).double(),
    )
    with torch.no_grad():
        close(compiled(*given), layer(*given))


def test_one_exported_program_for_all_sizes():
    torch.manual_seed(0)
    layer = GraphAttention(DIM, HEADS, num_features=4, **FORMS["reciprocal"]).double()
    atoms, graphs = Dim("atoms", min=2), Dim("graphs", min=2)
    given = arguments_of(SHAPES[0], True)
    shapes = {name: {0: graphs if name in ("cell", "pbc") else atoms} for name in given}
    program = export(layer, (), given, dynamic_shapes=shapes).module()
    for shape in SHAPES[1:]:
        given = arguments_of(shape, True)
        close(program(**given), layer(**given))


def test_compiled_layers_refuse_data_dependent_checks():
    """A periodic structure for a layer that was not told what to do with it."""
    layer = GraphAttention(DIM, HEADS).double()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    with pytest.raises(Exception, match="periodic="):
        compiled(**arguments_of(SHAPES[0], True))
