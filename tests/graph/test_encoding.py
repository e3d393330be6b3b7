from itertools import pairwise

import pytest
import torch
from graph_cases import EXACT, Graph, Kind, close, graph, kinds, run
from torch import Tensor
from torch.func import functional_call

from molflt.attention.mixing.forms import softmax
from molflt.graph import GraphAttention
from molflt.graph.geometry import Geometry

POSITIONS = ("spectral", "multiplicative", "near", "exact")
UNIMODULAR = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 2.0, 1.0]])
IN_PLANE = torch.tensor([[1.0, 3.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])


def reciprocal(position: str, mixing: str = "linear", **options) -> GraphAttention:
    """Returns a layer with reciprocal nodes; "near" and "exact" add forms of the near field."""
    near = {"near": True, "exact": "exact"}.get(position, False)
    mixing = "quadratic" if position == "exact" and mixing == "softmax" else mixing
    kind = Kind("multiplicative" if near else position, "reciprocal", near, "gaussian", mixing)
    return kind.build(**options)


@pytest.mark.parametrize("mixing", ["linear", "softmax"])
@pytest.mark.parametrize(
    ("structure", "matrix"), [("crystal", UNIMODULAR), ("slab", IN_PLANE)], ids=["crystal", "slab"]
)
@pytest.mark.parametrize("position", POSITIONS)
def test_other_descriptions_of_the_same_crystal(position, structure, matrix, mixing):
    layer, given = reciprocal(position, mixing), graph(structure, 9)
    expected = run(layer, [given])
    steps = torch.randint(-3, 4, (9, 3), generator=torch.manual_seed(0)) * given.pbc
    moved = given._replace(pos=given.pos + steps.double() @ given.cell)
    order, open_axis = [2, 0, 1], given.cell.clone()
    open_axis[~given.pbc] = torch.tensor([0.5, -0.2, 30.0]).double()
    handed = given._replace(cell=-given.cell[order], pbc=given.pbc[order])
    skewed = given._replace(cell=matrix.double() @ given.cell)
    for same in (moved, handed, skewed, given._replace(cell=open_axis)):
        close(run(layer, [same]), expected)
    other = given.pos.clone()
    other[0] += 0.5 * given.cell[0]
    assert (run(layer, [given._replace(pos=other)])[0] - expected[0]).abs().max() > 1e-6


def supercell(given: Graph, copies: tuple[int, int, int]) -> Graph:
    """Returns the atoms of all cells, one cell after another."""
    steps = torch.cartesian_prod(*(torch.arange(n).double() for n in copies))
    pos = (steps @ given.cell)[:, None] + given.pos
    cell = given.cell * torch.tensor(copies).double()[:, None]
    return Graph(given.x.repeat(len(steps), 1), pos.flatten(0, 1), cell, given.pbc)


SUPERCELLS = [("crystal", (2, 2, 2)), ("crystal", (2, 1, 1)), ("slab", (2, 2, 1))]


@pytest.mark.parametrize("mixing", ["linear", "quadratic", "softmax"])
@pytest.mark.parametrize(("structure", "copies"), SUPERCELLS)
@pytest.mark.parametrize("position", POSITIONS[1:])
def test_supercells_of_the_multiplicative_position(position, structure, copies, mixing):
    given, layer = graph(structure, 4), reciprocal(position, mixing)
    large = run(layer, [supercell(given, copies)])[0].unflatten(0, (-1, 4))
    assert (large - run(layer, [given])[0]).abs().max() < 1e-10


def kernel_at(layer: GraphAttention, distance: float) -> Tensor:
    """Returns the positional kernel between two atoms of a molecule, (heads,)."""
    pos = torch.tensor([[0.0, 0.0, 0.0], [0.6, 0.0, 0.8]], dtype=torch.float64) * distance
    one, none = torch.zeros(2, dtype=torch.long), torch.zeros(1, 3, dtype=torch.bool)
    geometry = Geometry(pos, one, torch.tensor([0, 2]), torch.zeros(1, 3, 3).double(), none)
    return layer.encoding.padded(geometry).encoding.dense(2, 2)[0, :, 0, 1]


@pytest.mark.parametrize(
    ("position", "periodic"),
    [(position, "none") for position in ("spectral", "multiplicative", "near")]
    + [("near", "reciprocal")],
)
def test_radial_profile_is_the_exact_kernel_of_a_pair(position, periodic):
    name, near = ("multiplicative", True) if position == "near" else (position, False)
    layer = Kind(name, periodic, near, "gaussian", "softmax").build()
    distance = torch.tensor([0.3, 1.7, 2.6], dtype=torch.float64)
    expected = torch.stack([kernel_at(layer, float(r)) for r in distance], dim=1)
    bound = 1e-10 if periodic == "none" else 1e-2  # a box of finite size
    assert (layer.encoding.radial_profile(distance) - expected).abs().max() < bound


@pytest.mark.parametrize("periodic", ["none", "reciprocal"])
def test_near_field_is_the_kernel_of_near_pairs(periodic):
    """The kernel is exp(f) up to half of the cutoff, and is continuous at the cutoff."""
    layer = Kind("multiplicative", periodic, True, "gaussian", "linear").build()
    near = layer.encoding.near_field
    for distance in (0.0, 0.7, 1.4):
        z = torch.tensor([0.6, 0.0, 0.8], dtype=torch.float64) * distance
        expected = near.spectrum.mask(z[None, None])[0, :, 0].exp()
        error = (kernel_at(layer, distance) - expected).abs().max()
        assert error < (1e-10 if periodic == "none" else 1e-2)
    inside, outside = (kernel_at(layer, near.cutoff + step) for step in (-1e-7, 1e-7))
    assert (inside - outside).abs().max() < 1e-5 < (inside - 1).abs().max()


FORCES = [
    kind
    for kind in kinds("linear", "softmax")
    if kind.nodes == "gaussian" and kind.periodic != "mesh"
]


def force_field(kind: Kind):
    """Returns an energy of two layers, of which the second depends on positions through its tokens.

    The energy also depends on a shift of parameters of the first layer along a direction.

    Biases are 0, as in many initializations, and queries of padding are then exactly 0.
    """
    options = {} if kind.mixing == "softmax" else {"num_features": 4}
    if kind.periodic != "none":
        options |= {"image_cutoff": 2.5} if kind.periodic == "images" else {"max_frequency": 0.25}
    layers = [kind.build(seed, **options) for seed in (0, 1)]
    with torch.no_grad():
        for layer in layers:
            for part in ("query", "key", "value", "out"):
                getattr(layer.attention, f"to_{part}").bias.zero_()
    # random features of additive reciprocal masks depend on the box
    other = "crystal" if kind[:2] == ("spectral", "reciprocal") else "slab"
    graphs = [graph("crystal", 2), graph(other, 3)]
    x = torch.cat([each.x for each in graphs])
    more = {
        "batch": torch.tensor([0, 0, 1, 1, 1]),
        "cell": torch.stack([each.cell for each in graphs]),
        "pbc": torch.stack([each.pbc for each in graphs]),
    }

    parts = ("spectrum.log_width", "amplitude", "to_query.weight", "to_key.bias")
    learned = {name: p for name, p in layers[0].named_parameters() if name.endswith(parts)}
    along = {name: torch.randn_like(value) for name, value in learned.items()}

    def energy(pos: Tensor, shift: float | Tensor = 0.0) -> Tensor:
        shifted = {name: value.detach() + shift * along[name] for name, value in learned.items()}
        h = x + functional_call(layers[0], shifted, (x, pos), more)
        return torch.tanh(layers[1](h, pos, **more)).sum()

    return energy, torch.cat([0.6 * each.pos for each in graphs])


@pytest.mark.parametrize("kind", FORCES, ids=str)
def test_forces_and_training_on_them(kind):
    energy, pos = force_field(kind)
    (forces,) = torch.autograd.grad(-energy(pos.requires_grad_()), pos)
    assert forces.abs().max() > 1e-4
    if kind[:2] != ("spectral", "reciprocal") or kind.mixing == "softmax":
        for atoms in (forces[:2], forces[2:]):
            torch.testing.assert_close(atoms.sum(dim=0), torch.zeros(3).double(), **EXACT)
    inputs = (pos, torch.zeros((), dtype=torch.float64, requires_grad=True))
    assert torch.autograd.gradcheck(energy, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(energy, inputs, fast_mode=True)


PTR = (0, 6, 7, 16)
POLYNOMIAL = {"feature_map": "polynomial", "num_features": None}


def build(**options):
    torch.manual_seed(0)
    options = {"near_field": 3.0, "num_features": 6, "position": "multiplicative", **options}
    options |= {"near_exact": True, "periodic": "none", "position_options": {"num_nodes": 4}}
    return GraphAttention(8, 2, **options).double()


def atoms(scale: float = 1.0):
    torch.manual_seed(1)
    batch = torch.repeat_interleave(torch.arange(3), torch.tensor(PTR).diff())
    x, pos = scale * torch.randn(16, 8).double(), 3 * torch.rand(16, 3).double()
    return x, pos, batch


def every_third(key, mask=None, rate=0.0):
    """Returns a constant dropout mask (batch, heads, keys), different for each head."""
    places = torch.arange(key.shape[-2]) + torch.arange(key.shape[1])[:, None]
    kept = (places % 3 > 0).expand(key.shape[:-1])
    return kept if mask is None else kept & mask


def softmax_of(layer, x, pos, kept=None):
    """Returns softmax attention of one graph with the exact mask f of the near field."""
    attention, near = layer.attention, layer.encoding.near_field
    query, key, value, *_ = attention._split(x[None])
    bias = near.spectrum.mask((pos[:, None] - pos[None])[None])
    mask = kept and kept(key)
    return attention._join(softmax(query, key, value, bias, mask))[0]


def test_the_near_field_replaces_a_mask_that_is_not_even():
    options = {"spectrum": "gaussian_mixture", "asymmetric": True}
    layer = GraphAttention(
        *(8, 2), position="multiplicative", position_options=options, mixing="softmax", near_field=9
    ).double()
    pos = torch.rand(5, 3, dtype=torch.float64)
    bias = layer.encoding(Geometry.of(pos)).classes[0].encoding.bias
    close([bias], [layer.encoding.near_field.spectrum.mask((pos[:, None] - pos)[None])])


@pytest.mark.parametrize("mixing", ["linear", "quadratic"])
@pytest.mark.parametrize(
    ("scale", "options", "kept"),
    [(1.0, {}, None), (30.0, {}, None), (30.0, POLYNOMIAL, None), (30.0, {}, every_third)],
)
def test_all_near_pairs_equal_softmax(mixing, scale, options, kept, monkeypatch):
    """Includes exp(q.k) that features cannot estimate, and keys that dropout keeps."""
    layer = build(near_field=100.0, mixing=mixing, **options)
    if kept:
        layer.attention.dropout = 0.4
        monkeypatch.setattr("molflt.attention.layer.drop_keys", kept)
    x, pos, batch = atoms(scale)
    x.requires_grad_()
    out = layer(x, pos, batch)
    expected = torch.cat([softmax_of(layer, x[a:b], pos[a:b], kept) for a, b in pairwise(PTR)])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-8)
    grads = [torch.autograd.grad(o.sum(), x, retain_graph=True)[0] for o in (out, expected)]
    torch.testing.assert_close(*grads, rtol=1e-7, atol=1e-7)


def test_float32_neither_overflows_nor_loses_rows():
    x, pos, batch = (t.float() if t.is_floating_point() else t for t in atoms(60.0))
    out = build(near_field=4.0).float()(x.requires_grad_(), pos, batch)
    out.square().sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()


def test_dropout_takes_near_pairs_as_well():
    """A rate near 1 drops all keys; on average, dropout does not change the sums."""
    x, pos, _ = atoms()
    layer = build(dropout=0.5, normalize="none")
    layer.attention.to_out = torch.nn.Identity()
    batch = torch.arange(500).repeat_interleave(6)
    drawn = layer(x[:6].repeat(500, 1), pos[:6].repeat(500, 1), batch).unflatten(0, (500, 6))
    expected = layer.eval()(x[:6], pos[:6])
    assert (drawn.mean(0) - expected).norm() < 0.1 * expected.norm()
    layer.train().attention.dropout = 0.999999
    assert not layer(x, pos, atoms()[2]).any()
