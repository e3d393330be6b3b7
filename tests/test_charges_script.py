"""scripts/charges.py: identities of its parts, and both trainings at the smallest size."""

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write
from script_files import load_script
from torch_geometric.data import Batch

charges = load_script("charges")


def chain(charge: int, draw: np.random.Generator) -> Atoms:
    """H-C-C-H; the ion has another H at the end of its first C."""
    x = [-1.1, 0.0, 1.2, 2.3] + [-0.5] * charge
    pos = np.stack([x, [0.0] * 4 + [0.9] * charge, 0 * np.array(x)], axis=1)
    atoms = Atoms("HCCH" + "H" * charge, pos + draw.normal(0, 0.02, pos.shape))
    atoms.info["total_charge"] = float(charge)
    atoms.arrays["dft_charge"] = np.arange(len(atoms)) / 10
    energy = {"energy": -70.0 + charge, "forces": draw.normal(0, 0.1, pos.shape)}
    atoms.calc = SinglePointCalculator(atoms, **energy)
    return atoms


def test_the_end_of_a_chain_is_the_hydrogen_far_from_the_others():
    draw = np.random.default_rng(0)
    frames = [charges.graph(one.numbers, one.positions) for one in (chain(0, draw), chain(1, draw))]
    for charge, one in enumerate(frames):
        one.charge = torch.tensor([float(charge)])
        one.hirshfeld = torch.arange(len(one.pos)) / 10.0
    rows = charges.far_end(torch.ones(9), Batch.from_data_list(frames))
    assert rows[2] == ["C10H3+, C1H", "2.000 ± 0.000", "0.500 ± 0.000"]  # atoms 3 and 2


def test_molecules_apart_interact_by_the_parts_of_the_law_alone():
    draw = np.random.default_rng(0)
    one, other = chain(0, draw), chain(0, draw)
    other.translate([0.0, 12.0, 0.0])
    both = [charges.graph(atoms.numbers, atoms.positions) for atoms in (one + other, one, other)]
    model = charges.new(50.0, long_range=[1, 6], messages=2).eval()
    total = charges.interactions(model, [both])
    parts = charges.interactions(model, [both], parts=True)
    assert parts.abs().min() > 1e-9
    torch.testing.assert_close(parts.sum(dim=1), total, rtol=1e-2, atol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_both_trainings_and_a_second_start(tmp_path, capsys):
    draw = np.random.default_rng(0)
    write(tmp_path / "chains.extxyz", [chain(i % 2, draw) for i in range(12)])
    pairs = []
    for k in range(40):
        one, other = (
            Atoms(name, draw.normal(0, 0.8, (2, 3)))
            for name in ("HO", ("HF", "CO", "NO", "CN", "HN")[k % 5])
        )
        other.translate([0.0, 0.0, 4.0 + k % 5])
        pairs.append(one + other)
    sapt = 0.1 * np.arange(40.0)[:, None] * [1, 0, 1, 1]  # no exchange: all are apart
    arrays = {"numbers": np.concatenate([one.numbers for one in pairs]), "sapt": sapt}
    arrays |= {"pos": np.concatenate([one.positions for one in pairs]), "natoms": [4] * 40}
    arrays |= {"num_a": [2] * 40, "e_int": draw.normal(size=40)}
    np.savez(tmp_path / "dimers.npz", **arrays)
    for what, file in (("chains", "chains.extxyz"), ("dimers", "dimers.npz")):
        words = [what, str(tmp_path / file), "--out", str(tmp_path), "--seconds", "0.2"]
        assert charges.main(words) == 0
        first = capsys.readouterr().out
        assert charges.main(words) == 0  # reads the weights
        again = capsys.readouterr().out
        table = [line for line in first.splitlines() if line.startswith("|")]
        assert table == [line for line in again.splitlines() if line.startswith("|")]
        assert "step" in first and "step" not in again and "nan" not in "".join(table[:4])
