"""GAME-Net's FG set: its archive, the splits of it, and what is wrong with others."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
from game_net_files import ARCHIVE, SHARED, content, write_archive

from molflt.commands.cli import main
from molflt.data.structures import open_dataset
from molflt.data.structures.game_net_splits import _folds
from molflt.data.structures.labels import energy_kind, label_faults
from molflt.data.structures.store import StructureStore
from molflt.data.structures.systems import read_systems

genuine = pytest.mark.skipif(not ARCHIVE.is_file(), reason=f"no GAME-Net archive at {ARCHIVE}")
BAD = "cu-00A1-a"
POSCAR, CONTCAR = (f"amides/structures/{BAD}.{end}" for end in ("poscar", "contcar"))


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fg")
    assert main(["data", "convert", str(ARCHIVE), str(folder)]) == 0
    return folder


def stores(folder):
    """Split -> names of its systems, in the order of the store."""
    systems = read_systems(folder)
    paths = sorted(folder.glob("*.safetensors"))
    return {p.stem: [systems[r.sid].name for r in StructureStore(p)] for p in paths}


@genuine
def test_all_systems_agree_with_arrays_made_independently(converted):
    with np.load(SHARED / "gamenet_fg.npz") as file:
        arrays = {name: file[name] for name in file.files}
    systems = read_systems(converted)
    ends = np.cumsum(arrays["natoms"].astype(int))
    seen = set()
    for path in converted.glob("*.safetensors"):
        for record in StructureStore(path):
            i = record.sid  # the place among the sorted names, as in the arrays
            seen.add(i)
            atoms = slice(ends[i] - record.natoms, ends[i])
            words = [str(arrays[key][i]) for key in ("name", "molecule", "family", "metal")]
            assert list(systems[i][1:]) == words
            for key in ("atomic_numbers", "tags"):
                assert (record[key].numpy() == arrays[key][atoms]).all()
            assert (record.fixed == (record.tags == 0)).all() and bool(record.pbc.all())
            for key in ("pos", "pos_relaxed"):
                np.testing.assert_allclose(record[key], arrays[key][atoms], atol=2e-6)
            np.testing.assert_allclose(record.cell[0], arrays["cell"][i], atol=1e-6)
            for key in ("y_init", "y_relaxed"):
                assert float(record[key]) == pytest.approx(arrays[key][i], abs=1e-9)
    assert seen == set(range(3052))


@genuine
def test_labels_are_adsorption_energies_and_none_is_absurd(converted):
    for path in converted.glob("*.safetensors"):
        store = StructureStore(path)
        assert energy_kind(store.y_relaxed, store.natoms) == "adsorption"
        assert label_faults(store.y_relaxed, store.natoms, required=True) == {}


@genuine
def test_default_splits_are_those_that_others_were_measured_on(converted):
    expected = json.loads((SHARED / "splits.json").read_text())
    assert stores(converted) == expected
    assert {name: len(names) for name, names in expected.items()} == {
        "train": 1664, "val_id": 250, "val_ood_ads": 484, "val_ood_cat": 522, "val_ood_both": 132,
    }  # fmt: skip


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "FG.tar.xz"
    return path, write_archive(path, content())


def convert(path, sha256, *words):
    return main(["data", "convert", str(path), *map(str, words), "--sha256", sha256])


def test_systems_have_tags_images_and_energies_against_references(archive):
    path, _ = archive
    structures = open_dataset(path)
    assert len(structures) == 30 and [r.sid for r in structures] == list(range(30))
    record, moved = structures.with_unwrapped(10)
    assert structures.where(10) == f"{path}: cu-00A0-a" and moved == 1
    assert record.tags.tolist() == [0, 0, 1, 2, 2, 2]
    assert record.fixed.tolist() == [True, True, False, False, False, False]
    assert float(record.y_relaxed) == pytest.approx(-122.0 + 101.0 + 20.0)
    assert float(record.y_init) == pytest.approx(-120.5 + 101.0 + 20.0)
    way = (record.pos_relaxed - record.pos).norm(dim=1)
    assert way[:5].max() < 1e-5 and way[5] == pytest.approx(0.05 * 6, abs=1e-5)


def test_default_rule_holds_out_metals_and_molecules(archive, tmp_path, capsys):
    out = tmp_path / "fg"
    assert convert(*archive, out) == 0
    assert f"{out}: train 13, val_id 3, val_ood_ads 4, val_ood_cat 8" in capsys.readouterr().out
    found = stores(out)
    held = {name.split("-")[1] for name in found["val_ood_ads"]}
    assert held == {"00A2", "00O2"} == {name.split("-")[1] for name in found["val_ood_both"]}
    assert {name[:2] for name in found["val_ood_cat"] + found["val_ood_both"]} == {"cu"}
    with open(out / "systems.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0] == {
        "sid": "0", "name": "ag-00A0-a", "molecule": "00A0", "family": "amides", "metal": "Ag",
        "split": "train",
    }  # fmt: skip


def test_groups_names_and_folds(archive, tmp_path, capsys):
    out = tmp_path / "held"
    assert convert(*archive, out, "--hold_out", "Ag", "oximes") == 0
    found = stores(out)
    assert {name[:2] for name in found["val_ood_cat"]} == {"ag"}
    assert {name[5] for name in found["val_ood_ads"]} == {"O"}
    assert {name[:2] + name[5] for name in found["val_ood_both"]} == {"agO"}
    assert {name[5] for name in found["train"] + found["val_id"]} == {"A"}

    names = sorted({system.name for system in read_systems(out).values()})
    (tmp_path / "s.json").write_text(json.dumps({"train": names[4:9], "mine": names[:2]}))
    assert convert(*archive, tmp_path / "named", "--splits", tmp_path / "s.json") == 0
    assert stores(tmp_path / "named") == {"train": names[4:9], "mine": names[:2]}

    folds = np.arange(len(names)) % 4
    np.savez(tmp_path / "f.npz", name=names, fold=folds.astype(np.int8))
    (tmp_path / "f.json").write_text(json.dumps(dict(zip(names, folds.tolist(), strict=True))))
    for kind in ("npz", "json"):
        pairs = tmp_path / kind
        assert convert(*archive, pairs, "--folds", tmp_path / f"f.{kind}") == 0
        assert len(list(pairs.iterdir())) == 12
        parts = stores(pairs / "test1-val3")
        assert parts["test_id"] == names[1::4] and parts["val_id"] == names[3::4]
        assert sorted(parts["train"]) == sorted(names[0::4] + names[2::4])
    capsys.readouterr()


def test_splits_of_an_earlier_conversion_do_not_stay_beside_a_new_train(archive, tmp_path, capsys):
    out = tmp_path / "fg"
    assert convert(*archive, out) == 0
    before = stores(out)
    (tmp_path / "s.json").write_text(json.dumps({"train": before["val_ood_ads"]}))
    for words in (("--hold_out", "Ag"), ("--splits", tmp_path / "s.json")):
        assert convert(*archive, out, *words) == 2
        error = capsys.readouterr().err
        assert f"{out / 'val_'}" in error and "whose systems may be in the new train" in error
    assert stores(out) == before
    assert convert(*archive, out) == 0 and stores(out) == before

    folds = {system.name: sid % 3 for sid, system in read_systems(out).items()}
    (tmp_path / "f.json").write_text(json.dumps(folds))
    pairs = tmp_path / "pairs"
    stale = pairs / "test2-val1" / "mine.safetensors"
    stale.parent.mkdir(parents=True)
    stale.touch()
    assert convert(*archive, pairs, "--folds", tmp_path / "f.json") == 2
    assert f"{stale}: of an earlier conversion" in capsys.readouterr().err
    assert list(pairs.iterdir()) == [stale.parent]


def test_lists_that_do_not_fit_are_refused(archive, tmp_path, capsys):
    file = tmp_path / "a.json"
    lists = [
        ("--splits", '{"train": ["ag-00A0-a", "xx-00A0-a"]}', "got 'xx-00A0-a', which the archive"),
        ("--splits", '{"train": ["ag-00A0-a", "ag-00A0-a"]}', "expected each name once"),
        ("--splits", '{"../x": ["ag-00A0-a"]}', "a list of names for each split"),
        ("--splits", '{"val_id": ["ag-00A0-a"]}', "expected a split train"),
        ("--splits", "[" * 10**5, "expected JSON"),
        ("--folds", '{"ag-00A0-a": 0}', "expected a fold of each of the 30 systems"),
        ("--folds", '{"ag-00A0-a": "x"}', "expected the number of a fold; got 'x'"),
    ]
    for option, text, reason in lists:
        file.write_text(text)
        assert convert(*archive, tmp_path / "out", option, file) == 2
        assert f"{file}: " in (error := capsys.readouterr().err) and reason in error
    assert convert(*archive, tmp_path / "out", "--hold_out", "Xe") == 2
    assert "expected some of Ag, Cu, Ni, amides, oximes; got 'Xe'" in capsys.readouterr().err
    assert convert(*archive, tmp_path / "out", "--hold_out", "Ag", "--folds", file) == 2
    assert "at most one of --splits, --folds and --hold_out" in capsys.readouterr().err
    assert convert(*archive, tmp_path / "a.safetensors", "--hold_out", "Ag") == 2
    assert "converted to a folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def row(files, table, name, value):
    """Another value of a row, or no such row."""
    rows = [line for line in files[table].splitlines() if line.split()[0] != name]
    files[table] = "\n".join(rows + ([f"{name} {value}"] if value else [])) + "\n"


def swap(text, a, b):
    lines = text.splitlines()
    lines[a], lines[b] = lines[b], lines[a]
    return "\n".join(lines) + "\n"


DAMAGE = {
    "no CONTCAR": (lambda f: f.pop(CONTCAR), f"no {CONTCAR} in the archive"),
    "no POSCAR": (lambda f: f.pop(POSCAR), f"no {POSCAR} in the archive"),
    "no family": (lambda f: row(f, "groups.dat", BAD, None), "no row in groups.dat"),
    "no energy": (lambda f: row(f, "energies.dat", BAD, None), f"no energy of {BAD} in energies"),
    "no first": (lambda f: row(f, "energies_i.dat", BAD, None), f"of {BAD} in energies_i.dat"),
    "NaN": (lambda f: row(f, "energies.dat", BAD, "nan"), f"no energy of {BAD} in energies.dat"),
    "absurd": (lambda f: row(f, "energies.dat", BAD, "-1.5"), "adsorption energy is 119.500 eV"),
    "elements": (lambda f: f.update({CONTCAR: f[CONTCAR].replace("H C", "C H")}), "atom 3 is H in"),
    "number": (
        lambda f: f.update({CONTCAR: f[CONTCAR].replace("3 2 1", "3 2 0")}),
        ".poscar has 6 atoms, .contcar 5",
    ),
    "order": (lambda f: f.update({CONTCAR: swap(f[CONTCAR], 9, 11)}), "atom 0 is fixed, but lies"),
    "cell": (
        lambda f: f.update({CONTCAR: f[CONTCAR].replace("5.2000", "5.3000")}),
        "differ by 0.100 Å",
    ),
    "metal": (
        lambda f: f.update({p: f[p].replace("Cu", "Au") for p in (POSCAR, CONTCAR)}),
        "expected Cu with an adsorbate; got Au3H2C",
    ),
    "cut": (lambda f: f.update({POSCAR: f[POSCAR][:300]}), f"{POSCAR}: expected a POSCAR"),
    "huge": (
        lambda f: f.update({POSCAR: f[POSCAR].replace("3 2 1", "3 999999999999 1")}),
        "line 7 says that there are 1000000000003 atoms",
    ),
    "old VASP": (
        lambda f: f.update({POSCAR: f[POSCAR].replace("\nCu H C\n", "\n3 2 1\n", 1)}),
        "line 6 names no elements",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_bad_system_is_named_or_left_out(tmp_path, capsys, damage):
    files, path = content(), tmp_path / "FG.tar.xz"
    change, reason = DAMAGE[damage]
    change(files)
    sha256 = write_archive(path, files)
    out = tmp_path / "fg"
    assert convert(path, sha256, out) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"molflt: error: {path}: {BAD}: ") and reason in error
    assert not out.exists()
    assert convert(path, sha256, out, "--skip_bad") == 0
    error = capsys.readouterr().err
    assert "left out 1 structures that are not valid" in error and f"{path}: {BAD}: " in error
    systems = read_systems(out)
    assert len(systems) == 29 and 11 not in systems  # the others keep their sids


def test_other_archives_are_refused(archive, tmp_path, capsys):
    path, sha256 = archive
    out = str(tmp_path / "out")
    assert main(["data", "convert", str(path), out]) == 2
    error = capsys.readouterr().err
    assert f"{path}: expected GAME-Net's archive with sha256 ce0a7f9b" in error and sha256 in error
    files = content()
    del files["groups.dat"], files["energies_i.dat"]
    assert convert(path, write_archive(path, files), out) == 2
    assert "an archive without energies_i.dat, groups.dat" in capsys.readouterr().err
    files = content() | {"groups.dat": "a b c\n"}
    assert convert(path, write_archive(path, files), out) == 2
    assert "groups.dat: line 1: expected a name and a value; got 'a b c'" in capsys.readouterr().err
    files = content() | {"energies.dat": "ag-0000 x\n"}
    assert convert(path, write_archive(path, files), out) == 2
    assert "energies.dat: 'ag-0000': expected an energy in eV" in capsys.readouterr().err
    files = content() | {POSCAR: " " * 2**21}
    assert convert(path, write_archive(path, files), out) == 2
    assert "expected at most 1,048,576 bytes in a file" in capsys.readouterr().err
    assert main(["data", "inspect", str(tmp_path / "absent.tar.xz")]) == 2
    assert "absent.tar.xz: no such file" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [lambda c: c[: len(c) // 2], lambda c: b"not xz" * 99])
def test_damaged_archives(archive, damage):
    path, _ = archive
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"FG\.tar\.xz: .*(whole xz|complete tar\.xz)"):
        open_dataset(path)


def test_damaged_tables_of_systems(archive, tmp_path, capsys):
    assert convert(*archive, tmp_path) == 0
    path = tmp_path / "systems.csv"
    whole = path.read_text()
    for text, reason in (
        (whole.replace("\n1,", "\nx,", 1), "line 3: expected sid, name, molecule, family, metal"),
        (whole.replace("\n1,", "\n0,", 1), "line 3: sid 0 comes twice"),
        ("sid\n1\n", "line 2: expected sid"),
        ("sid\n1,2,3\n", "line 2: expected sid"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=reason):
            read_systems(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="expected the names of the systems"):
        read_systems(tmp_path)
    capsys.readouterr()


@genuine
def test_authors_folds_are_read():
    counts = np.bincount(list(_folds(SHARED / "published_predictions.npz").values()))
    assert counts.tolist() == [610, 616, 612, 614, 600]
