"""Choices that the layer makes by itself."""

import contract
import pytest
import torch

from molflt.attention import Attention, encodings, make_position


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
