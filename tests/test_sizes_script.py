import json

import numpy as np
import pytest
import torch
from ase.build import fcc111, molecule
from ase.constraints import FixAtoms
from ase.geometry import get_distances
from script_files import load_script
from tiny_run import SMALL, start
from torch import nn

from molflt.data.structures.ase_fields import fixed_atoms
from molflt.data.structures.records import make_record
from molflt.data.structures.store import write_store

sizes = load_script("sizes")
from peers_kit.jobs import run_job  # noqa: E402


def slab_with(name: str, at: float = 0.0, down: float = 0.0, n: int = 3):
    """Returns n x n Pt(111) with a fixed bottom layer, and a molecule wrapped into the cell."""
    atoms = fcc111("Pt", (n, n, 3), vacuum=6.0, periodic=True)
    tags = np.where(atoms.positions[:, 2] < atoms.positions[:, 2].min() + 1, 0, 1)
    top = molecule(name)
    top.translate([at, at, 2.0 + atoms.positions[:, 2].max() - top.positions[:, 2].min()])
    both = atoms + top
    both.set_tags([*tags, *[2] * len(top)])
    both.set_constraint(FixAtoms(mask=both.get_tags() == 0))
    both.positions[:, 2] -= down
    both.wrap()
    return both


def test_structures_of_other_sizes():
    systems = [sizes.separate(slab_with(name)) for name in ("CH3OH", "CO")]
    found = sizes.build(systems)
    assert {name: len(part[0]) for name, part in found.items()} == {
        **{"1x1": 33, "2x1": 60, "2x2": 114, "3x3": 249, "whole": 66, "slab": 27},
        **{"8 Å": 33, "12 Å": 33, "20 Å": 33, "vacuum": 33, "AB": 251, "A": 249, "B": 245},
    }
    area = np.linalg.det(systems[0].slab.cell[:2, :2])
    for one, *_ in found.values():
        cells = round(one.cell.volume / one.cell[2, 2] / area)
        assert (one.get_tags() < 2).sum() == 27 * cells and fixed_atoms(one).sum() == 9 * cells
        apart = get_distances(one.positions, cell=one.cell, pbc=True)[1]
        assert apart[~np.eye(len(one), dtype=bool)].min() > 0.9
    lifted, old = found["12 Å"][0], found["1x1"][0]
    moved = (lifted.positions - old.positions)[:, 2]
    assert moved == pytest.approx(12.0 * (old.get_tags() == 2))
    assert lifted.cell[2, 2] - old.cell[2, 2] == pytest.approx(12.0)
    (both,) = found["AB"]
    ends = both.positions[-8:-2], both.positions[-2:]
    assert 10.0 <= get_distances(*ends, both.cell, both.pbc)[1].min() < 13.0


class Sum(nn.Module):
    """Predicts 1 - n_adsorbate + 0.01 n_slab, in eV, from numbers of atoms; refuses tall cells."""

    def forward(self, batch):
        atoms = torch.where(batch.tags == 2, -1.0, 0.01).double()
        energy = torch.ones(batch.num_graphs, dtype=torch.float64)
        if (batch.cell[:, 2, 2] > 30).any():
            raise ValueError("too high")
        return {"energy": energy.index_add(0, batch.batch, atoms)}


def test_changes_of_a_model_that_sums_atoms():
    found = sizes.build([sizes.separate(slab_with(name)) for name in ("CH3OH", "CO")])
    energy = {name: sizes.energies(Sum(), part) for name, part in found.items()}
    means = {name: np.abs(values).mean() for name, values in sizes.changes(energy).items()}
    expected = {"2x1": 0.27, "2x2": 0.81, "3x3": 2.16, "3x3 - 2x2": 1.35, "whole": 0.5}
    expected |= {"slab": 1.27, "8 Å": 2.73, "12 Å": 2.73, "20 Å": np.nan, "vacuum": 0.0}
    expected["two"] = 1.0 + 9 * 0.27
    assert means == pytest.approx(expected, nan_ok=True)


def record(name: str, sid: int):
    atoms = slab_with(name, n=2)
    tags = atoms.get_tags()
    own = {"pos": atoms.positions, "cell": atoms.cell.array, "pbc": atoms.pbc, "tags": tags}
    more = {"fixed": tags == 0, "sid": sid, "y_relaxed": -1.0 - sid}
    return make_record(**own, **more, atomic_numbers=atoms.numbers, pos_relaxed=atoms.positions)


def test_the_table_of_a_run_and_of_a_peer_that_is_trained_once(tmp_path, capsys, monkeypatch):
    done = []

    def work(path, job):
        done.append(job["minutes"])
        path.parent.mkdir(parents=True)
        run_job(json.loads(json.dumps(job)), path)

    monkeypatch.setattr(sizes.pool, "_work", work)
    for split, names in {"train": ["CO", "H2O", "CH3OH"], "val_id": ["CH4", "N2"]}.items():
        records = [record(name, i) for i, name in enumerate(names)]
        write_store(tmp_path / f"{split}.safetensors", records)
    run = str(tmp_path / "run")
    assert start(tmp_path, run, "--trainer.max_steps=1", "--trainer.val_every=1") == 0
    words = [run, "peer:painn", "--data", str(tmp_path), "--out", str(tmp_path / "out")]
    words += ["--systems", "2", "--minutes", "0.001", "--", *SMALL, "--task.lr=0.001"]
    assert sizes.main(words) == 0
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [line.split()[1] for line in table[2:]] == [run, "peer:painn"]
    found = json.loads((tmp_path / "out" / "sizes.json").read_text())
    assert found["structures"]["2x2"] == 2 and found["eV"][run]["2x2"] > 0
    # the energy of a trained net starts at the mean and does not change when it is read again
    assert 1 < found["eV"]["peer:painn"]["slab"] < 2.5
    assert sizes.main(words) == 0 and done == [0.001]
    assert json.loads((tmp_path / "out" / "sizes.json").read_text()) == found
    assert sizes.main(["peer:gemnet", *words[2:]]) == 2
    assert "peer:gemnet: expected one of schnet, " in capsys.readouterr().err
