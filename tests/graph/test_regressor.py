import copy
import warnings

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.neighborlist import neighbor_list as ase_neighbors
from contract import EXACT
from scipy.spatial.transform import Rotation
from torch_geometric.data import Batch, Data

from molflt.graph import EnergyRegressor
from molflt.graph.geometry import Geometry
from molflt.graph.radial import radial_bumps

SMALL = {"dim": 16, "heads": 2, "layers": 2, "refinements": 2, "ffn_dim": 24}
FLT = {"position": "spectral", "mixing": "linear", "num_features": 16}
KERNEL = {"position": "multiplicative", "mixing": "linear", "num_features": 16}
MOVING = {**KERNEL, "normalize_qk": True, "move_atoms": True}
PERFORMER = {"position": "none", "mixing": "linear", "num_features": 16}
SOFTMAX = {"mixing": "softmax", "position": "spectral"}
SHELLS = {"dim": 3, "nodes": "shells", "node_diameter": 12.0, "node_max_frequency": 0.15}
VARIANTS = {
    "default": {},
    "flt-images": {**FLT, "periodic": "images", "normalize_qk": True},
    "flt-shells": {**FLT, "position_options": SHELLS, "feature_map": "relu"},
    "kernel": {**KERNEL, "near_field": 0.0, "periodic": "none", "normalize": "unmasked"},
    "near-reciprocal-moving": {**MOVING, "near_field": 3.0, "normalize": "none"},
    "surface": {**KERNEL, "near_field": 3.0, "descriptors": True, "subsurface": False},
    "messages": {**KERNEL, "near_field": 3.0, "messages": 2, "subsurface": "near"},
    "messages-adsorbate": {**KERNEL, "messages": 2, "message_pairs": "adsorbate"},
    "performer-radial": {**PERFORMER, "radial_basis": 8, "descriptors": True},
    "softmax-mask-images": {**SOFTMAX, "periodic": "images", "radial_basis": 8},
    "softmax-near": {**SOFTMAX, "position": "multiplicative", "periodic": "none"},
}
RANDOM = ("flt-images", "flt-shells", "kernel", "messages-adsorbate")  # nodes do not rotate


def structure(atoms: int, seed: int, tags: bool = True) -> Data:
    """Returns random atoms, at least 1 Å apart, in a triclinic slab cell, float64."""
    rng = np.random.default_rng(seed)
    cell = np.array([[6.0, 0.3, 0.0], [-1.0, 5.5, 0.0], [0.2, 0.4, 18.0]])
    points: list[np.ndarray] = []
    while len(points) < atoms:
        point = rng.random(3) * [1, 1, 0.4] @ cell
        if all(np.linalg.norm(point - other) > 1.0 for other in points):
            points.append(point)
    pos = np.array(points).reshape(-1, 3)
    order = np.argsort(pos[:, 2])  # adsorbate on top
    tag = np.zeros(atoms, dtype=np.int64)
    tag[order[atoms // 3 :]] = 1
    tag[order[-2:]] = 2
    return Data(
        pos=torch.from_numpy(pos),
        cell=torch.from_numpy(cell)[None],
        pbc=torch.tensor([[True, True, True]]),
        atomic_numbers=torch.from_numpy(rng.integers(19, 90, atoms)),  # with descriptors
        tags=torch.from_numpy(tag if tags else 0 * tag),
        fixed=torch.from_numpy(tag == 0),
        natoms=atoms,
    )


def model(**options) -> EnergyRegressor:
    torch.manual_seed(0)
    net = EnergyRegressor(**{**SMALL, **options}).double().eval()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if parameter.ndim == 2 and "amplitude" not in name:
                parameter.normal_(std=0.3)
        if net.move_atoms:  # moves of tenths of an Å
            net.position_head.weight.weight.mul_(0.02)
    net.energy_mean.fill_(-1.5)
    net.energy_std.fill_(2.3)
    return net


STRUCTURES = [structure(n, n) for n in (6, 1, 14, 9)]


def predict(net, structures):
    return net(Batch.from_data_list(structures))


def changed(s: Data, **more) -> Data:
    other = copy.copy(s)
    for key, value in more.items():
        other[key] = value
    return other


@pytest.mark.filterwarnings("ignore:.*atom with tag")
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_structure_does_not_see_its_batch(variant):
    """Includes an empty structure, padding to the size of a large structure, and another order.

    Gradients across structures are exactly 0.
    """
    net = model(**VARIANTS[variant])
    alone = torch.cat([predict(net, [s])["energy"] for s in STRUCTURES])
    assert alone.std() > 0.01  # predictions differ
    nothing = STRUCTURES[0].subgraph(torch.zeros(6, dtype=torch.bool))
    nothing.natoms = 0
    assert predict(net, [nothing])["energy"] == net.energy_mean
    batch = [structure(40, 7), nothing, *STRUCTURES[::-1]]
    together = predict(net, batch)["energy"]
    assert together[1] == net.energy_mean
    torch.testing.assert_close(together[2:].flip(0), alone, **EXACT)
    batch = Batch.from_data_list(STRUCTURES)
    batch.pos.requires_grad_()
    out = net(batch)
    for target in (out["displacement"][batch.batch == 2].square().sum(), out["energy"][2]):
        (grad,) = torch.autograd.grad(target + 0 * batch.pos.sum(), batch.pos, retain_graph=True)
        assert (grad[batch.batch != 2] == 0).all() and torch.isfinite(grad).all()
    assert grad[batch.batch == 2].abs().max() > 1e-6


@pytest.mark.parametrize("variant", VARIANTS)
def test_symmetries(variant):
    net = model(**VARIANTS[variant])
    draw = torch.Generator().manual_seed(1)
    turn = torch.from_numpy(Rotation.random(rng=0).as_matrix())
    largest = 0.0
    for s in STRUCTURES:
        order = torch.randperm(s.natoms, generator=draw)
        keys = ("pos", "atomic_numbers", "tags", "fixed")
        lattice = torch.tensor([2.0, -1.0, 1.0], dtype=s.cell.dtype) @ s.cell[0]
        shifts = [torch.tensor([11.0, -7.3, 0.4]).double(), lattice]
        if net.encoding is not None and net.encoding.periodic.lattice:
            single = torch.zeros_like(s.pos)
            single[s.natoms // 2] = s.cell[0, 0] - s.cell[0, 2]
            shifts.append(single)
        given = [s, changed(s, **{key: s[key][order] for key in keys})]
        given.append(changed(s, pos=s.pos @ turn.T, cell=s.cell @ turn.T))
        given += [changed(s, pos=s.pos + shift) for shift in shifts]
        parts = {
            key: value.chunk(len(given), dim=int(key == "displacement_by_pass"))
            for key, value in predict(net, given).items()
        }
        for key, (here, shuffled, turned, *shifted) in parts.items():
            for there in shifted:
                torch.testing.assert_close(there, here, **EXACT)
            if key == "energy":
                torch.testing.assert_close(shuffled, here, **EXACT)
                largest = max(largest, (turned - here).abs().item())
            elif key == "displacement":
                torch.testing.assert_close(shuffled, here[order], **EXACT)
            if key.startswith("displacement") and variant not in RANDOM:
                torch.testing.assert_close(turned, here @ turn.T, **EXACT)
    if variant in RANDOM[:2]:
        assert largest > 1e-6, "random nodes became invariant: promise it and test it"
    elif variant not in RANDOM:
        assert largest < 1e-10


def test_the_near_field_has_its_own_neighbors():
    options = {"near_field": 5.0, "readout": "all"}
    nets = (model(**options, neighbor_cutoff=cutoff) for cutoff in (4.0, 5.0, 6.0))
    first, *others = (predict(net, STRUCTURES[2:])["energy"] for net in nets)
    for energy in others:
        torch.testing.assert_close(energy, first, **EXACT)
    # contacts of the readout end at the cutoff of neighbors
    nets = (model(position_head=False, neighbor_cutoff=cutoff) for cutoff in (4.0, 6.0))
    low, high = (predict(net, STRUCTURES[2:])["energy"] for net in nets)
    assert (low - high).abs().max() > 1e-6


def test_structures_without_tags_are_refused_or_sum_over_all_atoms():
    net = model(readout="all")
    untagged = structure(6, 6, tags=False)
    with pytest.warns(UserWarning, match="atom with tag > 0"):
        energy = predict(net, [untagged, STRUCTURES[2]])["energy"]
    assert abs(energy[0] - net.energy_mean) > 1e-6  # not an empty sum
    geometry, h = Geometry.of_data(Batch.from_data_list([untagged])), torch.randn(6, 16).double()
    with pytest.warns(UserWarning, match="atom with tag > 0"):
        found = net.readout(h, geometry)[0]
    surface = geometry._replace(tags=torch.ones_like(geometry.tags))
    torch.testing.assert_close(found, net.readout(h, surface)[0], **EXACT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predict(net, STRUCTURES[:1])
    for readout in ("adsorbate", "contact"):
        with pytest.raises(ValueError, match=r"1 structure.*tag.*readout"):
            predict(model(readout=readout), [untagged, STRUCTURES[2]])


@pytest.mark.filterwarnings("ignore:.*atom with tag")
def test_atoms_below_the_surface_are_left_out():
    net = model(subsurface=False, near_field=3.0, readout="all")
    whole, untagged = structure(14, 3), structure(6, 6, tags=False)
    kept = whole.tags > 0
    out = predict(net, [whole, untagged])
    expected = predict(net, [whole.subgraph(kept), untagged])
    torch.testing.assert_close(out["energy"], expected["energy"], **EXACT)
    everywhere = model(near_field=3.0, readout="all")
    assert (out["energy"] - predict(everywhere, [whole, untagged])["energy"]).abs()[0] > 1e-6
    kept = torch.cat((kept, torch.ones(6, dtype=torch.bool)))
    torch.testing.assert_close(out["displacement"][kept], expected["displacement"], **EXACT)
    assert not out["displacement"][~kept].any()
    net.element_energies.fill_(-1000.0)  # a total energy includes all atoms
    shift = predict(net, [whole, untagged])["energy"] - out["energy"]
    torch.testing.assert_close(shift, torch.tensor([-14000.0, -6000.0]).double(), **EXACT)


def test_atoms_below_the_surface_near_an_adsorbate_count_as_surface():
    """The subsurface atoms are found by ASE."""
    net, given = model(subsurface="near"), structure(14, 3)
    cell = given.cell[0].numpy()
    atoms = Atoms(given.atomic_numbers.numpy(), given.pos.numpy(), cell=cell, pbc=True)
    i, j = ase_neighbors("ij", atoms, 5.0)
    near = np.isin(np.arange(14), j[given.tags[i] == 2]) & (given.tags == 0).numpy()
    assert near.sum() == 2 and (given.tags == 0).sum() == 4
    retagged = given.clone()
    retagged.tags[near] = 1
    out = predict(net, [given, STRUCTURES[1]])
    expected = predict(model(subsurface=False), [retagged, STRUCTURES[1]])
    for name, value in out.items():
        torch.testing.assert_close(value, expected[name], **EXACT)
    without = predict(model(subsurface=False), [given])
    assert (out["energy"][0] - without["energy"]).abs() > 1e-6


@pytest.mark.parametrize("scale", [0.02, 1])
def test_the_mask_follows_free_atoms_and_fixed_ones_stay(scale):
    """The second pass uses the positions predicted by the first pass; atoms move less than 1 Å."""
    net, seen, steps = model(**VARIANTS["near-reciprocal-moving"]), [], []
    net.position_head.weight.weight.data *= scale
    net.position_head.register_forward_hook(lambda *got: steps.append(got[2]))
    net.encoding.register_forward_pre_hook(lambda _, geometry: seen.append(geometry[0].pos))
    batch = Batch.from_data_list(STRUCTURES)
    by_pass = net(batch)["displacement_by_pass"]
    assert by_pass.shape == (2, len(batch.pos), 3)
    assert by_pass[0].abs().max() > 0.01
    length = by_pass[0].norm(dim=-1, keepdim=True)
    assert (length.max() > 2) == (scale == 1)
    moved = torch.where(batch.fixed[:, None], 0.0, by_pass[0] / (1 + length**2).sqrt())
    torch.testing.assert_close(seen[0], batch.pos, **EXACT)
    torch.testing.assert_close(seen[1], batch.pos + moved, **EXACT)
    assert ((seen[1] - seen[0]).norm(dim=-1) < 1).all()
    torch.testing.assert_close(by_pass[1], moved + steps[1], **EXACT)


def test_radial_bumps_are_those_of_e3nn():
    """Bumps agree up to rounding of e3nn's factor."""
    from e3nn.math import soft_one_hot_linspace

    r = torch.linspace(0.0, 5.5, 200, dtype=torch.float64)
    theirs = soft_one_hot_linspace(r, 0.0, 5.0, 16, basis="smooth_finite", cutoff=True)
    torch.testing.assert_close(radial_bumps(r, 16, 5.0), theirs * 4, rtol=2e-7, atol=1e-12)


def test_energies_of_atoms_are_summed_in_float64():
    """Sums in bfloat16 would stop growing after a few hundred atoms."""
    net, atomic = model(readout="all").bfloat16(), []
    net.readout.register_forward_hook(lambda *call: atomic.append(call[2][0].double()))
    energy = predict(net, [structure(40, 0)])["energy"]
    expected = atomic[0].sum()[None] * net.energy_std + net.energy_mean
    torch.testing.assert_close(energy, expected, rtol=0, atol=1e-9)


def test_energies_are_in_eV_and_float64():
    """With references in float32, the energy of C60, -61,784 eV, would be off by 31 meV.

    References do not change forces.
    """
    net, batch = model(readout="all"), Batch.from_data_list(STRUCTURES)
    net.element_energies -= torch.linspace(0.0, 2059.6246913578, 119)
    net.energy_mean -= 61784.123456789
    exact = net(batch)["energy"]
    batch.pos.requires_grad_()
    found = net.float()
    assert found.element_energies.dtype == found.energy_std.dtype == torch.float64
    assert found.embedding.element.weight.dtype == torch.float32
    torch.testing.assert_close(found(batch)["energy"], exact, rtol=0, atol=1e-3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(found(batch)["energy"], exact, rtol=0, atol=0.3)
    assert found.to(torch.bfloat16).state_dict()["energy_mean"].dtype == torch.float64
    energies, forces, references = [], [], found.element_energies.clone()
    for own in (references, 0 * references):
        found.element_energies.copy_(own)
        energies.append(found(batch)["energy"])
        forces.append(torch.autograd.grad(energies[-1].sum(), batch.pos)[0])
    assert torch.equal(*forces) and forces[0].any()
    added = torch.zeros(4).double().index_add(0, batch.batch, references[batch.atomic_numbers])
    torch.testing.assert_close(energies[0] - added, energies[1], rtol=0, atol=1e-9)
    with torch.device("meta"):
        assert model().to_empty(device="cpu").energy_mean.dtype == torch.float64
