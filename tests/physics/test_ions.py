"""Molecules far from an ion or from each other: energies are those alone and of their charges."""

from __future__ import annotations

import math

import pytest
import torch
from ase import Atoms
from ase.build import molecule
from torch import Tensor
from torch_geometric.data import Data

from molflt.graph.long_range import COULOMB
from molflt.graph.potential import Potential

MEV = 1e-3
BOUND = 1e-6 * MEV


def potential(**options) -> Potential:
    """Random weights, with charges as large as those of trained ones."""
    torch.manual_seed(1)
    sizes = {"dim": 24, "heads": 2, "layers": 2, "ffn_dim": 16, "num_features": 8}
    model = Potential(**sizes, radial_basis=0, messages=2, far_field=False, **options).double()
    with torch.no_grad():
        model.long_range.charge.weight.mul_(30)
        if options.get("total_charge"):
            model.charge_vector.normal_()
    return model.eval()


def data(atoms: Atoms, charge: float = 0.0) -> Data:
    return Data(
        pos=torch.tensor(atoms.positions),
        atomic_numbers=torch.tensor(atoms.numbers),
        cell=torch.tensor(atoms.cell.array)[None],
        pbc=torch.tensor(atoms.pbc)[None],
        charge=torch.tensor([charge]),
    )


def energy(model: Potential, atoms: Atoms, charge: float = 0.0) -> float:
    return float(model(data(atoms, charge))["energy"])


def moved(atoms: Atoms, by: list[float]) -> Atoms:
    out = atoms.copy()
    out.positions += by
    return out


def latent(model: Potential, atoms: Atoms, charge: float = 0.0) -> Tensor:
    """Charges of p = 1, (atoms, channels)."""
    found = []
    hook = model.long_range.register_forward_hook(lambda *got: found.append(got[2].charges))
    model(data(atoms, charge))
    hook.remove()
    return found[0][:, model.long_range.powers.index(1)].detach()


def coulomb(model: Potential, *parts: tuple[Atoms, float]) -> float:
    """Energy between the charges that two molecules have alone, eV."""
    (a, one), (b, other) = parts
    far = 1 / torch.cdist(torch.tensor(a.positions), torch.tensor(b.positions))
    charges = latent(model, a, one), latent(model, b, other)
    return COULOMB * float(torch.einsum("ic,ij,jc->", charges[0], far, charges[1]))


def test_a_pair_of_dipoles_interacts_as_dipoles_do():
    model, water = potential(long_range=[1], long_range_channels=1), molecule("H2O")
    other = moved(water, [0.0, 30.0, 0.0])
    moment = model(data(water))["dipole"][0]
    assert moment.norm() > 0.05
    unit = torch.tensor([0.0, 1.0, 0.0]).double()
    expected = COULOMB * (moment @ moment - 3 * (moment @ unit) ** 2) / 30**3
    found = energy(model, water + other) - 2 * energy(model, water)
    assert found == pytest.approx(float(expected), rel=0.02)


def hydronium() -> Atoms:
    height = 0.3
    turns = [2 * math.pi * k / 3 for k in range(3)]
    around = [[0.95 * math.cos(t), 0.95 * math.sin(t), -height] for t in turns]
    return Atoms("OH3", [[0.0, 0.0, 0.0], *around])


def ionic() -> Potential:
    """A potential in which the atoms of methane have a weight of 0 in the total charge."""
    model = potential(long_range=[1], total_charge=True)
    methane, ion = data(molecule("CH4")), data(hydronium(), 1.0)

    def refit(share: torch.nn.Module) -> None:
        """The least vector of scores with -3 for the atoms of methane and 0 for the ion's."""
        seen = []
        hook = share.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        for one in (methane, ion):
            model(one)
        hook.remove()
        wanted = torch.cat([torch.full((5,), -3.0), torch.zeros(4)]).double()
        with torch.no_grad():
            vector = torch.linalg.lstsq(torch.cat(seen), wanted, driver="gelsd").solution
            share.score.weight.copy_(vector.expand(2, -1))

    refit(model.charge_share)  # tokens first, which features follow
    refit(model.long_range.share)
    return model


def test_a_total_charge_stays_on_the_ion():
    """Neutral molecules far from it take no share, however many they are."""
    model, ion = ionic(), hydronium()
    alone = energy(model, ion, 1.0)
    assert abs(alone - energy(model, ion)) > 1e-2
    charges = model(data(ion, 1.0))["charges"]
    assert float(charges.sum()) == pytest.approx(1.0, abs=1e-12)
    for distance in (20.0, 50.0, 1000.0):
        methane = moved(molecule("CH4"), [distance, 0.0, 0.0])
        found = energy(model, ion + methane, 1.0) - alone - energy(model, methane)
        assert abs(found - coulomb(model, (ion, 1.0), (methane, 0.0))) < BOUND
    together, held = ion.copy(), energy(model, molecule("CH4"))
    for k in range(1, 9):
        together += moved(molecule("CH4"), [0.0, 500.0 * k, 100.0 * k])
    torch.testing.assert_close(model(data(together, 1.0))["charges"][:4], charges)
    assert energy(model, together, 1.0) == pytest.approx(alone + 8 * held, abs=1e-3 * MEV)
