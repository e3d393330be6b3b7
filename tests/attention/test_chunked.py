"""Linear attention in chunks: the same sums and gradients, and bounded memory."""

import contract
import pytest
import torch

from molflt.attention import Attention, make_position

TOKENS = 23
CASES = {
    "plain": {},
    "spectral": {"position": "spectral"},
    "multiplicative": {"position": "multiplicative"},
    "without a logarithm": {"feature_map": "relu"},
    "signed": {"feature_map": "trigonometric", "position": "spectral"},
    "sums": {"normalize": "none"},
    "auto": {"mixing": "auto"},
}


@pytest.fixture
def cut(monkeypatch):
    """Returns a function that sets the number of tokens per chunk; 0 turns chunks off."""

    def set_size(size: int) -> None:
        monkeypatch.setattr("molflt.attention.encodings.chunk_size", lambda *_: size)

    return set_size


def layer(position: str = "", feature_map: str = "positive", dtype=torch.float64, **options):
    """Returns a call of attention at random positions, with masked tokens, and its leaves."""
    torch.manual_seed(0)
    drawn = (torch.randn(3, TOKENS, width, dtype=torch.float64) for width in (3, 8))
    places, x = (draw.to(dtype).requires_grad_() for draw in drawn)
    if position:
        options["position"] = make_position(position, 2, 4, num_nodes=3)
    attention = Attention(8, 2, feature_map=feature_map, num_features=6, **options).to(dtype)
    mask = torch.ones(3, TOKENS, dtype=torch.bool)
    mask[0, -7:] = False
    mask[2] = False

    def run() -> torch.Tensor:
        return attention(x, places if position else None, key_mask=mask)

    return run, [x, *attention.parameters(), *([places] if position else [])]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [1, 4, TOKENS])
def test_chunks_change_nothing(cut, case, size):
    """Outputs, gradients and second derivatives; with one-token chunks, some without any key."""
    found = []
    for tokens in (0, size):
        cut(tokens)
        run, leaves = layer(**CASES[case])
        out = run()
        loss = out.square().sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
        second = torch.autograd.grad(first[0].square().sum(), leaves, allow_unused=True)
        found.append([x for x in (out, *first, *second) if x is not None])
    for whole, in_chunks in zip(*found, strict=True):
        scale = whole.abs().max().clamp(min=1.0)
        torch.testing.assert_close(in_chunks / scale, whole / scale, **contract.EXACT)


def test_a_later_chunk_of_huge_keys_overflows_nothing(cut):
    """Log features of some thousands that grow along the sequence, in float32."""
    found = []
    for size, dtype in ((0, torch.float64), (4, torch.float32)):
        cut(size)
        run, (x, *_) = layer(feature_map="exp", dtype=dtype)
        with torch.no_grad():
            torch.manual_seed(1)
            x.copy_(torch.randn(TOKENS, 8, dtype=torch.float64).cumsum(0) * 60)
        found.append(run())
    error = (found[1] - found[0]).abs().max() / found[0].abs().max()
    assert error < 1e-5  # measured 3e-6, as without chunks


def test_nothing_of_the_size_of_all_features_is_kept():
    """Autograd saves no tensor of (heads, tokens, m) for 40 000 tokens."""
    attention = Attention(16, 8, num_features=64)
    x = torch.randn(1, 40_000, 16, requires_grad=True)
    sizes = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = attention(x)
    assert sizes and max(sizes) <= 2 * x.numel() < 8 * 64 * 40_000
    out.sum().backward()
    assert x.grad.isfinite().all()
