"""Problems are seeds: each comes once per epoch, and no two uses have one in common."""

import itertools

import pytest
import torch

from molflt.data.problems import ProblemData, ProblemSeeds, generator_of


def data(seed=0, **options):
    made = ProblemData(batch_size=4, problems=10, val_problems=6, **options)
    made.seed = seed
    made.setup()
    return made


def batches(made, count, start=0):
    made.start_step = start
    return [b.tolist() for b in itertools.islice(made.train_dataloader(), count)]


def test_an_epoch_holds_each_problem_once_and_goes_on_from_any_step():
    line = batches(data(), 6)  # two epochs of three batches
    for epoch in (line[:3], line[3:]):
        assert sorted(itertools.chain(*epoch)) == [2**32 + i for i in range(10)]
    assert batches(data(), 2, start=4) == line[4:]
    assert batches(data(seed=1), 6) != line
    assert [b.tolist() for b in data().val_dataloader()] == [[0, 1, 2, 3], [4, 5]]


def test_uses_have_no_problem_in_common():
    most = 2**31
    ends = [(s.first, s.first + most) for s in (ProblemSeeds(u, most) for u in ("val", "test"))]
    ends.append((ProblemSeeds("train", 1).first,) * 2)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(ends))


def test_draws_are_of_the_seed_and_the_purpose_alone():
    draws = [torch.randn(3, generator=generator_of(*of)) for of in ((5,), (5,), (6,), (5, 1))]
    assert torch.equal(draws[0], draws[1])
    assert not torch.allclose(draws[0], draws[2]) and not torch.allclose(draws[0], draws[3])


def test_fingerprints_tell_other_problems():
    one, other = data(), ProblemData(batch_size=4, problems=11, val_problems=6)
    other.setup()
    assert one.fingerprints()["train"] != other.fingerprints()["train"]
    assert one.fingerprints()["val"] == other.fingerprints()["val"]
    with pytest.raises(ValueError, match=r"data.problems must be 1 to 2,147,483,648; got 0"):
        ProblemData(problems=0)
    with pytest.raises(IndexError, match="problem 6 of 6"):
        one.datasets["val"][6]


def test_each_process_has_something_to_validate_on() -> None:
    data = ProblemData(batch_size=4, val_problems=8)
    data.setup()
    assert len(data.val_dataloader(1, 2)) == 1
    with pytest.raises(ValueError, match="expected one for each of 3 processes; got 2 of 4 probl"):
        data.val_dataloader(0, 3)
