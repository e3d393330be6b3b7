"""The potential: smooth, extensive, exactly periodic; forces and stress are its derivatives."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import add_adsorbate, bulk, fcc111, molecule
from graph_cases import data
from scipy.spatial.transform import Rotation
from torch_geometric.data import Batch, Data

from molflt.atoms import Tag
from molflt.graph.geometry import Geometry
from molflt.graph.neighbors import neighbor_list
from molflt.graph.periodic import Reciprocal
from molflt.graph.potential import Potential

SQUARE = {"feature_map": "polynomial", "num_features": None, "degree": 2}


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def potential(**options) -> Potential:
    torch.manual_seed(1)
    sizes = {"dim": 16, "heads": 2, "layers": 2, "ffn_dim": 16, "num_features": 8}
    model = Potential(**{**sizes, "radial_basis": 4, "messages": 2, **options})
    model.element_energies[:] = torch.linspace(-9, 0, 119, dtype=torch.float64)
    return model.double().eval()


def ethanol() -> Atoms:
    atoms = molecule("CH3CH2OH")
    atoms.rattle(0.05, seed=1)
    return atoms


def slab(pbc=(True, True, False)) -> Atoms:
    atoms = fcc111("Cu", (2, 2, 2), vacuum=5.0)
    add_adsorbate(atoms, "O", 1.5, "fcc")
    atoms.pbc = pbc
    return atoms


def salt() -> Atoms:
    atoms = bulk("NaCl", "rocksalt", 5.2)
    atoms.set_cell(atoms.cell.array + np.diag([0.2, -0.1, 0.05]), scale_atoms=True)
    atoms.rattle(0.1, seed=2)
    return atoms


def forces_along(model: torch.nn.Module, atoms: Atoms, step: np.ndarray, count: int) -> np.ndarray:
    """-dE/dt of atoms + t step for `count` times t from 0 to 1."""
    batch = Batch.from_data_list([data(atoms) for _ in range(count)])
    batch.pos = batch.pos.reshape(count, -1, 3)
    batch.pos = batch.pos + torch.linspace(0, 1, count)[:, None, None] * torch.tensor(step)
    batch.pos = batch.pos.flatten(0, 1)
    frames = batch.to_data_list()
    found = [model(Batch.from_data_list(frames[i : i + 101])) for i in range(0, count, 101)]
    forces = torch.cat([out["forces"] for out in found]).reshape(count, -1, 3)
    return (forces.numpy() * step).sum(axis=(1, 2))


def kink(forces: np.ndarray) -> float:
    """Largest second difference, over that of every second place: 1/4 if smooth, 1 of a kink."""
    return np.abs(np.diff(forces, 2)).max() / np.abs(np.diff(forces[::2], 2)).max()


@pytest.mark.parametrize("atoms", [ethanol(), slab(), salt()], ids=["molecule", "slab", "crystal"])
def test_no_kink_along_a_path_of_600_points(atoms):
    """Past neighbors, through cutoffs, and out of what the structure spans."""
    step = np.zeros((len(atoms), 3))
    step[-1] = [3.0, 2.0, 3.5]
    forces = forces_along(potential(radial_basis=0), atoms, step, 601)
    assert np.ptp(forces) > 1e-4 and kink(forces) < 0.3


def test_smooth_extents_remove_the_kink():
    """Of the plain span the slope jumps where another atom comes to be outermost."""
    model = potential(radial_basis=0, messages=0, near_field=0)
    atoms, step = Atoms("OHH", [[0, 0, 0], [1.0, 0, 0], [0.5, 1, 0]]), np.zeros((3, 3))
    atoms.set_cell([9.0, 9.0, 9.0])
    atoms.pbc = (False, True, True)
    step[2] = [1.0, 0, 0]  # past the atom at 1.0 Å
    smooth = forces_along(model, atoms, step, 601)
    model.encoding.periodic = Reciprocal()
    assert kink(smooth) < 0.3 and kink(forces_along(model, atoms, step, 601)) > 0.6


def slope(model: torch.nn.Module, atoms: Atoms, step: np.ndarray, strain: np.ndarray) -> float:
    """Derivative of the energy along a step and a strain, by differences of the fourth order."""
    energies = {}
    for k in (-2, -1, 1, 2):
        there, change = atoms.copy(), np.eye(3) + 1e-4 * k * strain
        there.cell = atoms.cell.array @ change
        there.positions = (atoms.positions + 1e-4 * k * step) @ change
        energies[k] = float(model(data(there))["energy"])
    return (8 * (energies[1] - energies[-1]) - energies[2] + energies[-2]) / 12e-4


@pytest.mark.parametrize("options", [{}, {"near_exact": True}, {"feature_map": "sigmoid"}, SQUARE])
@pytest.mark.parametrize("atoms", [slab((True, True, True)), salt()], ids=["slab", "crystal"])
def test_forces_and_stress_are_differences_of_energies(atoms, options):
    model, draw = potential(**options), np.random.default_rng(0)
    out = {name: x.numpy() for name, x in model(data(atoms)).items()}
    step, strain = draw.normal(size=(len(atoms), 3)), draw.normal(size=(3, 3))
    strain += strain.T
    none = np.zeros((3, 3))
    assert abs(slope(model, atoms, step, none) + (out["forces"] * step).sum()) < 1e-7
    virial = (out["stress"][0] * strain).sum() * atoms.get_volume()
    assert abs(slope(model, atoms, 0 * step, strain) - virial) < 1e-6
    assert abs(out["forces"]).max() > 1e-3 and abs(out["forces"].sum(axis=0)).max() < 1e-10
    np.testing.assert_allclose(out["stress"], out["stress"].swapaxes(1, 2), atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"feature_map": "sigmoid"}, SQUARE])
@pytest.mark.parametrize("atoms", [salt(), slab()], ids=["crystal", "slab"])
def test_energy_per_atom_of_supercells(atoms, options):
    model = potential(**options)
    first = model(data(atoms))
    for repeat in ((1, 2, 1), (2, 2, 1)):
        large = atoms.repeat(repeat)
        out = model(data(large))
        per_atom = float(out["energy"]) / len(large)
        assert abs(per_atom - float(first["energy"]) / len(atoms)) < 1e-10
        assert float((out["forces"][: len(atoms)] - first["forces"]).abs().max()) < 1e-9


def test_a_batch_changes_nothing_and_tags_are_not_read():
    model = potential()
    structures = [data(ethanol()), data(slab((True, True, True))), data(salt())]
    for structure in structures:
        structure.tags = torch.full_like(structure.atomic_numbers, int(Tag.SUBSURFACE))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # tags are unknown: no word about it
        together = model(Batch.from_data_list(structures))
        alone = [model(structure) for structure in structures]
    for name in ("energy", "forces"):
        parts = torch.cat([out[name] for out in alone])
        torch.testing.assert_close(together[name], parts, rtol=0, atol=1e-10)
    structures[1].tags = torch.randint(0, 3, structures[1].tags.shape)
    torch.testing.assert_close(model(structures[1])["energy"], alone[1]["energy"])
    assert bool(together["stress"][0].isnan().all()) and bool(
        together["stress"][1:].isfinite().all()
    )


def test_forces_and_stress_are_exact_under_autocast(monkeypatch):
    """Derivatives by positions and strain, of an energy that is exact itself."""

    def springs(self, batch):
        energy = neighbor_list(Geometry.of_data(batch), 4.0).distance.square().sum()
        return {"local": energy.double()[None]}, {"embedding": batch.pos}

    monkeypatch.setattr(Potential, "_parts", springs)
    atoms = salt()
    atoms.rattle(0.1, seed=1)
    model, batch = potential().float(), Batch.from_data_list([data(atoms)])
    batch.pos, batch.cell = batch.pos.float(), batch.cell.float()
    expected = model(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(batch)
    assert all(torch.equal(found[name], expected[name]) for name in ("energy", "forces", "stress"))


def test_potentials_train_and_predict_under_autocast():
    batch = Batch.from_data_list([data(salt()), data(slab())])
    for name in ("pos", "cell"):
        batch[name] = batch[name].float()
    for more in ({"near_exact": True}, {"long_range": [1], "far_field": False}):
        model = potential(near_field=4.0, **more).float()
        exact = model(batch)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = model(batch)
            model.train()(batch)["forces"].square().sum().backward()
        error = found["forces"] - exact["forces"]
        assert 0 < error.norm() < 0.05 * exact["forces"].norm(), error.norm()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_a_molecule_turns_and_needs_no_cell():
    model, atoms = potential(), ethanol()
    alone = Data(pos=torch.tensor(atoms.positions), atomic_numbers=torch.tensor(atoms.numbers))
    out = model(alone)
    assert out.keys() == {"energy", "forces", "embedding"}
    turn = Rotation.random(random_state=0).as_matrix()
    alone.pos = alone.pos @ torch.tensor(turn).T
    turned = model(alone)
    assert abs(float(turned["energy"] - out["energy"])) < 1e-10
    back = turned["forces"] @ torch.tensor(turn)
    assert float((back - out["forces"]).abs().max()) < 1e-10


@pytest.mark.parametrize("options", [{}, {"near_field": 0}, {"near_exact": True}])
def test_all_pairs_of_a_molecule_are_its_crystal_in_a_large_box(options):
    """Two ways to one number, but for what the kernel is beyond half of the box."""
    atoms, found = ethanol(), []
    for side, pbc in ((10.0, False), (40.0, True)):
        atoms.set_cell([side] * 3)
        atoms.pbc = pbc
        found.append(potential(**options)(data(atoms)))
    assert abs(float(found[0]["energy"] - found[1]["energy"])) < 1e-4
    assert float((found[0]["forces"] - found[1]["forces"]).abs().max()) < 1e-4


def test_inference_mode_has_forces():
    model = potential()
    with torch.inference_mode():
        quiet = model(Batch.from_data_list([data(ethanol())]))
    assert not quiet["forces"].requires_grad and float(quiet["forces"].abs().max()) > 0


def test_a_molecule_without_end_is_refused():
    """Its pairs are all computed, by a rule whose points grow with the distance."""
    near, far = (Atoms("Ar2", positions=[[0, 0, 0], [x, 0, 0]]) for x in (100.0, 9e4))
    with pytest.raises(ValueError, match="atoms of a molecule are 90,000 Å apart; expected at mos"):
        potential()(data(far))
    assert potential()(data(near))["forces"].isfinite().all()
