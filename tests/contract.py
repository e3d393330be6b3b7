"""Checks that every attention and every model passes, in float64 unless noted."""

import copy
import inspect
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from molflt.attention import (
    FEATURE_MAPS,
    MIXINGS,
    POSITIONS,
    SPECTRA,
    Attention,
    Position,
    Stack,
    make_position,
)
from molflt.attention.encodings import Bias, Kernel, Toeplitz

EXACT = {"rtol": 0.0, "atol": 1e-10}
SIZES = (7, 1, 12, 0, 5)  # lengths of the sequences in one batch
HEADS, DIM = 2, 16
HEAD_DIM = DIM // HEADS
LONGEST = 24  # length of a padded batch
GRID = (6, 4)


def with_features(count: int, options: dict[str, Any]) -> dict[str, Any]:
    """Returns options of attention with a number of features, if the map takes one."""
    phi = FEATURE_MAPS[options.get("feature_map") or "positive"]
    sized = (phi.random or phi.learned) and options.get("mixing") != "softmax"
    return {**({"num_features": count} if sized else {}), **options}


def cloud(size: int, generator: torch.Generator) -> Tensor:
    r = 3 * torch.randn(size, 3, dtype=torch.float64, generator=generator)
    return r - r.mean(dim=0) if size else r


def line(size: int, generator: torch.Generator | None = None) -> Tensor:
    """Returns 0, 1, 2, ..."""
    return torch.arange(size, dtype=torch.float64)[:, None]


def cells(size: int, generator: torch.Generator | None = None) -> Tensor:
    """Returns the cells of `GRID`, row by row."""
    index = torch.arange(size)
    return torch.stack((index // GRID[1], index % GRID[1]), dim=-1).double()


@dataclass(eq=False)
class Case:
    name: str  # `none` or a key of `POSITIONS`
    options: dict[str, Any]
    core: bool = True  # whether to combine it with every feature map instead of two

    def build(self) -> Position | None:
        return make_position(self.name, HEADS, HEAD_DIM, **self.options)

    @cached_property
    def example(self) -> Position | None:
        """Returns a position for its properties; building one can take a tenth of a second."""
        return self.build()

    @property
    def dim(self) -> int:
        return 3 if self.example is None else self.example.dim

    def positions(self, size: int, generator: torch.Generator) -> Tensor:
        return {1: line, 2: cells, 3: cloud}[self.dim](size, generator)

    @property
    def mixings(self) -> tuple[str, ...]:
        return tuple(m for m in MIXINGS if self.example is None or m in self.example.mixings)


# Sizes for small sequences; other positions and spectra are built with their defaults.
OPTIONS: dict[str, dict[str, Any]] = {
    "toeplitz": {"max_tokens": LONGEST},
    "low_rank": {"max_tokens": LONGEST, "rank": 4},
    "gaussian_bias": {"num_gaussians": 6},
    "cosine": {"max_tokens": 2 * LONGEST},
    "sine_spe": {"num_realizations": 12, "num_sines": 2},
    "conv_spe": {"num_realizations": 12, "max_tokens": LONGEST},
    "multiplicative": {"background": 9.0},
}
SHELLS = {"node_diameter": 8.0, "node_max_frequency": 0.2, "node_num_shells": 2}
SPECTRUM_OPTIONS: dict[str, dict[str, Any]] = {
    "gaussian_basis": {"num_gaussians": 6, "num_nodes": 5},
    "gaussian_mixture": {"num_gaussians": 6, "num_nodes": 5, "dim": 1},
    "laplace": {"num_nodes": 5, "dim": 2},
    "local": {"num_nodes": 5, "dim": 1},
    "smooth_local": {"num_nodes": 5, "dim": 2},
    "shell_weights": SHELLS,
}
VARIANTS = {
    "asymmetric": Case(
        "spectral", {"spectrum": "gaussian_mixture", "dim": 2, "asymmetric": True}, core=False
    ),
    "toeplitz_fft": Case("toeplitz", {"max_tokens": LONGEST, "method": "fft"}, core=False),
    "toeplitz_2d": Case("toeplitz", {"shape": GRID}, core=False),
    "rotary_3d": Case("rotary", {"dim": 3}, core=False),
}


def cases() -> dict[str, Case]:
    """Returns a case for each entry of `POSITIONS` with each possible spectrum, and variants."""
    found = {"none": Case("none", {})}
    for name in POSITIONS:
        own = OPTIONS.get(name, {})
        if "spectrum" not in inspect.signature(POSITIONS[name]).parameters:
            found[name] = Case(name, own)
            continue
        for i, spectrum in enumerate(SPECTRA):
            options = {"spectrum": spectrum, **SPECTRUM_OPTIONS.get(spectrum, {}), **own}
            key = spectrum if name == "spectral" else f"{name}-{spectrum}"
            found[key] = Case(name, options, core=i == 0)
    return {**found, **VARIANTS}


CASES = cases()
ELEMENTWISE = ("squared_relu", "abs")
PLAIN_AND_FACTORS = ("none", "gaussian_basis")


class Combination(NamedTuple):
    feature_map: str
    case: str
    mixing: str
    causal: bool

    def __str__(self) -> str:
        words = [self.feature_map, self.case, self.mixing, "causal" if self.causal else ""]
        return "-".join(filter(None, words))


def combinations() -> list[Combination]:
    """Returns combinations of feature map, position and mixing.

    Two feature maps are enough for each spectrum, which does not depend on the map. Maps in
    `ELEMENTWISE` differ from relu only in the function that they apply to each element.
    """
    found = []
    for name, case in CASES.items():
        maps = ["positive", "elu"]
        if case.core:
            maps = [m for m in FEATURE_MAPS if m not in ELEMENTWISE or name in PLAIN_AND_FACTORS]
        for causal in (False, True):
            if "linear" in case.mixings:
                found += [Combination(phi, name, "linear", causal) for phi in maps]
            if "softmax" in case.mixings:
                found.append(Combination("positive", name, "softmax", causal))
    return found


def make_stack(
    combination: Combination,
    *,
    layers: int = 2,
    refinements: int = 1,
    seed: int = 0,
    **options: Any,
) -> Stack:
    """Returns a small float64 stack with weights large enough that attention is not uniform.

    If products of features can be negative, the sums are not divided by their normalizers, because
    normalizers near 0 would amplify rounding.
    """
    torch.manual_seed(seed)
    phi, case, mixing, causal = combination
    divides = mixing == "softmax" or FEATURE_MAPS[phi].positive_kernel
    if mixing != "softmax":
        options = {"feature_map": phi, "normalize": "masked" if divides else "none", **options}
        if FEATURE_MAPS[phi].random or FEATURE_MAPS[phi].learned:
            options.setdefault("num_features", 24)
    options.update(mixing=mixing, causal=causal, position=CASES[case].build())
    stack = Stack(DIM, HEADS, layers, ffn_dim=24, refinements=refinements, **options)
    with torch.no_grad():
        for name, parameter in stack.named_parameters():
            if "amplitude" in name or name.endswith(("position.table", "log_temperature")):
                parameter.normal_(std=0.7)
            elif "blocks" in name and parameter.ndim == 2 and "weight" in name:
                parameter.normal_(std=0.35 if divides else 0.2)
    return stack.double().eval()


def copy_attention(theirs: nn.MultiheadAttention, ours: Attention) -> None:
    """Copies weights into PyTorch's attention."""
    parts = ours.to_query, ours.to_key, ours.to_value
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        theirs.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
    theirs.out_proj.load_state_dict(ours.to_out.state_dict())


def refine(stack: Stack, x: Tensor, r: Tensor, **others: Any) -> Tensor:
    """Returns the outputs of a stack; positions are passed only if it has an encoding."""
    return stack(x, None if stack.position is None else r, **others)


Item = tuple[Tensor, Tensor]


def ragged(case: str = "none", seed: int = 0) -> list[Item]:
    """Returns sequences of `SIZES` tokens with their positions, in float64."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for size in SIZES:
        x = torch.randn(size, DIM, dtype=torch.float64, generator=generator)
        out.append((x, CASES[case].positions(size, generator)))
    return out


def pad(items: list[Item], length: int, case: str = "none", fill: float = torch.nan) -> tuple:
    """Returns tokens (b, length, dim), positions (b, length, l) and mask; padding holds `fill`."""
    generator = torch.Generator().manual_seed(3)
    r = CASES[case].positions(length, generator).expand(len(items), -1, -1).clone()
    if CASES[case].dim == 3:  # points in space, without an order
        r.fill_(fill)
    x = torch.full((len(items), length, DIM), fill, dtype=items[0][0].dtype)
    r = r.to(items[0][1].dtype)
    mask = torch.zeros(len(items), length, dtype=torch.bool)
    for i, (tokens, positions) in enumerate(items):
        n = len(tokens)
        x[i, :n], r[i, :n], mask[i, :n] = tokens, positions, True
    return x, r, mask


def run(
    stack: Stack, items: list[Item], length: int, case: str = "none", fill: float = torch.nan
) -> list[Tensor]:
    """Returns the outputs of the tokens of each sequence in a batch padded to `length`."""
    x, r, mask = pad(items, length, case, fill)
    out = refine(stack, x, r, key_mask=mask)
    return [out[i, : len(tokens)] for i, (tokens, _) in enumerate(items)]


def check_batching(combination: Combination) -> None:
    """Outputs do not depend on the batch, its order, or the amount and content of padding."""
    stack, case = make_stack(combination), combination.case
    items = ragged(case)
    together = run(stack, items, max(SIZES), case)
    padded = run(stack, items[::-1], max(SIZES) + 9, case, fill=3.7)[::-1]
    for i, item in enumerate(items):
        alone = run(stack, [item], len(item[0]), case)[0]
        for other in (together[i], padded[i]):
            assert torch.isfinite(other).all()
            torch.testing.assert_close(other, alone, **EXACT)


def check_isolation(combination: Combination) -> None:
    """The gradient of one sequence's output with respect to every other sequence is exactly 0."""
    stack, case = make_stack(combination), combination.case
    x, r, mask = pad(ragged(case), max(SIZES), case)
    x.requires_grad_()
    r.requires_grad_()
    out = refine(stack, x, r, key_mask=mask)
    for i in (0, 2):
        # 0 * r.sum() adds positions to the graph of a stack without encoding
        loss = out[i][mask[i]].square().sum() + 0 * r.sum()
        for grad in torch.autograd.grad(loss, (x, r), retain_graph=True):
            others = torch.cat((grad[:i], grad[i + 1 :]))
            assert (others == 0).all(), f"gradient across sequences: {others.abs().max():.2e}"
            assert (grad[i][~mask[i]] == 0).all(), "gradient into padding"
            assert torch.isfinite(grad).all()
    empty = torch.autograd.grad(out[3].square().sum(), x)[0]  # a sequence without tokens
    assert torch.isfinite(empty).all() and (empty[:3] == 0).all() and (empty[4] == 0).all()


def check_oracle(combination: Combination, **options: Any) -> None:
    """The linear and the quadratic form have equal outputs and gradients."""
    case, other = combination.case, combination._replace(mixing="quadratic")
    x, r, mask = pad(ragged(case), max(SIZES), case)
    found = []
    for each in (combination, other):
        stack = make_stack(each, **options)
        tokens = x.clone().requires_grad_()
        out = refine(stack, tokens, r, key_mask=mask)[mask]
        parameters = [p for p in stack.parameters() if p.requires_grad]
        loss = (out * out.detach().cos()).sum()
        grads = torch.autograd.grad(loss, [tokens, *parameters], allow_unused=True)
        found.append([out, *(torch.zeros(()) if g is None else g for g in grads)])
    for fast, exact in zip(*found, strict=True):
        scale = max(1.0, float(exact.detach().abs().max()))
        torch.testing.assert_close(fast / scale, exact / scale, **EXACT)


def made(combination: Combination, **options: Any) -> tuple[Stack, Tensor, Tensor]:
    """Returns a stack, tokens (1, 12, dim) and their positions."""
    x, r = ragged(combination.case)[2]
    return make_stack(combination, **options), x[None], r[None]


def check_permutation(combination: Combination) -> None:
    stack, x, r = made(combination)
    order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(1))
    permuted = refine(stack, x[:, order], r[:, order])
    torch.testing.assert_close(permuted, refine(stack, x, r)[:, order], **EXACT)


def check_key_copies(combination: Combination) -> None:
    """Repeating every key with `key_index` leaves normalized sums unchanged."""
    stack, x, r = made(combination)
    index = torch.arange(x.shape[1]).repeat(2)[None]
    keys = None if stack.position is None else r.repeat(1, 2, 1)
    twice = refine(stack, x, r, key_positions=keys, key_index=index)
    torch.testing.assert_close(twice, refine(stack, x, r), **EXACT)


def check_cross(combination: Combination) -> None:
    """The outputs of the first queries do not depend on the other queries."""
    stack, x, r = made(combination)
    attention, position = stack.blocks[0].attention, stack.position

    def attend(n: int) -> Tensor:
        encoding = position(combination.mixing, r[:, :n], r) if position else None
        return attention(x[:, :n], encoding=encoding, context=x)

    torch.testing.assert_close(attend(5), attend(x.shape[1])[:, :5], **EXACT)


def check_translation(combination: Combination) -> None:
    stack, x, r = made(combination)
    shifted = r + torch.arange(3, 3 + r.shape[-1])
    torch.testing.assert_close(refine(stack, x, shifted), refine(stack, x, r), **EXACT)


def check_causality(combination: Combination) -> None:
    """Later tokens, of any size, do not change earlier outputs."""
    (stack, x, r), cut = made(combination), 7
    straight = refine(stack, x, r)[:, :cut]
    torch.testing.assert_close(refine(stack, x[:, :cut], r[:, :cut]), straight, **EXACT)
    for factor in (-3.0, 40.0):
        other = torch.cat((x[:, :cut], factor * x[:, cut:].flip(1)), dim=1)
        torch.testing.assert_close(refine(stack, other, r)[:, :cut], straight, **EXACT)


def check_decoding(combination: Combination, **options: Any) -> None:
    """Decoding a prompt and then single tokens gives the outputs of the whole sequence."""
    stack, x, r = made(combination, refinements=2, **options)
    x = torch.cat((x, x.flip(1)))
    state, outs, sizes = None, [], set()
    for part in (slice(0, 5), *(slice(t, t + 1) for t in range(5, x.shape[1]))):
        rows = 1 + part.start % 2  # positions of all sequences, or of each
        places = None if stack.position is None else r[:, part].expand(rows, -1, -1)
        out, state = stack.decode(x[:, part], places, state)
        outs.append(out)
        if part.start >= 5:
            sizes.add(count_numbers(state.blocks))
    expected = refine(stack, x, r)
    torch.testing.assert_close(torch.cat(outs, dim=1), expected, **EXACT)
    assert len(sizes) == 1 or combination.mixing == "softmax"


def count_numbers(state: Any) -> int:
    """Counts the numbers in all tensors of nested states."""
    if state is None:  # no mask of keys
        return 0
    return state.numel() if isinstance(state, Tensor) else sum(map(count_numbers, state))


def check_weights(combination: Combination) -> None:
    """`Attention.weights` is the matrix that mixes the values, with rows of sum 1."""
    attention = make_stack(combination).blocks[0].attention
    x, r, mask = pad(ragged(combination.case), max(SIZES), combination.case, fill=0.0)
    r = r if attention.position else None
    weights = attention.weights(x, r, key_mask=mask)
    out = attention._join(weights @ attention._split(x).value)
    torch.testing.assert_close(out, attention(x, r, key_mask=mask), rtol=1e-9, atol=1e-9)
    assert (weights.mT[~mask.unsqueeze(1).expand(-1, HEADS, -1)] == 0).all()
    assert (weights[~mask.any(1)] == 0).all()  # sequences without keys
    if combination.causal:
        assert weights.triu(1).abs().max() < 1e-12  # Fourier transforms round
    if attention.normalize == "masked":
        total = weights.sum(-1)[:, :, 0][mask.any(1)]
        if combination.feature_map == "cosformer":  # relu(q) . relu(k) can be 0 for a single key
            total = total[total != 0]
        torch.testing.assert_close(total, torch.ones_like(total))


def check_precision(combination: Combination) -> None:
    """Outputs in float32, bfloat16 autocast and bfloat16 are close to float64."""
    stack, case = make_stack(combination), combination.case
    items = ragged(case)
    exact = run(stack, items, max(SIZES), case)
    for tolerance, dtype, autocast in (
        (2e-3, torch.float32, False),
        (0.3, torch.float32, True),
        (0.6, torch.bfloat16, False),
    ):
        cast = copy.deepcopy(stack).to(dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            got = run(cast, [(x.to(dtype), r) for x, r in items], max(SIZES), case)
        for a, b in zip(got, exact, strict=True):
            assert torch.isfinite(a).all()
            error = (a.double() - b).square().mean().sqrt() if a.numel() else 0.0
            assert error < tolerance, error


def suite(combination: Combination) -> list[Callable[[Combination], None]]:
    """Returns the checks that apply to a mechanism, except precision and files."""
    phi, name, mixing, causal = combination
    position = CASES[name].example
    checks = [check_batching, check_isolation, check_weights]
    if mixing == "linear":
        checks.append(check_oracle)
    if position is not None:
        r = CASES[name].positions(3, torch.Generator())[None]
        of_differences = isinstance(position.double()(mixing, r, r), Bias | Kernel | Toeplitz)
        if of_differences or (mixing == "softmax" and not position.redraws):
            checks.append(check_translation)
    if causal:
        checks.append(check_causality)
        if position is None or position.decodes:
            checks.append(check_decoding)
    else:
        checks.append(check_cross)
    if not causal and (position is None or not position.grid):
        checks.append(check_permutation)
        # copies double sums that are not divided by a normalizer
        if mixing == "softmax" or FEATURE_MAPS[phi].positive_kernel:
            checks.append(check_key_copies)
    return checks


def covering(
    pairs: list[tuple[Combination, Callable[[Combination], None]]],
) -> list[tuple[Combination, Callable[[Combination], None]]]:
    """Returns a small subset of `pairs` with the same pairs of choices.

    The choices are feature map, position, form and check.
    """
    seen: set[tuple[object, ...]] = set()
    chosen = []
    shuffled = random.Random(0).sample(pairs, len(pairs))
    for least in range(6, 0, -1):  # entries with many new pairs come first
        for combination, check in shuffled:
            phi, case, *form = combination
            choices = enumerate((phi, case, tuple(form), check))
            new = set(itertools.combinations(choices, 2)) - seen
            if len(new) >= least:
                seen |= new
                chosen.append((combination, check))
    return chosen
