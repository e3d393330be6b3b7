import math

import ase.build
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import fcc111, molecule
from graph_cases import data
from tiny_run import random_potential
from torch import Tensor
from torch_geometric.data import Batch, Data

from molflt.data.structures.geometry import adsorbates
from molflt.graph import EnergyRegressor, Potential
from molflt.graph.long_range import COULOMB

SMALL = {"dim": 16, "heads": 2, "layers": 2, "ffn_dim": 16, "num_features": 8}
FORMS = {
    "adsorbate": {"readout": "adsorbate"},
    "contact": {"readout": "contact"},
    "near": {"readout": "contact", "far_field": False},
    "surface": {"readout": "contact", "far_field": False, "subsurface": False},
    "subsurface": {"readout": "contact", "far_field": False, "subsurface": "near"},
}
EXACT = 1e-9  # eV
LIFT = np.array([0.0, 0.0, 1.0])


def model(seed: int = 0, **options) -> EnergyRegressor:
    """Returns a model with random weights, and constants that reveal mistakes in sums."""
    torch.manual_seed(seed)
    net = EnergyRegressor(**{**SMALL, **options}).double().eval()
    net.energy_std.fill_(0.7)
    if options["readout"] == "adsorbate":
        net.element_energies.normal_()
    torch.nn.init.normal_(net.readout.factor.weight)
    return net


def slab(*repeats: int, layers: int = 3, vacuum: float = 12.0) -> Atoms:
    """Returns Cu(111), whose deepest layer is fixed and subsurface."""
    atoms = ase.build.fcc111("Cu", (*(repeats or (3, 3)), layers), vacuum=vacuum, periodic=True)
    atoms.set_tags(np.where(atoms.positions[:, 2] < atoms.positions[:, 2].min() + 1, 0, 1))
    return atoms


def adsorbed(on: Atoms, name: str = "CO", height: float = 2.0, at: tuple[int, int] = (0, 0)):
    """Returns a slab with a tilted molecule above one of its atoms; `at` counts along both axes."""
    molecule = ase.build.molecule(name)
    molecule.rotate(40, "x")
    molecule.set_tags(2)
    step = ase.build.fcc111("Cu", (1, 1, 1)).cell
    top = on.positions[on.get_tags() == 1, 2].max()
    molecule.translate(at @ step[:2] + (height + top - molecule.positions[:, 2].min()) * LIFT)
    return on + molecule


def record(atoms: Atoms) -> Data:
    """Returns PyG data in float64; records are rounded to float32."""
    found_tags = torch.from_numpy(atoms.get_tags())
    more = {"tags": found_tags, "fixed": found_tags == 0, "natoms": len(atoms)}
    return data(atoms, pos_relaxed=torch.from_numpy(atoms.positions + 0.1), **more)


def energies(net, *structures: Atoms) -> torch.Tensor:
    with torch.no_grad():
        return net(Batch.from_data_list([record(one) for one in structures]))["energy"]


@pytest.mark.parametrize("form", FORMS)
def test_supercells_are_multiples(form):
    one = adsorbed(slab(2, 3))
    found = energies(model(**FORMS[form]), one, one.repeat((2, 1, 1)), one.repeat((2, 2, 1)))
    assert abs(found[0]) > 1e-3
    torch.testing.assert_close(found / found[0], found.new_tensor([1, 2, 4]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_clean_slab_has_no_energy(form):
    assert (energies(model(**FORMS[form]), slab(2, 2), slab(3, 3, layers=4)) == 0).all()


@pytest.mark.parametrize(("form", "most"), [("contact", 2e-2), ("near", EXACT), ("surface", EXACT)])
def test_the_slab_may_be_larger(form, most):
    """Images of the adsorbate are at least 10 Å away, and only a far field sees them."""
    net, sizes = model(**FORMS[form], layers=1), (4, 5, 6, 7)
    found = energies(net, *(adsorbed(slab(n, n)) for n in sizes))
    changes = found.diff().abs()
    assert changes.max() < most
    assert changes[-1] < max(changes[0], EXACT)


@pytest.mark.parametrize("form", ["near", "surface"])
def test_the_slab_may_be_thicker_and_the_vacuum_higher(form):
    net = model(**FORMS[form], layers=1)
    thin, high = (adsorbed(slab(3, 3, layers=6, vacuum=v)) for v in (12.0, 24.0))
    thick = adsorbed(slab(3, 3, layers=7))
    found = energies(net, thin, high, thick)
    torch.testing.assert_close(found, found[0].expand(3), rtol=0, atol=EXACT)


@pytest.mark.parametrize("form", FORMS)
def test_a_lifted_molecule_is_free(form):
    """The energy is 0 or, in the form "adsorbate", does not depend on the slab."""
    net = model(**FORMS[form])
    found = energies(net, *(adsorbed(slab(vacuum=60.0), height=h) for h in (2.0, 8.0, 20.0, 40.0)))
    if form == "adsorbate":
        free = energies(net, adsorbed(slab(4, 4, vacuum=60.0), height=40.0))
        assert abs(found[-1] - free) < 1e-4
    else:
        assert abs(found[0]) > 1e-3
        assert (found[1:] == 0).all()


def test_far_adsorbates_add_up():
    net = model(**FORMS["near"], layers=1)
    whole = slab(9, 4)
    one, other = adsorbed(whole, "CO"), adsorbed(whole, "H2O", at=(4, 2))
    both = adsorbed(one, "H2O", at=(4, 2))
    found = energies(net, one, other, both)
    assert abs(found[0] + found[1] - found[2]) < EXACT
    shared = net(Batch.from_data_list([record(both)]))["adsorbate_energy"].detach()
    labels = torch.from_numpy(adsorbates(record(both)))
    assert labels.max() == 1
    assert (shared[labels < 0] == 0).all()
    for label in (0, 1):
        assert abs(shared[labels == label].sum() - found[label]) < EXACT


@pytest.mark.parametrize("form", FORMS)
def test_energies_of_adsorbates_sum_to_the_energy(form):
    net, crowded = model(**FORMS[form]), adsorbed(adsorbed(slab(3, 2)), "H2O", at=(1, 1))
    out = net(Batch.from_data_list([record(crowded), record(adsorbed(slab(2, 2)))]))
    atoms = len(crowded)
    shared = torch.stack([x.sum() for x in out["adsorbate_energy"].split([atoms, 14])])
    torch.testing.assert_close(shared, out["energy"], rtol=0, atol=EXACT)


def test_the_energy_is_smooth_where_contacts_end():
    """Second derivatives with respect to height are continuous; the energy is 0 beyond 5 Å."""
    net = model(readout="contact", far_field=False, position_head=False)
    heights = torch.arange(4.6, 5.2, 0.002)
    found = energies(net, *(adsorbed(slab(2, 2), "N2", float(h)) for h in heights))
    assert (found[heights > 5.0] == 0).all()
    assert found.diff(n=3).abs().max() < 0.1 * found.diff(n=2).abs().max()


def test_weights_of_earlier_versions_keep_their_numbers():
    """These weights lack the buffer of the readout, and their energies sum over all atoms."""
    old, new = model(readout="all"), EnergyRegressor(**SMALL).double().eval()
    old.energy_mean.fill_(-1.0)
    weights = old.state_dict()
    del weights["readout.by_contact"]
    new.load_state_dict(weights)
    structures = [adsorbed(slab(2, 3)), slab(2, 2)]
    torch.testing.assert_close(
        energies(new, *structures), energies(old, *structures), rtol=0, atol=EXACT
    )
    assert energies(new, slab(2, 2)).abs() > 0.1


BOUND = 1e-6  # meV
DEEP = {"dim": 24, "layers": 2, "radial_basis": 0, "messages": 2}


def potential(**options: object) -> Potential:
    """Returns a potential with random weights, whose latent charges are enlarged 30-fold."""
    options = {"far_field": False, "long_range": [1], **options}
    made = random_potential(**options).double().eval()
    with torch.no_grad():
        made.long_range.charge.weight.mul_(30)
        if options.get("total_charge"):
            made.charge_vector.normal_()
    return made


def total(charge: float) -> dict[str, Tensor]:
    return {"charge": torch.tensor([charge])}


def energy(model: Potential, atoms: Atoms, charge: float = 0.0) -> float:
    """Returns the energy in meV."""
    return 1e3 * float(model(data(atoms, **total(charge)))["energy"])


def latent(model: Potential, atoms: Atoms, charge: float = 0.0) -> Tensor:
    """Returns the charges of p = 1, (atoms, channels)."""
    found = []
    hook = model.long_range.register_forward_hook(lambda *got: found.append(got[2][2]))
    model(data(atoms, **total(charge)))
    hook.remove()
    return found[0][:, 0].detach()


def apart(model: Potential, one: Atoms, other: Atoms, charge: float = 0.0) -> tuple[float, float]:
    """Returns E(both) - E(one) - E(other), and the Coulomb energy of the model's charges, in meV.

    `charge` is the total charge of the first structure.
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
    """Neutral molecules have no net charge in any channel."""
    model, one, other = potential(**options), molecule("H2O"), molecule("CH4")
    one.rotate(50, "y")
    other.positions[1] += [0.2, 0.1, -0.1]
    found = {by: apart(model, one, moved(other, by)) for by in (20.0, 50.0, 200.0, 1000.0)}
    for difference, law in found.values():
        assert abs(difference - law) < BOUND
    assert abs(found[20.0][0]) > 1e-3
    assert found[20.0][0] / found[200.0][0] == pytest.approx(1e3, rel=0.2)  # two dipoles
    assert abs(found[1000.0][0]) < 1e-5


def test_separate_slabs_do_not_interact():
    """Sheets of dipoles have no field outside, so only the error of the sums remains."""
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
    """Returns a potential in which the atoms of methane have no share of the total charge."""
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
    """Any number of neutral molecules far from the ion take no share."""
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
