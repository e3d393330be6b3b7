"""Neighbors in spaces that are extreme: the same pairs, or a refusal, and never a crash."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from molflt.graph.geometry import Geometry
from molflt.graph.neighbors import neighbor_list

CELL = torch.tensor([[6.0, 0.5, 0.2], [1.5, 7.0, 0.3], [0.4, 0.6, 8.0]]).double()


def geometry(pos, cell=None, pbc=(False, False, False)):
    pos = torch.as_tensor(pos, dtype=torch.float64)
    return Geometry.of(pos, cell=CELL if cell is None else cell, pbc=torch.tensor(pbc))


def pairs_of(found):
    vectors = found.vector.numpy().round(6) + 0.0
    return sorted(
        zip(found.center.tolist(), found.neighbor.tolist(), map(tuple, vectors), strict=True)
    )


def every_pair(pos, cell, pbc, cutoff):
    """All images within reach, none left out."""
    steps = np.array(list(itertools.product(*[range(-9, 10) if axis else (0,) for axis in pbc])))
    vectors = pos[None, :, None] - pos[:, None, None] + steps @ cell
    near = np.linalg.norm(vectors, axis=-1) < cutoff
    near &= np.any(steps != 0, axis=1) | ~np.eye(len(pos), dtype=bool)[..., None]
    i, j, _ = near.nonzero()
    return sorted(
        zip(i.tolist(), j.tolist(), map(tuple, vectors[near].round(6) + 0.0), strict=True)
    )


@pytest.mark.parametrize("pbc", list(itertools.product((False, True), repeat=3)))
@pytest.mark.parametrize("spread", [1.0, 40.0])
def test_pairs_are_those_of_all_images(pbc, spread):
    rng = np.random.default_rng(3)
    pos = rng.random((9, 3)) @ CELL.numpy() + 20.0
    pos += spread * rng.integers(0, 2, (9, 3)) * ~np.array(pbc)
    found = neighbor_list(geometry(pos, pbc=pbc), 5.0)
    expected = every_pair(pos, CELL.numpy(), pbc, 5.0)
    assert pairs_of(found) == expected and expected
    torch.testing.assert_close(found.distance, found.vector.norm(dim=1))


@pytest.mark.parametrize(
    ("pos", "cell", "message"),
    [
        ([1e6, 0, 0], None, "pos must be finite and within 100000 Å"),
        ([float("nan"), 0, 0], None, "pos must be finite"),
        ([1, 0, 0], 0.02, "at least 0.5 Å apart; got 0.02 Å"),
        ([1, 0, 0], float("nan"), "cell finite"),
        ([1, 0, 0], 1e7, "spans 1e[+]07 Å along one direction"),
    ],
)
def test_inputs_that_crash_the_neighbor_search_are_refused(pos, cell, message):
    periodic = cell is not None
    lattice = torch.diag(torch.tensor([3.0, 3.0, cell or 0.0]).double())
    fine = geometry([[0, 0, 0], [1, 0, 0]])
    both = Geometry(  # as it comes from a GPU, where `Geometry.of` does not look at numbers
        torch.cat((fine.pos, torch.tensor([[0, 0, 0], pos]).double())),
        torch.tensor([0, 0, 1, 1]),
        torch.tensor([0, 2, 4]),
        torch.cat((fine.cell, lattice[None])),
        torch.cat((fine.pbc, torch.full((1, 3), periodic))),
    )
    with pytest.raises(ValueError, match="^graph 1: .*" + message) as caught:
        neighbor_list(both, 5.0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("pbc", [(True, True, True), (True, True, False), (False, False, False)])
def test_more_pairs_than_fit_are_refused_before(pbc, monkeypatch):
    rng = np.random.default_rng(3)
    given = geometry(20 * rng.random((60, 3)), 20 * torch.eye(3), pbc)
    size = 240 * len(neighbor_list(given, 9.0).center)
    monkeypatch.setattr("molflt.graph.memory._SMALL", 0)
    monkeypatch.setattr("molflt.graph.memory.available_memory", lambda: 1.1 * size)
    neighbor_list(given, 9.0)
    monkeypatch.setattr("molflt.graph.memory.available_memory", lambda: 0.1 * size)
    message = "neighbors within 9 Å of the 60 atoms of graph 0, and .* GB are free; take a smaller"
    with pytest.raises(MemoryError, match=message):
        neighbor_list(given, 9.0)
