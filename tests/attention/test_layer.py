"""Choices that the layer makes by itself, and the precision in which it makes them."""

import contract
import pytest
import torch

from molflt.attention import Attention, encodings, make_position
from molflt.attention.scaling import Scaling


@pytest.mark.parametrize(("tokens", "form"), [(3, "quadratic"), (200, "linear")])
@pytest.mark.parametrize("name", ["none", "multiplicative"])
def test_auto_takes_the_form_with_fewer_multiplications(monkeypatch, tokens, form, name):
    """And gives its numbers, gradients included."""
    torch.manual_seed(0)
    options = {"dim": 1, "num_nodes": 2} if name == "multiplicative" else {}
    position = make_position(name, 2, 4, **options)
    auto = Attention(8, 2, mixing="auto", num_features=6, position=position).double()
    x = torch.randn(2, tokens, 8, dtype=torch.float64, requires_grad=True)
    r = None if position is None else torch.rand(2, tokens, 1, dtype=torch.float64)
    calls, exact = [], encodings.quadratic

    def counted(*arguments, **options):
        calls.append(1)
        return exact(*arguments, **options)

    monkeypatch.setattr(encodings, "quadratic", counted)
    out = auto(x, r)
    assert bool(calls) == (form == "quadratic")
    for mixing in ("linear", "quadratic"):
        auto.mixing = mixing
        expected = auto(x, r)
        torch.testing.assert_close(out, expected, **contract.EXACT)
        grads = [torch.autograd.grad(o.sum(), x, retain_graph=True)[0] for o in (out, expected)]
        torch.testing.assert_close(*grads, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-4, 300.0])
def test_norms_are_taken_in_single_precision_under_autocast(dtype, size):
    """Squares of 300 overflow in float16, and those of 1e-4 vanish."""
    scaling = Scaling(1, 8, normalize=True)
    x = (size * torch.randn(1, 1, 5, 8, generator=torch.manual_seed(0))).to(dtype)
    with torch.autocast("cpu", dtype=dtype):
        found = scaling(x)
    assert torch.equal(found, scaling(x))
