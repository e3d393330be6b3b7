"""Separate molecules, ions and slabs interact only by the law between their latent charges."""

import math

import pytest
import torch
from ase import Atoms
from ase.build import fcc111, molecule
from graph_cases import data
from torch import Tensor

from molflt.graph import Potential
from molflt.graph.long_range import COULOMB

BOUND = 1e-6  # meV
DEEP = {"dim": 24, "layers": 2, "radial_basis": 0, "messages": 2}


def potential(**options: object) -> Potential:
    """Random weights, with latent charges 30 times those of the start."""
    torch.manual_seed(0)
    sizes = {"dim": 16, "heads": 2, "layers": 1, "ffn_dim": 16, "num_features": 8}
    options = {**sizes, "radial_basis": 4, "far_field": False, "long_range": [1], **options}
    made = Potential(**options).double().eval()
    with torch.no_grad():
        made.long_range.charge.weight.mul_(30)
        if options.get("total_charge"):
            made.charge_vector.normal_()
    return made


def total(charge: float) -> dict[str, Tensor]:
    return {"charge": torch.tensor([charge])}


def energy(model: Potential, atoms: Atoms, charge: float = 0.0) -> float:
    """In meV."""
    return 1e3 * float(model(data(atoms, **total(charge)))["energy"])


def latent(model: Potential, atoms: Atoms, charge: float = 0.0) -> Tensor:
    """Charges of p = 1, (atoms, channels)."""
    found = []
    hook = model.long_range.register_forward_hook(lambda *got: found.append(got[2].charges))
    model(data(atoms, **total(charge)))
    hook.remove()
    return found[0][:, 0].detach()


def apart(model: Potential, one: Atoms, other: Atoms, charge: float = 0.0) -> tuple[float, float]:
    """E(both) - E(one) - E(other) of a model and of Coulomb's law between its charges, meV.

    `charge` is that of the first.
    """
    alone = energy(model, one, charge) + energy(model, other)
    r = torch.cdist(torch.tensor(one.positions), torch.tensor(other.positions))
    q, p = latent(model, one, charge), latent(model, other)
    return energy(model, one + other, charge) - alone, 1e3 * COULOMB * float((q @ p.T / r).sum())


def moved(atoms: Atoms, *by: float) -> Atoms:
    out = atoms.copy()
    out.positions[:, : len(by)] += by
    return out


@pytest.mark.parametrize("options", [{}, {"total_charge": True}])
def test_separate_molecules_interact_only_by_dipoles(options):
    """What is neutral has no charge that a far molecule sees."""
    model, one, other = potential(**options), molecule("H2O"), molecule("CH4")
    one.rotate(50, "y")
    other.positions[1] += [0.2, 0.1, -0.1]
    found = {by: apart(model, one, moved(other, by)) for by in (20.0, 50.0, 200.0, 1000.0)}
    for difference, law in found.values():
        assert abs(difference - law) < BOUND
    assert abs(found[20.0][0]) > 1e-3
    assert found[20.0][0] / found[200.0][0] == pytest.approx(1e3, rel=0.2)  # two dipoles
    assert abs(found[1000.0][0]) < 1e-5


def test_a_pair_of_dipoles_interacts_as_dipoles_do():
    model, water = potential(**DEEP, long_range_channels=1), molecule("H2O")
    moment = model(data(water))["dipole"][0]
    assert moment.norm() > 0.05
    expected = 1e3 * COULOMB * (moment @ moment - 3 * moment[1] ** 2) / 30**3
    found, _ = apart(model, water, moved(water, 0.0, 30.0))
    assert found == pytest.approx(float(expected), rel=0.02)


def test_dispersion_vanishes_with_the_distance():
    one, other = molecule("H2O"), molecule("CH4")
    models = potential(long_range=[1, 6]), potential()
    weights = models[0].state_dict()
    weights["long_range.charge.weight"] = weights["long_range.charge.weight"][:4]
    models[1].load_state_dict(weights)
    for by, bound in ((20.0, 1e-1), (200.0, BOUND), (1000.0, BOUND)):
        both = [apart(model, one, moved(other, by))[0] for model in models]
        assert abs(both[0] - both[1]) < bound


def test_separate_slabs_do_not_interact():
    """Sheets of dipoles have no field outside; what is left is the error of the sums."""
    one = fcc111("Cu", (2, 2, 2), vacuum=30.0, periodic=True)
    one.set_cell([*one.cell[:2], [0.0, 0.0, 120.0]])
    one.pbc = (True, True, False)
    other = moved(one, 0.0, 0.0, 40.0)
    other.symbols[:4] = "Ni"
    model = potential(long_range_smearing=0.8)
    charges = model(data(other))["charges"]
    assert charges.abs().max() > 0.1 and charges.sum().abs() < 1e-12
    assert abs(apart(model, one, other)[0]) < BOUND


def hydronium() -> Atoms:
    turns = [2 * math.pi * k / 3 for k in range(3)]
    around = [[0.95 * math.cos(t), 0.95 * math.sin(t), -0.3] for t in turns]
    return Atoms("OH3", [[0.0, 0.0, 0.0], *around])


def ionic() -> Potential:
    """A potential in which the atoms of methane have a weight of 0 in the total charge."""
    model = potential(**DEEP, total_charge=True)
    structures = data(molecule("CH4"), **total(0.0)), data(hydronium(), **total(1.0))
    wanted = torch.cat([torch.full((5,), -3.0), torch.zeros(4)]).double()
    for share in (model.charge_share, model.long_range.share):  # tokens first; features follow
        seen = []
        hook = share.register_forward_pre_hook(lambda _, given, to=seen: to.append(given[0]))
        for one in structures:
            model(one)
        hook.remove()
        with torch.no_grad():
            vector = torch.linalg.lstsq(torch.cat(seen), wanted, driver="gelsd").solution
            share.score.weight.copy_(vector.expand(2, -1))
    return model


def test_a_total_charge_stays_on_the_ion():
    """Neutral molecules far from it take no share, however many they are."""
    model, ion, methane = ionic(), hydronium(), molecule("CH4")
    alone = energy(model, ion, 1.0)
    assert abs(alone - energy(model, ion)) > 10
    charges = model(data(ion, **total(1.0)))["charges"]
    assert float(charges.sum()) == pytest.approx(1.0, abs=1e-12)
    for distance in (20.0, 50.0, 1000.0):
        found, law = apart(model, ion, moved(methane, distance), 1.0)
        assert abs(found - law) < BOUND
    together = ion.copy()
    for k in range(1, 9):
        together += moved(methane, 0.0, 500.0 * k, 100.0 * k)
    torch.testing.assert_close(model(data(together, **total(1.0)))["charges"][:4], charges)
    expected = alone + 8 * energy(model, methane)
    assert energy(model, together, 1.0) == pytest.approx(expected, abs=1e-3)


def test_only_the_first_channel_has_the_total_charge():
    model, atoms = potential(total_charge=True), molecule("CH3OH")
    for charge in (-1.0, 0.0, 2.0):
        sums = latent(model, atoms, charge).sum(dim=0)
        assert float(sums[0]) == pytest.approx(charge, abs=1e-12)
        assert sums[1:].abs().max() < 1e-12


def test_supercells_hold_the_charge_of_their_cells():
    atoms = Atoms("NaClNa", [[0, 0, 0], [2.6, 0, 0], [0, 3, 1]], cell=[6, 7, 8], pbc=True)
    model, double = potential(total_charge=True), atoms.repeat((2, 1, 1))
    one, two = model(data(atoms, **total(1.0))), model(data(double, **total(2.0)))
    assert abs(float(two["energy"] - 2 * one["energy"])) < 1e-9
    assert abs(float(one["energy"] - model(data(atoms))["energy"])) > 1e-2
    torch.testing.assert_close(two["charges"], one["charges"].repeat(2))
