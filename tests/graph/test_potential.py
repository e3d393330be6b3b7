import math
import warnings

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import add_adsorbate, bulk, fcc111, molecule
from graph_cases import data
from torch import Tensor
from torch_geometric.data import Batch, Data

import molflt
from molflt.atoms import Tag
from molflt.attention.spectra import InversePower
from molflt.graph import Potential, long_range
from molflt.graph.geometry import Geometry
from molflt.graph.long_range import COULOMB, ChargeShare, inverse_power_sums
from molflt.graph.neighbors import neighbor_list
from molflt.graph.periodic import Reciprocal

pytestmark = pytest.mark.usefixtures("float64")


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
    """Returns -dE/dt of atoms + t step at `count` values of t from 0 to 1."""
    batch = Batch.from_data_list([data(atoms) for _ in range(count)])
    batch.pos = batch.pos.reshape(count, -1, 3)
    batch.pos = batch.pos + torch.linspace(0, 1, count)[:, None, None] * torch.tensor(step)
    batch.pos = batch.pos.flatten(0, 1)
    frames = batch.to_data_list()
    found = [model(Batch.from_data_list(frames[i : i + 101])) for i in range(0, count, 101)]
    forces = torch.cat([out["forces"] for out in found]).reshape(count, -1, 3)
    return (forces.numpy() * step).sum(axis=(1, 2))


def kink(forces: np.ndarray) -> float:
    """Returns the ratio of largest second differences at two steps: 1/4, or 1 at a kink."""
    return np.abs(np.diff(forces, 2)).max() / np.abs(np.diff(forces[::2], 2)).max()


def test_smooth_extents_remove_the_kink():
    """The slope of the plain extent jumps where another atom becomes the outermost."""
    model = potential(radial_basis=0, messages=0, near_field=0)
    atoms, step = Atoms("OHH", [[0, 0, 0], [1.0, 0, 0], [0.5, 1, 0]]), np.zeros((3, 3))
    atoms.set_cell([9.0, 9.0, 9.0])
    atoms.pbc = (False, True, True)
    step[2] = [1.0, 0, 0]  # past the atom at 1.0 Å
    smooth = forces_along(model, atoms, step, 601)
    model.encoding.periodic = Reciprocal()
    assert kink(smooth) < 0.3 and kink(forces_along(model, atoms, step, 601)) > 0.6


def test_a_batch_changes_nothing_and_tags_are_not_read():
    model = potential()
    structures = [data(ethanol()), data(slab((True, True, True))), data(salt())]
    for structure in structures:
        structure.tags = torch.full_like(structure.atomic_numbers, int(Tag.SUBSURFACE))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no warning about missing tags
        together = model(Batch.from_data_list(structures))
        alone = [model(structure) for structure in structures]
    for name in ("energy", "forces"):
        parts = torch.cat([out[name] for out in alone])
        torch.testing.assert_close(together[name], parts, rtol=0, atol=1e-10)
    bare = Data(pos=structures[0].pos, atomic_numbers=structures[0].atomic_numbers)
    found = model(bare)
    torch.testing.assert_close(found["forces"], alone[0]["forces"], rtol=0, atol=1e-10)
    assert "stress" not in found
    structures[1].tags = torch.randint(0, 3, structures[1].tags.shape)
    torch.testing.assert_close(model(structures[1])["energy"], alone[1]["energy"])
    assert together["stress"][0].isnan().all() and together["stress"][1:].isfinite().all()


def test_forces_and_stress_are_exact_under_autocast(monkeypatch):
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


def test_large_molecules_have_nodes(monkeypatch):
    model, small = potential(), data(ethanol())
    by_pairs = model(small)["energy"]
    monkeypatch.setattr("molflt.graph.periodic._MOST_PAIRED", 8)
    by_nodes = model(small)["energy"]
    assert 1e-7 < abs(float(by_nodes - by_pairs)) < 1e-2


# Epstein's zeta function of the simple cubic lattice: sum' 1 / r^p, continued for p < 3
EPSTEIN = {1: -2.83729747948, 2: -8.91363291758, 4: 16.5323159597617, 6: 8.40192397482754}
MADELUNG = {  # relative to the side of the cube
    "rocksalt": (1.747564594633, 1 / 2),
    "cesiumchloride": (1.762674773071, 3**0.5 / 2),
    "zincblende": (1.638055053389, 3**0.5 / 4),
}


@pytest.fixture
def exact(monkeypatch):
    """Makes errors of the cutoffs of pairs and nodes smaller than rounding."""
    monkeypatch.setattr(long_range, "_DEPTH", 6.6)
    monkeypatch.setattr(long_range, "_HIGHEST", 2.4)
    monkeypatch.setattr(long_range, "_APART", 6.5)


def skewed(height: float = 0.0, pbc=(True, True, False), stretch: float = 1.0) -> Atoms:
    """Returns four atoms on a skewed plane."""
    places = np.array([[0, 0, 0], [2.0, 2.1, 0.4], [2.2, 0.1, 3.0], [0.1, 1.9, 4.1]])
    places[:, 2] *= stretch
    cell = [[4.0, 0.3, 0], [0.2, 4.2, 0], [0, 0, height]]
    return Atoms("NaClNaCl", places, cell=cell, pbc=pbc)


def energy(atoms: Atoms, charges, powers=(1,), **options) -> Tensor:
    """Returns 1/2 sum q q / r^p of the same charges for each power, (powers,)."""
    return sum(parts(atoms, charges, powers, **options))


def parts(atoms: Atoms, charges, powers=(1,), dtype=torch.float64, **options) -> list[Tensor]:
    geometry = Geometry.of_data(data(atoms))
    geometry = geometry._replace(pos=geometry.pos.to(dtype), cell=geometry.cell.to(dtype))
    q = torch.as_tensor(charges, dtype=dtype).view(-1, 1, 1).expand(-1, len(powers), 1)
    return [x[0, :, 0] for x in inverse_power_sums(q, geometry, powers, **options)]


def derivatives(atoms: Atoms, charges, power: int, **options) -> list[Tensor]:
    """Returns the energy and its gradients for positions, cell and charges."""
    inputs = [torch.tensor(x) for x in (atoms.positions, atoms.cell.array, np.array(charges))]
    pos, cell, q = (x.requires_grad_() for x in inputs)
    geometry = Geometry.of(pos, cell=cell, pbc=torch.tensor(atoms.pbc))
    near, far = inverse_power_sums(q.view(-1, 1, 1), geometry, [power], **options)
    total = (near + far).sum()
    return [total, *torch.autograd.grad(total, (pos, cell, q))]


@pytest.mark.parametrize("structure", MADELUNG)
def test_madelung_constants(structure):
    constant, nearest = MADELUNG[structure]
    names = {"rocksalt": "NaCl", "cesiumchloride": "CsCl", "zincblende": "ZnS"}
    atoms = bulk(names[structure], structure, 5.0)
    for cutoff in (5.0, 8.0, 11.0):
        found = -float(energy(atoms, [1.0, -1.0], cutoff=cutoff)) * 5.0 * nearest
        assert found == pytest.approx(constant, abs=5e-7)


@pytest.mark.parametrize("power", EPSTEIN)
def test_sums_over_the_cubic_lattice(power, exact):
    """The lattice has equal charges; for p < 3, a background neutralizes them."""
    atoms = Atoms("Na", cell=[2.5] * 3, pbc=True)
    found = 2 * float(energy(atoms, [1.0], (power,), cutoff=7.0)) * 2.5**power
    assert found == pytest.approx(EPSTEIN[power], abs=1e-10)


@pytest.mark.parametrize("power", EPSTEIN)
def test_the_split_does_not_matter(power, exact):
    charges = [0.7, -0.4]
    one, other = (derivatives(salt(), charges, power, cutoff=cutoff) for cutoff in (5.0, 7.0))
    for a, b in zip(one, other, strict=True):
        assert float(a.detach().abs().max()) > 1e-3
        torch.testing.assert_close(a, b, rtol=0, atol=2e-10)


@pytest.mark.parametrize("stretch", [1.0, 8.0])
@pytest.mark.parametrize("charges", [[0.7, -0.4, -0.5, 0.2], [0.7, 0.4, 0.5, -0.2]])
def test_a_slab_is_its_crystal_with_the_dipole_term(charges, stretch, exact):
    """Includes net charges, thick slabs and gradients (J. Chem. Phys. 131, 094107, 2009)."""
    height, q = 30.0 * (1 + stretch / 8), torch.tensor(charges)
    slab = skewed(stretch=stretch)
    found = derivatives(slab, charges, 1, cutoff=7.0)
    expected = derivatives(skewed(height, True, stretch), charges, 1, cutoff=7.0)
    pos = torch.tensor(slab.positions, requires_grad=True)
    cell = torch.tensor(slab.cell.array, requires_grad=True)
    area, z = torch.linalg.cross(cell[0], cell[1]).norm(), pos[:, 2]
    dipole = (q * z).sum() ** 2 - q.sum() * (q * z**2).sum() - q.sum() ** 2 * height**2 / 12
    term = 2 * math.pi / (area * height) * dipole
    slopes = torch.autograd.grad(term, (pos, cell))
    assert abs(float(found[0] - expected[0] - term)) < 1e-10
    torch.testing.assert_close(found[1], expected[1] + slopes[0], rtol=0, atol=1e-10)
    along = found[2][:2, :2] - (expected[2] + slopes[1])[:2, :2]
    assert float(along.abs().max()) < 1e-10


@pytest.mark.parametrize("power", EPSTEIN)
@pytest.mark.parametrize("smearing", [0.0, 0.8])
def test_molecules_are_all_pairs(power, smearing):
    atoms = ethanol()
    atoms.positions[-1] += 12.0  # beyond the cutoff
    charges = np.linspace(-1, 2, len(atoms))
    pos = torch.tensor(atoms.positions, requires_grad=True)
    i, j = torch.triu_indices(len(atoms), len(atoms), 1)
    r, q = (pos[i] - pos[j]).norm(dim=1), torch.tensor(charges)
    law = torch.special.gammainc(torch.tensor(power / 2), r**2 / 2 / smearing**2) if smearing else 1
    total = (q[i] * q[j] * law / r**power).sum()
    near, far = parts(atoms, charges, (power,), smearing=smearing)
    assert float(near + far) == pytest.approx(float(total), abs=1e-10)
    assert abs(float(near)) > 1e-3 and abs(float(far)) > 1e-4
    options = {"smearing": smearing, "cutoff": 8.0}
    (slope,) = torch.autograd.grad(total, pos)
    atoms.set_cell(np.eye(3))  # ignored
    found = derivatives(atoms, charges, power, **options)
    torch.testing.assert_close(found[1], slope, rtol=0, atol=1e-9)


@pytest.mark.parametrize("atoms", [salt(), skewed()], ids=["crystal", "slab"])
def test_gradients_by_differences(atoms):
    """Includes second derivatives, as in training on forces."""
    pbc, half = torch.tensor(atoms.pbc), torch.tensor(2)
    powers = [1, 2, 4, 6] if atoms.pbc.all() else [1]

    def total(pos: Tensor, cell: Tensor, q: Tensor) -> Tensor:
        charges = q[:, None, None].expand(-1, len(powers), -1)
        near, far = inverse_power_sums(charges, Geometry.of(pos, cell=cell, pbc=pbc), powers, 4.0)
        return (near + far).sum() / half

    inputs = (torch.tensor(x) for x in (atoms.positions, atoms.cell.array, np.arange(len(atoms))))
    inputs = tuple(x.double().requires_grad_() for x in inputs)
    assert torch.autograd.gradcheck(total, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(total, inputs, fast_mode=True)


@pytest.mark.parametrize("atoms", [salt(), ethanol()], ids=["crystal", "molecule"])
def test_nodes_and_pairs_in_pieces_are_the_same(monkeypatch, atoms):
    def found() -> list[Tensor]:
        pos = torch.tensor(atoms.positions, requires_grad=True)
        q = torch.linspace(0.7, -0.4, len(pos), dtype=torch.float64).view(-1, 1, 1)
        q = (q * torch.tensor([[[1.0], [0.5]]])).requires_grad_()
        geometry = Geometry.of_data(data(atoms))._replace(pos=pos)
        total = sum(inverse_power_sums(q, geometry, [4, 6])).sum()
        (slope,) = torch.autograd.grad(total, pos, create_graph=True)
        return [total, slope, *torch.autograd.grad(slope.square().sum(), (pos, q))]

    whole = found()
    monkeypatch.setattr(long_range, "_TRANSIENT", 64)
    pieces: list[int] = []
    smooth = InversePower.smooth
    monkeypatch.setattr(
        InversePower, "smooth", lambda law, x: pieces.append(len(x)) or smooth(law, x)
    )
    monkeypatch.setattr("molflt.graph.neighbors._MANY", 8)
    monkeypatch.setattr("molflt.graph.neighbors._PIECE", 10)
    torch.testing.assert_close(found(), whole, rtol=1e-11, atol=1e-12)
    assert max(pieces) == 10


def test_pairs_of_large_molecules_are_limited_before_allocation(monkeypatch):
    model, atoms = potential(long_range=[1], far_field=False), data(ethanol())
    monkeypatch.setattr("molflt.memory._SMALL", 0)
    monkeypatch.setattr("molflt.graph.neighbors.expect_memory", lambda *_: None)
    monkeypatch.setattr("molflt.memory.available_memory", lambda: 200 * 9**2 - 1)
    with pytest.raises(MemoryError, match=r"pairs of up to 9 atoms .* set pbc"):
        model(atoms)
    monkeypatch.setattr("molflt.memory.available_memory", lambda: 200 * 9**2)
    model(atoms)


def test_single_precision():
    """Phases are rounded after the removal of full turns, which matters far from the origin."""
    atoms, charges = salt(), [0.7, -0.4]
    atoms.positions += 100 * atoms.cell.array.sum(axis=0).round()
    exact = energy(atoms, charges, (1, 6))
    atoms.positions = atoms.positions.astype(np.float32)
    single = energy(atoms, charges, (1, 6), dtype=torch.float32)
    assert single.dtype == torch.float64
    torch.testing.assert_close(single, exact, rtol=2e-5, atol=0)


def charged(powers=(1,), **options):
    """Returns a potential with large latent charges."""
    model = potential(long_range=list(powers), **options)
    with torch.no_grad():
        model.long_range.charge.weight.mul_(30)
    return model


def test_weights_of_earlier_versions_keep_their_charges():
    old, new = charged((1,), long_range_neutral=False), charged((1,))
    weights = {k: v for k, v in old.state_dict().items() if k != "long_range.neutral"}
    before = new(data(ethanol()))["energy"]
    new.load_state_dict(weights)
    after = new(data(ethanol()))["energy"]
    assert float(after) == float(old(data(ethanol()))["energy"]) != float(before)
    new.load_state_dict(charged((1,)).state_dict())
    assert bool(new.long_range.neutral)


def test_parts_of_an_energy():
    model, batch = charged((1, 6)), Batch.from_data_list([data(salt()), data(ethanol())])
    out, found = model(batch), model.parts(batch)
    *_, charges = model.long_range(out["embedding"], Geometry.of_data(batch))
    assert found.keys() == {"local", "near", "far"}
    for name, part in found.items():
        assert part.dtype == torch.float64 and float(part.abs().min()) > 1e-3
        torch.testing.assert_close(out[f"energy_{name}"], part)
    torch.testing.assert_close(out["energy"], sum(found.values()), rtol=0, atol=1e-12)
    signs = torch.tensor([[1.0] * 4, [-1, 1, -1, 1]])  # equal charges of p = 1 repel each other
    sums = inverse_power_sums(charges, Geometry.of_data(batch), (1, 6), 8.0, 1.0)
    for name, part in zip(("near", "far"), sums, strict=True):
        torch.testing.assert_close(found[name], COULOMB * (part * signs).sum((1, 2)))
    with torch.device("meta"):
        empty = charged((1, 6))
    empty = empty.to_empty(device="cpu")
    for buffer in empty.buffers():
        buffer.fill_(7)  # arbitrary memory
    empty.load_state_dict(model.state_dict())
    torch.testing.assert_close(empty.parts(batch), found)
    atoms = salt()
    atoms.calc = molflt.Calculator(model)
    total = atoms.get_potential_energy()
    assert total == pytest.approx(sum(atoms.calc.results[f"energy_{name}"] for name in found))


def test_cations_and_anions_have_their_own_shares():
    share, h = ChargeShare(3), torch.randn(5, 3)
    atoms = Geometry.of(torch.zeros(5, 3), torch.tensor([0, 0, 0, 1, 1]))
    found = share(h, atoms._replace(charge=torch.tensor([2.0, -1.0])))
    cation, anion = (1 + h @ share.score.weight.T).clamp(min=0).pow(4).T
    expected = 2 * cation[:3] / cation[:3].sum(), -anion[3:] / anion[3:].sum()
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=1e-9)
    share(h, atoms).sum().backward()  # in DDP, each parameter must have a gradient
    assert not share.score.weight.grad.any()


def test_charges_dipoles_and_forces_of_ions():
    model = charged((1,), total_charge=True, messages=1)
    with torch.no_grad():
        model.charge_vector.normal_()
    batch = Batch.from_data_list([data(ethanol()), data(ethanol()), data(salt())])
    batch.charge = torch.tensor([1.0, torch.nan, -1.0])
    out = model(batch)
    sums = Geometry.of_data(batch).sum(out["charges"])
    torch.testing.assert_close(sums, torch.tensor([1.0, 0.0, -1.0]).double())
    first = slice(0, 9)
    center = batch.pos[first] - batch.pos[first].mean(dim=0)
    torch.testing.assert_close(out["dipole"][0], out["charges"][first] @ center)
    assert out["dipole"][:2].isfinite().all() and out["dipole"][2].isnan().all()
    neutral = model(data(ethanol()))
    assert abs(float(out["energy"][1] - neutral["energy"])) < 1e-10
    torch.testing.assert_close(out["charges"][9:18], neutral["charges"])
    assert abs(float(out["energy"][0] - neutral["energy"])) > 1e-2
    assert "charges" not in charged((6,))(data(ethanol()))
    model.train()
    pos, h = batch.pos.clone(), 1e-4
    found = []
    for sign in (1, -1):
        batch.pos = pos.clone()
        batch.pos[2, 0] += sign * h
        found.append(float(model(batch)["energy"].sum()))
    batch.pos = pos
    forces = model(batch)["forces"]
    assert float(forces[2, 0]) == pytest.approx(-(found[0] - found[1]) / 2 / h, abs=1e-5)
    forces.square().sum().backward()
    for name in ("charge_vector", "charge_share.score.weight", "long_range.share.score.weight"):
        gradient = model.get_parameter(name).grad
        assert gradient.isfinite().all() and gradient.abs().max() > 1e-6


LONG_RANGE = {"long_range_cutoff": 4.0, "far_field": False, "long_range_smearing": 0.5}


@pytest.mark.parametrize(
    ("atoms", "options"),
    [(ethanol(), {}), (slab(), {}), (salt(), {}), (salt(), LONG_RANGE)],
    ids=["molecule", "slab", "crystal", "long range"],
)
def test_no_kink_along_a_path_of_300_points(atoms, options):
    """The paths pass neighbors, cross cutoffs and leave the extent of the structure."""
    model = charged(radial_basis=0, **options) if options else potential(radial_basis=0)
    step = np.zeros((len(atoms), 3))
    step[-1] = [3.0, 2.0, 3.5]
    forces = forces_along(model, atoms, step, 301)
    assert np.ptp(forces) > 1e-4 and kink(forces) < 0.3
