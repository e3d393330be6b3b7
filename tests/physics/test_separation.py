"""Separate neutral things: what is left of their interaction is the law between their charges."""

import pytest
import torch
from ase import Atoms
from ase.build import fcc111, molecule
from torch import Tensor
from torch_geometric.data import Data

from molflt.graph import Potential, long_range
from molflt.graph.geometry import Geometry
from molflt.graph.long_range import COULOMB


def potential(**options: object) -> Potential:
    """Random weights, with latent charges 30 times those of the start."""
    torch.manual_seed(0)
    sizes = {"layers": 1, "ffn_dim": 16, "num_features": 8, "radial_basis": 4}
    made = Potential(16, 2, far_field=False, **sizes, **options).double().eval()
    with torch.no_grad():
        made.long_range.charge.weight.mul_(30)
    return made


def data(atoms: Atoms, **labels: Tensor) -> Data:
    cell, pbc = torch.tensor(atoms.cell.array)[None], torch.tensor(atoms.pbc)[None]
    pos, numbers = torch.tensor(atoms.positions), torch.tensor(atoms.numbers)
    return Data(pos=pos, atomic_numbers=numbers, cell=cell, pbc=pbc, **labels)


def apart(model: Potential, one: Atoms, other: Atoms) -> tuple[float, float]:
    """E(both) - E(one) - E(other) of a model and of Coulomb's law between its charges, meV."""
    found, charges = [], []
    for atoms in (one + other, one, other):
        out = model(data(atoms))
        found.append(float(out["energy"]))
        layer = model.long_range(out["embedding"], Geometry.of_data(data(atoms)))
        charges.append(layer.charges[:, 0].detach())
    q, p = charges[1:]
    r = torch.cdist(torch.tensor(one.positions), torch.tensor(other.positions))
    return 1e3 * (found[0] - found[1] - found[2]), 1e3 * COULOMB * float((q @ p.T / r).sum())


def moved(atoms: Atoms, by: float) -> Atoms:
    atoms = atoms.copy()
    atoms.positions[:, 0] += by
    return atoms


@pytest.mark.parametrize("options", [{}, {"total_charge": True}])
def test_separate_molecules_interact_only_by_dipoles(options):
    """What is neutral has no charge that a far molecule sees."""
    model, one, other = potential(long_range=[1], **options), molecule("H2O"), molecule("CH4")
    one.rotate(50, "y")
    other.positions[1] += [0.2, 0.1, -0.1]
    found = {by: apart(model, one, moved(other, by)) for by in (20.0, 50.0, 200.0, 1000.0)}
    for energy, law in found.values():
        assert abs(energy - law) < 1e-6
    assert abs(found[20.0][0]) > 1e-3
    assert found[20.0][0] / found[200.0][0] == pytest.approx(1e3, rel=0.2)  # two dipoles
    assert abs(found[1000.0][0]) < 1e-5


def test_dispersion_vanishes_with_the_distance():
    one, other = molecule("H2O"), molecule("CH4")
    models = potential(long_range=[1, 6]), potential(long_range=[1])
    weights = models[0].state_dict()
    weights["long_range.charge.weight"] = weights["long_range.charge.weight"][:4]
    models[1].load_state_dict(weights)
    for by, bound in ((20.0, 1e-1), (200.0, 1e-6), (1000.0, 1e-6)):
        both = [apart(model, one, moved(other, by))[0] for model in models]
        assert abs(both[0] - both[1]) < bound


def test_separate_slabs_do_not_interact(monkeypatch):
    """Sheets of dipoles have no field outside; what is left is the error of the sums."""
    one = fcc111("Cu", (2, 2, 2), vacuum=30.0, periodic=True)
    one.set_cell([*one.cell[:2], [0.0, 0.0, 120.0]])
    one.pbc = (True, True, False)
    other = one.copy()
    other.symbols[:4] = "Ni"
    other.positions[:, 2] += 40.0
    model = potential(long_range=[1], long_range_smearing=0.8)
    charges = model(data(other))["charges"]
    assert charges.abs().max() > 0.1 and charges.sum().abs() < 1e-12
    assert abs(apart(model, one, other)[0]) < 1e-5
    for name, value in {"_DEPTH": 6.6, "_HIGHEST": 2.4, "_APART": 6.5}.items():
        monkeypatch.setattr(long_range, name, value)
    assert abs(apart(model, one, other)[0]) < 1e-6


def test_a_distant_ion_sees_the_total_charge():
    """Only the first channel has a net charge, which is that of the molecule."""
    model, atoms = potential(long_range=[1], total_charge=True), molecule("CH3OH")
    for charge in (-1.0, 0.0, 2.0):
        out = model(data(atoms, charge=torch.tensor([charge])))
        assert float(out["charges"].sum()) == pytest.approx(charge, abs=1e-12)
    layer = model.long_range(out["embedding"], Geometry.of_data(data(atoms)))
    assert layer.charges[:, 0, 1:].sum(dim=0).abs().max() < 1e-12


def test_supercells_hold_the_charge_of_their_cells():
    atoms = Atoms("NaClNa", [[0, 0, 0], [2.6, 0, 0], [0, 3, 1]], cell=[6, 7, 8], pbc=True)
    model = potential(long_range=[1], total_charge=True)
    with torch.no_grad():
        model.charge_vector.normal_()
    one = model(data(atoms, charge=torch.tensor([1.0])))
    two = model(data(atoms.repeat((2, 1, 1)), charge=torch.tensor([2.0])))
    neutral = model(data(atoms))
    assert abs(float(two["energy"] - 2 * one["energy"])) < 1e-9
    assert abs(float(one["energy"] - neutral["energy"])) > 1e-2
    torch.testing.assert_close(two["charges"], one["charges"].repeat(2))
