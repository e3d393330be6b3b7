"""Every feature map x position x mixing against the contract."""

import contract
import pytest
import torch
from contract import CASES, Combination

from molflt.attention import FEATURE_MAPS, MIXINGS, PROJECTIONS, Attention

COMBINATIONS = contract.combinations()


def grid(combination: Combination) -> bool:
    position = CASES[combination.case].build()
    return position is not None and position.grid


def decodes(combination: Combination) -> bool:
    position = CASES[combination.case].build()
    return position is None or position.decodes


def some(*names: str) -> list[Combination]:
    """Combinations of every position with two maps, and of every map with a few positions.

    For checks of what map and position do not do together.
    """
    return [
        c
        for c in COMBINATIONS
        if c.feature_map in ("positive", "elu") or c.case in ("none", "gaussian_basis", *names)
    ]


@pytest.mark.parametrize(
    "check",
    [contract.check_batching, contract.check_isolation],
    ids=lambda check: check.__name__,
)
@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_contract(combination, check):
    check(combination)


@pytest.mark.parametrize("combination", [c for c in COMBINATIONS if c.mixing == "linear"], ids=str)
def test_fast_equals_quadratic(combination):
    contract.check_oracle(combination)


@pytest.mark.parametrize(
    "combination", [c for c in some() if not c.causal and not grid(c)], ids=str
)
def test_permutation(combination):
    contract.check_permutation(combination)


@pytest.mark.parametrize(
    "combination",
    [c for c in some() if not c.causal and c.case in ("none", "gaussian_basis", "gaussian_bias")],
    ids=str,
)
def test_key_copies(combination):
    if FEATURE_MAPS[combination.feature_map].signed and combination.mixing != "softmax":
        pytest.skip("signed features are not normalized in the contract: copies double the sum")
    contract.check_key_copies(combination)


@pytest.mark.parametrize(
    "combination",
    [c for c in some() if c.mixing == "softmax" and CASES[c.case].relative and not grid(c)]
    + [Combination("elu", "cosine", "linear", False)],
    ids=str,
)
def test_translation(combination):
    contract.check_translation(combination)


@pytest.mark.parametrize("combination", [c for c in COMBINATIONS if c.causal], ids=str)
def test_causality(combination):
    contract.check_causality(combination)


@pytest.mark.parametrize(
    "combination", [c for c in COMBINATIONS if c.causal and decodes(c)], ids=str
)
def test_decoding(combination):
    contract.check_decoding(combination)


@pytest.mark.parametrize("combination", some(), ids=str)
def test_precision(combination):
    contract.check_precision(combination)


@pytest.mark.parametrize("combination", some(), ids=str)
def test_save_load(combination):
    stack, twin = (contract.make_stack(combination, seed=seed) for seed in (0, 1))
    items = contract.ragged(combination.case)
    contract.check_save_load(stack, twin, lambda s: contract.run(s, items, 12, combination.case)[2])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_normalized_queries_and_keys(feature_map, causal):
    combination = Combination(feature_map, "gaussian_basis", "linear", causal)
    fast, exact = (
        contract.make_stack(c, normalize_qk=True)
        for c in (combination, combination._replace(mixing="quadratic"))
    )
    items = contract.ragged("gaussian_basis")
    for a, b in zip(*(contract.run(s, items, 12) for s in (fast, exact)), strict=True):
        torch.testing.assert_close(a, b, **contract.EXACT)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize(
    "feature_map", [name for name, build in FEATURE_MAPS.items() if build.random or build.learned]
)
def test_projections(feature_map, projection):
    """Every projection under every map that has one: fast == quadratic, and reloading its draw."""
    combination = Combination(feature_map, "none", "linear", False)
    items = contract.ragged()
    stacks = [
        contract.make_stack(c, projection=projection, seed=seed)
        for c, seed in (
            (combination, 0),
            (combination._replace(mixing="quadratic"), 0),
            (combination, 1),
        )
    ]
    outs = [contract.run(stack, items, 12)[2] for stack in stacks[:2]]
    torch.testing.assert_close(*outs, **contract.EXACT)
    contract.check_save_load(stacks[0], stacks[2], lambda s: contract.run(s, items, 12)[2])


@pytest.mark.parametrize(
    ("combination", "causal"),
    [
        (Combination("positive", "gaussian_basis", "linear", False), False),
        (Combination("positive", "gaussian_mixture", "linear", True), True),
        (Combination("positive", "toeplitz", "linear", True), True),
        (Combination("positive", "gaussian_basis", "softmax", False), False),
    ],
    ids=["linear", "causal", "toeplitz", "softmax"],
)
def test_compile(combination, causal):
    contract.check_compile(contract.make_stack(combination, refinements=1), combination.case)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mixing": "fast"}, ["mixing='fast'", *MIXINGS]),
        ({"feature_map": "swish"}, ["feature_map='swish'", "positive"]),
        ({"projection": "halton"}, ["projection='halton'", "iid"]),
        ({"normalize": "maybe"}, ["normalize='maybe'", "unmasked"]),
        ({"num_features": 0}, ["num_features", "0"]),
        ({"heads": 3}, ["dim=16", "heads=3"]),
        ({"feature_map": "elu", "projection": "iid"}, ["EluFeatures", "projection='iid'"]),
        ({"mixing": "softmax", "normalize": "none"}, ["softmax", "normalize='none'"]),
        ({"mixing": "softmax", "gate": True}, ["softmax", "gate=True"]),
        ({"gate": True}, ["gate=True", "causal=True"]),
    ],
)
def test_a_wrong_choice_names_itself_and_the_choices(options, words):
    with pytest.raises(ValueError) as error:
        Attention(**{"dim": 16, "heads": 2, **options})
    for word in words:
        assert word in str(error.value)


def test_every_pair_that_makes_no_sense_is_refused():
    """Each position with each mixing, causal or not, gated or not: it works or it is refused."""
    refused = set()
    for name, case in CASES.items():
        for mixing in MIXINGS:
            for causal in (False, True):
                for gate in (False, True):
                    options = {"mixing": mixing, "causal": causal, "gate": gate}
                    position = case.build()
                    sound = not gate or (causal and mixing != "softmax")
                    if position is not None:
                        sound &= mixing in position.mixings and (position.causal or not causal)
                        sound &= not gate or position.decodes
                    if sound:
                        Attention(16, 2, position=position, **options)
                        continue
                    refused.add((name, mixing, causal, gate))
                    with pytest.raises(ValueError, match="; "):
                        Attention(16, 2, position=position, **options)
    assert ("gaussian_bias", "linear", False, False) in refused
    assert ("cosine", "softmax", False, False) in refused
    assert ("toeplitz", "linear", True, True) in refused


@pytest.mark.parametrize(
    ("mixing", "case", "causal", "words"),
    [
        ("linear", "toeplitz", True, "Toeplitz.* no state"),
        ("quadratic", "none", True, "mixing 'linear' or 'softmax'"),
        ("linear", "none", False, "causal=True"),
    ],
)
def test_what_cannot_decode_says_so(mixing, case, causal, words):
    stack = contract.make_stack(Combination("positive", case, mixing, causal))
    x, r = contract.ragged(case)[2]
    with pytest.raises(ValueError, match=words):
        stack.decode(x[None], r[None])


def test_a_position_module_needs_positions():
    stack = contract.make_stack(Combination("positive", "gaussian_basis", "linear", False))
    with pytest.raises(ValueError, match="needs positions"):
        stack(torch.zeros(1, 3, 16, dtype=torch.float64))
