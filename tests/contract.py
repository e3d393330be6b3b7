"""What every attention and every model promises, as suites that each of them passes.

Every check takes a callable and data, works in float64 unless it says otherwise, and raises through
`torch.testing.assert_close` or a plain assert with the measured difference.
"""

import copy
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from molflt.attention import (
    FEATURE_MAPS,
    Attention,
    Block,
    Features,
    Position,
    Stack,
    make_position,
)

EXACT = {"rtol": 0.0, "atol": 1e-10}
SIZES = (7, 1, 12, 0, 5)  # tokens of the sequences in one batch: ragged, one token, none
HEADS, DIM = 2, 16
HEAD_DIM = DIM // HEADS
LONGEST = 24  # tokens of a padded batch
GRID = (6, 4)


def plain(values: Tensor) -> Features:
    """Features given as they are."""
    return Features(values)


def cloud(size: int, generator: torch.Generator) -> Tensor:
    """Centred points in space."""
    r = 3 * torch.randn(size, 3, dtype=torch.float64, generator=generator)
    return r - r.mean(dim=0) if size else r


def line(size: int, generator: torch.Generator | None = None) -> Tensor:
    """0, 1, 2, ..."""
    return torch.arange(size, dtype=torch.float64)[:, None]


def cells(size: int, generator: torch.Generator | None = None) -> Tensor:
    """Cells of `GRID`, row by row."""
    index = torch.arange(size)
    return torch.stack((index // GRID[1], index % GRID[1]), dim=-1).double()


class Case(NamedTuple):
    """A positional encoding with options, and the kind of positions that it takes."""

    name: str
    options: dict[str, Any]
    positions: Callable[[int, torch.Generator], Tensor]
    relative: bool = True
    """whether softmax outputs depend on differences of positions alone"""

    def build(self) -> Position | None:
        """The encoding for `HEADS` heads of `HEAD_DIM`; None for no encoding."""
        return make_position(self.name, HEADS, HEAD_DIM, **self.options)


def _spectral(positions: Callable, dim: int, spectrum: str, **options: Any) -> Case:
    return Case(
        "spectral", {"dim": dim, "spectrum": spectrum, "num_nodes": 5, **options}, positions
    )


CASES: dict[str, Case] = {
    "none": Case("none", {}, cloud),
    "gaussian_basis": _spectral(cloud, 3, "gaussian_basis", num_gaussians=6),
    "gaussian_mixture": _spectral(line, 1, "gaussian_mixture", num_gaussians=6),
    "asymmetric": _spectral(cells, 2, "gaussian_mixture", num_gaussians=6, asymmetric=True),
    "gaussian": _spectral(cloud, 3, "gaussian"),
    "laplace": _spectral(cells, 2, "laplace"),
    "matern": _spectral(cloud, 3, "matern"),
    "local": _spectral(line, 1, "local"),
    "smooth_local": _spectral(cells, 2, "smooth_local"),
    "kernel": Case(
        "kernel",
        {"dim": 3, "num_nodes": 5, "num_gaussians": 6, "background": 9.0},
        cloud,
    ),
    "toeplitz": Case("toeplitz", {"max_tokens": LONGEST}, line),
    "toeplitz_2d": Case("toeplitz", {"shape": GRID}, cells),
    "bucketed": Case("bucketed", {}, line),
    "low_rank": Case("low_rank", {"max_tokens": LONGEST, "rank": 4}, line),
    "gaussian_bias": Case("gaussian_bias", {"num_gaussians": 6}, cloud),
    "rotary": Case("rotary", {"dim": 1}, line),
    "rotary_3d": Case("rotary", {"dim": 3}, cloud),
    "cosine": Case("cosine", {"max_tokens": 2 * LONGEST}, line),
    "sine_spe": Case("sine_spe", {"num_realizations": 12}, line, relative=False),
    "conv_spe": Case(
        "conv_spe", {"num_realizations": 12, "max_tokens": LONGEST}, line, relative=False
    ),
}


class Combination(NamedTuple):
    """One mechanism."""

    feature_map: str
    case: str
    mixing: str
    causal: bool

    def __str__(self) -> str:
        words = [self.feature_map, self.case, self.mixing, "causal" if self.causal else ""]
        return "-".join(filter(None, words))


def combinations() -> list[Combination]:
    """Feature map x position x mixing, as far as they differ; softmax has no feature map.

    The quadratic form is compared with the linear one in `check_oracle`, for each of them.
    """
    found = []
    for name, case in CASES.items():
        position = case.build()
        mixings = ("linear", "softmax") if position is None else position.mixings
        for causal in (False, True):
            if "linear" in mixings:
                found += [Combination(phi, name, "linear", causal) for phi in FEATURE_MAPS]
            if "softmax" in mixings and (position is None or position.causal or not causal):
                found.append(Combination("positive", name, "softmax", causal))
    return found


def make_stack(
    combination: Combination,
    *,
    normalize_qk: bool = False,
    refinements: int = 2,
    seed: int = 0,
    **options: Any,
) -> Stack:
    """A small float64 stack with weights large enough that attention is far from uniform.

    Signed features divide by nothing, because their normalizers come near 0 and would amplify
    rounding without bound.
    """
    torch.manual_seed(seed)
    phi, case, mixing, causal = combination
    position = CASES[case].build()
    signed = mixing != "softmax" and FEATURE_MAPS[phi].signed
    options = {"normalize": "none" if signed else "masked", **options}
    blocks = [
        Block(
            Attention(
                DIM,
                HEADS,
                mixing=mixing,
                causal=causal,
                feature_map=phi,
                num_features=24,
                position=position,
                normalize_qk=normalize_qk,
                **options,
            ),
            ffn_dim=24,
        )
        for _ in range(2)
    ]
    stack = Stack(blocks, position, refinements)
    with torch.no_grad():
        for name, parameter in stack.named_parameters():
            if "amplitude" in name or name.endswith("position.table"):
                parameter.normal_(std=0.7)
            elif "blocks" in name and parameter.ndim == 2 and "weight" in name:
                parameter.normal_(std=0.2 if signed else 0.35)
    return stack.double().eval()


Item = tuple[Tensor, Tensor]


def ragged(case: str = "none", seed: int = 0) -> list[Item]:
    """Sequences of tokens and their positions, float64, of `SIZES` tokens."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for size in SIZES:
        x = torch.randn(size, DIM, dtype=torch.float64, generator=generator)
        out.append((x, CASES[case].positions(size, generator)))
    return out


def pad(items: list[Item], length: int, case: str = "none", fill: float = 0.0) -> tuple:
    """Tokens (b, length, dim), positions (b, length, l) and mask; padding holds `fill`.

    On a grid the padding has the places that follow, because they are part of the grid's form.
    """
    generator = torch.Generator().manual_seed(3)
    r = CASES[case].positions(length, generator).expand(len(items), -1, -1).clone()
    if CASES[case].positions is cloud:
        r.fill_(fill)
    x = torch.full((len(items), length, DIM), fill, dtype=items[0][0].dtype)
    r = r.to(items[0][1].dtype)
    mask = torch.zeros(len(items), length, dtype=torch.bool)
    for i, (tokens, positions) in enumerate(items):
        n = len(tokens)
        x[i, :n], r[i, :n], mask[i, :n] = tokens, positions, True
    return x, r, mask


def run(
    stack: Stack, items: list[Item], length: int, case: str = "none", fill: float = 0.0
) -> list[Tensor]:
    """Outputs of the real tokens of each sequence in a batch padded to `length`."""
    x, r, mask = pad(items, length, case, fill)
    out = stack(x, r, key_mask=mask)
    return [out[i, : len(tokens)] for i, (tokens, _) in enumerate(items)]


def check_batching(combination: Combination) -> None:
    """Alone == in a batch == any padding (whatever it holds) == any order of the batch."""
    stack, case = make_stack(combination), combination.case
    items = ragged(case)
    together = run(stack, items, max(SIZES), case)
    padded = run(stack, items, max(SIZES) + 9, case, fill=3.7)
    backwards = run(stack, items[::-1], max(SIZES), case)[::-1]
    for i, item in enumerate(items):
        alone = run(stack, [item], len(item[0]), case)[0]
        for other in (together[i], padded[i], backwards[i]):
            assert torch.isfinite(other).all()
            torch.testing.assert_close(other, alone, **EXACT)


def check_isolation(combination: Combination) -> None:
    """The gradient of one sequence's output with respect to every other sequence is exactly 0."""
    stack, case = make_stack(combination), combination.case
    x, r, mask = pad(ragged(case), max(SIZES), case)
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


def check_oracle(combination: Combination) -> None:
    """Linear equals its quadratic form: outputs, and gradients of all parameters and of tokens."""
    case, other = combination.case, combination._replace(mixing="quadratic")
    x, r, mask = pad(ragged(case), max(SIZES), case)
    found = []
    for each in (combination, other):
        stack = make_stack(each, refinements=1)
        tokens = x.clone().requires_grad_()
        out = stack(tokens, r, key_mask=mask)[mask]
        parameters = [p for p in stack.parameters() if p.requires_grad]
        loss = (out * out.detach().cos()).sum()
        grads = torch.autograd.grad(loss, [tokens, *parameters], allow_unused=True)
        found.append([out, *(torch.zeros(()) if g is None else g for g in grads)])
    for fast, exact in zip(*found, strict=True):
        scale = max(1.0, float(exact.detach().abs().max()))
        torch.testing.assert_close(fast / scale, exact / scale, **EXACT)


def check_permutation(combination: Combination) -> None:
    """Permuting tokens permutes outputs."""
    stack, case = make_stack(combination), combination.case
    x, r = ragged(case)[2]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    straight = stack(x[None], r[None])[0]
    permuted = stack(x[order][None], r[order][None])[0]
    torch.testing.assert_close(permuted, straight[order], **EXACT)


def check_key_copies(combination: Combination) -> None:
    """`key_index` equals writing the copied tokens out as keys: here, a copy of every key.

    Every key twice at the same place leaves each normalized sum as it was.
    """
    stack, case = make_stack(combination, normalize="masked"), combination.case
    x, r = ragged(case)[2]
    index = torch.arange(len(x)).repeat(2)[None]
    twice = stack(x[None], r[None], r.repeat(2, 1)[None], None, index)
    torch.testing.assert_close(twice, stack(x[None], r[None]), **EXACT)


def check_cross(combination: Combination) -> None:
    """Queries may be fewer than keys: the first ones attend as they do among all."""
    stack, case = make_stack(combination, refinements=1), combination.case
    x, r = ragged(case)[2]
    attention, position, few = stack.blocks[0].attention, stack.position, 5

    def attend(n: int) -> Tensor:
        encoding = position(combination.mixing, r[None, :n], r[None]) if position else None
        return attention(x[None, :n], encoding, context=x[None])

    torch.testing.assert_close(attend(few), attend(len(x))[:, :few], **EXACT)


def check_translation(combination: Combination) -> None:
    """Shifting all positions changes nothing."""
    stack, case = make_stack(combination), combination.case
    x, r = ragged(case)[2]
    shifted = r + torch.arange(3, 3 + r.shape[-1])
    straight = stack(x[None], r[None])
    torch.testing.assert_close(stack(x[None], shifted[None]), straight, **EXACT)


def check_causality(combination: Combination) -> None:
    """What comes later, however large, and whether it comes at all, changes nothing earlier."""
    stack, case = make_stack(combination), combination.case
    x, r = ragged(case)[2]
    cut = 7
    straight = stack(x[None], r[None])[0, :cut]
    truncated = stack(x[None, :cut], r[None, :cut])[0]
    torch.testing.assert_close(truncated, straight, **EXACT)
    for factor in (-3.0, 40.0):
        other = torch.cat((x[:cut], factor * x[cut:].flip(0)))
        torch.testing.assert_close(stack(other[None], r[None])[0, :cut], straight, **EXACT)


def check_decoding(combination: Combination) -> None:
    """Prompt and steps give what the whole sequence gives, from a state that does not grow."""
    stack, case = make_stack(combination), combination.case
    x, r = ragged(case)[2]
    x, r = x[None], r[None]
    expected = stack(x, r)
    out, state = stack.decode(x[:, :5], r[:, :5])
    outs, sizes = [out], set()
    for t in range(5, x.shape[1]):
        out, state = stack.decode(x[:, t : t + 1], r[:, t : t + 1], state)
        outs.append(out)
        sizes.add(sum(part.numel() for block in state.blocks for part in _tensors(block)))
    torch.testing.assert_close(torch.cat(outs, dim=1), expected, **EXACT)
    assert len(sizes) == 1 or combination.mixing == "softmax"


def _tensors(state: Any) -> list[Tensor]:
    return [state] if isinstance(state, Tensor) else [t for part in state for t in _tensors(part)]


def check_precision(combination: Combination) -> None:
    """float32 and bfloat16 autocast stay near float64, and finite; autocast returns no NaN."""
    stack, case = make_stack(combination), combination.case
    items = ragged(case)
    exact = run(stack, items, max(SIZES), case)
    single = copy.deepcopy(stack).float()
    items32 = [(x.float(), r.float()) for x, r in items]
    for tolerance, context in (
        (2e-3, torch.autocast("cpu", enabled=False)),
        (0.3, torch.autocast("cpu", dtype=torch.bfloat16)),
    ):
        with context:
            got = run(single, items32, max(SIZES), case)
        for a, b in zip(got, exact, strict=True):
            assert torch.isfinite(a).all()
            error = (a.double() - b).square().mean().sqrt() if a.numel() else 0.0
            assert error < tolerance, error


def check_save_load(module: nn.Module, twin: nn.Module, call: Callable[[nn.Module], Any]) -> None:
    """A twin from another seed gives the same numbers after loading, random draws included."""
    twin.load_state_dict(load(save(module.state_dict())))
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True)
    torch.testing.assert_close(call(twin), call(module), rtol=0.0, atol=0.0)


def check_compile(stack: Stack, case: str) -> None:
    """torch.compile gives the same numbers, outputs and gradients, without a graph break."""
    x, r, mask = pad(ragged(case), max(SIZES), case)
    found = []
    for module in (stack, torch.compile(stack, fullgraph=True)):
        tokens = x.clone().requires_grad_()
        out = module(tokens, r, key_mask=mask)[mask]
        found.append((out, torch.autograd.grad(out.square().sum(), tokens)[0]))
    for compiled, eager in zip(*found[::-1], strict=True):
        torch.testing.assert_close(compiled, eager, **EXACT)
