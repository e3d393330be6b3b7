from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ase import Atoms
from ase.build import bcc110, fcc100, fcc110, fcc111, fcc211, graphene, hcp0001, molecule, surface
from ase.calculators.emt import EMT
from ase.constraints import FixAtoms, FixBondLengths, FixedPlane
from ase.data import covalent_radii
from ase.formula import Formula
from ase.io import read, write
from tiny_run import printed, table

from molflt.adsorption import cut, placements, ranked, sites, varied
from molflt.adsorption import molecule as named
from molflt.evaluation.relaxation import Relaxed, relax_atoms

# Sites in the literature. pymatgen's AdsorbateSiteFinder also finds 4, 3, 4 and 4 sites for the
# first four surfaces, but only sees the upper row of fcc(110).
KNOWN = {
    "fcc111": (lambda n: fcc111("Cu", (n, n, 4), vacuum=8), "top bridge hollow hollow"),
    "fcc100": (lambda n: fcc100("Cu", (n, n, 4), vacuum=8), "top bridge hollow"),
    "hcp0001": (lambda n: hcp0001("Ru", (n, n, 4), vacuum=8), "top bridge hollow hollow"),
    "bcc110": (lambda n: bcc110("Fe", (n, n, 4), vacuum=8), "top bridge bridge hollow"),
    "fcc110": (lambda n: fcc110("Pt", (n, n, 4), vacuum=8), 2 * "top bridge hollow "),
    "graphene": (lambda n: graphene(size=(n, n, 1), vacuum=8), "top bridge hollow"),
}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", KNOWN)
def test_known_surfaces_have_their_sites(name: str, n: int) -> None:
    make, expected = KNOWN[name]
    slab = make(n)
    slab.rotate(20, "z", rotate_cell=True)
    slab.rattle(1e-3)
    found = sites(slab)
    order = ("top", "bridge", "hollow")
    assert [one.name.split()[0] for one in found] == sorted(expected.split(), key=order.index)
    for one in found:
        np.testing.assert_allclose(one.axes @ one.axes.T, np.eye(3), atol=1e-9)
        apart = one.point - slab.repeat((3, 3, 1)).positions + slab.cell.array[:2].sum(axis=0)
        gaps = np.linalg.norm(apart, axis=1) - covalent_radii[slab.repeat((3, 3, 1)).numbers]
        assert abs(gaps.min() - 0.75) < 1e-3


def test_sites_of_alloys_differ_by_element() -> None:
    """No two Pt atoms touch in Cu3Pt(111), which has nine sites."""
    corners = [(0, 0, 0), (0, 0.5, 0.5), (0.5, 0, 0.5), (0.5, 0.5, 0)]
    crystal = Atoms("PtCu3", scaled_positions=corners, cell=3 * [3.7], pbc=True)
    crystal.positions += 0.1
    found = sites(surface(crystal, (1, 1, 1), 4, vacuum=8))
    kinds = {"top Cu": 1, "top Pt": 1, "bridge CuPt": 1, "bridge Cu2": 2, "hollow Cu2Pt": 2}
    assert Counter(" ".join(one.name.split()[:2]) for one in found) == kinds | {"hollow Cu3": 2}


def test_hollows_and_sites_of_steps_have_their_names() -> None:
    names = {one.name for one in sites(fcc111("Cu", (2, 2, 4), vacuum=8))}
    assert {"hollow Cu3 (9 9 9)", "hollow Cu3 above Cu (9 9 9)"} < names
    found = {one.name: one for one in sites(fcc211("Pt", (3, 2, 4), vacuum=8))}
    assert {"top Pt (7)", "bridge Pt2 above Pt (7 7)"} < found.keys()
    foot = found["hollow Pt4 above Pt (7 7 10 10)"]  # square site at the foot of the step
    assert foot.axes[2, 2] < 0.9 and len(found) == 11


def keys(placed: list[Atoms]) -> Counter[tuple[object, ...]]:
    return Counter((one.info["orientation"], one.info["height"]) for one in placed)


def test_supercells_have_the_same_placements() -> None:
    small, large = (placements(fcc111("Cu", (n, n, 4), vacuum=8), "CO") for n in (2, 4))
    assert len(small) == 24 and keys(small) == keys(large)


def test_atoms_outside_of_the_cell_do_not_change_the_sites() -> None:
    slab = fcc111("Cu", (2, 2, 4), vacuum=8)
    moved = slab.copy()
    moved.positions += np.random.default_rng(0).integers(-4, 5, (16, 2)) @ slab.cell.array[:2]
    found = [placements(one, "CO") for one in (slab, moved)]
    assert keys(found[0]) == keys(found[1])
    assert {one.info["site"] for one in found[0]} == {one.info["site"] for one in found[1]}


def test_benzene_lies_flat_in_the_eight_known_ways() -> None:
    """The sites are top, bridge, hcp and fcc; molecules are rotated by 0 or 30 degrees."""
    placed = placements(fcc111("Pt", (4, 4, 4), vacuum=8), "C6H6")
    flat = [one for one in placed if np.ptp(one.positions[-12:, 2]) < 1e-6]
    assert Counter(one.info["site"][0] for one in flat) == dict.fromkeys("0123", 2)


@pytest.mark.parametrize(
    "slab", [fcc111("Cu", (2, 2, 4), vacuum=8), fcc211("Pt", (3, 2, 4), vacuum=8)]
)
def test_molecules_touch_without_overlaps_and_keep_their_shape(slab: Atoms) -> None:
    slab.pbc = True
    own = molecule("CH3OH")
    radii = covalent_radii[own.numbers] + np.where(own.numbers == 1, 0.5, 0.1)
    for one in placements(slab, own, rotation=120):
        placed = one[one.get_tags() == 2]
        placed.pbc = False
        np.testing.assert_allclose(placed.get_all_distances(), own.get_all_distances(), atol=1e-9)
        volumes = [np.linalg.det(x.positions[[1, 2, 4]] - x.positions[0]) for x in (own, placed)]
        assert abs(volumes[0] - volumes[1]) < 1e-6  # not a mirror image
        count = len(slab)
        away = one.get_all_distances(mic=True)[count:, :count]
        gap = away - np.add.outer(radii, covalent_radii[slab.numbers])
        assert abs(gap.min()) < 1e-6
        images = one[count:].repeat((2, 2, 1))
        assert images.get_all_distances(mic=True)[:6, 6:].min() > 1.6


def test_placements_are_ready_for_calculations() -> None:
    slab = fcc111("Cu", (2, 2, 4), vacuum=6)
    slab.positions[:, 2] -= 7.0
    outside = keys(placements(slab, "H2O"))
    slab.wrap(pbc=True)  # in two pieces
    one = (placed := placements(slab, "H2O"))[0]
    assert keys(placed) == outside
    flat = placements(fcc111("Cu", (2, 2, 4), vacuum=3.5), "CH3OH", rotation=90)
    assert max(x.positions[16:, 2].max() - x.positions[15, 2] for x in flat) < 4  # 3 Å to the next
    assert one.pbc.all() and Counter(one.get_tags()) == {0: 8, 1: 8, 2: 3}
    assert np.ptp(one.positions[:16, 2]) < 7 < one.positions[16:, 2].min() - one.positions[0, 2]
    assert sorted(one.constraints[0].index) == list(np.flatnonzero(one.get_tags() == 0))
    slab = fcc111("Cu", (2, 2, 4), vacuum=6)
    slab.set_constraint(FixedPlane(11, (0, 0, 1)))
    assert [type(x) for x in placements(slab, "O")[0].constraints] == [FixedPlane, FixAtoms]
    slab.set_constraint(FixAtoms(indices=range(4)))
    assert Counter(placements(slab, "H2O")[0].get_tags()) == {0: 4, 1: 12, 2: 3}
    shared = placements(slab, "H2O", share=(0.2, 0.3))[0]
    assert Counter(shared.get_tags()) == {0: 12, 1: 4, 2: 3}
    slab = fcc111("Cu", (2, 2, 5), vacuum=6)
    slab.set_constraint(FixAtoms(indices=range(8, 12)))
    del slab[-1]
    assert len(placements(slab, "CO")) > 0


def test_atoms_that_fit_through_a_hole_rest_at_the_site() -> None:
    sheet = graphene(size=(3, 3, 1), vacuum=6)
    found = {one.info["site"]: one for one in placements(sheet, "H")}
    assert len(found) == 3  # top, bridge, and the center of a ring
    for one in found.values():
        assert 1 < one.get_distances(-1, range(len(sheet)), mic=True).min() < 1.6
        assert one.positions[-1, 2] > sheet.positions[:, 2].max()


@pytest.mark.parametrize(
    "name", ["CHO", "COH", "CHOH", "CH2OH", "HCOO", "COOH", "OOH", "CH2", "H2S"]
)
def test_fragments_have_the_bonds_of_their_name(name: str) -> None:
    hydroxyl, found = name.endswith("OH"), named(name)
    near = found.get_all_distances() < 1.6
    on_oxygen = [found.symbols[near[i]].count("O") for i in np.flatnonzero(found.numbers == 1)]
    assert found.symbols.formula.count() == Formula(name).count()
    assert near.any(axis=1).all() and sum(on_oxygen) == hydroxyl


def test_molecules_from_smiles_keep_their_charge() -> None:
    pytest.importorskip("rdkit")
    assert [named(f"smiles:{text}").info["charge"] for text in ("[OH-]", "CO")] == [-1, 0]


def test_molecules_are_read_from_files_without_their_cell(tmp_path: Path) -> None:
    methyl, slab = molecule("CH3"), fcc111("Cu", (2, 2, 3), vacuum=8)
    expected = keys(placements(slab, "CH3"))
    methyl.info["multiplicity"] = 2
    methyl.cell = [1, 1, 1]
    methyl.pbc = True
    write(tmp_path / "methyl.extxyz", methyl)
    assert keys(placements(slab, tmp_path / "methyl.extxyz")) == expected
    whole = molecule("CH3OH", cell=[9, 9, 9], pbc=True)
    whole.info["charge"] = -1
    write(tmp_path / "whole.extxyz", whole)
    whole.translate([8, 0, 4])
    whole.wrap()
    write(tmp_path / "wrapped.extxyz", whole)
    found = [placements(slab, tmp_path / f"{name}.extxyz") for name in ("whole", "wrapped")]
    assert keys(found[0]) == keys(found[1]) and found[0][0].info["charge"] == -1


@pytest.mark.parametrize("tags", [4 * [0] + 12 * [1], 4 * [1] + 8 * [0] + 4 * [1], 16 * [1]])
def test_tags_and_charge_of_a_slab_are_kept(tags: list[int]) -> None:
    slab = fcc111("Cu", (2, 2, 4), vacuum=6)
    slab.set_tags(tags)
    slab.info["charge"] = 1.0
    one = placements(slab, Atoms("CO", [[0, 0, 0], [0, 0, 1.1]], info={"charge": 1}))[0]
    assert [*one.get_tags()] == [*tags, 2, 2] and one.info["charge"] == 2


def test_labels_of_a_slab_do_not_describe_its_placements() -> None:
    slab = fcc111("Cu", (2, 2, 3), vacuum=6)
    for name in ("pos_relaxed", "REF_forces", "other"):
        slab.set_array(name, slab.positions)
    one = placements(slab, "CO")[0]
    assert one.arrays.keys() & {"pos_relaxed", "REF_forces", "other"} == {"other"}
    assert {"pos_relaxed", "REF_forces"} < slab.arrays.keys()


def test_cutting_rhombohedral_crystals() -> None:
    """Miller indices refer to the cubic cell only for primitive cells of fcc and bcc."""
    fcc, other = (Atoms("Ni", cell=3 * [2.5] + 3 * [angle], pbc=True) for angle in (60, 60.9))
    assert len(cut(fcc, (1, 0, 0), 2)) == 8 and len(cut(other, (1, 0, 0), 2)) == 2


def test_ranking_is_by_energy_and_varied() -> None:
    placed = placements(
        [fcc111("Cu", (2, 2, 3), vacuum=8), fcc100("Cu", (2, 2, 3), vacuum=8)], "CO"
    )
    energies = np.random.default_rng(0).normal(size=len(placed))

    def predict(given: list[Atoms], tags: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(energy=energy) for energy in energies]

    model = SimpleNamespace(predict=predict, domain=None)
    found = ranked(model, placed)
    assert [one.energy for _, one in found] == sorted(energies)
    assert all(atoms is placed[list(energies).index(one.energy)] for atoms, one in found[:5])
    kinds = [
        tuple(atoms.info[key] for key in ("slab", "site", "orientation")) for atoms, _ in found
    ]
    chosen = [kinds.index(one) for one in dict.fromkeys(kinds)][:7]
    assert [atoms for atoms, _ in varied(found, 7)] == [found[i][0] for i in chosen]
    model.domain = SimpleNamespace(kind="total")  # energies of different slabs are not compared
    assert [one.info["slab"] for one, _ in ranked(model, placed)] == [
        one.info["slab"] for one in placed
    ]


def test_command_on_a_file_of_a_step(tmp_path: Path, capsys) -> None:
    slab, out = tmp_path / "slab.traj", tmp_path / "best.extxyz"
    clean = fcc211("Cu", (3, 2, 3), vacuum=8)
    clean.set_constraint(FixedPlane(17, (0, 0, 1)))
    write(slab, clean)
    words = ["adsorb", str(slab), "H2O", "--rotation=360", "--best=3", f"--out={out}"]
    told = printed(capsys, *words, "--relax=ase.calculators.emt:EMT", "--steps=2", status=3)
    assert "sites; best: " in told.out and "3 of 3 relaxations" in told.err
    assert f"{out}: .extxyz cannot store FixedPlane; write .traj" in told.err
    rows, frames = table(out.with_suffix(".csv")), read(out, ":")
    energies = [float(row["energy_eV"]) for row in rows]
    assert energies == sorted(energies) and len(rows) > 50
    assert {row["slab"] for row in rows} == {f"{slab} 0"} and float(rows[0]["uncertainty_eV"]) > 0
    relaxed = sorted(float(row["relaxed_energy_eV"]) for row in rows if row["relaxed_energy_eV"])
    assert len(frames) == 3 and [one.get_potential_energy() for one in frames] == relaxed
    frames[0].calc = EMT()
    assert abs(frames[0].get_potential_energy() - relaxed[0]) < 1e-4
    assert Counter(frames[0].get_tags()) == {0: 10, 1: 8, 2: 3} and frames[0].constraints
    assert out.with_suffix(".png").stat().st_size > 5000


def test_an_interruption_keeps_finished_relaxations(tmp_path: Path, monkeypatch, capsys) -> None:
    def interrupted(atoms: Atoms, *given, **options) -> Relaxed:
        if (tmp_path / "second").exists():
            kept.extend(read(out, ":"))  # what remains if the process is killed here
            raise KeyboardInterrupt
        (tmp_path / "second").touch()
        return relax_atoms(atoms, *given, **options)

    drawn: list[str] = []
    kept: list[Atoms] = []
    monkeypatch.setattr("molflt.commands.adsorb.relax_atoms", interrupted)
    monkeypatch.setattr("molflt.plots.structure_views", lambda shown, _: drawn.extend(shown))
    slab, out = tmp_path / "slab.extxyz", tmp_path / "best.traj"
    write(slab, 2 * [fcc111("Cu", (2, 2, 3), vacuum=8)])
    words = ["adsorb", str(slab), "O", "--best=3", f"--out={out}", "--steps=1"]
    printed(capsys, *words, "--relax=ase.calculators.emt:EMT", status=130)
    done = [row for row in table(out.with_suffix(".csv")) if row["relaxed_energy_eV"]]
    first, *others = read(out, ":")
    assert first.get_potential_energy() == float(done[0]["relaxed_energy_eV"]) and len(done) == 1
    assert len(others) == 5 and not any(one.calc for one in others)  # three for each slab
    assert [one.calc is not None for one in kept] == [True, *[False] * 5]
    ranks = [(row["slab"], row["rank"]) for row in table(out.with_suffix(".csv"))]
    assert ranks[0] == (f"{slab} 0", "1") and (f"{slab} 1", "1") in ranks
    titles = [title.split()[:3] for title in drawn]
    assert titles == [["slab.extxyz", "0", "1:"], ["slab.extxyz", "1", "4:"]]


def test_slabs_keep_their_order_and_folder(tmp_path: Path, monkeypatch, capsys) -> None:
    drawn: list[str] = []
    monkeypatch.setattr("molflt.plots.structure_views", lambda shown, _: drawn.extend(shown))
    slabs, out = [tmp_path / metal / "slab.traj" for metal in ("Ru", "Cu")], tmp_path / "o.traj"
    for slab in slabs:
        slab.parent.mkdir()
        clean = fcc111(slab.parent.name, (2, 2, 3), a=3.8, vacuum=8)
        clean.set_constraint(FixBondLengths([(8, 9)]))  # ASE cannot repeat it
        write(slab, clean)
    words = ["adsorb", *map(str, slabs), "O", "--best=1", "--steps=1", f"--out={out}"]
    told = printed(capsys, *words, "--relax=ase.calculators.emt:EMT", status=3).err
    assert "No EMT-potential for Ru" in told
    found = read(out, ":")
    assert [one.info["slab"] for one in found] == [f"{slab} 0" for slab in slabs]
    assert isinstance(found[0].constraints[0], FixBondLengths)
    assert [title.split("\n")[0] for title in drawn] == ["Ru/slab.traj 0", "Cu/slab.traj 0"]


def test_a_file_that_is_named_twice_is_one_slab(tmp_path: Path, monkeypatch, capsys) -> None:
    folder, out = Path("slabs"), tmp_path / "out.extxyz"
    monkeypatch.chdir(tmp_path)
    folder.mkdir()
    write(folder / "a.extxyz", fcc111("Cu", (2, 2, 3), vacuum=8))
    write(folder / "b.extxyz", 2 * [fcc111("Pd", (2, 2, 3), vacuum=8)])
    twice = [folder, folder / "b.extxyz", folder.absolute() / "a.extxyz"]
    told = printed(capsys, "adsorb", *map(str, twice), "O", "--best=1", f"--out={out}").out
    names = [one.info["slab"].removeprefix(f"{tmp_path}/") for one in read(out, ":")]
    assert names == ["slabs/a.extxyz 0", "slabs/b.extxyz 0", "slabs/b.extxyz 1"]
    assert told.count("best: ") == 3


def test_command_ranks_slabs_separately_with_a_potential(potential_run, tmp_path, capsys) -> None:
    out = tmp_path / "out.extxyz"
    words = ["adsorb", "Ar", "Ne", "H", "--facet", "1,1,1", "1,0,0", "--layers=2"]
    words += ["--rotation=180", "--best=2", f"--run={potential_run}", f"--out={out}"]
    assert printed(capsys, *words).out.count("best: ") == 4
    slabs = [f"{metal} {facet}" for metal in ("Ar", "Ne") for facet in ((1, 1, 1), (1, 0, 0))]
    frames = read(out, ":")
    assert [one.info["slab"] for one in frames] == [slab for slab in slabs for _ in range(2)]
    assert frames[0].cell.angles()[2] != pytest.approx(frames[2].cell.angles()[2])
    rows = table(out.with_suffix(".csv"))
    for slab in slabs:
        ranks = [int(row["rank"]) for row in rows if row["slab"] == slab]
        assert ranks == [*range(1, len(ranks) + 1)]
