import json

import game_net
import numpy as np
import pytest
from game_net_files import content, write_archive
from kit.systems import read_systems
from shared_files import shared

from molflt.data.structures.store import StructureStore


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fg")
    archive = shared("gamenet_fg", "FG_dataset_lite.tar.xz")
    assert game_net.main([str(archive), str(folder)]) == 0
    return folder


def stores(folder):
    """Returns the names of the systems of each split, in the order of the store."""
    systems = read_systems(folder)
    paths = sorted(folder.glob("*.safetensors"))
    return {p.stem: [systems[r.sid].name for r in StructureStore(p)] for p in paths}


def test_all_systems_agree_with_arrays_made_independently(converted):
    with np.load(shared("gamenet_fg", "gamenet_fg.npz")) as file:
        arrays = {name: file[name] for name in file.files}
    systems = read_systems(converted)
    ends = np.cumsum(arrays["natoms"].astype(int))
    seen = set()
    for path in converted.glob("*.safetensors"):
        for record in StructureStore(path):
            i = record.sid  # the index in the sorted names, as in the arrays
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


def test_default_splits_are_those_that_others_were_measured_on(converted):
    expected = json.loads(shared("gamenet_fg", "splits.json").read_text())
    assert stores(converted) == expected


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "FG.tar.xz"
    write_archive(path, content())
    return path


def convert(path, *words):
    return game_net.main([str(path), *map(str, words)])


def test_systems_have_tags_images_and_energies_against_references(archive):
    systems, records = game_net.read(archive)
    assert len(records) == 30 and [r.sid for r in records] == list(range(30))
    record = records[10]
    assert systems[10].name == "cu-00A0-a"
    assert record.tags.tolist() == [0, 0, 1, 2, 2, 2]
    assert record.fixed.tolist() == [True, True, False, False, False, False]
    assert float(record.y_relaxed) == pytest.approx(-122.0 + 101.0 + 20.0)
    assert float(record.y_init) == pytest.approx(-120.5 + 101.0 + 20.0)
    way = (record.pos_relaxed - record.pos).norm(dim=1)
    assert way[:5].max() < 1e-5 and way[5] == pytest.approx(0.05 * 6, abs=1e-5)


def test_default_rule_holds_out_metals_and_molecules(archive, tmp_path, capsys):
    out = tmp_path / "fg"
    assert convert(archive, out) == 0
    assert f"{out}: train 13, val_id 3, val_ood_ads 4, val_ood_cat 8" in capsys.readouterr().out
    found = stores(out)
    held = {name.split("-")[1] for name in found["val_ood_ads"]}
    assert held == {"00A2", "00O2"} == {name.split("-")[1] for name in found["val_ood_both"]}
    assert {name[:2] for name in found["val_ood_cat"] + found["val_ood_both"]} == {"cu"}


def test_groups_names_and_folds(archive, tmp_path):
    out = tmp_path / "held"
    assert convert(archive, out, "--hold-out", "Ag", "oximes") == 0
    found = stores(out)
    assert {name[:2] for name in found["val_ood_cat"]} == {"ag"}
    assert {name[5] for name in found["val_ood_ads"]} == {"O"}
    assert {name[:2] + name[5] for name in found["val_ood_both"]} == {"agO"}
    assert {name[5] for name in found["train"] + found["val_id"]} == {"A"}

    names = sorted({system.name for system in read_systems(out).values()})
    named = {"train": names[4:9], "mine": names[:2]}
    (tmp_path / "s.json").write_text(json.dumps(named))
    assert convert(archive, tmp_path / "named", "--splits", tmp_path / "s.json") == 0
    assert stores(tmp_path / "named") == named
    folds = np.arange(len(names)) % 4
    np.savez(tmp_path / "f.npz", name=names, fold=folds.astype(np.int8))
    pairs = tmp_path / "pairs"
    assert convert(archive, pairs, "--folds", tmp_path / "f.npz") == 0
    assert len(list(pairs.iterdir())) == 12
    parts = stores(pairs / "test1-val3")
    assert parts["test_id"] == names[1::4] and parts["val_id"] == names[3::4]
    assert sorted(parts["train"]) == sorted(names[0::4] + names[2::4])
