import itertools

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, fcc111, molecule
from ase.neighborlist import neighbor_list as ase_neighbors
from graph_cases import data as data_of
from torch import Tensor
from torch_geometric.data import Batch, Data

from molflt.graph import PBCRadiusGraph
from molflt.graph.geometry import Geometry
from molflt.graph.neighbors import neighbor_list

SKEWED = [[3.1, 0.2, 0.0], [1.4, 2.9, 0.3], [-0.8, 0.9, 3.6]]


def crystal() -> Atoms:
    """Returns a triclinic crystal smaller than the radius, with one atom outside the cell."""
    inside = np.random.default_rng(0).random((5, 3))
    inside[0] += [1, -2, 3]
    return Atoms("CuAg2Pd2", scaled_positions=inside, cell=SKEWED, pbc=True)


def slab() -> Atoms:
    made = fcc111("Pt", (2, 2, 3), vacuum=4.0)
    made.rattle(0.05, seed=1)
    made.cell[2] = 0  # as in ASE's slabs without vacuum
    return made


def scattered(pbc: tuple[bool, ...]) -> Atoms:
    """Returns atoms, some of which are far from the other atoms along open axes."""
    rng = np.random.default_rng(3)
    cell = np.array([[6.0, 0.5, 0.2], [1.5, 7.0, 0.3], [0.4, 0.6, 8.0]])
    pos = rng.random((9, 3)) @ cell + 20 + 40 * rng.integers(0, 2, (9, 3)) * ~np.array(pbc)
    return Atoms("Cu9", pos, cell=cell, pbc=pbc)


STRUCTURES = {
    **{str(pbc): scattered(pbc) for pbc in itertools.product((False, True), repeat=3)},
    "crystal": crystal(),
    "slab": slab(),
    "wire": Atoms("CO", [[0, 0, 0], [0.3, 0.2, 1.1]], cell=[0, 0, 2.5], pbc=[0, 0, 1]),
    "molecule": molecule("CH3CH2OH"),
    "molecule in a cell": Atoms("CO", [[0.1, 0, 0], [4.9, 0, 0]], cell=[5, 5, 5], pbc=False),
    "one atom of a crystal": bulk("Cu"),
    "one atom": Atoms("Cu"),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", STRUCTURES)
def test_same_edges_shifts_and_distances_as_ase(kind: str, dtype: torch.dtype) -> None:
    atoms = STRUCTURES[kind]
    given = data_of(atoms)
    given.pos, given.cell = given.pos.to(dtype), given.cell.to(dtype)
    data = PBCRadiusGraph(4.3)(given)
    # ASE: D = positions[j] - positions[i] + S @ cell
    i, j, d, vectors, shifts = ase_neighbors("ijdDS", atoms, 4.3)
    edges = map(tuple, torch.cat((data.edge_index, data.edge_shift.T)).T.tolist())
    expected = [(b, a, *s) for a, b, s in zip(i, j, shifts.tolist(), strict=True)]
    assert sorted(edges) == sorted(expected)
    assert data.edge_shift.dtype == torch.long and data.edge_vec.dtype == dtype
    assert (data.edge_index[1].diff() >= 0).all()  # sorted by target
    key = np.lexsort((*shifts.T, j, i))
    own = np.lexsort((*data.edge_shift.T.numpy(), *data.edge_index.numpy()))
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5
    np.testing.assert_allclose(data.edge_vec.numpy()[own], vectors[key], atol=tolerance)
    np.testing.assert_allclose(data.edge_weight.numpy()[own], d[key], atol=tolerance)
    if dtype == torch.float64:
        found = neighbor_list(Geometry.of_data(given), 4.3)
        rows = torch.column_stack((found.center, found.neighbor, found.vector)).numpy()
        expected = np.column_stack((i, j, vectors))
        rows, expected = (x[np.lexsort(x.round(6).T)] for x in (rows, expected))
        np.testing.assert_allclose(rows, expected, atol=1e-10)


def test_a_batch_has_the_edges_of_its_structures() -> None:
    kinds = [data_of(atoms) for atoms in STRUCTURES.values()]
    transform = PBCRadiusGraph(4.0, max_neighbors=9)
    together = transform(Batch.from_data_list([data.clone() for data in kinds]))
    apart = Batch.from_data_list([transform(data.clone()) for data in kinds])
    for name in ("edge_index", "edge_shift", "edge_vec", "edge_weight"):
        torch.testing.assert_close(together[name], apart[name])
    loose = Data(pos=together.pos, batch=together.batch, cell=together.cell, pbc=together.pbc)
    torch.testing.assert_close(transform(loose).edge_index, together.edge_index)


def test_max_neighbors_keeps_the_nearest_and_their_ties() -> None:
    data = data_of(slab())
    all_edges = PBCRadiusGraph(6.0)(data.clone())
    kept = PBCRadiusGraph(6.0, max_neighbors=7)(data.clone())
    assert (torch.bincount(kept.edge_index[1]) == 7).all()  # rattled, which excludes ties
    for atom in range(len(data.pos)):
        nearest = all_edges.edge_weight[all_edges.edge_index[1] == atom].sort().values[:7]
        own = kept.edge_weight[kept.edge_index[1] == atom].sort().values
        torch.testing.assert_close(own, nearest)
    turned = bulk("Cu", cubic=True)
    turned.rotate(23, (1, 2, 3), rotate_cell=True)  # ties up to rounding
    perfect = PBCRadiusGraph(4.0, max_neighbors=5)(data_of(turned))
    assert (torch.bincount(perfect.edge_index[1]) == 12).all()  # the whole first shell
    few = PBCRadiusGraph(3.0, max_neighbors=50)(data_of(STRUCTURES["molecule"]))
    assert few.num_edges == PBCRadiusGraph(3.0)(data_of(STRUCTURES["molecule"])).num_edges


def test_gradients_of_distances_and_old_attributes() -> None:
    def energy(pos: Tensor, cell: Tensor) -> Tensor:
        data = PBCRadiusGraph(2.5)(Data(pos=pos, cell=cell[None], edge_attr=torch.zeros(3, 1)))
        assert data.edge_attr is None
        return (-data.edge_weight).exp().sum()

    full = data_of(crystal())
    inputs = full.pos.requires_grad_(), full.cell[0].clone().requires_grad_()
    assert torch.autograd.gradcheck(energy, inputs)
