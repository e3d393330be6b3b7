"""Inverse powers: the smooth part against SciPy's incomplete gamma function, and its transform."""

from __future__ import annotations

import contract
import numpy as np
import pytest
import torch
from scipy.special import gammainc

from molflt.attention.spectra import InversePower
from molflt.attention.spectra.inverse_power import POWERS


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


@pytest.mark.parametrize("power", POWERS)
def test_spectrum_is_its_transform(power):
    contract.check_fourier_pair(InversePower(power, 0.7))


@pytest.mark.parametrize("power", [4, 6])
def test_spectrum_at_zero_is_the_integral(power):
    """Beyond 100, 1 / r^p is integrated in closed form, which needs p > 3."""
    law, end = InversePower(power, 0.7), 100.0
    x, step = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(600))
    r = end * (x + 1) / 2
    tail = 4 * np.pi * end ** (3 - power) / (power - 3)
    integral = float((4 * np.pi * r**2 * law.smooth(r**2) * step).sum() * end / 2 + tail)
    at_zero = float(law.spectrum(torch.zeros(1, 1, 3, dtype=torch.float64)))
    assert integral == pytest.approx(at_zero, rel=1e-10)
