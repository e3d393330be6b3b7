"""Batches of similar size: each structure once, the same on every call, capped, and resumable."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molflt.data.batches import SizeBucketedBatchSampler, _TrainingStream

sizes = st.lists(st.integers(1, 60), min_size=1, max_size=80)


def stream(natoms, step=0, rank=0, world=1, seed=3, batch_size=4):
    batches = SizeBucketedBatchSampler(
        natoms, batch_size, shuffle=True, seed=seed, rank=rank, world=world
    )
    return iter(_TrainingStream(batches, step))


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(1, 9), st.one_of(st.none(), st.integers(60, 200)), st.booleans())
def test_every_structure_once_and_no_batch_over_the_caps(natoms, batch_size, max_atoms, shuffle):
    natoms = np.array(natoms)
    sampler = SizeBucketedBatchSampler(natoms, batch_size, max_atoms, shuffle, seed=1)
    batches = list(sampler)
    assert sorted(itertools.chain(*batches)) == list(range(len(natoms)))
    assert len(sampler) == len(batches)
    for batch in batches:
        assert 1 <= len(batch) <= batch_size
        assert max_atoms is None or natoms[batch].max() * len(batch) <= max_atoms


@settings(max_examples=30, deadline=None)
@given(sizes, st.integers(1, 5))
def test_ranks_share_an_evaluation_without_overlap(natoms, world):
    ranks = [
        SizeBucketedBatchSampler(np.array(natoms), 3, rank=r, world=world) for r in range(world)
    ]
    parts = [list(sampler) for sampler in ranks]
    assert [len(part) for part in parts] == [len(sampler) for sampler in ranks]
    everything = list(itertools.chain(*itertools.chain(*parts)))
    assert sorted(everything) == list(range(len(natoms)))


def test_a_large_bucket_keeps_padding_small():
    natoms = np.random.default_rng(0).integers(20, 225, 3000)

    def padding(batches):
        padded = sum(natoms[b].max() * len(b) for b in batches)
        return padded / natoms.sum() - 1

    random, sorted_ = (
        SizeBucketedBatchSampler(natoms, 32, shuffle=True, bucket=bucket).batches()
        for bucket in (1, 100)
    )
    assert padding(random) > 0.5
    assert padding(sorted_) < 0.05


def test_epochs_differ_and_repeat():
    sampler = SizeBucketedBatchSampler(np.arange(1, 41), 4, shuffle=True, seed=5)
    again = SizeBucketedBatchSampler(np.arange(1, 41), 4, shuffle=True, seed=5)
    other = SizeBucketedBatchSampler(np.arange(1, 41), 4, shuffle=True, seed=6)

    def flat(batches):
        return np.concatenate(batches).tolist()

    assert flat(sampler.batches(2)) == flat(again.batches(2))
    assert flat(sampler.batches(2)) != flat(sampler.batches(3))
    assert flat(sampler.batches(2)) != flat(other.batches(2))
    equal = SizeBucketedBatchSampler(np.full(40, 20), 4, shuffle=True)  # others meet in batches
    first, second = ({frozenset(b.tolist()) for b in equal.batches(epoch)} for epoch in (0, 1))
    assert len(first & second) < 3


@settings(max_examples=30, deadline=None)
@given(sizes, st.integers(0, 60), st.integers(1, 3))
def test_stream_from_a_step_on_is_the_rest_of_the_stream(natoms, step, world):
    for rank in range(world):
        whole = stream(np.array(natoms), 0, rank, world)
        rest = stream(np.array(natoms), step, rank, world)
        assert list(itertools.islice(whole, step, step + 8)) == list(itertools.islice(rest, 8))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_together_see_every_structure_once_per_epoch(world):
    natoms = np.random.default_rng(0).integers(5, 40, 30)  # 8 batches of at most 4
    ranks = [stream(natoms, 0, rank, world) for rank in range(world)]
    steps = 24 // world  # three epochs of eight batches
    line = [batch for _ in range(steps) for batch in (next(r) for r in ranks)]
    for epoch in range(3):
        seen = itertools.chain(*line[8 * epoch : 8 * (epoch + 1)])
        assert sorted(seen) == list(range(30))


def test_refusals_say_what_is_wrong():
    with pytest.raises(ValueError, match=r"structure 1 has 90 atoms; .*max_atoms=80; raise"):
        SizeBucketedBatchSampler(np.array([10, 90]), 4, 80)
    with pytest.raises(ValueError, match="batch_size must be at least 1; got 0"):
        SizeBucketedBatchSampler(np.array([10]), 0)
    with pytest.raises(ValueError, match=r"at least 1; got \(0,\)"):
        SizeBucketedBatchSampler(np.array([]), 4)
    with pytest.raises(ValueError, match=r"rank must be in 0..1; got 2"):
        SizeBucketedBatchSampler(np.array([10]), 4, rank=2, world=2)
