"""Reciprocal lattices keep their promises in whole layers, and forces can be trained."""

import pytest
import torch
from graph_cases import EXACT, Graph, Kind, close, graph, run
from torch import Tensor

from molflt.graph import GraphAttention
from molflt.graph.geometry import Geometry

POSITIONS = ("spectral", "multiplicative", "near")
UNIMODULAR = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 2.0, 1.0]])
IN_PLANE = torch.tensor([[1.0, 3.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])


def reciprocal(position: str, mixing: str = "linear", **options) -> GraphAttention:
    """A layer with nodes on reciprocal lattices; "near": multiplicative with a near field."""
    near = position == "near"
    kind = Kind("multiplicative" if near else position, "reciprocal", near, "gaussian", mixing)
    return kind.build(**options)


@pytest.mark.parametrize("mixing", ["linear", "softmax"])
@pytest.mark.parametrize("structure", ["crystal", "slab"])
@pytest.mark.parametrize("position", POSITIONS)
def test_lattice_shifts_of_single_atoms(position, structure, mixing):
    """Any atom by any lattice vector along periodic axes, each by another."""
    layer, given = reciprocal(position, mixing), graph(structure, 9)
    steps = torch.randint(-3, 4, (9, 3), generator=torch.manual_seed(0)) * given.pbc
    assert (steps.abs().sum(dim=1) > 0).sum() > 6
    moved = given._replace(pos=given.pos + steps.double() @ given.cell)
    close(run(layer, [moved]), run(layer, [given]))
    # A step along an axis that is not periodic, or of half a cell, is another structure.
    other = given.pos.clone()
    other[0] += 0.5 * given.cell[0]
    changed = run(layer, [given._replace(pos=other)])[0] - run(layer, [given])[0]
    assert changed.abs().max() > 1e-6


@pytest.mark.parametrize("mixing", ["linear", "softmax"])
@pytest.mark.parametrize(
    ("structure", "matrix"), [("crystal", UNIMODULAR), ("slab", IN_PLANE)], ids=["crystal", "slab"]
)
@pytest.mark.parametrize("position", POSITIONS)
def test_another_cell_of_the_same_crystal(position, structure, matrix, mixing):
    """Also with its vectors in another order, and of the other handedness."""
    layer, given = reciprocal(position, mixing), graph(structure, 9)
    expected = run(layer, [given])
    cell = matrix.double() @ given.cell
    close(run(layer, [given._replace(cell=cell)]), expected)
    order = [2, 0, 1]
    close(run(layer, [given._replace(cell=-cell[order], pbc=given.pbc[order])]), expected)


@pytest.mark.parametrize("position", POSITIONS)
def test_the_vector_of_an_axis_that_is_not_periodic_is_not_read(position):
    layer, given = reciprocal(position), graph("slab", 9)
    cell = given.cell.clone()
    cell[2] = torch.tensor([0.5, -0.2, 30.0])
    close(run(layer, [given._replace(cell=cell)]), run(layer, [given]))


def supercell(given: Graph, copies: tuple[int, int, int]) -> Graph:
    """Every atom once in each of the cells, those of one cell behind those of another."""
    steps = torch.cartesian_prod(*(torch.arange(n).double() for n in copies))
    pos = (steps @ given.cell)[:, None] + given.pos
    cell = given.cell * torch.tensor(copies).double()[:, None]
    return Graph(given.x.repeat(len(steps), 1), pos.flatten(0, 1), cell, given.pbc)


def against_supercell(
    layer: GraphAttention, structure: str, copies: tuple[int, int, int]
) -> Tensor:
    """Outputs in the supercell minus those in the cell, for every copy of every atom."""
    given = graph(structure, 4)
    large = run(layer, [supercell(given, copies)])[0]
    return large.unflatten(0, (-1, 4)) - run(layer, [given])[0]


SUPERCELLS = [("crystal", (2, 2, 2)), ("crystal", (2, 1, 1)), ("slab", (2, 2, 1))]


@pytest.mark.parametrize("mixing", ["linear", "quadratic", "softmax"])
@pytest.mark.parametrize(("structure", "copies"), SUPERCELLS)
@pytest.mark.parametrize("position", ["multiplicative", "near"])
def test_supercells_of_the_multiplicative_position(position, structure, copies, mixing):
    layer = reciprocal(position, mixing)
    assert against_supercell(layer, structure, copies).abs().max() < 1e-10


@pytest.mark.parametrize("mixing", ["linear", "softmax"])
def test_additive_position_promises_nothing_about_supercells(mixing):
    """It exponentiates the sum over images, and exp(a + b) is not exp(a) + exp(b)."""
    found = against_supercell(reciprocal("spectral", mixing), "crystal", (2, 1, 1))
    assert torch.isfinite(found).all() and found.abs().max() > 1e-6


@pytest.mark.parametrize(
    "options", [{"position_options": {"background": 1.0}}, {"normalize": "unmasked"}], ids=str
)
def test_options_that_break_supercells_are_off_by_default(options):
    """What all pairs see of each other, and a normalizer without the kernel, double with a cell."""
    default = reciprocal("multiplicative").encoding.position
    assert default.background == 0 and default.spectrum.positive
    layer = reciprocal("multiplicative", **options)
    assert against_supercell(layer, "crystal", (2, 1, 1)).abs().max() > 1e-6


def kernel_at(layer: GraphAttention, distance: float) -> Tensor:
    """Positional kernel between two atoms of a molecule, (heads,)."""
    pos = torch.tensor([[0.0, 0.0, 0.0], [0.6, 0.0, 0.8]], dtype=torch.float64) * distance
    one, none = torch.zeros(2, dtype=torch.long), torch.zeros(1, 3, dtype=torch.bool)
    geometry = Geometry(pos, one, torch.tensor([0, 2]), torch.zeros(1, 3, 3).double(), none)
    return layer.encoding.padded(geometry).encoding.dense(2, 2)[0, :, 0, 1]


@pytest.mark.parametrize("periodic", ["none", "reciprocal"])
def test_near_field_is_the_kernel_of_near_pairs(periodic):
    """exp(f) up to half of the cutoff, and no step at the cutoff."""
    layer = Kind("multiplicative", periodic, True, "gaussian", "linear").build()
    near = layer.encoding.near_field
    for distance in (0.0, 0.7, 1.4):
        z = torch.tensor([0.6, 0.0, 0.8], dtype=torch.float64) * distance
        expected = near.spectrum.mask(z[None, None])[0, :, 0].exp()
        error = (kernel_at(layer, distance) - expected).abs().max()
        assert error < (1e-10 if periodic == "none" else 1e-2)
    inside, outside = (kernel_at(layer, near.cutoff + step) for step in (-1e-7, 1e-7))
    assert (inside - outside).abs().max() < 1e-5 < (inside - 1).abs().max()


FORCES = {
    "spectral": ("spectral", "none", False),
    "multiplicative": ("multiplicative", "none", False),
    "near": ("multiplicative", "none", True),
    "images": ("spectral", "images", False),
    "additive-reciprocal": ("spectral", "reciprocal", False),
    "reciprocal": ("multiplicative", "reciprocal", False),
    "reciprocal-near": ("multiplicative", "reciprocal", True),
}


def force_field(name: str, mixing: str = "linear"):
    """Two layers, so that the second sees positions through its tokens, too, and a readout.

    Without biases, which are 0 in many initializations: padding then has queries of exactly 0.
    """
    position, periodic, near = FORCES[name]
    kind = Kind(position, periodic, near, "gaussian", mixing)
    options = {} if mixing == "softmax" else {"num_features": 4}
    if periodic != "none":
        options |= {"image_cutoff": 2.5} if periodic == "images" else {"max_frequency": 0.25}
    layers = [kind.build(seed, **options) for seed in (0, 1)]
    with torch.no_grad():
        for layer in layers:
            for part in ("query", "key", "value", "out"):
                getattr(layer.attention, f"to_{part}").bias.zero_()
    # Random features of additive reciprocal masks depend on the box: see the last test.
    other = "crystal" if name == "additive-reciprocal" else "slab"
    graphs = [graph("crystal", 2), graph(other, 3)]
    x = torch.cat([each.x for each in graphs])
    more = {
        "batch": torch.tensor([0, 0, 1, 1, 1]),
        "cell": torch.stack([each.cell for each in graphs]),
        "pbc": torch.stack([each.pbc for each in graphs]),
    }

    def energy(pos: Tensor) -> Tensor:
        h = x + layers[0](x, pos, **more)
        return torch.tanh(layers[1](h, pos, **more)).sum()

    return layers, energy, torch.cat([0.6 * each.pos for each in graphs])


@pytest.mark.parametrize("mixing", ["linear", "quadratic", "softmax"])
@pytest.mark.parametrize("name", FORCES)
def test_forces_and_training_on_them(name, mixing):
    """First and second derivatives, and no net force on a graph that may be moved."""
    layers, energy, pos = force_field(name, mixing)
    (forces,) = torch.autograd.grad(-energy(pos.requires_grad_()), pos)
    assert forces.abs().max() > 1e-4
    if name != "additive-reciprocal" or mixing == "softmax":
        for atoms in (forces[:2], forces[2:]):
            torch.testing.assert_close(atoms.sum(dim=0), torch.zeros(3).double(), **EXACT)
    parts = ("spectrum.log_width", "amplitude", "to_query.weight", "to_key.bias")
    learned = [value for name, value in layers[0].named_parameters() if name.endswith(parts)]
    inputs = (pos, *learned)
    assert torch.autograd.gradcheck(lambda where, *_: energy(where), inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda where, *_: energy(where), inputs, fast_mode=True)


def test_additive_reciprocal_forces_on_slabs_leave_the_change_of_random_features_out():
    """Named, because it is not promised: the box, and so what is drawn, depends on the height.

    Rows of the random projection are drawn by the frequencies of a virtual box as high as the slab,
    and no gradient flows into them. In place, where the height stays, forces are right.
    """
    layer, given = reciprocal("spectral"), graph("slab", 9)
    normal = torch.linalg.cross(*given.cell[:2])
    height = given.pos @ (normal / normal.norm())
    step = 1e-4 * normal / normal.norm()
    for atom, right in ((height.argmax(), False), (height.argsort()[4], True)):
        pos = given.pos.clone().requires_grad_()
        layer(given.x, pos, cell=given.cell, pbc=given.pbc).sin().sum().backward()
        energies = []
        for sign in (1, -1):
            there = given.pos.clone()
            there[atom] += sign * step
            with torch.no_grad():
                energies.append(run(layer, [given._replace(pos=there)])[0].sin().sum())
        error = (energies[0] - energies[1]) / 2 - pos.grad[atom] @ step
        assert (abs(error) / step.norm() < 1e-5) == right


@pytest.mark.parametrize("periodic", ["none", "reciprocal"])
def test_radial_profile_is_the_kernel_of_a_pair(periodic):
    """Two atoms, one image: the logarithm of what the layer multiplies their product by."""
    layer = Kind("multiplicative", periodic, True, "gaussian", "linear").build()
    encoding = layer.encoding
    for distance in (0.3, 1.7, 2.6):
        z = torch.tensor([[0.0, 0.0, 0.0], [distance, 0.0, 0.0]], dtype=torch.float64)
        profile = encoding.radial_profile(z[1:, 0])[:, 0]
        near = encoding.near_field
        f, s = near.spectrum.mask(z[None, 1:])[0, :, 0], near.switch(z[1, 0])
        far = (profile.exp() - s * f.exp()) / (1 - s) if s < 1 else None
        if far is None:
            torch.testing.assert_close(profile, f, **EXACT)
        elif periodic == "none":
            torch.testing.assert_close(far, encoding.position.kernel(z[None, 1:])[0, :, 0], **EXACT)
        else:
            assert (far > 0).all()
