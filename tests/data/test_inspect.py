import math

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from oc20_files import old_record, record, same, write_lmdb
from tiny_run import error_of, inspected, printed, write_splits

from molflt.data.structures import Reading, open_dataset
from molflt.data.structures.base import to_atoms
from molflt.data.structures.datamodule import IS2REData
from molflt.data.structures.domain import Domain
from molflt.data.structures.geometry import TOO_NEAR, atoms_coincide, equal_structures, fingerprint
from molflt.data.structures.records import make_record
from molflt.data.structures.store import write_store
from molflt.evaluation.predictions import infer
from molflt.graph import EnergyRegressor


def test_an_lmdb_is_inspected_and_converted(tmp_path, capsys):
    """Bad records are listed or skipped."""
    content = {str(i): old_record(i) for i in range(5)}
    content |= {"1": old_record(1, y_relaxed=math.nan), "3": b"damaged"}
    content |= {"2": old_record(2, fixed=torch.ones(7))}  # fixed atoms do not count
    path, store = write_lmdb(tmp_path / "data.lmdb", content), tmp_path / "out" / "a.safetensors"
    found = inspected(capsys, path)
    assert (found["systems"], found["atoms_total"], found["with_labels"]) == (3, 21, 3)
    assert found["tags"] == {"subsurface": 9, "surface": 6, "adsorbate": 6}
    assert [item["name"] for item in found["left_out"]] == [f"{path}: key '{i}'" for i in (1, 3)]
    original = open_dataset(path, skip_bad=True)
    assert inspected(capsys, path, "--limit", 1)["systems"] == 1
    told = printed(capsys, "data", "convert", path, store, "--limit=4", "--skip_bad").err
    assert "skipped" in told and "sid 1001" in told
    for index, item in enumerate(open_dataset(store)):
        same(original[index], item)
    assert "is also the input" in error_of(capsys, "data", "convert", store, store, "--limit=2")
    assert "nothing was computed" in error_of(
        capsys, "data", "convert", store, f"{store}/a.safetensors"
    )


def test_warnings(tmp_path, capsys):
    path = tmp_path / "user.safetensors"
    one_tag = record(2).tags.clamp(min=1)
    strange = [record(0, tags=None), record(1, y_relaxed=None), record(2, tags=one_tag)]
    strange.append(record(3, pos_relaxed=None, sid=1002))
    write_store(path, strange)
    found = inspected(capsys, path)
    assert found["with_labels"] == 3 and found["with_relaxed_positions"] == 3
    text = "\n".join(found["warnings"])
    for words in (
        "no tags: 1 of 4 systems",
        "no labels: 1 of 4 systems",
        "no relaxed positions: 1 of 4",
        "repeated sids: 1 systems",
        "slabs with a single tag: 1 of 4 systems",
    ):
        assert words in text
    assert len(found["warnings"]) == 5
    write_store(path, [record(i) for i in range(3)])
    found = inspected(capsys, path)
    assert found["warnings"] == [] and found["energies_look_like"] == "adsorption"
    write_store(path, [record(i, y_relaxed=e) for i, e in enumerate((-35.0, -42.0))])  # 7 atoms
    (text,) = inspected(capsys, path)["warnings"]
    assert text.startswith("total energies") and "is 5.5 eV per atom" in text


def test_structures_that_are_there_twice(tmp_path, capsys):
    """Structures may repeat within a source, or in two splits, which would spoil the validation."""
    one, two = record(0), record(1)
    moved = record(0)
    moved.pos = moved.pos + 1e-3
    write_splits(tmp_path, train=[one, two, record(0, y_relaxed=-1.0)], val_id=[moved, two])
    splits = inspected(capsys, tmp_path)["splits"]
    text = "\n".join(splits["train"]["warnings"])
    assert "repeated structures: 1 of 3 systems have the elements" in text
    (warning,) = splits["val_id"]["warnings"]
    (tmp_path / "test_id.extxyz").symlink_to(tmp_path / "absent")
    told = printed(capsys, "data", "inspect", tmp_path)
    assert f"{tmp_path}/test_id.extxyz: no such file" in told.err and "val_id" in told.out
    assert "two splits: 1 with" in warning and f"train, for instance sid {two.sid}" in warning


def test_forces_and_stress_are_counted(tmp_path, capsys):
    frames = [Atoms("CO", [[0, 0, 0], [0, 0, 1.1 + 0.1 * i]]) for i in range(3)]
    for atoms in frames[:2]:
        atoms.calc = SinglePointCalculator(atoms, energy=-1.0, forces=np.ones((2, 3)))
    ase.io.write(tmp_path / "co.extxyz", frames)
    found = inspected(capsys, tmp_path / "co.extxyz")
    assert found["with_forces"] == 2 and found["with_stress"] == 0
    assert list(found["energies_eV"]) == ["energy"] and found["energies_look_like"] == "unknown"
    told = printed(capsys, "data", "inspect", tmp_path / "co.extxyz").out
    assert "forces_eV_per_A: {count: 4, min: 1.73205, mean: 1.73205, median: 1.73205" in told
    frames[2].arrays["dft_gradient"] = np.ones((2, 3))
    ase.io.write(tmp_path / "co.extxyz", frames[2])
    found = inspected(capsys, tmp_path / "co.extxyz", "--recipe", "potential")
    assert "forces are minus dft_gradient" in "".join(found["warnings"])
    crystal = Atoms("Cu", cell=[2, 2, 2], pbc=True)
    crystal.calc = SinglePointCalculator(crystal, energy=-1.0, stress=[-0.125, 0, 0, 0, 0, 0.01])
    ase.io.write(tmp_path / "cu.extxyz", crystal)
    told = printed(capsys, "data", "inspect", tmp_path / "cu.extxyz").out
    assert "stress_eV_per_A3: {count: 9, min: -0.125, mean: -0.0116667, median: 0.0," in told


def test_other_properties_are_not_judged_as_energies(tmp_path, capsys):
    path, draw = tmp_path / "gaps.extxyz", np.random.default_rng(0)
    gaps = [0.5, 1.5, 25.0, 0.5]
    frames = [Atoms("H2", draw.normal(size=(2, 3)), info={"gap": gap}) for gap in gaps]
    ase.io.write(path, frames)
    found = inspected(capsys, path, "--energy_key", "gap")
    assert (found["recipe"], found["label"], found["with_labels"]) == ("is2re", "gap", 4)
    assert found["energies_look_like"] == "unknown" and found["energies_per_atom_eV"] is None
    assert not [text for text in found["warnings"] if "energies" in text or "forces" in text]
    told = printed(capsys, "data", "inspect", path, "--energy_key", "gap").out
    assert "label: gap" in told and "min: 0.5, mean: 6.875, median: 1.0, max: 25.0" in told
    words = ("convert", path, tmp_path / "gaps.safetensors", "--energy_key", "gap")
    assert ": 4 structures" in printed(capsys, "data", *words).out
    words = ("inspect", tmp_path / "gaps.safetensors", "--energy_key", "y_baseline")
    assert "energy_key=y_baseline" in error_of(capsys, "data", *words)  # it is not read
    for atoms in frames:
        atoms.info["dft"] = atoms.info.pop("gap")
    ase.io.write(tmp_path / "dft.extxyz", frames)
    with pytest.raises(ValueError, match="sid 2: .* 25.000 eV; expected at most 20 eV"):
        IS2REData(tmp_path / "dft.extxyz", energy_key="dft").setup()
    for root, key in ((path, "gap"), (tmp_path / "gaps.safetensors", None)):
        data = IS2REData(root, energy_key=key, val_fraction=0.5)  # not limited to 20
        data.refuse_totals()
        assert sum(map(len, data.datasets.values())) == 4


def test_labels_of_two_quantities_are_not_mixed(tmp_path, capsys):
    for name, key in (("train", "gap"), ("val_id", "e_ads")):
        ase.io.write(tmp_path / "one.extxyz", Atoms("H2", [[0, 0, 0], [0.7, 0, 0]], info={key: -2}))
        words = ("data", "convert", tmp_path / "one.extxyz", tmp_path / f"{name}.safetensors")
        assert ": 1 structure\n" in printed(capsys, *words, "--energy_key", key).out
    stores = tmp_path / "train.safetensors", tmp_path / "val_id.safetensors"
    assert "gap" in error_of(capsys, "data", "convert", *stores, tmp_path / "both.safetensors")
    with pytest.raises(ValueError, match="gap in .*train.safetensors, energies in .*val_id"):
        IS2REData(tmp_path).setup()
    domain = Domain.of(open_dataset(stores[0]))
    assert domain.kind == "gap"
    model = EnergyRegressor(8, 2, layers=1, readout="all").eval()
    told = []
    for store in stores:
        infer(model, open_dataset(store), 1, "other", domain)
        told.append(capsys.readouterr().err)
    assert "do not compare" not in told[0] and "do not compare" in told[1]
    assert "look like adsorption energies; the model predicts gap" in told[1]
    assert len(open_dataset(stores, reading=Reading(for_prediction=True))) == 2


def test_overlaps_equal_a_search_over_all_images() -> None:
    draw, found = np.random.default_rng(0), []
    while len(found) < 300:
        count, pbc = int(draw.integers(2, 8)), draw.integers(0, 2, 3).astype(bool)
        pos, cell = draw.uniform(-5, 5, (count, 3)), draw.normal(scale=2, size=(3, 3))
        way = draw.normal(size=3)
        way *= draw.uniform(0, 2 * TOO_NEAR) / np.linalg.norm(way)
        pos[1] = pos[0] + way + (draw.integers(-3, 4, 3) * pbc) @ cell
        try:
            record = make_record(pos=pos, atomic_numbers=np.ones(count), cell=cell, pbc=pbc)
        except ValueError:
            continue  # the cell is too flat
        atoms = to_atoms(record)
        atoms.cell[~pbc] = 0  # ASE returns wrong distances if open axes are nearly parallel
        nearest = atoms.get_all_distances(mic=True)[np.triu_indices(count, 1)].min()
        if abs(nearest - TOO_NEAR) > 1e-5:
            found.append((atoms_coincide(record), bool(nearest < TOO_NEAR)))
    assert all(got == expected for got, expected in found)
    assert 50 < sum(expected for _, expected in found) < 250


def test_equal_positions_are_found_without_a_search(monkeypatch) -> None:
    """In a search, each of 5,000 equal positions would be compared with all others."""
    one = make_record(pos=np.ones((5000, 3)), atomic_numbers=[29] * 5000, cell=np.eye(3) * 8)
    monkeypatch.setattr("scipy.spatial.cKDTree", None)
    assert atoms_coincide(one)


def test_overlapping_atoms_are_reported(tmp_path, capsys) -> None:
    """Includes atoms that overlap across a boundary, which viewers do not show."""
    draw, records = np.random.default_rng(0), []
    for sid in range(4):
        pos = np.array([[0, 0, z] for z in (1.0, 3.0, 5.0, 7.0)]) + draw.uniform(0, 0.3, (4, 3))
        if sid >= 2:
            pos[3] = pos[0] + [8, -8, 0.01]
        own = {"tags": [0, 1, 2, 2], "sid": sid, "y_relaxed": -1.0, "cell": np.eye(3) * 8}
        records.append(make_record(pos=pos, atomic_numbers=[29, 29, 8, 1], **own))
    path = tmp_path / "mine.safetensors"
    write_store(path, records)
    words = "2 of 4 structures have two atoms closer than 0.1 Å, for instance sid 2; their energies"
    told = f"coinciding atoms: {words}"
    assert any(text.startswith(told) for text in inspected(capsys, path)["warnings"])
    assert printed(capsys, "predict", path, "--device=cpu").err.count(words) == 1
    out = tmp_path / "out.safetensors"
    told = printed(capsys, "data", "convert", path, out).err
    assert told.count(f"molflt: warning: {path}: {words}") == 1 and len(open_dataset(out)) == 4


def test_structures_of_two_charges_differ() -> None:
    made = [record(0, charge=charge) for charge in (None, 0, 1, -1, 1)]
    first, *others = equal_structures(np.array([fingerprint(one) for one in made]))
    assert [number == first for number in others] == [True, False, False, False]
    assert others[1] == others[3] != others[2]


@pytest.mark.parametrize("pbc", [[True] * 3, [True, True, False], [False] * 3])
def test_moved_structures_are_equal(pbc: list[bool]) -> None:
    """Whole lattice vectors along periodic axes, and any distance along other axes."""
    pos, cell = np.random.default_rng(0).uniform(0, 5, (4, 3)), np.diag([5.0, 6.0, 9.0])
    moves = np.outer((0, 14, -200), np.where(pbc, np.diag(cell), 0.7))
    made = [make_record(pos=pos + x, atomic_numbers=[29] * 4, cell=cell, pbc=pbc) for x in moves]
    assert len(set(equal_structures(np.array([fingerprint(one) for one in made])))) == 1
