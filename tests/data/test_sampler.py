import itertools
import multiprocessing
import os
import select
import signal
import subprocess

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molflt.data.batches import SizeBucketedBatchSampler
from molflt.data.optimizers import ProblemData, problem_seeds

sizes = st.lists(st.integers(1, 60), min_size=1, max_size=80)


def stream(natoms, step=0, rank=0, world=1, seed=3, batch_size=4):
    options = {"shuffle": True, "seed": seed, "rank": rank, "world": world, "start_step": step}
    return iter(SizeBucketedBatchSampler(natoms, batch_size, **options))


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(1, 9), st.one_of(st.none(), st.integers(60, 200)), st.booleans())
def test_every_structure_comes_once_and_batches_are_limited(natoms, batch_size, max_atoms, shuffle):
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
    natoms = np.array(natoms)
    ranks = [SizeBucketedBatchSampler(natoms, 3, rank=r, world=world) for r in range(world)]
    parts = [list(sampler) for sampler in ranks]
    assert [len(part) for part in parts] == [len(sampler) for sampler in ranks]
    everything = list(itertools.chain(*itertools.chain(*parts)))
    assert sorted(everything) == list(range(len(natoms)))


@settings(max_examples=30, deadline=None)
@given(sizes, st.integers(0, 60), st.integers(1, 3))
def test_a_stream_from_a_step_is_the_rest_of_the_stream(natoms, step, world):
    with pytest.raises(TypeError, match="no length"):
        len(SizeBucketedBatchSampler(np.array(natoms), 4, start_step=0))
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


def problems(seed=0, train=10):
    made = ProblemData(batch_size=4, problems=train, val_problems=6)
    made.seed = seed
    made.setup()
    return made


def drawn(made, count, start=0):
    made.start_step = start
    return [b.tolist() for b in itertools.islice(made.train_dataloader(), count)]


def test_an_epoch_holds_each_problem_once_and_starts_at_any_step():
    line = drawn(problems(), 6)  # two epochs of three batches
    for epoch in (line[:3], line[3:]):
        assert sorted(itertools.chain(*epoch)) == [2**32 + i for i in range(10)]
    assert drawn(problems(), 2, start=4) == line[4:]
    assert drawn(problems(seed=1), 6) != line and line[:3] != line[3:]
    assert [b.tolist() for b in problems().val_dataloader()] == [[0, 1, 2, 3], [4, 5]]
    assert len(problems().val_dataloader(1, 2)) == 1
    ranges = [problem_seeds(use, 2**31) for use in ("val", "test", "train")]
    assert all(one.stop <= other.start for one, other in itertools.pairwise(ranges))
    one, other = (problems(train=count).fingerprints() for count in (10, 11))
    assert one["train"] != other["train"] and one["val"] == other["val"]


@pytest.mark.parametrize("signum", [0, signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_a_run(signum, monkeypatch):
    """A pipe ends with the last process that has it open."""
    monkeypatch.setattr("torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL", 0.1)  # s
    made, kept, (end, pipe) = problems(), [], os.pipe()
    made.workers = 2

    def act():
        kept.append(iter(made.train_dataloader()))
        next(kept[0])
        os.kill(os.getpid(), signum)

    run = multiprocessing.get_context("fork").Process(target=act)
    run.start()
    os.close(pipe)
    try:
        assert select.select([end], [], [], 55)[0]
    finally:
        os.close(end)
        run.kill()
    run.join()
    assert run.exitcode == -signum


def test_workers_outlast_signals_to_all_processes_of_a_run():
    made = problems()
    made.workers = 1
    batches = iter(made.train_dataloader())
    next(batches)
    (worker,) = multiprocessing.active_children()
    for signum in ("INT", "HUP", "USR1", "TERM", "TERM"):
        subprocess.run(["kill", "-s", signum, str(worker.pid)], check=True)
    for _ in range(8):  # more than were read ahead
        next(batches)
    worker.terminate()  # as Python does at exit
    worker.join(30)
    assert worker.exitcode == 0
