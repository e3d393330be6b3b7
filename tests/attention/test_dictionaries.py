import contract
import numpy as np
import pytest
import torch
from families import EXACT, VARIANTS, make, randn
from scipy.interpolate import BSpline
from scipy.special import gammainc
from torch import Tensor

from molflt.attention import FEATURE_MAPS, NODES, PROJECTIONS, SPECTRA, TOKEN_MIXERS, make_position
from molflt.attention.checks import accepted
from molflt.attention.decoder import Decoder
from molflt.attention.spectra import Gaussian, InversePower, ShiftInvariant
from molflt.attention.spectra.inverse_power import POWERS

KERNELS = [v for v in VARIANTS if issubclass(SPECTRA[v.split(",")[0]], ShiftInvariant)]


def dims(variant: str) -> tuple[int, int]:
    """Returns (1, 3) for functions of the distance and (1, 2) for other functions, to save time."""
    return (1, 3) if SPECTRA[variant.split(",")[0]].isotropic else (1, 2)


@pytest.mark.parametrize(("variant", "dim"), [(v, dim) for v in VARIANTS for dim in dims(v)])
def test_mask_and_spectrum_are_a_fourier_pair(variant, dim):
    contract.check_fourier_pair(make(variant, dim=dim))


@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("variant", KERNELS)
def test_draws_follow_the_density(variant, dim):
    contract.check_draws(make(variant, dim=dim))


@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("rule", NODES)
def test_nodes_give_the_mask(rule, dim):
    contract.check_nodes(rule, dim)


REDRAWN = {
    **{f"map {name}": lambda make=make: make(8, 2) for name, make in FEATURE_MAPS.items()},
    **{f"rows {name}": lambda make=make: make(2, 20, 7) for name, make in PROJECTIONS.items()},
    **{
        f"nodes {name}": lambda rule=rule: rule(
            **accepted(rule, heads=2, density=Gaussian(2), num_nodes=8)
        )
        for name, rule in NODES.items()
        if rule.random
    },
    "mask": lambda: make_position("spectral", 2, 8),
    "low rank": lambda: make_position("low_rank", 2, 8, max_tokens=9, rank=3),
    "sines": lambda: make_position("sine_spe", 2, 8),
    "convolutions": lambda: make_position("conv_spe", 2, 8, max_tokens=9),
    "mixer": lambda: TOKEN_MIXERS["random"](8, 6),
    "decoder": lambda: Decoder(8, 2, 1),
}


@pytest.mark.parametrize("name", REDRAWN)
def test_redraw_follows_its_generator(name):
    module = REDRAWN[name]()
    buffers = {key for key, _ in module.named_buffers() if key in module.state_dict()}

    def drawn(seed: int) -> dict[str, Tensor]:
        torch.rand(7)
        module.redraw_(torch.Generator().manual_seed(seed))
        return {key: value.clone() for key, value in module.state_dict().items()}

    first, other, again = drawn(5), drawn(6), drawn(5)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert {key for key in first if not torch.equal(first[key], other[key])} == buffers


@pytest.mark.parametrize("order", range(2, 9))
def test_smooth_local_is_scipys_spline(order):
    family = make("smooth_local", heads=1, dim=1, order=order, num_boxes=1, radius_range=(0.7, 0.7))
    z = torch.linspace(-7, 7, 401, dtype=torch.float64)
    radius = family.log_radius.exp().item()
    knots = [radius * (2 * k - order) for k in range(order + 1)]
    spline = BSpline.basis_element(knots, extrapolate=False)
    expected = torch.nan_to_num(torch.from_numpy(spline(z.numpy()) / spline(0.0)))
    mask = family.mask(z[None, :, None])[0, 0]
    torch.testing.assert_close(mask, family.amplitude.item() * expected, rtol=0, atol=1e-13)
    single = family.float().mask(z.float()[None, :, None])[0, 0]
    torch.testing.assert_close(single.double(), mask, rtol=0, atol=2e-6)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dim", [1, 3])
def test_amplitude_is_the_mask_at_zero_distance(variant, dim):
    family = make(variant, dim=dim)
    mask = family.mask(torch.zeros(1, 1, dim, dtype=torch.float64))[0, :, 0]
    total = family.amplitude if family.amplitude.ndim == 1 else family.amplitude.sum(dim=-1)
    power = dim if "product" in variant else 1
    torch.testing.assert_close(mask, total**power, **EXACT)


@pytest.mark.parametrize("variant", VARIANTS)
def test_masks_have_finite_gradients_at_the_origin(variant):
    family, zero = make(variant), torch.zeros(1, 4, 4, 3, dtype=torch.float64, requires_grad=True)
    inputs = [zero, *family.parameters()]
    for grad in torch.autograd.grad(family.mask(zero).sum(), inputs, allow_unused=True):
        assert grad is None or torch.isfinite(grad).all()


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "shell_weights"])
def test_frequencies_have_second_derivatives_at_the_origin(variant):
    """Training on stress needs these derivatives: every reciprocal lattice has the node 0."""
    spectrum, xi = make(variant), randn(1, 4, 3)
    xi[:, 0] = 0.0
    xi[:, 1, 0] = 0.0

    def by_strain(strain):
        return spectrum.spectrum(xi @ (torch.eye(3) - strain)).abs().square().sum()

    strain = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(by_strain, (strain,))


@pytest.mark.parametrize("power", POWERS)
def test_smooth_part_is_an_incomplete_gamma_function(power):
    law = InversePower(power, 0.7)
    square = torch.logspace(-4, 3, 300, dtype=torch.float64, requires_grad=True)
    found, r = law.smooth(square), square.detach().numpy() ** 0.5
    expected = gammainc(power / 2, 0.49 * r**2) / r**power
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-12)
    at_zero = law.smooth(torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(at_zero, torch.full_like(at_zero, law.at_zero()))
    # branches that `where` discards must not affect the gradient
    (slope,) = torch.autograd.grad(found.sum(), square)
    rest = law.smooth(square.detach() + 1e-7) - law.smooth(square.detach() - 1e-7)
    torch.testing.assert_close(slope, rest / 2e-7, rtol=1e-6, atol=1e-8)
