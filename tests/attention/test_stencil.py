"""Products with the sparse matrix of a stencil: forms, derivatives, and the splines in it."""

import numpy as np
import pytest
import torch
from scipy.interpolate import BSpline
from torch.autograd import gradcheck, gradgradcheck

from molflt.attention.mixing import stencil as stencils
from molflt.attention.mixing.stencil import Stencil, gather, spread
from molflt.attention.nodes.mesh import splines

TOKENS, POINTS, CHANNELS = 5, 7, 3


def case():
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(0, POINTS, (TOKENS, 4), generator=generator)
    places[0] = torch.tensor([1, 1, 2, 3])  # a point twice
    sizes = (TOKENS, 4), (TOKENS, CHANNELS), (POINTS, CHANNELS)
    made = [torch.randn(s, dtype=torch.float64, generator=generator) for s in sizes]
    return Stencil.of(places, POINTS), *(x.requires_grad_() for x in made)


@pytest.mark.parametrize("sparse", [True, False])
def test_they_are_the_products_and_have_gradients_of_two_orders(sparse, monkeypatch):
    monkeypatch.setattr(stencils, "_has_sparse_products", lambda _: sparse)
    stencil, weight, x, y = case()
    matrix = torch.zeros(TOKENS, POINTS, dtype=torch.float64)
    rows = torch.arange(TOKENS)[:, None].expand_as(weight)
    matrix = matrix.index_put((rows, stencil.places), weight, accumulate=True)
    torch.testing.assert_close(spread(weight, x, stencil), matrix.T @ x, rtol=0, atol=1e-14)
    torch.testing.assert_close(gather(weight, y, stencil), matrix @ y, rtol=0, atol=1e-14)
    for product, other in ((spread, x), (gather, y)):
        assert gradcheck(lambda w, z, f=product: f(w, z, stencil), (weight, other))
        assert gradgradcheck(lambda w, z, f=product: f(w, z, stencil), (weight, other))


def test_transforms_take_the_plain_form():
    stencil, weight, x, _ = (z.detach() if isinstance(z, torch.Tensor) else z for z in case())
    batch = torch.stack((x, 2 * x))
    found = torch.func.vmap(lambda one: spread(weight, one, stencil))(batch)
    torch.testing.assert_close(found[1], 2 * spread(weight, x, stencil))


@pytest.mark.parametrize("order", [4, 5, 6, 8])
def test_splines_are_those_of_scipy(order):
    t = torch.linspace(0, 0.999, 7, dtype=torch.float64)
    found = splines(t, order)
    cardinal = BSpline.basis_element(np.arange(order + 1), extrapolate=False)
    for place in range(order):
        expected = np.nan_to_num(cardinal(t.numpy() + order - 1 - place))
        np.testing.assert_allclose(found[:, place], expected, atol=1e-14)
    torch.testing.assert_close(found.sum(dim=-1), torch.ones_like(t), rtol=0, atol=1e-14)
