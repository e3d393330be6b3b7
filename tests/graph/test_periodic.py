"""Edges of periodic structures: ties at the cutoff, gradients of cells, rows that are not read."""

from functools import partial

import pytest
import torch
from graph_cases import ALL, DIM, EXACT, FEW, HEADS, Kind, collated, graph, kinds
from torch_geometric.data import Data

from molflt.graph import GraphAttention
from molflt.graph.dense import DenseAtoms
from molflt.graph.geometry import Geometry
from molflt.graph.neighbors import neighbor_list
from molflt.graph.periodic import Images
from molflt.graph.transforms import PBCRadiusGraph

CUTOFF = 8.0


def imaged(**options) -> GraphAttention:
    torch.manual_seed(0)
    return GraphAttention(DIM, HEADS, periodic="images", image_cutoff=CUTOFF, **options).double()


def film(side: float = 4.0) -> dict[str, torch.Tensor]:
    """Six atoms whose images lie at exactly the cutoff, two cells away."""
    draw = torch.manual_seed(1)
    flat = torch.rand(6, 3, dtype=torch.float64, generator=draw) * torch.tensor([4.0, 4.0, 3.0])
    return {
        "x": torch.randn(6, DIM, dtype=torch.float64, generator=draw),
        "pos": flat,
        "cell": torch.diag(torch.tensor([side, side, 30.0], dtype=torch.float64)),
        "pbc": torch.tensor([True, True, False]),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("mixing", ["linear", "quadratic", "softmax"])
def test_images_at_the_cutoff_do_not_depend_on_rounding(mixing, dtype):
    """Order, translation and rotation change nothing where ties are the rule."""
    layer, given = imaged(mixing=mixing).to(dtype), film()
    given = {name: x.to(dtype) if x.is_floating_point() else x for name, x in given.items()}
    out = layer(**given)
    close = {"rtol": 0.0, "atol": 1e-10 if dtype == torch.float64 else 3e-5}
    order = torch.randperm(6, generator=torch.manual_seed(2))
    mixed = {**given, "x": given["x"][order], "pos": given["pos"][order]}
    torch.testing.assert_close(layer(**mixed), out[order], **close)
    moved = {**given, "pos": given["pos"] + torch.tensor([0.37, -12.3, 41.1]).to(dtype)}
    torch.testing.assert_close(layer(**moved), out, **close)
    if mixing == "softmax":
        turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.manual_seed(3)).double()).Q
        turned = {name: (given[name].double() @ turn).to(dtype) for name in ("pos", "cell")}
        torch.testing.assert_close(layer(**{**given, **turned}), out, **close)


def test_images_come_and_go_smoothly():
    """As the cell grows by steps of 1e-5 Å through several distances that equal the cutoff."""
    layer = imaged(mixing="softmax")
    sides = 3.999 + 1e-5 * torch.arange(200, dtype=torch.float64)
    outs = torch.stack([layer(**film(float(side))) for side in sides])
    steps = outs.diff(dim=0)
    assert steps.abs().max() < 1e-4  # at the most as steep as the mask itself
    assert steps.diff(dim=0).abs().max() < 1e-7  # no jump, and no kink


@pytest.mark.parametrize("mixing", ["linear", "softmax"])
def test_images_have_forces_and_stress(mixing):
    """What images weigh is part of the gradient, by positions and by the cell."""
    layer, given = imaged(mixing=mixing, position="multiplicative"), film(3.7)
    pos, cell = given["pos"].requires_grad_(), given["cell"].requires_grad_()

    def energy(pos, cell):
        return layer(given["x"], pos, cell=cell, pbc=given["pbc"]).square().sum()

    assert torch.autograd.gradcheck(energy, (pos, cell))


def test_weights_of_images():
    """1 up to an Å from the cutoff, 0 from there on, and of several atoms the nearest counts."""
    cell = torch.diag(torch.tensor([6.5, 40.0, 40.0], dtype=torch.float64))
    pos = torch.zeros(1, 3, dtype=torch.float64)

    def weights(cutoff: float) -> list[float]:
        dense = Images(cutoff).dense(Geometry.of(pos, cell=cell))
        kept = dense.key_mask[0]
        assert kept[0] and dense.key_weight[0, 0] == 1
        return dense.key_weight[0, 1:][kept[1:]].tolist()

    assert weights(6.5) == [] and weights(7.5) == [1.0, 1.0]
    assert weights(7.0) == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("tags", [None, torch.tensor([1, 2, 1, 2])])
@pytest.mark.parametrize("rows", [[[4, 0, 0], [0, 4, 0], [4, 4, 0]], torch.eye(3) / 10])
def test_images_need_a_lattice(rows, tags):
    """As neighbors do; flat cells had no images, and tiny ones more than a tensor can have."""
    cell = torch.stack((4 * torch.eye(3), torch.as_tensor(rows).float()))
    given = Geometry.of(torch.rand(4, 3), torch.tensor([0, 0, 1, 1]), cell, tags=tags)
    encoding = imaged().float().encoding
    with pytest.raises(ValueError, match="^graph 1: .* Å apart"):
        encoding(given)
    encoding(given._replace(pbc=torch.tensor([[True] * 3, [False] * 3])))


def same_under_autocast(compute, *arguments) -> None:
    """To the bit, all tensors of a result that is a tuple of them."""
    expected = compute(*arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = compute(*arguments)
    for one, other in zip(found, expected, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def test_where_atoms_are_is_not_rounded_under_autocast():
    """A side of 10.03 Å is 10 Å in bfloat16: images, pairs and centres would be off."""
    draw = torch.manual_seed(0)
    tags = torch.tensor([0, 1, 1, 2])
    given = Geometry.of(10 * torch.rand(4, 3, generator=draw), cell=10.03 * torch.eye(3))
    same_under_autocast(neighbor_list, given, 6.0)
    same_under_autocast(partial(DenseAtoms.of, lattice=True), given)
    same_under_autocast(Images(6.0).dense, given)
    same_under_autocast(Images(6.0).dense, given._replace(tags=tags))
    data = Data(pos=given.pos, cell=given.cell, pbc=given.pbc)
    same_under_autocast(lambda: PBCRadiusGraph(6.0)(data.clone()).edge_vec)


@pytest.mark.parametrize(
    "kind",
    [k for k in kinds("quadratic", "softmax") if k.nodes == "gaussian" and k.near != "exact"],
    ids=str,
)
def test_encodings_are_not_rounded_under_autocast(kind):
    """What the N x N form and softmax take is as exact as what the linear form takes."""
    layer = kind.build().float()
    encoding = layer.encoding
    given = collated([graph("crystal", 7), graph("slab", 5)])
    geometry = Geometry.of(*(given[k] for k in ("pos", "batch", "cell", "pbc")))
    geometry = geometry._replace(pos=geometry.pos.float(), cell=geometry.cell.float())

    def evaluated():
        dense, found, _ = encoding.padded(geometry)
        matrix = found.dense(dense.mask.shape[1], dense.key_mask.shape[1])
        return dense.positions, dense.key_positions, matrix

    same_under_autocast(evaluated)


def test_additive_reciprocal_refuses_gradients_by_the_cell():
    given, found = graph("crystal", 4), {}
    cell = given.cell.clone().requires_grad_()
    for position, mixing in (("spectral", "linear"), ("multiplicative", "linear")):
        found[position] = Kind(position, "reciprocal", False, "gaussian", mixing).build()
    with pytest.raises(ValueError, match="gradient.*cell.*position='multipl"):
        found["spectral"](given.x, given.pos, cell=cell)
    with torch.no_grad():
        found["spectral"](given.x, given.pos, cell=cell)
    exact = Kind("spectral", "reciprocal", False, "gaussian", "softmax").build()
    for layer in (found["multiplicative"], exact):
        check = torch.autograd.gradcheck
        assert check(lambda c, net=layer: net(given.x, given.pos, cell=c).square().sum(), (cell,))


@pytest.mark.parametrize(
    ("kind", "garbage"),
    [*((kind, torch.nan) for kind in ALL), *((kind, 1e300) for kind in FEW)],
    ids=str,
)
def test_rows_of_axes_that_are_not_periodic_are_not_read(kind, garbage):
    """Files of molecules and slabs have anything there; gradients do not see it either."""
    layer, given = kind.build(), collated([graph("slab", 7), graph("molecule", 5)])
    expected = layer(**given)
    cell = given["cell"].masked_fill(~given["pbc"][..., None], garbage)
    pos = given["pos"].requires_grad_()
    out = layer(**{**given, "cell": cell})
    torch.testing.assert_close(out, expected, **EXACT)
    assert torch.autograd.grad(out.sum(), pos)[0].isfinite().all()


@pytest.mark.parametrize("kind", FEW, ids=str)
def test_torch_func_equals_autograd(kind):
    """By atoms and by positions, neighbors and nodes included."""
    layer, given = kind.build(), collated([graph("crystal", 5), graph("slab", 4)])

    def loss(x, pos):
        return layer(**{**given, "x": x, "pos": pos}).square().sum()

    leaves = [given[name].clone().requires_grad_() for name in ("x", "pos")]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    found = torch.func.grad(loss, (0, 1))(given["x"], given["pos"])
    torch.testing.assert_close(found, expected, **EXACT)


def test_structures_are_not_mapped_but_batched():
    layer = next(kind for kind in FEW if kind.near).build()
    given = collated([graph("crystal", 5)])
    with pytest.raises(ValueError, match="cannot be mapped by torch.func.vmap; got a batch of 3"):
        torch.func.vmap(lambda pos: layer(**{**given, "pos": pos}))(given["pos"].expand(3, -1, -1))
