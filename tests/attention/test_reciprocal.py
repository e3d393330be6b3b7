"""Reciprocal nodes: explicit image sums, invariances, crystals of known energy, mixed batches."""

import numpy as np
import pytest
import torch
from families import EXACT, randn
from torch import Tensor

from molflt.attention.nodes.lattice import free_extent
from molflt.attention.nodes.reciprocal import reciprocal_nodes
from molflt.attention.positions.spectral import SpectralPosition
from molflt.attention.spectra.base import Spectrum
from molflt.attention.spectra.gaussian import GaussianBasis

CELL = torch.tensor([[7.0, 0.0, 0.0], [2.5, 6.0, 0.0], [-1.5, 2.0, 8.0]], dtype=torch.float64)
PBC = {"crystal": [1, 1, 1], "slab": [1, 1, 0], "wire": [1, 0, 0], "molecule": [0, 0, 0]}
ANY_AXIS = {**PBC, "slab along b and c": [0, 1, 1], "slab along a and c": [1, 0, 1]}
UNIMODULAR = torch.tensor([[1.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [2.0, -1.0, 1.0]]).double()


def gaussians(*widths: float, heads: int = 2) -> GaussianBasis:
    torch.manual_seed(0)
    basis = GaussianBasis(heads, len(widths), amplitude=0.5, positive=True).double()
    basis.log_width.data = torch.tensor(widths).double().log()
    return basis


def periodic(kind: str) -> Tensor:
    return torch.tensor([ANY_AXIS[kind]]).bool()


def atoms(count: int = 6, seed: int = 0) -> Tensor:
    return 3 + randn(1, count, 3, seed=seed).clamp(-1.5, 1.5) * 2


def nodes_of(positions, cell, pbc, max_frequency, **options):
    graph = torch.arange(len(positions)).repeat_interleave(positions.shape[1])
    extent = free_extent(positions.flatten(0, 1), graph, cell, pbc)
    return reciprocal_nodes(cell, pbc, max_frequency, extent, **options)


def product(spectrum, positions, nodes) -> Tensor:
    """U_i . V_j: (b, heads, n, n)."""
    left, right = SpectralPosition(spectrum, None).factors(positions, positions, nodes)
    return left @ right.mT


def mask(spectrum: Spectrum, positions, cell, pbc, max_frequency=0.6, **options) -> Tensor:
    return product(spectrum, positions, nodes_of(positions, cell, pbc, max_frequency, **options))


def image_sum(spectrum: Spectrum, positions: Tensor, cell: Tensor, pbc: Tensor) -> Tensor:
    """sum_T f(r_i - r_j + T) over 13 images on either side of every periodic axis."""
    steps = [torch.arange(-13.0, 14.0) if p else torch.zeros(1) for p in pbc[0].tolist()]
    images = torch.cartesian_prod(*steps).double() @ torch.where(pbc[0, :, None], cell[0], 0.0)
    delta = positions[:, :, None] - positions[:, None]
    return spectrum.mask(delta[..., None, :] + images).sum(dim=-1)


@pytest.mark.parametrize("kind", ANY_AXIS)
def test_equals_the_sum_over_images(kind):
    """Measured 1.5e-9 with the frequencies 1.2 / width and a reach of 7 widths."""
    spectrum, x = gaussians(2.0, 2.3), atoms()
    fast = mask(spectrum, x, CELL[None], periodic(kind), 0.6, reach=16.1)
    exact = image_sum(spectrum, x, CELL[None], periodic(kind))
    assert (fast - exact).abs().max() < 1e-8


@pytest.mark.parametrize("max_frequency", [0.25, 0.5])
def test_nodes_are_all_vectors_of_half_the_ball(max_frequency):
    cell = torch.tensor([[[8.0, 0.0, 0.0], [1.5, 8.0, 0.0], [0.0, 0.0, 29.9]]]).double()
    nodes, _ = reciprocal_nodes(cell, torch.ones(1, 3).bool(), max_frequency)
    box = np.indices((41, 41, 41)).reshape(3, -1).T - 20
    ball = np.linalg.norm(box @ np.linalg.inv(cell[0].numpy()).T, axis=1) < max_frequency
    assert 2 * nodes.shape[1] - 1 == ball.sum()
    assert nodes[0, 0].abs().max() == 0 and nodes.norm(dim=-1).max() < max_frequency
    integers = nodes @ cell.mT
    torch.testing.assert_close(integers, integers.round(), **EXACT)


@pytest.mark.parametrize("taper", ["step", "positive"])
def test_nodes_enter_with_weight_zero(taper):
    """A threshold exactly at lattice vectors, passed by rounding, makes no difference."""
    spectrum, x = gaussians(0.7), atoms()
    cube = 6 * torch.eye(3).double()[None]
    inside, outside = (
        nodes_of(x, cube, periodic("crystal"), k, taper=taper) for k in (0.5 - 5e-7, 0.5 + 5e-7)
    )
    assert outside[0].shape[1] - inside[0].shape[1] == 15  # pairs of (3, 0, 0), (2, 2, 1)
    difference = (product(spectrum, x, inside) - product(spectrum, x, outside)).abs().max()
    assert 0 < difference < 1e-5


def test_positive_taper_keeps_positive():
    """A sharp positive kernel, far below the resolution: the step ripples to -6 % of its height."""
    spectrum, cell = gaussians(0.7), 40 * torch.eye(3).double()[None]
    line = torch.zeros(1, 100, 3).double()
    line[0, :, 0] = torch.linspace(0, 20, 100)
    step, positive = (
        product(spectrum, line, reciprocal_nodes(cell, periodic("crystal"), 0.3, taper=taper))[0, 0]
        for taper in ("step", "positive")
    )
    assert step[0].min() < -0.05 * step[0, 0]
    assert 0 < positive[0].min() < 1e-4 * positive[0, 0]  # with a kink in the taper: 6e-4


def test_extent():
    """Per direction that is free, 0 without atoms."""
    x = torch.tensor([[0.0, 0.0, 1.0], [2.0, 5.0, 4.0]]).double().repeat(4, 1)[:7]
    atom = torch.tensor([0, 0, 1, 1, 2, 2, 3])
    pbc = torch.tensor([[1, 1, 1], [0, 1, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0]]).bool()
    cell = 9 * torch.eye(3).double().repeat(5, 1, 1)
    expected = torch.tensor([[0.0, 0, 0], [0, 0, 2], [2, 3, 5], [0, 0, 0], [0, 0, 0]]).double()
    for origin in (-100.0, 100.0):
        found = free_extent(x + origin, atom, cell, pbc).sort(dim=1).values
        torch.testing.assert_close(found, expected)
    assert (free_extent(x[:0], atom[:0], cell, pbc) == 0).all()


def test_precision_and_autocast():
    """float32 and bfloat16 autocast find the same nodes."""
    cell, pbc = CELL[None].float(), periodic("slab")
    extent = torch.tensor([[0.0, 0.0, 5.0]])
    nodes, weights = reciprocal_nodes(cell, pbc, 0.37, extent)
    exact = reciprocal_nodes(cell.double(), pbc, 0.37, extent)
    torch.testing.assert_close((nodes.double(), weights.double()), exact, rtol=0, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(reciprocal_nodes(cell, pbc, 0.37, extent)[1], weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_skewed_cells_have_the_gradient_of_their_nodes(dtype):
    """Nodes of a cell that has to be reduced follow a strain as those of the reduced one do."""
    short = torch.tensor([[4.0, 0.2, 0.1], [0.3, 4.5, 0.2], [0.1, 0.2, 5.0]], dtype=dtype)
    skew = torch.tensor([[1.0, 2, 0], [0, 1, 0], [3, 1, 1]], dtype=dtype)
    found = []
    for basis in (torch.eye(3, dtype=dtype), skew):
        strain = torch.zeros(3, 3, dtype=dtype, requires_grad=True)
        cell = basis @ short @ (torch.eye(3, dtype=dtype) + strain)
        nodes, weights = reciprocal_nodes(cell[None], torch.ones(1, 3).bool(), 0.5)
        total = (weights * (-nodes.square().sum(dim=-1)).exp()).sum()
        found.append(torch.autograd.grad(total, strain)[0])
    torch.testing.assert_close(*found)
