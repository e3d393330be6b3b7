from collections.abc import Callable
from functools import partial

import pytest
import torch
from graph.test_regressor import changed, structure
from graph_cases import (
    DIM,
    EXACT,
    FEW,
    HEADS,
    Kind,
    close,
    collated,
    graph,
    kinds,
    mixed,
    run,
    uneven,
)
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch_geometric.data import Batch, Data

from molflt.attention.nodes.lattice import Lattice, free_extent
from molflt.attention.nodes.reciprocal import reciprocal_nodes
from molflt.attention.numerics import fade
from molflt.attention.positions.multiplicative import MultiplicativePosition
from molflt.attention.positions.spectral import GraphNodes
from molflt.graph import EnergyRegressor, GraphAttention, PBCRadiusGraph
from molflt.graph.computation import EnergyComputation, EnergyInputs
from molflt.graph.dense import DenseAtoms
from molflt.graph.geometry import Geometry
from molflt.graph.mesh import use_mesh_
from molflt.graph.neighbors import neighbor_list
from molflt.graph.periodic import PERIODIC, Images, make_periodic


def imaged(**options) -> GraphAttention:
    return GraphAttention(DIM, HEADS, periodic="images", image_cutoff=8.0, **options).double()


def film(side: float = 4.0) -> dict[str, torch.Tensor]:
    """Returns six atoms with images exactly at the cutoff, two cells away."""
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
    """The cell grows in steps of 1e-5 Å, and several distances pass the cutoff."""
    layer = imaged(mixing="softmax")
    sides = 3.9996 + 1e-5 * torch.arange(80, dtype=torch.float64)
    outs = torch.stack([layer(**film(float(side))) for side in sides])
    steps = outs.diff(dim=0)
    assert steps.abs().max() < 1e-4  # not steeper than the mask itself
    assert steps.diff(dim=0).abs().max() < 1e-7  # no jump, and no kink


def test_weights_of_images():
    """The weight falls from 1 to 0 over the last Å, and the nearest atom dominates."""
    cell = torch.diag(torch.tensor([6.5, 40.0, 40.0], dtype=torch.float64))
    pos = torch.zeros(1, 3, dtype=torch.float64)

    def weights(cutoff: float) -> list[float]:
        dense = Images(cutoff).dense(Geometry.of(pos, cell=cell))
        kept = dense.key_mask[0]
        assert kept[0] and dense.key_weight[0, 0] == 1
        return dense.key_weight[0, 1:][kept[1:]].tolist()

    assert weights(6.5) == [] and weights(7.5) == [1.0, 1.0]
    assert weights(7.0) == pytest.approx([0.5, 0.5])
    pos = torch.tensor([[0.0, 0, 0], [0, 1, 0]], dtype=torch.float64)
    given = Geometry.of(pos, cell=cell, pbc=torch.tensor([True, False, False]))
    dense = Images(7.0).dense(given._replace(tags=torch.tensor([1, 2])))
    expected = fade(torch.tensor((6.5**2 + 1) ** 0.5 - 6.0))  # distances from the adsorbate
    found = dense.key_weight[0, 2:][dense.key_mask[0, 2:]]
    torch.testing.assert_close(found, expected.double().expand(2), rtol=0, atol=1e-6)


def test_images_equal_brute_force():
    """Includes one periodic axis, and atoms that are several cells away from other atoms."""
    tagged, bare, film = structure(9, 3), structure(9, 3, tags=False), graph("slab", 12)
    one_axis = changed(tagged, pbc=torch.tensor([[True, False, False]]))
    far = {"pos": 2 * film.pos, "cell": film.cell[None], "pbc": film.pbc[None]}
    far = changed(structure(12, 5, tags=False), **far)
    for given, cutoff in ((tagged, 7.0), (bare, 7.0), (one_axis, 7.0), (far, 4.0)):
        geometry = Geometry.of_data(Batch.from_data_list([given, structure(4, 1)]))
        geometry = geometry._replace(tags=None) if given is far else geometry
        reach = 9.0 if given is far else 1.0  # with tags, only the nearest cells in the plane count
        dense = Images(cutoff).dense(geometry)
        ads = given.tags == 2
        centers, sources = (ads, ~ads) if ads.any() else (ads | True, ads | True)
        steps = torch.cartesian_prod(*[torch.arange(-reach, reach + 1)] * 2) * given.pbc[0, :2]
        shifts = steps.unique(dim=0).double() @ given.cell[0, :2]
        places = given.pos + shifts[shifts.any(dim=1), None]
        near = torch.cdist(places, given.pos[centers]).amin(dim=2) < cutoff
        atoms, expected = (near & sources).nonzero()[:, 1], places[near & sources]
        real = dense.key_mask[0].clone()
        real[: dense.mask.shape[1]] = False
        found = dense.key_positions[0][real] + given.pos.mean(dim=0)
        nearest = torch.cdist(found, expected).argmin(dim=1)
        assert len(found) == len(expected) == len(nearest.unique()) > 0
        torch.testing.assert_close(found, expected[nearest], rtol=0, atol=1e-9)
        assert torch.equal(dense.key_index[0][real], atoms[nearest])


def test_images_of_surfaces_along_any_two_axes():
    slab = structure(9, 3)
    turned = changed(slab, cell=slab.cell[:, [2, 0, 1]], pbc=torch.tensor([[False, True, True]]))
    dense = [Images(7.0).dense(Geometry.of_data(data)) for data in (slab, turned)]
    torch.testing.assert_close(dense[0].key_positions, dense[1].key_positions, rtol=0, atol=1e-12)


def same_under_autocast(compute, *arguments) -> None:
    """Asserts that all tensors of a result are bitwise equal under autocast."""
    expected = compute(*arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = compute(*arguments)
    for one, other in zip(found, expected, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def test_where_atoms_are_is_not_rounded_under_autocast():
    """In bfloat16, a side of 10.03 Å would be 10 Å, and images and pairs would be wrong."""
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
    """Encodings of the N x N form, of softmax and of the linear form are equally exact."""
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
    given = graph("crystal", 4)
    inputs, cell = (given.x, given.pos), given.cell.clone().requires_grad_()
    additive, exact = (
        Kind("spectral", "reciprocal", False, "gaussian", mixing).build()
        for mixing in ("linear", "softmax")
    )
    with pytest.raises(ValueError, match="gradient.*cell.*position='multipl"):
        additive(*inputs, cell=cell)
    with torch.no_grad():
        additive(*inputs, cell=cell)
    assert gradcheck(lambda cell: exact(*inputs, cell=cell).square().sum(), (cell,))


@pytest.mark.parametrize(
    ("kind", "garbage"),
    [*((kind, torch.nan) for kind in kinds("linear", "softmax")), *((kind, 1e300) for kind in FEW)],
    ids=str,
)
def test_rows_of_axes_that_are_not_periodic_are_not_read(kind, garbage):
    layer, given = kind.build(), collated([graph("slab", 7), graph("molecule", 5)])
    expected = layer(**given)
    cell = given["cell"].masked_fill(~given["pbc"][..., None], garbage)
    pos = given["pos"].requires_grad_()
    out = layer(**{**given, "cell": cell})
    torch.testing.assert_close(out, expected, **EXACT)
    assert torch.autograd.grad(out.sum(), pos)[0].isfinite().all()


class AllImages(Images):
    """Images of all atoms, whatever their tags."""

    def dense(self, geometry: Geometry) -> DenseAtoms:
        return super().dense(geometry._replace(tags=None))


def test_a_scheme_is_one_class_and_one_line(monkeypatch):
    monkeypatch.setitem(PERIODIC, "all_images", AllImages)
    options, graphs = {"periodic": "all_images", "image_cutoff": 4.0}, mixed()
    net = GraphAttention(DIM, HEADS, **options).double()
    assert net.encoding.periodic.image_cutoff == 4.0
    close([run(net, [each])[0] for each in graphs], run(net, graphs))
    with pytest.raises(ValueError, match="max_frequency=0.2 has no effect with periodic='all_im"):
        GraphAttention(DIM, HEADS, **options, max_frequency=0.2)


ERROR = {4: 3e-3, 5: 6e-4, 6: 6e-6, 8: 2e-7}  # the documented error is that of the worst kernel


def layer(periodic: str = "mesh", **options) -> GraphAttention:
    """Returns a layer whose weights depend only on its options."""
    torch.manual_seed(0)
    chosen = {"position": "multiplicative", "max_frequency": 0.2, "num_features": 16}
    return uneven(GraphAttention(DIM, HEADS, periodic=periodic, **{**chosen, **options}).double())


def kernels(kind: str, max_frequency: float, **options) -> tuple[Tensor, Callable[[int], Tensor]]:
    """Returns h of 9 atoms, computed with nodes, and a function that computes it with a mesh."""
    given = graph(kind, 9)
    cell, pbc, pos = given.cell[None], given.pbc[None], given.pos[None]
    torch.manual_seed(0)
    position = MultiplicativePosition.build(HEADS, sampled=False, **options).double()
    extent = free_extent(given.pos, torch.zeros(9, dtype=torch.long), cell, pbc)
    nodes = GraphNodes(*reciprocal_nodes(cell, pbc, max_frequency, extent, taper="positive"))
    left, right = position.factors(pos, pos, nodes)
    lattice, mask = Lattice.of(cell, pbc, extent), torch.ones(1, 9, dtype=torch.bool)

    def by_mesh(order: int) -> Tensor:
        return position.on_mesh(pos, mask, lattice, max_frequency, order).dense(9)

    return left @ right.mT, by_mesh


@pytest.mark.parametrize("kind", ["crystal", "slab", "molecule"])
@pytest.mark.parametrize("max_frequency", [0.1, 0.3])
def test_the_kernel_is_that_of_the_nodes(kind, max_frequency):
    # a spectrum that is flat until its end, the worst case for splines
    sharp = {"width_range": (0.2, 0.3), "num_gaussians": 2, "positive": True, "background": 0.0}
    expected, by_mesh = kernels(kind, max_frequency, **sharp)
    for order, bound in ERROR.items():
        error = (by_mesh(order) - expected).norm() / expected.norm()
        assert error < bound, (order, error)


def test_a_background_is_seen_by_all_pairs():
    options = {"num_gaussians": 4, "positive": True}
    expected, by_mesh = kernels("crystal", 0.2, background=0.7, **options)
    without, _ = kernels("crystal", 0.2, background=0.0, **options)
    assert (expected - without - 0.7).abs().max() < 1e-12
    assert (by_mesh(8) - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("near", [None, 3.0])
def test_a_layer_is_that_of_the_nodes_with_its_gradients(near):
    graphs = [graph("crystal", 7), graph("slab", 12)]
    found = []
    for periodic, options in (("mesh", {"mesh_order": 8}), ("reciprocal", {})):
        net, given = layer(periodic, near_field=near, **options), collated(graphs)
        given["pos"].requires_grad_()
        out = net(**given)
        slopes = torch.autograd.grad(out.square().sum(), [given["pos"], *net.parameters()])
        found.append([out, *slopes])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() < 1e-5 * max(1e-3, float(other.norm()))


NETS = {
    "images": partial(imaged, position="multiplicative"),
    "softmax": partial(imaged, position="multiplicative", mixing="softmax"),
    "mesh": partial(layer, near_field=3.0, num_features=4),
    "reciprocal": partial(layer, "reciprocal", near_field=3.0, num_features=4),
}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("kind", ["crystal", "slab"])
def test_gradients_by_positions_and_cell_of_two_orders(kind, name):
    net = NETS[name]()
    given = collated([graph(kind, 3)])

    def energy(pos: Tensor, cell: Tensor) -> Tensor:
        return net(**{**given, "pos": pos, "cell": cell}).square().sum()

    inputs = (given["pos"].requires_grad_(), given["cell"].requires_grad_())
    assert gradcheck(energy, inputs, fast_mode=True)
    assert gradgradcheck(energy, inputs, fast_mode=True)


def test_trained_models_can_use_a_mesh():
    net = EnergyRegressor(16, 2, layers=2, near_field=3.0).double().eval()
    batch = Batch.from_data_list([structure(9, 3), structure(6, 4)])
    by_nodes, weights = net(batch)["energy"], dict(net.state_dict())
    use_mesh_(net, 8)
    by_mesh = net(batch)["energy"]
    assert 0 < (by_mesh - by_nodes).abs().max() < 1e-5
    assert all(torch.equal(x, weights[name]) for name, x in net.state_dict().items())
    use_mesh_(net, 5)  # another order
    assert (net(batch)["energy"] - by_nodes).abs().max() > (by_mesh - by_nodes).abs().max()


def test_auto_chooses_by_each_graph(monkeypatch):
    """Large crystals use a mesh in any batch; other crystals and exports use nodes."""
    graphs = [structure(9, 3), structure(6, 4), structure(12, 5)]

    def energies(periodic: str, order: int | None, *picked: int) -> Tensor:
        torch.manual_seed(0)
        net = EnergyRegressor(16, 2, layers=2, near_field=3.0, periodic=periodic, mesh_order=order)
        net, batch = net.double().eval(), Batch.from_data_list([graphs[i] for i in picked])
        if periodic == "auto":
            exported = EnergyComputation(net)(*EnergyInputs.of(net, batch))
            close([exported], [energies("reciprocal", None, *picked)])
        return net(batch)["energy"]

    nodes, mesh = energies("reciprocal", None, 0, 1, 2), energies("mesh", 5, 0, 1, 2)
    assert (nodes != mesh).all()
    close([energies("auto", None, 0, 1, 2)], [nodes])
    monkeypatch.setattr("molflt.graph.periodic._MOST_BY_NODES", 8)
    mixed = torch.stack((mesh[0], nodes[1], mesh[2]))
    close([energies("auto", None, 0, 1, 2)], [mixed])
    close([energies("auto", None, i)[0] for i in range(3)], list(mixed))
    close([energies("auto", None, 2, 0)], [mixed[[2, 0]]])
    geometry = Geometry.of_data(Batch.from_data_list(graphs))
    assert make_periodic("auto").on_mesh(geometry).tolist() == [True, False, True]
    given, scheme = collated([graph("crystal", 9)]), make_periodic("auto")
    made = partial(GraphAttention, DIM, HEADS, position="multiplicative", periodic=scheme)
    both = [made(mixing=mixing).encoding.periodic for mixing in ("softmax", "linear")]
    assert [each.nodes_only for each in both] == [True, False]
    empty = {"cell": given["cell"].repeat(2, 1, 1), "pbc": given["pbc"].repeat(2, 1)}
    close([layer("auto")(**{**given, **empty, "batch_size": 2})], [layer("mesh")(**given)])
    assert make_periodic("auto", max_frequency=0.05).on_mesh(geometry) is None  # few nodes


@pytest.mark.parametrize("near", [None, 3.0])
def test_many_pairs_and_pieces_change_nothing(near, monkeypatch):
    def found() -> list[Tensor]:
        torch.manual_seed(0)
        net = EnergyRegressor(8, 2, layers=1, num_features=6, periodic="mesh", near_field=near)
        net = uneven(net.double())
        batch = Batch.from_data_list([structure(5, 3), structure(4, 4)])
        batch.pos = batch.pos.double().requires_grad_()
        out = net(batch)
        total = out["energy"].sum() + out["displacement"].square().sum()
        weights = [w for w in net.parameters() if w.requires_grad]
        (force,) = torch.autograd.grad(total, batch.pos, create_graph=True)
        first = torch.autograd.grad(total, weights, retain_graph=True, materialize_grads=True)
        second = torch.autograd.grad(force.square().sum(), weights, materialize_grads=True)
        return [out["energy"], out["displacement"], force, *first, *second]

    whole = found()
    monkeypatch.setattr("molflt.attention.mixing.mesh._CHANNELS", 10)
    monkeypatch.setattr("molflt.attention.mixing.pairs._MANY", 8)
    monkeypatch.setattr("molflt.graph.neighbors._MANY", 8)
    monkeypatch.setattr("molflt.graph.neighbors._PIECE", 50)
    close(found(), whole)
