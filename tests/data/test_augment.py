"""Turned structures keep every distance, and matrices are what they say."""

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch

from molflt.data.structures.augment import interpolate, random_orthogonal, rotate
from molflt.data.structures.records import make_record


@pytest.mark.parametrize("about", ["z", "all"])
def test_matrices_are_orthogonal_and_uniform(about):
    torch.manual_seed(0)
    matrices = random_orthogonal(20_000, about).double()
    identity = torch.eye(3, dtype=torch.float64).expand_as(matrices)
    torch.testing.assert_close(matrices @ matrices.mT, identity, rtol=0, atol=1e-5)
    assert abs((torch.linalg.det(matrices) > 0).double().mean() - 0.5) < 0.02
    mean = matrices.mean(dim=0)
    if about == "z":
        assert (matrices[:, 2] == torch.tensor([0.0, 0.0, 1.0])).all()
        mean[2, 2] = 0.0
    else:  # every entry of a Haar matrix has variance 1/3
        assert (matrices.square().mean(dim=0) - 1 / 3).abs().max() < 0.01
    assert mean.abs().max() < 0.02


def record(pos, relaxed, **more):
    cell = np.diag([40.0, 41.0, 42.0])
    numbers = np.ones(len(pos))
    return make_record(
        pos=pos, atomic_numbers=numbers, pos_relaxed=relaxed, cell=cell, pbc=True, **more
    )


def test_distances_and_cells_turn_together():
    rng = np.random.default_rng(0)
    records = [record(rng.normal(size=(n, 3)), rng.normal(size=(n, 3)), sid=n) for n in (3, 5)]
    batch = Batch.from_data_list(records)
    before = batch.pos.clone()
    turned = rotate(batch, random_orthogonal(2, "all"))
    assert torch.equal(batch.pos, before)  # the original is left alone
    assert (turned.pos - batch.pos).abs().max() > 0.1
    for graph in range(2):
        own = batch.batch == graph
        old, new = (
            torch.cat((b.pos[own], b.pos_relaxed[own], b.cell[graph])) for b in (batch, turned)
        )
        torch.testing.assert_close(torch.cdist(new, new), torch.cdist(old, old), rtol=0, atol=1e-4)


def relaxations(count=400):
    """Two free atoms and a fixed one each; every fourth structure has no relaxed positions."""
    rng = np.random.default_rng(0)
    records = []
    for k in range(count):
        pos = rng.normal(size=(3, 3))
        relaxed = pos + np.array([[0.5, 0, 0], [0, -0.5, 0], [0, 0, 0]])
        fixed = [False, False, True]
        records.append(record(pos, relaxed if k % 4 else None, sid=k, fixed=fixed))
    return Batch.from_data_list(records)


def test_interpolated_positions_lie_on_the_path():
    batch = relaxations()
    torch.manual_seed(0)
    moved = interpolate(batch, share=0.6, noise=0.0)
    step = (moved.pos - batch.pos).view(-1, 3, 3)
    assert not step[:, 2].any() and not step[::4].any()  # fixed, unknown
    t = step[:, 0, 0] / 0.5
    torch.testing.assert_close(step[:, 1, 1], -0.5 * t, rtol=0, atol=1e-5)
    known = torch.arange(400) % 4 > 0
    share = (t[known] != 0).double().mean()
    assert abs(share - 0.6) < 0.1  # four standard deviations
    assert t.min() >= 0 and t.max() <= 1 and abs(t[t > 0].mean() - 0.5) < 0.1
    for key in ("pos_relaxed", "fixed", "cell"):
        torch.testing.assert_close(moved[key], batch[key], equal_nan=True)


def test_noise_is_on_structures_that_moved():
    batch = relaxations()
    torch.manual_seed(0)
    moved = interpolate(batch, share=0.5, noise=0.1)
    step = (moved.pos - batch.pos).view(-1, 3, 3)
    away = step[:, 0, 2]  # across the way
    assert not step[:, 2].any() and not step[::4].any()
    assert abs(away[away != 0].std() - 0.1) < 0.03
    assert 0.2 < (away != 0).double().mean() < 0.55
