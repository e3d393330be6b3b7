import numpy as np
import pytest

from molflt.metrics import locality


def random_rows(*shape: int, causal: bool = False) -> np.ndarray:
    weights = np.random.default_rng(0).gamma(0.3, size=shape)
    weights = np.tril(weights) if causal else weights
    return weights / weights.sum(axis=-1, keepdims=True)


def test_equally_far_keys_share_their_weight() -> None:
    weights = np.array([[[0.4, 0.25, 0.15, 0.05, 0.05, 0.02, 0.02, 0.02, 0.01, 0.03]]])
    distances = np.arange(10.0)[None]
    distances[0, 1] = 2.0  # the second and the third are equally far
    assert locality(weights, distances, fraction=0.2).nearest == pytest.approx([0.4 + 0.2])


@pytest.mark.parametrize("fraction", [0.1, 0.37, 1.0])
@pytest.mark.parametrize("causal", [False, True])
def test_locality_sums_over_sorted_keys(causal: bool, fraction: float) -> None:
    weights = random_rows(2, 60, 60, causal=causal)
    distances = np.random.default_rng(1).uniform(size=(60, 60))
    expected = np.zeros((2, 2))
    for head in range(2):
        for query in range(60):
            seen = query + 1 if causal else 60
            ordered = weights[head, query, :seen][np.argsort(distances[query, :seen])]
            whole, part = divmod(fraction * seen, 1)
            for side, row in enumerate((ordered, ordered[::-1])):
                expected[side, head] += row[: int(whole)].sum() + part * (
                    row[int(whole)] if part else 0
                )
    found = locality(weights, distances, fraction, causal)
    np.testing.assert_allclose(found, expected / 60, atol=1e-14)


def test_locality_ignores_padding_and_other_queries() -> None:
    weights, distances = random_rows(2, 30, 30), np.abs(np.subtract.outer(*[np.arange(30.0)] * 2))
    expected = locality(weights, distances)
    padded = np.pad(distances, ((0, 0), (0, 13)), constant_values=np.inf)
    found = locality(np.pad(weights, ((0, 0), (0, 0), (0, 13))), padded)
    np.testing.assert_allclose(found, expected, atol=1e-14)
    cut = locality(weights[:, 20:], distances[20:])  # some of the queries
    alone = locality(weights[1, 20:], np.broadcast_to(distances[20:], (10, 30)))
    assert cut.nearest[1] == pytest.approx(alone.nearest) and alone.nearest.shape == ()
    assert distances.max() == 29  # the argument is unchanged
    causal = random_rows(30, 30, causal=True)
    shared, row = np.repeat(distances[:1], 30, axis=0), distances[:1]  # the same for all queries
    expected = locality(causal, shared, causal=True)
    np.testing.assert_allclose(locality(causal, row, causal=True), expected, atol=1e-14)
    last = locality(causal[20:], distances[20:], causal=True)  # the last query sees all keys
    each = [
        locality(causal[i : i + 1, : i + 1], distances[i : i + 1, : i + 1]) for i in range(20, 30)
    ]
    np.testing.assert_allclose(last, np.mean(each, axis=0), atol=1e-14)
