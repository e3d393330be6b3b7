import numpy as np
import pytest
import torch
from contract import EXACT
from families import randn
from scipy import linalg
from torch import Tensor, nn

from molflt.attention import TOKEN_MIXERS
from molflt.attention.fnet import Mixer

DIM = 10
OPTIONS = {"fourier": {}, "fourier-normalized": {"normalize": True}, "none": {}}
OPTIONS |= {"dense": {"max_tokens": 12}, "random": {"max_tokens": 12}}
SIZES = [(1, 1), (1, 7), (2, 2), (3, 1), (5, 4), (6, 9), (16, 8), (31, 64), (96, 33)]


def make(name: str, dim: int = DIM) -> Mixer:
    torch.manual_seed(0)
    mixer = TOKEN_MIXERS[name.split("-")[0]](dim, **OPTIONS[name]).double()
    if name == "dense":
        nn.init.normal_(mixer.sequence_weight)
        nn.init.normal_(mixer.hidden_weight)
    return mixer


def ragged(width: int, fill: float = 0.0, order: int = 1) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns sequences of 5, 1, 12, 0, 5 and 7 tokens, with gaps between the tokens."""
    items = [randn(n, DIM, seed=n + i) for i, n in enumerate((5, 1, 12, 0, 5, 7))][::order]
    x = torch.full((len(items), width, DIM), fill, dtype=torch.float64)
    mask = torch.zeros(len(items), width, dtype=torch.bool)
    for i, item in enumerate(items):
        generator = torch.Generator().manual_seed(i)
        mask[i, torch.randperm(width, generator=generator)[: len(item)]] = True
        x[i, mask[i]] = item
    return x, mask, items


@pytest.mark.parametrize("tokens, dim", SIZES)
def test_transform_is_that_of_scipy(tokens, dim):
    x = randn(2, tokens, dim)
    expected = np.einsum("kn,bnm,ml->bkl", linalg.dft(tokens), x.numpy(), linalg.dft(dim)).real
    for name, scale in (("fourier", 1.0), ("fourier-normalized", (tokens * dim) ** -0.5)):
        expected_of = torch.from_numpy(scale * expected)
        torch.testing.assert_close(make(name, dim)(x), expected_of, **EXACT)


@pytest.mark.parametrize("name", OPTIONS)
def test_sequence_is_the_same_in_any_batch_with_any_padding(name):
    mixer = make(name)
    for width, fill, order in ((12, 0.0, 1), (21, 3.7, 1), (40, torch.nan, -1)):
        x, mask, items = ragged(width, fill, order)
        x.requires_grad_()
        out = mixer(x, key_mask=mask)
        assert (out[~mask] == 0).all() and mixer(x[:0], key_mask=mask[:0]).shape == x[:0].shape
        for row, there, item in zip(out, mask, items, strict=True):
            torch.testing.assert_close(row[there], mixer(item[None])[0], **EXACT)
            assert name == "none" or not len(item) or row[there].abs().max() > 1e-3
        (grad,) = torch.autograd.grad(out[2].square().sum(), x)
        assert (grad[[0, 1, 3, 4, 5]] == 0).all() and (grad[~mask] == 0).all()
        assert name == "none" or not mask[2].any() or (grad[2, mask[2]] != 0).all()


@pytest.mark.parametrize("name", OPTIONS)
def test_half_precision_loses_only_the_rounding_of_input_and_output(name):
    mixer, (x, mask, _) = make(name), ragged(12)
    exact = mixer(x.half().double(), key_mask=mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which has no effect
        out = mixer.float()(x.half(), key_mask=mask)
    assert out.dtype is torch.float16
    assert (out.double() - exact).norm() <= torch.finfo(out.dtype).eps / 2 * exact.norm()


def test_compiled_in_one_graph():
    mixer, x = make("fourier-normalized"), randn(2, 9, DIM).requires_grad_()
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    found = [(y, torch.autograd.grad(y.square().sum(), x)[0]) for y in (compiled(x), mixer(x))]
    torch.testing.assert_close(*found, **EXACT)


def test_two_matrices_and_their_transposes():
    for name in ("dense", "random"):
        mixer = make(name)
        x = randn(2, 9, DIM)
        expected = torch.einsum(
            "nm,bmi,ij->bnj", mixer.sequence_weight[:9, :9], x, mixer.hidden_weight
        )
        torch.testing.assert_close(mixer(x), expected, **EXACT)
    assert (make("none")(x) == 0).all()


def test_random_matrices_have_the_variance_of_the_public_code():
    """Entries are normal, truncated at two standard deviations, with variance 1 / fan-in."""
    mixer = TOKEN_MIXERS["random"](500, max_tokens=1000)
    for weight in (mixer.sequence_weight, mixer.hidden_weight):
        scaled = weight.double() * len(weight) ** 0.5
        entries = scaled.numel()
        assert abs(scaled.mean()) < 4 / entries**0.5
        assert abs(scaled.var() - 1) < 4 * (1.06 / entries) ** 0.5  # kurtosis 2.06
        assert 2.27 < scaled.abs().max() < 2.2738  # 2 / 0.8796
    assert not list(mixer.parameters()) and len(mixer.state_dict()) == 2
