"""molflt data inspect and convert, through the command line."""

from __future__ import annotations

import json
import math

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from oc20_files import old_record, record, same, write_lmdb

from molflt.commands.cli import main
from molflt.data.structures import open_dataset
from molflt.data.structures.datamodule import IS2REData
from molflt.data.structures.store import write_store


def as_json(capsys, *words):
    assert main(["data", "inspect", *map(str, words), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)  # one object and nothing else
    assert isinstance(found, dict)
    return found


def test_genuine_records(real_lmdb, capsys):
    found = as_json(capsys, real_lmdb)
    assert (found["systems"], found["atoms_total"], found["with_labels"]) == (20, 1695, 20)
    assert sum(found["elements"].values()) == 1695 and found["elements"]["H"] == 198
    assert found["tags"] == {"subsurface": 1189, "surface": 403, "adsorbate": 103}
    assert found["unwrapped_atoms"] == 47
    assert found["warnings"] == ["wrapped relaxed positions: unwrapped 47 of 506 free atoms"]
    assert found["displacements_A"]["max"] == pytest.approx(4.1885, abs=1e-4)


def test_warnings(tmp_path, capsys):
    path = tmp_path / "user.safetensors"
    strange = [record(0, tags=None), record(1, y_relaxed=None), record(2, y_init=514.0)]
    strange.append(record(3, pos_relaxed=None, sid=1002))
    write_store(path, strange)
    found = as_json(capsys, path)
    assert found["with_labels"] == 3 and found["with_relaxed_positions"] == 3
    text = "\n".join(found["warnings"])
    for words in (
        "no tags: 1 of 4 systems",
        "no labels: 1 of 4 systems",
        "no relaxed positions: 1 of 4",
        "absurd labels: |y_init| > 100 eV in 1 systems, for instance sid 1002 with 514.000 eV",
        "repeated sids: 1 systems",
    ):
        assert words in text
    assert len(found["warnings"]) == 5
    write_store(path, [record(i) for i in range(3)])
    assert as_json(capsys, path)["warnings"] == []


def test_slabs_of_one_tag_are_named(tmp_path, capsys):
    """In inspect and before training; a slab with both tags is not named."""
    kinds = [tags.masked_fill(tags < 2, fill) for tags in [record(0).tags] for fill in (0, 1)]
    write_store(tmp_path / "train.safetensors", [record(0), *(record(9, tags=t) for t in kinds)])
    write_store(tmp_path / "val_id.safetensors", [record(5)])
    (text,) = [
        one for one in as_json(capsys, tmp_path / "train.safetensors")["warnings"] if "tag 1" in one
    ]
    assert "2 of 3" in text and f"sid {int(record(9).sid)}" in text
    data = IS2REData(tmp_path)
    with pytest.warns(UserWarning, match="slabs of one tag: 2 of 3"):
        data.files()


def test_structures_that_are_there_twice(tmp_path, capsys):
    """In one source, and in two splits, where one would be judged by what it was trained on."""
    one, two = record(0), record(1)
    moved = record(0)
    moved.pos = moved.pos + 1e-3
    write_store(tmp_path / "train.safetensors", [one, two, record(0, y_relaxed=-1.0)])
    write_store(tmp_path / "val_id.safetensors", [moved, two])
    splits = as_json(capsys, tmp_path)["splits"]
    text = "\n".join(splits["train"]["warnings"])
    assert "repeated structures: 1 of 3 systems have the elements" in text
    (warning,) = splits["val_id"]["warnings"]
    assert "two splits: 1 have" in warning and f"train, for instance sid {two.sid}" in warning
    assert main(["data", "inspect", str(tmp_path)]) == 0
    assert "warning: structures of two splits: 1 have" in capsys.readouterr().out


def test_without_any_labels(tmp_path, capsys):
    path = tmp_path / "test_id.safetensors"
    write_store(path, [record(i, y_init=None, y_relaxed=None, pos_relaxed=None) for i in (1, 2)])
    found = as_json(capsys, path, "--plot", tmp_path / "a.png")
    assert found["with_labels"] == 0
    assert found["energies_eV"] == {"y_init": None, "y_relaxed": None}
    assert found["displacements_A"] is None and (tmp_path / "a.png").is_file()
    assert main(["data", "inspect", str(path)]) == 0
    assert "y_relaxed   unknown" in capsys.readouterr().out


def bad_lmdb(tmp_path):
    content = {str(i): old_record(i) for i in range(5)}
    content["1"] = old_record(1, y_relaxed=math.nan)
    content["3"] = b"damaged"
    return write_lmdb(tmp_path / "data.lmdb", content)


def test_bad_records_are_listed_and_the_others_reported(tmp_path, capsys):
    path = bad_lmdb(tmp_path)
    found = as_json(capsys, path)
    assert found["systems"] == 3 and as_json(capsys, path, "--limit", 1)["systems"] == 1
    names = [item["name"] for item in found["left_out"]]
    assert names == [f"{path}: key '1'", f"{path}: key '3'"]
    assert found["left_out"][0]["reason"].startswith("sid 1001: y_relaxed must be")
    assert "left out: 2 structures are not valid" in found["warnings"]


def test_convert(tmp_path, capsys, real_lmdb):
    store = tmp_path / "out" / "val.safetensors"
    assert main(["data", "convert", str(real_lmdb), str(store), "--limit", "7"]) == 0
    out = capsys.readouterr().out
    assert "(2.9 MB) -> " in out and "7 structures" in out
    assert "relaxed positions were stored in another periodic image; unwrapped" in out
    original = open_dataset(real_lmdb)
    converted = open_dataset(store)
    assert len(converted) == 7 and converted.source == real_lmdb.name
    for index, item in enumerate(converted):
        same(original[index], item)


def test_convert_leaves_out_bad_records_in_one_pass(tmp_path, capsys):
    path, store = bad_lmdb(tmp_path), tmp_path / "a.safetensors"
    assert main(["data", "convert", str(path), str(store)]) == 2
    assert "sid 1001" in capsys.readouterr().err and not store.exists()
    assert main(["data", "convert", str(path), str(store), "--skip_bad"]) == 0
    error = capsys.readouterr().err
    assert "left out 2 structures" in error and "key '3'" in error
    assert [item.sid for item in open_dataset(store)] == [1000, 1002, 1004]
    assert main(["data", "convert", str(path), str(tmp_path / "a.lmdb")]) == 2
    assert "ends in .safetensors; got '.lmdb'" in capsys.readouterr().err  # before reading


def test_a_store_is_not_shortened_in_its_own_place(tmp_path, capsys):
    path = tmp_path / "a.safetensors"
    write_store(path, (record(i) for i in range(3)))
    for word in ("--limit=2", "--skip_bad"):
        assert main(["data", "convert", str(path), str(path), word]) == 2
        assert "is also the input" in capsys.readouterr().err
    assert main(["data", "convert", str(path), str(path)]) == 0 and len(open_dataset(path)) == 3


def test_s2ef_records_are_recognized(tmp_path, capsys):
    y = {"y": -3.5, "force": torch.zeros(7, 3), "y_relaxed": None, "pos_relaxed": None}
    path = write_lmdb(tmp_path / "train.lmdb", {str(i): old_record(i, **y) for i in range(2)})
    assert as_json(capsys, path)["recipe"] == "potential"
    found = as_json(capsys, path, "--recipe=is2re")
    labels = next(text for text in found["warnings"] if text.startswith("no labels"))
    assert "y and force are those of S2EF" in labels and "expected IS2RE" in labels
    with pytest.raises(ValueError, match="sid 1000: y_relaxed must be .* y and force .* S2EF"):
        IS2REData(tmp_path, val_split="train").normalizer()


@pytest.mark.parametrize(
    ("energies", "kind"),
    [
        ([-1.2, 0.4, -6.0], "adsorption"),
        ([-35.0, -41.0, math.nan], "total"),  # 7 atoms each
        ([4000.0, 3500.0, 3000.0], "total"),
        ([None, None, None], "unknown"),
    ],
)
def test_kind_of_energies_is_reported(tmp_path, capsys, energies, kind):
    path = tmp_path / "a.safetensors"
    labels = [None if e is None or math.isnan(e) else e for e in energies]
    write_store(path, [record(i, y_relaxed=e) for i, e in enumerate(labels)])
    found = as_json(capsys, path)
    assert found["energies_look_like"] == kind
    totals = [text for text in found["warnings"] if text.startswith("total energies")]
    assert len(totals) == (kind == "total")
    if kind == "total":
        known = [abs(e) / 7 for e in labels if e is not None]
        assert f"is {np.median(known):.1f} eV per atom" in totals[0]


def test_forces_and_stress_are_counted(tmp_path, capsys):
    frames = [Atoms("CO", [[0, 0, 0], [0, 0, 1.1 + 0.1 * i]]) for i in range(3)]
    for atoms in frames[:2]:
        atoms.calc = SinglePointCalculator(atoms, energy=-1.0, forces=np.ones((2, 3)))
    ase.io.write(tmp_path / "co.extxyz", frames)
    found = as_json(capsys, tmp_path / "co.extxyz")
    assert found["with_forces"] == 2 and found["with_stress"] == 0
    assert main(["data", "inspect", str(tmp_path / "co.extxyz")]) == 0
    told = capsys.readouterr().out
    assert "2 energies, 2 forces\n" in told and "stress  " not in told
    assert "forces      1.732 to 1.732 eV/Å, mean 1.732, median 1.732 (magnitudes)\n" in told
    crystal = Atoms("Cu", cell=[2, 2, 2], pbc=True)
    crystal.calc = SinglePointCalculator(crystal, energy=-1.0, stress=[-0.125, 0, 0, 0, 0, 0.01])
    ase.io.write(tmp_path / "cu.extxyz", crystal)
    assert main(["data", "inspect", str(tmp_path / "cu.extxyz")]) == 0
    told = capsys.readouterr().out
    assert "stress      -0.12500 to 0.01000 eV/Å^3, mean -0.01167, median 0.00000 (comp" in told


def test_labels_of_other_names_are_named_with_their_option(tmp_path, capsys):
    atoms = Atoms("CO", [[0, 0, 0], [0, 0, 1.1]])
    atoms.info.update(dft_energy=-500.0, E=-3.0)
    atoms.arrays.update(forces_dft=np.ones((2, 3)), dft_gradient=np.ones((2, 3)))
    longer = atoms.copy()
    longer.positions[1, 2] = 1.2
    ase.io.write(tmp_path / "co.extxyz", [atoms, longer])
    text = "\n".join(as_json(capsys, tmp_path / "co.extxyz", "--recipe=potential")["warnings"])
    for words in ("--data.energy_key dft_energy", "E", "--data.forces_key forces_dft", "minus"):
        assert words in text
