"""Every feature map x position x mixing against the contract."""

import os

import contract
import pytest
from contract import Combination

from molflt.attention import FEATURE_MAPS, PROJECTIONS

COMBINATIONS = contract.combinations()


def some(*maps: str) -> list[Combination]:
    """Returns every position with these maps, and every map with no position and with factors."""
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
# The full product takes ten times as long; the weekly workflow runs it.
CHOSEN = ALL if os.environ.get("MOLFLT_FULL") else contract.covering(ALL)


@pytest.mark.parametrize(
    ("combination", "check"), CHOSEN, ids=lambda x: getattr(x, "__name__", None) or str(x)
)
def test_contract(combination, check):
    check(combination)


@pytest.mark.parametrize("combination", some("positive"), ids=str)
def test_precision(combination):
    contract.check_precision(combination)


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_normalized_queries_and_keys(feature_map):
    combination = Combination(feature_map, "gaussian_basis", "linear", False)
    contract.check_oracle(combination, normalize_qk=True)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("feature_map", ["positive", "trigonometric", "learnable_exp"])
def test_projections(feature_map, projection):
    """Linear and quadratic forms agree for every projection, random or learned."""
    combination = Combination(feature_map, "none", "linear", False)
    contract.check_oracle(combination, projection=projection)


@pytest.mark.parametrize(
    ("case", "mixing", "causal"),
    [
        ("gaussian_basis", "linear", False),
        ("gaussian_mixture", "linear", True),
        ("toeplitz", "linear", True),
        ("gaussian_basis", "softmax", False),
    ],
)
def test_compile(case, mixing, causal):
    stack = contract.make_stack(Combination("positive", case, mixing, causal))
    contract.check_compile(stack, case)
