"""Automatic choices of the layer, and their precision."""

import contract
import pytest
import torch

from molflt.attention import Attention, encodings, make_position
from molflt.attention.layer import Scaling


@pytest.mark.parametrize(("tokens", "form"), [(3, "quadratic"), (200, "linear")])
@pytest.mark.parametrize("name", ["none", "multiplicative"])
def test_auto_takes_the_form_with_fewer_multiplications(monkeypatch, tokens, form, name):
    """Outputs and gradients equal those of both forms."""
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


@pytest.mark.parametrize("mixing", ["linear", "quadratic", "softmax"])
def test_weights_of_keys(mixing):
    """Weights of masked keys do not matter; others are cast to the precision of the layer."""
    torch.manual_seed(0)
    layer, x = Attention(8, 2, mixing=mixing).double(), torch.randn(2, 3, 8).double()
    mask = torch.tensor([[True, True, False], [True, False, False]])
    weight = torch.tensor([[1.0, 2.0, 0.0], [1.0, -1.0, torch.nan]], requires_grad=True)
    out = layer(x, key_mask=mask, key_weight=weight)
    plain = layer(x, key_mask=mask, key_weight=torch.tensor([[1, 2, 1], [1, 1, 1]]))
    torch.testing.assert_close(out, plain, **contract.EXACT)
    (own,) = torch.autograd.grad(out.square().sum(), weight)
    assert own.isfinite().all() and own[0, 1] != 0 and (own[~mask] == 0).all()
    single = layer.float()(x.float(), key_mask=mask, key_weight=weight.double())
    torch.testing.assert_close(single.double(), out, rtol=0, atol=1e-5)


def test_a_small_weight_of_a_key_has_a_finite_slope():
    torch.manual_seed(0)
    net, x = Attention(16, 2).double(), torch.randn(1, 4, 16).double()
    weight = torch.tensor([[1.0, 1e-30, 0.5, 2.0]]).double().requires_grad_()
    (slope,) = torch.autograd.grad(net(x, key_weight=weight).sum(), weight)
    assert slope.isfinite().all() and slope[0, 1] != 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mixing", ["linear", "quadratic", "softmax"])
def test_another_default_device_changes_nothing(mixing, causal):
    torch.manual_seed(0)
    net, x = Attention(16, 2, mixing=mixing, causal=causal), torch.randn(2, 5, 16)
    expected = net(x)
    with torch.device("meta"):
        assert torch.equal(net(x), expected)
