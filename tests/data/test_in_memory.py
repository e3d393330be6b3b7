import numpy as np
import torch
from ase import Atoms
from ase.build import molecule
from ase.constraints import FixAtoms
from ase.io import write
from tiny_run import structures
from torch_geometric.data import Batch, Data

from molflt.data.structures import open_dataset
from molflt.data.structures.base import to_atoms
from molflt.data.structures.in_memory import StructuresInMemory

WATER = molecule("H2O")


def test_atoms_are_read_as_from_their_file(tmp_path) -> None:
    slab = Atoms("Cu3O", positions=np.eye(4, 3) * 2.5, cell=[8, 8, 20], pbc=True)
    slab.set_tags([0, 1, 1, 2])
    slab.set_constraint(FixAtoms(indices=[0]))
    slab.info["sid"] = 7
    write(tmp_path / "in.traj", [slab, WATER])
    for own, read in zip(
        StructuresInMemory([slab, WATER]), open_dataset(tmp_path / "in.traj"), strict=True
    ):
        for key in ("pos", "atomic_numbers", "cell", "pbc", "tags", "fixed", "sid", "natoms"):
            assert torch.equal(torch.as_tensor(own[key]), torch.as_tensor(read[key])), key
    back = to_atoms(StructuresInMemory(slab)[0])
    assert back.info == {"sid": 7} and (back.get_tags() == slab.get_tags()).all()
    assert (back.constraints[0].get_indices() == [0]).all()
    np.testing.assert_allclose(back.positions, slab.positions, atol=1e-6)


def test_batches_lists_and_data_sets_are_the_same() -> None:
    records = list(structures(3))
    for given in (
        records,
        tuple(records),
        Batch.from_data_list(records),
        [Batch.from_data_list(records[:2]), records[2]],
        StructuresInMemory(records),
    ):
        own = StructuresInMemory(given)
        assert own.natoms.tolist() == [one.natoms for one in records]
        for one, record in zip(own, records, strict=True):
            assert torch.equal(one.pos, record.pos) and one.sid == record.sid
            assert torch.equal(one.y_relaxed, record.y_relaxed)


def test_pyg_data_of_others() -> None:
    data = Data(pos=torch.rand(2, 3, dtype=torch.float64), z=torch.tensor([1, 1]))
    own = StructuresInMemory(data)[0]
    assert own.atomic_numbers.tolist() == [1, 1] and not own.pbc.any()
    assert own.pos.dtype == torch.float32 and torch.isnan(own.y_relaxed).all()
    data.y_relaxed = torch.tensor([float("nan")])  # NaN counts as a missing label
    assert len(StructuresInMemory([data])) == 1


def test_total_charge_is_read_and_spin_named_once(capsys) -> None:
    atoms = Atoms("H2", [[0, 0, 0], [0, 0, 0.74]], info={"charge": 1, "spin": 2})
    first, again = StructuresInMemory([atoms, atoms])
    assert float(first.charge) == 1 and capsys.readouterr().err.count("spin not used") == 1
    (held,) = StructuresInMemory(again)
    assert float(held.charge) == 1 and to_atoms(held).info["charge"] == 1
