import json
import os

import game_net
import numpy as np
import pytest
import torch
from game_net_files import content, write_archive
from kit.systems import read_systems
from shared_files import shared
from torch_geometric.data import Batch

from molflt.data.structures.store import StructureStore


def stores(folder):
    """Returns the names of the systems of each split, in the order of the store."""
    systems = read_systems(folder)
    paths = sorted(folder.glob("*.safetensors"))
    return {p.stem: [systems[r.sid].name for r in StructureStore(p)] for p in paths}


STEP = 1 if os.environ.get("MOLFLT_FULL") else 8


@pytest.fixture(scope="module")
def published():
    """Returns the systems of the published archive; records are None except for every eighth."""
    record = game_net._record
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(game_net, "_record", lambda x, *y: None if x.sid % STEP else record(x, *y))
        return game_net.read(shared("gamenet_fg", "FG_dataset_lite.tar.xz"))


def test_systems_agree_with_arrays_made_independently(published):
    with np.load(shared("gamenet_fg", "gamenet_fg.npz")) as file:
        arrays = {name: file[name] for name in file.files}
    systems, batch = published[0], Batch.from_data_list(published[1][::STEP])
    assert len(systems) == 3052
    for key in ("name", "molecule", "family", "metal"):
        assert [getattr(system, key) for system in systems] == arrays[key].tolist()
    chosen = np.arange(3052) % STEP == 0
    atoms = chosen.repeat(arrays["natoms"])
    assert batch.sid.tolist() == [*range(0, 3052, STEP)]
    assert (batch.natoms.numpy() == arrays["natoms"][chosen]).all()
    for key in ("atomic_numbers", "tags"):
        assert (batch[key].numpy() == arrays[key][atoms]).all()
    assert torch.equal(batch.fixed, batch.tags == 0) and bool(batch.pbc.all())
    for key in ("pos", "pos_relaxed"):
        np.testing.assert_allclose(batch[key], arrays[key][atoms], atol=2e-6)
    for key, bound in {"cell": 1e-6, "y_init": 1e-9, "y_relaxed": 1e-9}.items():
        np.testing.assert_allclose(batch[key], arrays[key][chosen], rtol=0, atol=bound)


def test_default_splits_are_those_that_others_were_measured_on(published):
    expected = json.loads(shared("gamenet_fg", "splits.json").read_text())
    parts = game_net.held_out(published[0]).items()
    assert {split: [system.name for system in own] for split, own in parts} == expected


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
