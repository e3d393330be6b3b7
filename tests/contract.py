"""What every attention and every model promises, as suites that each of them passes.

Every check takes a callable and data, works in float64 unless it says otherwise, and raises through
`torch.testing.assert_close` or a plain assert with the measured difference.
"""

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from molflt.attention import (
    FEATURE_MAPS,
    MIXINGS,
    POSITIONS,
    Attention,
    Block,
    GaussianBasis,
    GaussianNodes,
    SpectralPosition,
    Stack,
)

EXACT = {"rtol": 0.0, "atol": 1e-10}
POSITION_CHOICES = ("none", *POSITIONS)
SIZES = (7, 1, 12, 0, 5)  # tokens of the sequences in one batch: ragged, one token, none


def combinations() -> list[tuple[str, str, str]]:
    """(feature map, position, mixing) of every pair that differs; softmax has no feature map."""
    kernelized = [
        (phi, position, mixing)
        for phi in FEATURE_MAPS
        for position in POSITION_CHOICES
        for mixing in MIXINGS
        if mixing != "softmax"
    ]
    return kernelized + [("positive", position, "softmax") for position in POSITION_CHOICES]


def make_stack(
    feature_map: str, position: str, mixing: str, *, normalize_qk: bool = False, seed: int = 0
) -> Stack:
    """A small float64 stack with weights large enough that attention is far from uniform."""
    torch.manual_seed(seed)
    heads, dim = 2, 16
    encoding = None
    if position == "spectral":
        encoding = SpectralPosition(GaussianBasis(heads, 6), GaussianNodes(heads, 5))
    width = 0 if encoding is None else encoding.width
    blocks = [
        Block(
            Attention(
                dim,
                heads,
                mixing=mixing,
                feature_map=feature_map,
                num_features=24,
                position_width=width,
                normalize_qk=normalize_qk,
            ),
            ffn_dim=24,
        )
        for _ in range(2)
    ]
    stack = Stack(blocks, encoding, refinements=2)
    with torch.no_grad():
        for name, parameter in stack.named_parameters():
            if "amplitude" in name:
                parameter.normal_(std=0.7)
            elif parameter.ndim == 2 and "weight" in name:
                parameter.normal_(std=0.35)
    return stack.double().eval()


def ragged(seed: int = 0, dim: int = 16) -> list[tuple[Tensor, Tensor]]:
    """Sequences of tokens and centred 3-D positions, float64, of `SIZES` tokens."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for size in SIZES:
        x = torch.randn(size, dim, dtype=torch.float64, generator=generator)
        r = 3 * torch.randn(size, 3, dtype=torch.float64, generator=generator)
        out.append((x, r - r.mean(dim=0) if size else r))
    return out


def pad(
    items: list[tuple[Tensor, Tensor]], length: int, fill: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (b, length, dim), positions (b, length, 3) and mask; padding holds `fill`."""
    x = torch.full((len(items), length, items[0][0].shape[-1]), fill, dtype=items[0][0].dtype)
    r = torch.full((len(items), length, 3), fill, dtype=items[0][1].dtype)
    mask = torch.zeros(len(items), length, dtype=torch.bool)
    for i, (tokens, positions) in enumerate(items):
        n = len(tokens)
        x[i, :n], r[i, :n], mask[i, :n] = tokens, positions, True
    return x, r, mask


def run(stack: Stack, items: list[tuple[Tensor, Tensor]], length: int, fill: float = 0.0) -> list:
    """Outputs of the real tokens of each sequence in a batch padded to `length`."""
    x, r, mask = pad(items, length, fill)
    out = stack(x, r, key_mask=mask)
    return [out[i, : len(tokens)] for i, (tokens, _) in enumerate(items)]


def check_batching(stack: Stack) -> None:
    """Alone == in a batch == any padding (whatever it holds) == any order of the batch."""
    items = ragged()
    together = run(stack, items, max(SIZES))
    padded = run(stack, items, max(SIZES) + 9, fill=3.7)
    backwards = run(stack, items[::-1], max(SIZES))[::-1]
    for i, item in enumerate(items):
        alone = run(stack, [item], len(item[0]))[0]
        for other in (together[i], padded[i], backwards[i]):
            assert torch.isfinite(other).all()
            torch.testing.assert_close(other, alone, **EXACT)


def check_isolation(stack: Stack) -> None:
    """The gradient of one sequence's output with respect to every other sequence is exactly 0."""
    items = ragged()
    x, r, mask = pad(items, max(SIZES))
    x.requires_grad_()
    r.requires_grad_()
    out = stack(x, r, key_mask=mask)
    for i in (0, 2):
        # 0 * r.sum(): positions are not in the graph of a stack without encoding.
        loss = out[i][mask[i]].square().sum() + 0 * r.sum()
        for grad in torch.autograd.grad(loss, (x, r), retain_graph=True):
            others = torch.cat((grad[:i], grad[i + 1 :]))
            assert (others == 0).all(), f"gradient across sequences: {others.abs().max():.2e}"
            assert (grad[i][~mask[i]] == 0).all(), "gradient into padding"
            assert torch.isfinite(grad).all()


def check_permutation(stack: Stack) -> None:
    """Permuting tokens permutes outputs."""
    x, r = ragged()[2]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    straight = run(stack, [(x, r)], len(x))[0]
    permuted = run(stack, [(x[order], r[order])], len(x))[0]
    torch.testing.assert_close(permuted, straight[order], **EXACT)


def check_key_copies(stack: Stack) -> None:
    """`key_index` equals writing the copied tokens out as keys: here, a copy of every key.

    Every key twice at the same place leaves each normalized sum as it was.
    """
    x, r = ragged()[2]
    index = torch.arange(len(x)).repeat(2)[None]
    twice = stack(x[None], r[None], r.repeat(2, 1)[None], None, index)
    torch.testing.assert_close(twice, stack(x[None], r[None]), **EXACT)


def check_precision(stack: Stack) -> None:
    """float32 and bfloat16 autocast stay near float64, and finite; autocast returns no NaN."""
    items = ragged()
    exact = run(stack, items, max(SIZES))
    single = copy.deepcopy(stack).float()
    items32 = [(x.float(), r.float()) for x, r in items]
    for tolerance, context in (
        (2e-3, torch.autocast("cpu", enabled=False)),
        (0.3, torch.autocast("cpu", dtype=torch.bfloat16)),
    ):
        with context:
            got = run(single, items32, max(SIZES))
        for a, b in zip(got, exact, strict=True):
            assert torch.isfinite(a).all()
            torch.testing.assert_close(a.double(), b, rtol=0.0, atol=tolerance)


def check_save_load(module: nn.Module, twin: nn.Module, call: Callable[[nn.Module], Any]) -> None:
    """A twin from another seed gives the same numbers after loading, random draws included."""
    twin.load_state_dict(load(save(module.state_dict())))
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True)
    torch.testing.assert_close(call(twin), call(module), rtol=0.0, atol=0.0)


def check_compile(stack: Stack) -> None:
    """torch.compile gives the same numbers."""
    x, r, mask = pad(ragged(), max(SIZES))
    expected = stack(x, r, key_mask=mask)
    compiled = torch.compile(stack, fullgraph=True)(x, r, key_mask=mask)
    torch.testing.assert_close(compiled[mask], expected[mask], **EXACT)
