"""Products with a sparse matrix, splines of a mesh, and sums with a kernel given by factors."""

import contract
import numpy as np
import pytest
import torch
from scipy.interpolate import BSpline
from torch.autograd import gradcheck, gradgradcheck

from molflt.attention.features import Features
from molflt.attention.mixing import forms
from molflt.attention.mixing import sparse as products
from molflt.attention.mixing.forms import linear_with_kernel, quadratic
from molflt.attention.mixing.sparse import Pattern, correlate, gather, spread
from molflt.attention.nodes.mesh import splines

TOKENS, POINTS, CHANNELS = 5, 7, 3


def case():
    generator = torch.Generator().manual_seed(0)
    row = torch.tensor([0, 0, 0, 0, 1, 1, 3, 3, 3, 4])  # one of them empty
    column = torch.tensor([1, 1, 2, 3, 6, 0, 5, 1, 2, 2])  # a place twice
    sizes = (len(row),), (TOKENS, CHANNELS), (POINTS, CHANNELS)
    made = [torch.randn(s, dtype=torch.float64, generator=generator) for s in sizes]
    pattern = Pattern.of(row, column, TOKENS, POINTS)
    assert torch.equal(pattern.rows().long(), row)
    return pattern, (row, column), *(x.requires_grad_() for x in made)


@pytest.mark.parametrize("sparse", [True, False])
def test_sparse_products_equal_dense_ones_with_two_gradients(sparse, monkeypatch):
    monkeypatch.setattr(products, "has_sparse_products", lambda _: sparse)
    monkeypatch.setattr(products, "_TRANSIENT", 4 * CHANNELS)
    pattern, places, weight, x, y = case()
    matrix = torch.zeros(TOKENS, POINTS, dtype=torch.float64)
    matrix = matrix.index_put(places, weight, accumulate=True)
    torch.testing.assert_close(spread(weight, x, pattern), matrix.T @ x, rtol=0, atol=1e-14)
    torch.testing.assert_close(gather(weight, y, pattern), matrix @ y, rtol=0, atol=1e-14)
    for product, other in ((spread, x), (gather, y)):
        assert gradcheck(lambda w, z, f=product: f(w, z, pattern), (weight, other))
        assert gradgradcheck(lambda w, z, f=product: f(w, z, pattern), (weight, other))
    expected = (x @ y.T)[places]
    torch.testing.assert_close(correlate(x, y, pattern), expected, rtol=0, atol=1e-14)
    assert gradcheck(lambda a, b: correlate(a, b, pattern), (x, y))
    assert gradgradcheck(lambda a, b: correlate(a, b, pattern), (x, y))


def test_more_places_than_the_matrix_has_numbers():
    """A small cell has many images of few atoms."""
    row, column = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([1, 1, 0, 0, 1, 0])
    x, y = torch.randn(2, 2, 3, dtype=torch.float64).unbind()
    found = correlate(x, y, Pattern.of(row, column, 2, 2))
    torch.testing.assert_close(found, (x @ y.T)[row, column], rtol=0, atol=1e-14)


@pytest.mark.parametrize("order", [4, 5, 6, 8])
def test_splines_are_those_of_scipy(order):
    t = torch.linspace(0, 0.999, 7, dtype=torch.float64)
    found = splines(t, order)
    cardinal = BSpline.basis_element(np.arange(order + 1), extrapolate=False)
    for place in range(order):
        expected = np.nan_to_num(cardinal(t.numpy() + order - 1 - place))
        np.testing.assert_allclose(found[:, place], expected, atol=1e-14)
    torch.testing.assert_close(found.sum(dim=-1), torch.ones_like(t), rtol=0, atol=1e-14)


@pytest.mark.parametrize("transient", [2**22, 200], ids=["whole", "pieces"])
@pytest.mark.parametrize("shared", [True, False], ids=["factors of all heads", "of each head"])
@pytest.mark.parametrize("columns", [1, 4, 19])
def test_by_column_and_by_feature(columns, shared, transient, monkeypatch):
    """Values, gradients and second derivatives, with 4 features: above 4 columns, by feature."""
    monkeypatch.setattr(forms, "_TRANSIENT", transient)
    torch.manual_seed(0)
    heads = 1 if shared else 3
    features, kernel = [(2, 3, 6, 4), (2, 3, 7, 4)], [(2, heads, n, columns) for n in (6, 7)]
    shapes = [*features, (2, 3, 7, 2), *kernel]
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    query, key, value, left, right = leaves

    def found(linear: bool) -> list[torch.Tensor]:
        features = Features(query.exp(), None), Features(key.square(), key)
        if linear:
            sums = linear_with_kernel(*features, value, (left, right))
        else:
            sums = quadratic(*features, value, kernel=left @ right.mT)
        parts = torch.cat((sums.numerator, sums.normalizer), dim=-1) * sums.log_scale.exp()
        first = torch.autograd.grad(parts.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(x.sum() for x in first), leaves)
        return [parts, *first, *second]

    for one, other in zip(found(True), found(False), strict=True):
        scale = other.abs().max()
        torch.testing.assert_close(one / scale, other / scale, **contract.EXACT)
