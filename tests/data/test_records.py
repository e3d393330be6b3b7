from itertools import product

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch

from molflt.data.structures.augment import interpolate, random_orthogonal, repeat, rotate
from molflt.data.structures.records import _lattice_shift, make_record


def small(**changes):
    fields = {"pos": [[0.1, 0.0, 0.0], [1.0, 2.0, 3.0]], "atomic_numbers": [8, 78]}
    fields |= {"cell": np.diag([4.0, 5.0, 20.0]), "sid": 77}
    return make_record(**{**fields, **changes})


def test_types_shapes_and_defaults():
    record = small()
    energies = ("y_init", "y_relaxed", "y_baseline", "energy", "charge")
    expected = {
        **dict.fromkeys(("pos", "pos_relaxed", "forces"), ((2, 3), torch.float32)),
        **dict.fromkeys(("atomic_numbers", "tags"), ((2,), torch.int64)),
        **dict.fromkeys(energies, ((1,), torch.float64)),
        **dict.fromkeys(("cell", "stress"), ((1, 3, 3), torch.float32)),
        "pbc": ((1, 3), torch.bool),
        "fixed": ((2,), torch.bool),
    }
    assert sorted(record.keys()) == sorted([*expected, "natoms", "sid"])
    for key, (shape, dtype) in expected.items():
        assert tuple(record[key].shape) == shape and record[key].dtype == dtype, key
    assert (record.natoms, record.sid) == (2, 77) and type(record.sid) is int
    assert record.pbc.all() and not record.tags.any() and not record.fixed.any()
    assert record.y_relaxed.isnan().all() and record.pos_relaxed.isnan().all()
    assert not small(cell=None).pbc.any()
    assert small(sid=torch.tensor([2**60 + 1])).sid == 2**60 + 1
    stress = small(stress=[1, 2, 3, 4, 5, 6]).stress[0]  # in Voigt's order
    assert stress.tolist() == [[1, 6, 5], [6, 2, 4], [5, 4, 3]]
    numbers, fixed = torch.tensor([8.0, 78.0]), torch.tensor([0.0, 1.0])  # as in OC20
    record = small(atomic_numbers=numbers, fixed=fixed)
    assert record.atomic_numbers.tolist() == [8, 78] and record.fixed.tolist() == [False, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pos": [[0.0, 0.0, float("nan")], [0.0, 0.0, 0.0]]}, "pos must be finite.*atom 0"),
        ({"atomic_numbers": [8, 119]}, "1 to 118; got 119; no such element"),
        ({"atomic_numbers": [8.0, 7.5]}, "integers; got 7.5"),
        ({"tags": [1, 4]}, "tags must be 0 .* got 4"),
        ({"y_relaxed": 1j}, "y_relaxed must be real numbers; got torch.complex128"),
        ({"y_relaxed": float("nan")}, "y_relaxed must be finite, in eV; got .*nan"),
        ({"forces": np.zeros((3, 3))}, r"forces must be \(2, 3\) in eV/Å; got shape \(3, 3\)"),
        ({"y_init": [1.0, 2.0]}, r"y_init must be \(1,\) in eV; got shape \(2,\)"),
        ({"fixed": [119.0, 0]}, "fixed must be 0 or 1; got 119"),
        ({"pos": [[0.0, 0.0, 0.0], [0.0, -1.1e5, 0.0]]}, "within 100000 Å.*-110000.0.*atom 1"),
        ({"cell": np.diag([4.0, 5.0, 0.49])}, "at least 0.5 Å apart; got 0.49 Å"),
        ({"sid": 1.5}, "sid must be an integer of at most 64 bits; got 1.5"),
        # could be 299, rounded to bfloat16
        ({"sid": torch.tensor(300.0, dtype=torch.bfloat16)}, "sid must be an integer .*tensor"),
    ],
)
def test_refuses_naming_the_sid(change, message):
    pattern = message if "sid" in change else "^sid 77: .*" + message
    with pytest.raises(ValueError, match=pattern):
        small(**change)


def test_relaxed_positions_are_unwrapped_only_along_periodic_axes():
    relaxed = [[3.9, 4.9, 19.8], [1.1, 2.0, 3.0]]
    free = small(pos_relaxed=relaxed)
    torch.testing.assert_close(free.pos_relaxed[0], torch.tensor([-0.1, -0.1, -0.2]))
    assert torch.equal(free.pos_relaxed[1], torch.tensor([1.1, 2.0, 3.0]))
    slab = small(pos_relaxed=relaxed, pbc=[True, True, False])
    torch.testing.assert_close(slab.pos_relaxed[0], torch.tensor([-0.1, -0.1, 19.8]))
    # the shortest vectors among all images
    rng = np.random.default_rng(3)
    cell = np.array([[3.0, 0.2, 0.0], [2.6, 3.0, 0.1], [1.0, 1.0, 9.0]])
    delta = rng.normal(scale=6, size=(40, 3))
    for pbc in ([1, 1, 1], [1, 1, 0], [0, 1, 0], [0, 0, 0]):
        steps = [range(-12, 13) if axis else (0,) for axis in pbc]
        grid = np.stack(np.meshgrid(*steps, indexing="ij"), -1).reshape(-1, 3) @ cell
        shortest = np.linalg.norm(delta[:, None] - grid, axis=2).min(axis=1)
        given = torch.from_numpy(delta)
        found = given - _lattice_shift(given, torch.from_numpy(cell), torch.tensor(pbc).bool())
        np.testing.assert_allclose(found.norm(dim=1), shortest, atol=1e-12)
        turns = (delta - found.numpy()) @ np.linalg.inv(cell)
        np.testing.assert_allclose(turns, turns.round() * pbc, atol=1e-8)  # a lattice vector away


@pytest.mark.parametrize("move", [(9e4, -9e4, 1e4), (1234.56789, -77.7, 65432.1)])
def test_moved_structures_keep_their_digits(move):
    rng = np.random.default_rng(0)
    pos, cell = 12 * rng.random((20, 3)), 12 * np.eye(3)
    relaxed = pos + rng.normal(scale=0.1, size=pos.shape)
    make = {"atomic_numbers": [6] * 20, "cell": cell}
    for pbc in (True, False):
        here = make_record(pos=pos, pos_relaxed=relaxed, pbc=pbc, **make)
        there = make_record(pos=pos + move, pos_relaxed=relaxed + move, pbc=pbc, **make)
        for name in ("pos", "pos_relaxed"):
            moved = there[name].double() - here[name].double()
            assert float((moved - moved[0]).abs().max()) < 2e-6
        if move[0] % 1000 == 0 and not pbc:
            assert torch.equal(here.pos, there.pos)
        assert torch.equal(here.pos, torch.from_numpy(pos).float())  # not moved near the origin


def test_an_atom_in_a_far_image_keeps_its_digits():
    rng = np.random.default_rng(0)
    pos, cell = 12 * rng.random((20, 3)), np.diag([12.3456789, 13.0, 14.0])
    far = pos.copy()
    far[3] += 5000 * cell[0]
    record = make_record(pos=far, pos_relaxed=pos + 0.1, atomic_numbers=[6] * 20, cell=cell)
    shift = (record.pos[3].double().numpy() - pos[3]) @ np.linalg.inv(cell)
    assert np.abs(shift - shift.round()).max() < 1e-6 and np.abs(record.pos).max() < 30
    way = (record.pos_relaxed - record.pos).numpy()
    np.testing.assert_allclose(way, 0.1, atol=1e-5)
    alone = make_record(pos=far, atomic_numbers=[6] * 20)  # a molecule is not changed
    assert float(alone.pos[3, 0]) > 6e4


# --- augmentation ----------------------------------------------------------------------------


@pytest.mark.parametrize("about", ["z", "all"])
def test_matrices_are_orthogonal_and_uniform(about):
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


def in_box(pos, relaxed, **more):
    cell = np.diag([40.0, 41.0, 42.0])
    numbers = np.ones(len(pos))
    return make_record(
        pos=pos, atomic_numbers=numbers, pos_relaxed=relaxed, cell=cell, pbc=True, **more
    )


def test_distances_and_cells_turn_together():
    rng = np.random.default_rng(0)
    records = [in_box(rng.normal(size=(n, 3)), rng.normal(size=(n, 3)), sid=n) for n in (3, 5)]
    batch = Batch.from_data_list(records)
    before = batch.pos.clone()
    turned = rotate(batch, random_orthogonal(2, "all"))
    assert torch.equal(batch.pos, before)  # the original does not change
    assert (turned.pos - batch.pos).abs().max() > 0.1
    for graph in range(2):
        own = batch.batch == graph
        old, new = (
            torch.cat((b.pos[own], b.pos_relaxed[own], b.cell[graph])) for b in (batch, turned)
        )
        torch.testing.assert_close(torch.cdist(new, new), torch.cdist(old, old), rtol=0, atol=1e-4)


def test_interpolated_positions_lie_on_the_path():
    """Structures have two free atoms and one fixed atom; a quarter lacks relaxed positions."""
    rng, way = np.random.default_rng(0), np.array([[0.5, 0, 0], [0, -0.5, 0], [0, 0, 0]])
    records = []
    for k in range(400):
        pos = rng.normal(size=(3, 3))
        relaxed = pos + way if k % 4 else None
        records.append(in_box(pos, relaxed, sid=k, fixed=[False, False, True]))
    batch = Batch.from_data_list(records)
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
    noisy = interpolate(batch, share=0.5, noise=0.1)
    step = (noisy.pos - batch.pos).view(-1, 3, 3)
    away = step[:, 0, 2]  # perpendicular to the path
    assert not step[:, 2].any() and not step[::4].any()
    assert abs(away[away != 0].std() - 0.1) < 0.03 and 0.2 < (away != 0).double().mean() < 0.55
    for key in ("pos_relaxed", "fixed", "cell"):
        torch.testing.assert_close(moved[key], batch[key], equal_nan=True)


def test_slabs_are_repeated_without_their_adsorbate():
    cell = np.array([[8, 0, 0], [2, 8, 0], [0, 0, 20]])
    places = [[[1, 1, 1], [2, 1, 1], [1, 1, 3 + k]][k % 2 :] for k in range(12)]
    records = []
    for k, pos in enumerate(places):
        slab, own = len(pos) - 1, {"pos": pos, "pos_relaxed": pos, "cell": (1 + k / 99) * cell}
        own |= {"tags": [1] * slab + [2], "y_relaxed": k}
        records.append(make_record(atomic_numbers=[29] * slab + [8], **own))
    batch = Batch.from_data_list(records)
    torch.manual_seed(0)
    large, some = repeat(batch, share=1.0), repeat(batch, share=0.6)
    assert repeat(batch, share=0.0) is batch
    kept = [torch.equal(one, other) for one, other in zip(some.cell, batch.cell, strict=True)]
    assert 0 < sum(kept) < 12 and torch.equal(large.y_relaxed, batch.y_relaxed)
    seen = set()
    for k, pos in enumerate(places):
        mine, (a, b) = large.batch == k, (large.cell[k].diagonal()[:2] / 8).int().tolist()
        steps = [[i, j, 0] @ records[k].cell[0].numpy() for i, j in product(range(a), range(b))]
        expected = [*pos, *(np.add(p, step) for step in steps[1:] for p in pos[:-1])]
        np.testing.assert_allclose(large.pos[mine], np.array(expected), atol=1e-5)
        torch.testing.assert_close(large.cell[k], torch.tensor([[a], [b], [1]]) * batch.cell[k])
        assert large.pos_relaxed[mine].isfinite().all(dim=1).sum() == len(pos)
        assert (large.tags[mine] == 2).nonzero().tolist() == [[len(pos) - 1]]
        seen.add((a, b))
    assert seen == {(1, 2), (2, 1), (2, 2)} and large.num_nodes == int(large.ptr[-1])
    batch.pos[2, 1], batch.tags[1] = 8.5, 2  # an adsorbate across the boundary
    assert torch.equal(repeat(batch, share=1.0).cell[0], batch.cell[0])
    cell = np.array([[5.1, 0, 0], [2.55, 4.417, 0], [0, 0, 20]])  # a bond of 1.82 Å across it
    own = {"pos": [[0, 0.1, 8], [3.524, 1.01, 8], [1, 1, 6]], "cell": cell, "tags": [2, 2, 1]}
    bonded = Batch.from_data_list([make_record(atomic_numbers=[6, 16, 29], **own)])
    assert repeat(bonded, share=1.0) is bonded
