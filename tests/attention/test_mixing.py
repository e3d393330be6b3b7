"""Fast mixing against its oracle, and the limits of the normalizer."""

import contract
import pytest
import torch

from molflt.attention import FEATURE_MAPS, linear, quadratic, softmax
from molflt.attention.layer import Attention


@pytest.mark.parametrize("position", contract.POSITION_CHOICES)
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_linear_equals_quadratic_with_gradients(feature_map, position):
    outputs, gradients = [], []
    for mixing in ("linear", "quadratic"):
        stack = contract.make_stack(feature_map, position, mixing)
        x, r, mask = contract.pad(contract.ragged(), 12)
        x.requires_grad_()
        r.requires_grad_()
        out = stack(x, r, key_mask=mask)[mask]
        loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()
        parameters = [p for p in stack.parameters() if p.requires_grad]
        loss = loss + 0 * r.sum()
        outputs.append(out)
        gradients.append(torch.autograd.grad(loss, [x, r, *parameters]))
    torch.testing.assert_close(*outputs, **contract.EXACT)
    for fast, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(fast, exact, rtol=1e-10, atol=1e-10)
    # The comparison means something: the mask reaches the gradient.
    assert (gradients[0][1].abs().max() > 1e-6) == (position == "spectral")


def test_linear_is_twice_differentiable():
    torch.manual_seed(0)
    q, k = (torch.rand(1, 1, 3, 4, dtype=torch.float64, requires_grad=True) for _ in "qk")
    v = torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(linear, (q, k, v))


def test_softmax_is_the_formula_of_the_paper():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 4, dtype=torch.float64) for n in (5, 6, 6))
    bias = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    mask = torch.rand(2, 1, 6) > 0.3
    weights = (q @ k.transpose(-1, -2) + bias).exp() * mask[:, :, None]
    expected = weights @ v / weights.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(softmax(q, k, v, bias, mask), expected, **contract.EXACT)


def test_a_row_without_keys_is_zero_and_its_gradient_finite():
    q, k, v = (torch.rand(1, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    nobody = torch.zeros(1, 1, 4, dtype=torch.bool)
    for out in (
        linear(q, k * 0, v),
        quadratic(q, k * 0, v),
        softmax(q, k, v, None, nobody),
    ):
        assert (out == 0).all()
        for grad in torch.autograd.grad(out.sum(), (q, v)):
            assert torch.isfinite(grad).all()


@pytest.mark.parametrize("std", [1.0, 3.0, 10.0, 100.0])
def test_normalizer_of_exponential_features_is_at_least_one(std):
    """The stabilizer leaves a term 1 x 1 in every normalizer, so float32 cannot underflow."""
    torch.manual_seed(0)
    q, k = (std * torch.randn(2, 4, 50, 16) for _ in "qk")
    mask = torch.rand(2, 1, 50) > 0.5
    for name in ("positive", "learnable"):
        phi_q, phi_k = FEATURE_MAPS[name](16, 4, 32)(q, k, mask)
        assert torch.isfinite(phi_q).all() and torch.isfinite(phi_k).all()
        normalizer = (phi_q @ phi_k.transpose(-1, -2)).sum(dim=-1)
        assert normalizer.min() >= 1.0


def test_key_dropout_only_in_training():
    torch.manual_seed(0)
    attention = Attention(16, 2, dropout=0.5).double()
    x = torch.randn(1, 10, 16, dtype=torch.float64)
    attention.eval()
    torch.testing.assert_close(attention(x), attention(x), rtol=0, atol=0)
    attention.train()
    assert (attention(x) - attention(x)).abs().max() > 1e-6
