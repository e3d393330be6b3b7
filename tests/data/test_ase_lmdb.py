"""ASE databases in LMDB files: what is taken, rows that are missing, and damaged files."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms
from ase.db.row import AtomsRow
from ase.io.jsonio import encode
from oc20_files import write_lmdb

from molflt.data.structures import open_dataset
from molflt.data.structures.ase_files import rows_of_aselmdb


def frame(number):
    atoms = molecule("CH3CH2OH", cell=[8, 9, 10], pbc=True)
    atoms.rattle(0.1, seed=number)
    atoms.set_constraint(FixAtoms([0, 2]))
    forces = np.random.default_rng(number).normal(size=(len(atoms), 3))
    stress = np.arange(6) * 1e-4
    atoms.calc = SinglePointCalculator(atoms, energy=-1.5 - number, forces=forces, stress=stress)
    return atoms


def packed(thing):
    return zlib.compress(encode(thing).encode())


def row(number):
    """A row as ase-db-backends writes it."""
    own = AtomsRow(frame(number))
    fields = {
        name: own[name]
        for name in own.__dict__
        if name[0] != "_" and name not in (*own._keys, "id")
    }
    fields |= {"cell": np.asarray(own.cell), "mtime": 1.0, "ctime": 1.0, "user": "me"}
    fields |= {"key_value_pairs": {"sid": 70 + number, "kind": "x"}, "data": {"extra": [1.0, 2.0]}}
    fields["constraints"] = [each.todict() for each in own.constraints]
    return packed(fields)


def database(path, rows, next_id=None, deleted=None):
    content = {str(number): row(number) for number in rows}
    content |= {} if next_id is None else {"nextid": packed(next_id)}
    content |= {} if deleted is None else {"deleted_ids": packed(deleted)}
    return write_lmdb(path, content)


def test_everything_is_taken_and_nothing_is_written(tmp_path):
    path = database(tmp_path / "a.aselmdb", [1, 3, 10], next_id=12, deleted=[2, *range(4, 10), 11])
    dataset = open_dataset(path)
    assert [record.sid for record in dataset] == [71, 73, 80]
    for record, number in zip(dataset, [1, 3, 10], strict=True):
        atoms = frame(number)
        torch.testing.assert_close(record.pos, torch.tensor(atoms.positions).float())
        assert record.fixed.nonzero().flatten().tolist() == [0, 2]
        assert record.pbc.all() and float(record.y_relaxed) == -1.5 - number
        torch.testing.assert_close(
            record.forces, torch.tensor(atoms.calc.results["forces"]).float()
        )
        assert record.stress.abs().amax() == pytest.approx(5e-4)
    (_, read), *_ = rows_of_aselmdb(path)
    info = read().info
    assert info["key_value_pairs"] == {"sid": 71, "kind": "x"}
    assert info["data"]["extra"] == [1.0, 2.0]
    assert [file.name for file in tmp_path.iterdir()] == ["a.aselmdb"]


def test_same_as_ase_db_backends(tmp_path):
    backends = pytest.importorskip("ase_db_backends.aselmdb")
    path = tmp_path / "a.aselmdb"
    database = backends.LMDBDatabase(path, use_lock_file=False)
    for number in range(12):
        big = np.random.default_rng(number).normal(size=(400 * number, 3))
        database.write(frame(number), name=f"n{number}", data={"big": big})
    database.delete([2, 5, 12])
    database.update(3, data={"big": np.ones((3000, 3))})
    expected = [(row.id, row.toatoms(add_additional_information=True)) for row in database.select()]
    database.close()
    found = [(number, read()) for number, read in rows_of_aselmdb(path)]
    assert [number for number, _ in found] == [number for number, _ in expected]
    for (_, one), (_, other) in zip(found, expected, strict=True):
        assert one == other and one.info["key_value_pairs"] == other.info["key_value_pairs"]
        assert np.array_equal(one.info["data"]["big"], other.info["data"]["big"])
        assert one.calc.results.keys() == other.calc.results.keys()
        assert all(
            np.array_equal(one.calc.results[k], other.calc.results[k]) for k in one.calc.results
        )


def test_missing_rows_are_named_and_all_others_read(tmp_path):
    path = database(tmp_path / "a.aselmdb", [1, 2, 4, 7], next_id=6)  # 3 and 5; 7 is beyond
    with pytest.raises(ValueError, match="row 3 is missing"):
        open_dataset(path)
    dataset = open_dataset(path, skip_bad=True)
    assert [record.sid for record in dataset] == [71, 72, 74, 77]
    assert ["row 3" in dataset.bad[0][1], "row 5" in dataset.bad[1][1]] == [True, True]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"1": b"abc"}, "key '1' is damaged"),
        ({"1": row(1)[:-40]}, "key '1' is truncated"),
        ({"1": packed([1, 2])}, "row 1 .*fields"),
        ({"other": b"abc"}, "neither rows"),
        ({"1": zlib.compress(b"[" + b" " * 2**29)}, "larger than"),
    ],
)
def test_damaged_rows(tmp_path, content, named):
    path = write_lmdb(tmp_path / "a.aselmdb", content)
    with pytest.raises(ValueError, match=named) as caught:
        open_dataset(path)
    assert "\n" not in str(caught.value)
