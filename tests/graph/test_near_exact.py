"""The near field whose q.k is exact as well: softmax for near pairs, kernels beyond."""

from itertools import pairwise

import pytest
import torch

from molflt.attention.mixing.forms import softmax
from molflt.graph import GraphAttention

PTR = (0, 6, 7, 16)
POLYNOMIAL = {"feature_map": "polynomial", "num_features": None}


def build(**options):
    torch.manual_seed(0)
    options = {"near_field": 3.0, "num_features": 6, "position": "multiplicative", **options}
    options |= {"near_exact": True, "periodic": "none", "position_options": {"num_nodes": 4}}
    return GraphAttention(8, 2, **options).double()


def atoms(scale: float = 1.0):
    torch.manual_seed(1)
    batch = torch.repeat_interleave(torch.arange(3), torch.tensor(PTR).diff())
    x, pos = scale * torch.randn(16, 8).double(), 3 * torch.rand(16, 3).double()
    return x, pos, batch


def every_third(key, mask=None, rate=0.0):
    """What dropout leaves, always the same (batch, heads, keys), other keys in each head."""
    places = torch.arange(key.shape[-2]) + torch.arange(key.shape[1])[:, None]
    kept = (places % 3 > 0).expand(key.shape[:-1])
    return kept if mask is None else kept & mask


def softmax_of(layer, x, pos, kept=None):
    """Softmax of one graph with f, the exact mask of the near field."""
    attention, near = layer.attention, layer.encoding.near_field
    query, key, value, *_ = attention._split(x[None])
    bias = near.spectrum.mask((pos[:, None] - pos[None])[None])
    mask = kept and kept(key)
    return attention._join(softmax(query, key, value, bias, mask))[0]


@pytest.mark.parametrize("mixing", ["linear", "quadratic"])
@pytest.mark.parametrize(
    ("scale", "options", "kept"),
    [(1.0, {}, None), (30.0, {}, None), (30.0, POLYNOMIAL, None), (30.0, {}, every_third)],
)
def test_all_near_pairs_equal_softmax(mixing, scale, options, kept, monkeypatch):
    """Also where exp(q.k) is beyond what features estimate, and of the keys that dropout leaves."""
    layer = build(near_field=50.0, mixing=mixing, **options)
    if kept:
        layer.attention.dropout = 0.4
        monkeypatch.setattr("molflt.attention.layer.drop_keys", kept)
    layer.encoding.near_field.onset = 0.9
    x, pos, batch = atoms(scale)
    x.requires_grad_()
    out = layer(x, pos, batch)
    expected = torch.cat([softmax_of(layer, x[a:b], pos[a:b], kept) for a, b in pairwise(PTR)])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-8)
    grads = [torch.autograd.grad(o.sum(), x, retain_graph=True)[0] for o in (out, expected)]
    torch.testing.assert_close(*grads, rtol=1e-7, atol=1e-7)


def test_float32_neither_overflows_nor_loses_rows():
    x, pos, batch = (t.float() if t.is_floating_point() else t for t in atoms(60.0))
    out = build(near_field=4.0).float()(x.requires_grad_(), pos, batch)
    out.square().sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()


def test_dropout_takes_near_pairs_as_well():
    """All keys at a rate next to 1; and on average nothing at any rate."""
    x, pos, _ = atoms()
    layer = build(dropout=0.5, normalize="none")
    layer.attention.to_out = torch.nn.Identity()
    batch = torch.arange(500).repeat_interleave(6)
    drawn = layer(x[:6].repeat(500, 1), pos[:6].repeat(500, 1), batch).unflatten(0, (500, 6))
    expected = layer.eval()(x[:6], pos[:6])
    assert (drawn.mean(0) - expected).norm() < 0.1 * expected.norm()
    layer.train().attention.dropout = 0.999999
    assert not layer(x, pos, atoms()[2]).any()
