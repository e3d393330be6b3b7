"""The spectral position: its factors, and what it is made of, by name as in a configuration."""

import io

import contract
import pytest
import torch
from families import EXACT, randn
from scipy.spatial.transform import Rotation

from molflt.attention.nodes import NODES
from molflt.attention.nodes.random import GaussianNodes
from molflt.attention.positions import SpectralPosition, make_position
from molflt.attention.spectra.gaussian import GaussianBasis

SHELLS = {"node_diameter": 5.0, "node_max_frequency": 0.3, "node_num_shells": 4}


def random_position(heads: int, nodes: int, seed: int = 0) -> SpectralPosition:
    torch.manual_seed(seed)
    position = SpectralPosition(
        GaussianBasis(heads, 4, width_range=(1.0, 3.0), amplitude=0.5), GaussianNodes(heads, nodes)
    )
    return position.double()


def estimate(position: SpectralPosition, r: torch.Tensor) -> torch.Tensor:
    left, right = position.factors(r[None], r[None])
    return (left @ right.transpose(-1, -2))[0]


def test_product_of_factors_depends_on_differences_only():
    position = random_position(3, 16)
    r = 3 * torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shift = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    torch.testing.assert_close(
        estimate(position, r + shift), estimate(position, r), **contract.EXACT
    )
    assert torch.allclose(estimate(position, r), estimate(position, r).transpose(-1, -2))


def test_exact_mask_is_rotation_invariant():
    position = random_position(3, 16)
    r = torch.randn(9, 3, dtype=torch.float64)
    turn = torch.from_numpy(Rotation.random(rng=0).as_matrix())
    delta = (r[:, None] - r)[None]
    torch.testing.assert_close(
        position.bias(delta @ turn.T), position.bias(delta), **contract.EXACT
    )


def test_zero_spectrum_has_a_gradient():
    """A product of two square roots would have none, and the mask could never start to learn."""
    position = random_position(2, 8)
    with torch.no_grad():
        position.spectrum.amplitude.zero_()
    r = torch.randn(5, 3, dtype=torch.float64)
    assert estimate(position, r).abs().max() == 0
    (estimate(position, r) * torch.randn(2, 5, 5, dtype=torch.float64)).sum().backward()
    grad = position.spectrum.amplitude.grad
    assert torch.isfinite(grad).all() and grad.abs().max() > 0


def test_gradients_of_the_factors():
    position = random_position(2, 3)
    r = torch.randn(1, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: position.factors(x, x), (r,))
    parameters = tuple(position.parameters())
    out = estimate(position, r[0])
    for grad in torch.autograd.grad(out.square().sum(), parameters):
        assert torch.isfinite(grad).all() and grad.abs().max() > 0


@pytest.mark.parametrize("name", ["spectral", "multiplicative"])
@pytest.mark.parametrize(
    "options",
    [
        *({"nodes": rule} for rule in ("gaussian", "orthogonal", "sobol")),
        {"nodes": "shells", **SHELLS},
        {"spectrum": "shell_weights", **SHELLS},
        {"spectrum": "matern", "nodes": "shells", **SHELLS},
        {"spectrum": "matern"},
    ],
)
def test_parts_by_name_survive_saving(name, options):
    x = randn(2, 7, 3)
    positions = [make_position(name, 4, 8, **options).double() for _ in range(2)]
    file = io.BytesIO()
    torch.save(positions[0].state_dict(), file)
    file.seek(0)
    positions[1].load_state_dict(torch.load(file))
    products = [left @ right.mT for left, right in (p.factors(x, x) for p in positions)]
    assert products[0].shape == (2, 4, 7, 7)
    torch.testing.assert_close(*products, **EXACT)
    expected = {"shell_weights": "ShellNodes", "matern": "DensityNodes"}
    rule = options.get("nodes") and NODES[options["nodes"]].__name__
    assert type(positions[0].nodes).__name__ == (rule or expected[options["spectrum"]])
