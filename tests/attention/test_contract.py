"""Every feature map x position x mixing against the contract."""

import contract
import pytest

from molflt.attention import MIXINGS, Attention

CHECKS = (
    contract.check_batching,
    contract.check_isolation,
    contract.check_permutation,
    contract.check_key_copies,
    contract.check_precision,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("combination", contract.combinations(), ids="-".join)
def test_contract(combination, check):
    check(contract.make_stack(*combination))


@pytest.mark.parametrize("combination", contract.combinations(), ids="-".join)
def test_normalized_queries_and_keys(combination):
    contract.check_batching(contract.make_stack(*combination, normalize_qk=True))


@pytest.mark.parametrize("combination", contract.combinations(), ids="-".join)
def test_save_load(combination):
    stack, twin = (contract.make_stack(*combination, seed=seed) for seed in (0, 1))
    contract.check_save_load(stack, twin, lambda s: contract.run(s, contract.ragged(), 12)[2])


@pytest.mark.parametrize("mixing", ["linear", "softmax"])
def test_compile(mixing):
    contract.check_compile(contract.make_stack("positive", "spectral", mixing))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mixing": "fast"}, ["mixing='fast'", *MIXINGS]),
        ({"feature_map": "gelu"}, ["feature_map='gelu'", "positive"]),
        ({"projection": "sobol"}, ["projection='sobol'", "iid"]),
        ({"num_features": 0}, ["num_features", "0"]),
        ({"heads": 3}, ["dim=16", "heads=3"]),
    ],
)
def test_a_wrong_choice_names_itself_and_the_choices(options, words):
    with pytest.raises(ValueError) as error:
        Attention(**{"dim": 16, "heads": 2, **options})
    for word in words:
        assert word in str(error.value)
