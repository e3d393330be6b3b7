"""Sums under a kernel of few and of many columns, whole and in pieces, against the whole matrix."""

import contract
import pytest
import torch

from molflt.attention.features import Features
from molflt.attention.mixing import multiplicative
from molflt.attention.mixing.forms import quadratic
from molflt.attention.mixing.multiplicative import linear_with_kernel


@pytest.mark.parametrize("transient", [2**22, 1, 200], ids=["whole", "one by one", "pieces"])
@pytest.mark.parametrize("shared", [True, False], ids=["factors of all heads", "of each head"])
@pytest.mark.parametrize("columns", [1, 4, 5, 19])
def test_by_column_and_by_feature(columns, shared, transient, monkeypatch):
    """Values, gradients and second derivatives, with 4 features: above 4 columns, by feature."""
    monkeypatch.setattr(multiplicative, "_TRANSIENT", transient)
    torch.manual_seed(0)
    heads = 1 if shared else 3
    shapes = [
        (2, 3, 6, 4),
        (2, 3, 7, 4),
        (2, 3, 7, 2),
        (2, heads, 6, columns),
        (2, heads, 7, columns),
    ]
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
