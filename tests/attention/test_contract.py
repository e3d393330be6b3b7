import os

import contract
import pytest
import torch
from contract import Combination
from torch.func import functional_call, grad, jacfwd, vmap

from molflt.attention import Attention, make_position
from molflt.attention.nodes.shells import _directions

COMBINATIONS = contract.combinations()


def some(*maps: str) -> list[Combination]:
    """Returns all cases of these maps, and the cases of PLAIN_AND_FACTORS of every map."""
    return [
        c for c in COMBINATIONS if c.feature_map in maps or c.case in contract.PLAIN_AND_FACTORS
    ]


# Properties of positions that do not depend on the feature map.
COMMON = (
    contract.check_cross,
    contract.check_key_copies,
    contract.check_permutation,
    contract.check_translation,
)
SOME = set(some("positive", "elu"))


ALL = [
    (c, check)
    for c in COMBINATIONS
    for check in contract.suite(c)
    if check not in COMMON or c in SOME
]
ALL += [(c, contract.check_precision) for c in some("positive")]
# The full product takes ten times as long; the weekly workflow runs it.
CHOSEN = ALL if os.environ.get("MOLFLT_FULL") else contract.covering(ALL)


@pytest.mark.parametrize(
    ("combination", "check"), CHOSEN, ids=lambda x: getattr(x, "__name__", None) or str(x)
)
def test_contract(combination, check):
    check(combination)


ONE_OF_EACH_CASE = {
    c.case: c for c in reversed(some("positive")) if c.feature_map == "positive"
}.values()


@pytest.mark.parametrize("combination", ONE_OF_EACH_CASE, ids=str)
def test_gradients_of_single_samples(combination):
    stack, x, r = contract.made(combination)
    x = torch.cat((x.flip(1), x))
    own = {name: value.detach() for name, value in stack.named_parameters()}

    def loss(parameters, one, place):
        places = None if stack.position is None else place[None]
        return functional_call(stack, parameters, (one[None], places)).square().sum()

    single = vmap(grad(loss), in_dims=(None, 0, 0))(own, x, r.expand(len(x), -1, -1))
    loss(dict(stack.named_parameters()), x[1], r[0]).backward()
    for name, value in stack.named_parameters():
        expected = torch.zeros_like(value) if value.grad is None else value.grad
        torch.testing.assert_close(single[name][1], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "options"), [("spectral", {"dim": 1}), ("toeplitz", {})])
def test_transforms_of_softmax_with_a_learned_mask(name, options):
    position = make_position(name, 2, 4, mixing="softmax", **options)
    layer = Attention(8, 2, mixing="softmax", position=position).double()
    x, r = torch.randn(2, 1, 5, 8).double(), torch.randn(2, 1, 5, 1).double()
    single = torch.stack([layer(x[0], r[0]), layer(x[1], r[1])])
    torch.testing.assert_close(vmap(layer)(x, r), single)
    expected = torch.autograd.functional.jacobian(layer, (x[0], r[0]))[0]
    torch.testing.assert_close(jacfwd(layer)(x[0], r[0]), expected)


POLYNOMIAL = [c for c in some("polynomial") if c.feature_map == "polynomial"]


@pytest.mark.parametrize("combination", [*ONE_OF_EACH_CASE, POLYNOMIAL[0]], ids=str)
def test_modules_made_without_memory(combination):
    """A module built on the meta device computes after `load_state_dict`."""
    _directions.cache_clear()  # cached tensors must not be on the meta device
    with torch.device("meta"):
        empty = contract.make_stack(combination)
    stack, empty = contract.make_stack(combination), empty.to_empty(device="cpu")
    with torch.no_grad():
        for value in (*empty.parameters(), *empty.buffers()):
            value.fill_(7)  # arbitrary memory
    empty.load_state_dict(stack.state_dict())
    _, x, r = contract.made(combination)
    assert torch.equal(contract.refine(empty, x, r), contract.refine(stack, x, r))


@pytest.mark.parametrize(
    ("case", "mixing", "causal"),
    [
        ("gaussian_mixture", "linear", True),
        ("toeplitz", "linear", True),
        ("gaussian_basis", "softmax", False),
    ],
)
def test_compile(case, mixing, causal):
    """A stack compiles without a graph break and returns the same outputs and gradients."""
    stack = contract.make_stack(Combination("positive", case, mixing, causal), layers=1)
    x, r, mask = contract.pad(contract.ragged(case), max(contract.SIZES), case)
    found = []
    for call in (torch.compile(stack, fullgraph=True, backend="aot_eager"), stack):
        tokens = x.clone().requires_grad_()
        out = call(tokens, r, key_mask=mask)[mask]
        found.append((out, torch.autograd.grad(out.square().sum(), tokens)[0]))
    torch.testing.assert_close(*found, **contract.EXACT)
