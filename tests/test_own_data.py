"""A file, or a folder of files, is split, trained on and evaluated without preparation."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ase import Atoms
from ase.build import add_adsorbate, fcc111, molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import iread, write
from data.oc20_files import old_record, write_lmdb
from tiny_run import (
    arguments,
    error_of,
    inspected,
    printed,
    results_of,
    start,
    structures,
    table,
    write_data,
    write_frames,
)

import molflt
from molflt.commands.cli import main
from molflt.data.structures import Reading, open_dataset
from molflt.data.structures.base import ANY_TAGS, to_atoms
from molflt.data.structures.datamodule import IS2REData
from molflt.data.structures.sources import DataSet
from molflt.evaluation.results import own_results

pytestmark = pytest.mark.usefixtures("undrawn")
STEPS = ("--trainer.max_steps=2", "--task.warmup_steps=1")


def frames(count: int = 10, **info: float) -> list[Atoms]:
    """Returns small slabs as `ase.Atoms` with energies in the calculator and in `info`."""
    out = []
    for record in structures(count, first_sid=500):
        atoms, energy = to_atoms(record), float(record.y_relaxed)
        atoms.info |= info
        atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=np.zeros((len(atoms), 3)))
        out.append(atoms)
    return out


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("own") / "mine.extxyz"
    write(path, frames())
    return path


@pytest.fixture(scope="module")
def run(file, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    assert start(file, folder, *STEPS, "--data.val_fraction=0.3") == 0
    return folder


def test_unknown_displacements_have_no_error(run, tmp_path, capsys) -> None:
    """A column of zeros would look like perfect predictions."""
    rows = table(run / "metrics.csv")
    assert rows[-1]["val_mae_eV"] and any(row["train_mae_eV"] for row in rows)
    assert not any(row.get("train_displacement_mae_A") for row in rows)
    words = ["evaluate", run, "--device=cpu", "--relaxed", tmp_path / "moved"]
    assert "trained with relaxed positions" in error_of(capsys, *words)


def sids(data: Any) -> list[int]:
    return [int(data[i].sid) for i in range(len(data))]


def module(root: Path, split_seed: int = 0, **options: Any) -> IS2REData:
    data = IS2REData(root, batch_size=2, split_seed=split_seed, **options)
    data.seed = 7  # the seed of the run does not affect the split
    data.setup()
    return data


def test_one_file_is_split_by_seed(file: Path) -> None:
    split = {seed: module(file, seed, val_fraction=0.3).datasets for seed in (0, 1)}
    for parts in split.values():
        train, val = sids(parts["train"]), sids(parts["val"])
        assert (len(train), len(val)) == (7, 3)
        assert sorted(train + val) == list(range(500, 510))
    assert sids(split[0]["val"]) != sids(split[1]["val"])
    again = module(file, 0, val_fraction=0.3).datasets
    assert sids(again["val"]) == sids(split[0]["val"])
    tenth = module(file)
    assert tenth.describe()[1].startswith("val_id 1 system (")
    energies = {500 + i: float(a.get_potential_energy()) for i, a in enumerate(frames())}
    part = split[0]["train"]
    assert part.y_relaxed == pytest.approx([energies[sid] for sid in sids(part)])
    assert part.natoms.tolist() == [part[i].natoms for i in range(len(part))]


def test_runs_on_one_file_are_evaluated_on_held_out_structures(run, file, tmp_path) -> None:
    held = sids(module(file, val_fraction=0.3).datasets["val"])
    for more in ([], ["--data", str(file)]):
        assert list(results_of(run, "--device=cpu", *more, out=tmp_path)) == ["val_id"]
        rows = table(tmp_path / "predictions.csv")
        assert sorted(int(row["sid"]) for row in rows) == sorted(held)


def test_copies_of_training_in_validation_are_refused(tmp_path, capsys) -> None:
    order, copies = np.random.default_rng(0).permutation, frames(11, y_relaxed=-1.0)[:1:-1]
    for atoms in copies:
        atoms.set_array("positions", atoms.positions.astype(np.float32).astype(float))
        atoms.positions[0] += atoms.cell.array[0]
    write(tmp_path / "train.extxyz", frames())
    write(tmp_path / "val_id.extxyz", [atoms[order(len(atoms))] for atoms in copies])
    words = ["train", *arguments(tmp_path, tmp_path / "run", *STEPS)]
    error = printed(capsys, *words, status=2).err
    assert "8 of 9" in error and "--data.allow_duplicates" in error
    assert "8 of 9" in printed(capsys, *words, "--data.allow_duplicates=true").err


def test_ensembles_are_evaluated_on_structures_held_out_by_all_members(
    run, file, tmp_path, capsys
) -> None:
    """Members with another split seed held out other structures, even if their file has moved."""
    named, same, other = tmp_path / "named.extxyz", tmp_path / "same", tmp_path / "other"
    shutil.copy(file, named)
    words = (*STEPS, "--data.val_fraction=0.3", "--seed=1")
    assert start(named, same, *words) == 0
    assert start(named, other, *words, "--data.split_seed=1") == 0
    named.unlink()
    command = ["evaluate", str(run), "--out", str(tmp_path / "out"), "--device=cpu", "--also"]
    held = sids(module(file, val_fraction=0.3).datasets["val"])
    assert main([*command, str(same), "--calibration_split=null"]) == 0
    rows = table(tmp_path / "out" / "predictions.csv")
    assert sorted(int(row["sid"]) for row in rows) == sorted(held)
    assert "held out other structures" in error_of(capsys, *command, str(other))


def test_a_changed_file_is_not_split_again(run, file, tmp_path, capsys) -> None:
    """Otherwise, training structures would count as held out."""
    own, copy = shutil.copytree(run, tmp_path / "run"), shutil.copy(file, tmp_path)
    config = (own / "config.yaml").read_text()
    (own / "config.yaml").write_text(config.replace(str(file), str(copy)))
    command = ["evaluate", str(own), "--device=cpu", "--out", str(tmp_path)]
    assert main(command) == 0
    write(copy, frames()[::-1])
    assert "has changed since" in error_of(capsys, *command)


def test_one_file_has_one_kind_of_label(tmp_path, capsys) -> None:
    """Energies of two references, or levels of theory, are not mixed."""
    mixed = frames(6)
    for atoms in mixed[:4]:
        atoms.info["y_relaxed"] = -1.0
    write(tmp_path / "mixed.extxyz", mixed)
    found = open_dataset(tmp_path / "mixed.extxyz")
    assert np.isnan(found.y_relaxed).tolist() == 4 * [False] + 2 * [True]
    assert "the first structures have y_relaxed, others only energy" in found.hint
    line = error_of(capsys, "train", f"--data.root={tmp_path / 'mixed.extxyz'}")
    assert "choose one with --energy_key" in line
    write(tmp_path / "mixed.extxyz", mixed[::-1])
    found = open_dataset(tmp_path / "mixed.extxyz")
    assert np.isnan(found.y_relaxed).tolist() == 2 * [False] + 4 * [True]
    assert "the first structures have energy, others only y_relaxed" in found.hint


def test_steps_of_a_relaxation_are_not_taken_for_systems_in_silence(tmp_path, capsys) -> None:
    first = frames(1)[0]
    steps = []
    for i in range(6):
        atoms = first.copy()
        atoms.rattle(0.01, seed=i)
        atoms.calc = SinglePointCalculator(atoms, energy=-i, forces=np.zeros((len(atoms), 3)))
        steps.append(atoms)
    write(tmp_path / "relax.traj", steps)
    open_dataset(tmp_path / "relax.traj")
    assert "look like steps of relaxations" in capsys.readouterr().err
    open_dataset(tmp_path / "relax.traj", reading=ANY_TAGS)  # for a potential
    assert capsys.readouterr().err == ""


def test_other_energies_of_the_data_are_not_the_results_of_the_run(run, file, tmp_path) -> None:
    """Results on other energies have no baseline; model cards and comparisons do not use them."""
    some = frames()
    for atoms in some:
        atoms.info |= {"sid": atoms.info["sid"], "other_energy": 100.0}
    own = shutil.copytree(run, tmp_path / "run")
    write(tmp_path / "mine.extxyz", some)
    text = (own / "config.yaml").read_text().replace(str(file), str(tmp_path / "mine.extxyz"))
    (own / "config.yaml").write_text(text)
    (own / "checkpoints" / "last.ckpt").unlink()  # its labels differ
    weights = [own / "checkpoints" / "best.safetensors"]
    for words, said in (([], ""), (["--energy_key=other_energy"], "with energy_key other_energy")):
        row = results_of(own, "--device=cpu", *words)["val_id"]
        _, why = own_results(own, weights)
        assert said in why and bool(said) == bool(why)
    assert row["mae_eV"] > 50 and row["baseline_mae_eV"] is None


def test_the_energy_is_the_entry_that_is_named(tmp_path, capsys) -> None:
    some = frames(3)
    for i, atoms in enumerate(some):
        atoms.info |= {"REF_energy": -2.0 - i, "dft_energy": -7.0 - i, "y_relaxed": 0.0}
    for name in ("a.extxyz", "a.db"):
        path = write_frames(tmp_path / name, some)
        dataset = open_dataset(path, reading=Reading("REF_energy"))
        assert dataset.y_relaxed.tolist() == [-2.0, -3.0, -4.0]
        assert {"energy", "dft_energy", "y_relaxed"} <= set(dataset.unused)
        assert dataset.labels["forces"] == "forces"
    words = [str(tmp_path / "a.extxyz"), "--energy_key", "dft_energy"]
    told = printed(capsys, "data", "convert", words[0], tmp_path / "a.safetensors", *words[1:])
    assert "unused labels: energy, REF_energy, y_relaxed" in told.out
    assert open_dataset(tmp_path / "a.safetensors").y_relaxed.tolist() == [-7.0, -8.0, -9.0]
    found = inspected(capsys, *words)
    assert found["energies_eV"]["energy"]["max"] == -7.0
    assert found["labels_not_used"] == ["energy", "REF_energy", "y_relaxed"]


def test_folders_are_inspected_and_converted_whole(tmp_path, capsys) -> None:
    source = tmp_path / "source"
    write_data(source, 4, 3)
    write(source / "val_ood_ads.extxyz", frames(2))
    (source / "made.json").write_text("{}")
    found = inspected(capsys, source)
    counts = {name: each["systems"] for name, each in found["splits"].items()}
    assert counts == {"train": 4, "val_id": 3, "val_ood_ads": 2}
    assert found["others"] == ["made.json"]
    assert main(["data", "convert", str(source), str(tmp_path / "out")]) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"train.safetensors", "val_id.safetensors", "val_ood_ads.safetensors"}
    assert len(open_dataset(tmp_path / "out" / "val_ood_ads.safetensors")) == 2
    (tmp_path / "root").mkdir()
    (tmp_path / "out").rename(tmp_path / "root/all")  # as in OC20's archive
    error = error_of(capsys, "data", "convert", str(tmp_path / "root"), str(tmp_path / "merged"))
    assert "root/all: expected one split; got several" in error
    write(source / "train.traj", frames(1))
    assert "expected one file for train" in error_of(capsys, "data", "inspect", str(source))


def test_shards_are_one_source(tmp_path) -> None:
    shards = tmp_path / "train"
    shards.mkdir()
    write_lmdb(shards / "data.0000.lmdb", {str(i): old_record(i) for i in range(3)})
    write_lmdb(shards / "data.0001.lmdb", {str(i): old_record(i + 3) for i in range(2)})
    assert DataSet(shards).is_one and not DataSet(tmp_path).is_one
    parts = module(shards, val_fraction=0.4).datasets
    assert (len(parts["train"]), len(parts["val"])) == (3, 2)
    (shards / "sub").mkdir()
    for count, name in enumerate(("sub/a.traj", "b.traj"), 6):  # nothing is ignored
        layered(2).write(shards / name)
        assert len(open_dataset(shards)) == count


def layered(layers: int, adsorbate: bool = True) -> Atoms:
    atoms = fcc111("Cu", (1, 1, layers), vacuum=6.0, periodic=True)
    if adsorbate:
        add_adsorbate(atoms, molecule("CO"), 2.0, "ontop")
    atoms.calc = SinglePointCalculator(atoms, energy=-1.0)
    return atoms


@pytest.mark.parametrize("layers", [2, 4])
def test_layers_of_ase_become_tags(layers: int, tmp_path, capsys) -> None:
    path = tmp_path / "a.traj"
    write(path, layered(layers))
    record = open_dataset(path, reading=Reading(tags="ase"))[0]
    assert record.tags.tolist() == [0] * (layers - 1) + [1] + [2, 2]
    assert capsys.readouterr().err == ""
    words = ["data", "inspect", str(path)]
    if layers > 2:
        line = error_of(capsys, *words)
        assert "tags must be" in line and "set --tags ase" in line
        assert "--recipe potential" in line
    else:  # read unchanged, with a warning
        said = printed(capsys, *words).err
        assert "tags of 1 of 1 structures look like the layer numbers of ase.build" in said
    counts = f"tags: {{subsurface: {layers - 1}, surface: 1, adsorbate: 2}}"
    assert counts in printed(capsys, *words, "--tags", "ase").out


def test_other_tags_are_not_converted(tmp_path, capsys) -> None:
    ours, bare = layered(3), layered(3, adsorbate=False)
    ours.set_tags([0, 0, 1, 2, 2])
    bare.set_tags([0, 0, 1])
    down = ours.copy()
    down.cell[2] *= -1  # the same atoms
    write(tmp_path / "down.traj", down)
    open_dataset(tmp_path / "down.traj")
    write(tmp_path / "a.traj", [ours, bare])
    tags = [record.tags.tolist() for record in open_dataset(tmp_path / "a.traj")]
    assert tags == [[0, 0, 1, 2, 2], [0, 0, 1]] and capsys.readouterr().err == ""
    open_dataset(tmp_path / "a.traj", reading=Reading(tags="ase"))
    assert "tags of 2 of 2 structures were read as layer numbers" in capsys.readouterr().err


def test_predictions_use_the_tags_convention_of_training(tmp_path) -> None:
    path, run = tmp_path / "a.traj", tmp_path / "run"
    many = [layered(1 + i % 2) for i in range(12)]
    for i, atoms in enumerate(many):
        atoms.rattle(0.1, seed=i)
        atoms.calc = SinglePointCalculator(atoms, energy=-1.0 - 0.1 * i)
    write(path, many)
    words = ("--data.tags=ase", "--data.val_fraction=0.3", "--trainer.max_steps=2")
    assert start(path, run, *words) == 0
    export = str(tmp_path / "export")
    assert main(["export", str(run), export, "--about", "energies of nothing"]) == 0
    told, out = [], tmp_path / "out.csv"
    for model, more in ((run, ["--tags", "ase"]), (export, [])):
        assert main(["predict", str(model), str(path), "--out", str(out), *more]) == 0
        told.append(out.read_text())
    assert told[0] == told[1]
    loaded = molflt.load(run)
    written = [float(row["energy_eV"]) for row in table(out)]
    for given in (path, many):
        energies = [one.energy for one in loaded.predict(given)]
        assert energies == pytest.approx(written, abs=1e-5)
    others = [one.energy for one in loaded.predict(many, tags="oc20", force=True)]
    assert others != pytest.approx(written, abs=1e-5)
    again = tmp_path / "again.extxyz"  # written tags can be read again
    assert main(["predict", str(run), str(path), "--out", str(again)]) == 0
    tags = [[list(atoms.get_tags()) for atoms in each] for each in (iread(again), many)]
    assert tags[0] == tags[1]


def test_a_run_with_an_energy_key_is_evaluated_on_any_source(tmp_path, capsys) -> None:
    """A compact store and a file lack the entry; a different key must be passed explicitly."""
    some = frames(12, e_ads=-0.5)
    for index, atoms in enumerate(some):
        atoms.info["e_ads"] -= 0.1 * index
    write(tmp_path / "mine.extxyz", some)
    store = tmp_path / "store.safetensors"
    words = ["data", "convert", str(tmp_path / "mine.extxyz"), str(store), "--energy_key=e_ads"]
    assert main(words) == 0
    write(tmp_path / "other.extxyz", frames())
    run = tmp_path / "run"
    assert start(tmp_path / "mine.extxyz", run, *STEPS, "--data.energy_key=e_ads") == 0
    command = ["evaluate", str(run), "--device=cpu", "--out", str(tmp_path / "out"), "--data"]
    labels = open_dataset(store).y_relaxed
    assert main([*command, str(store)]) == 0
    rows = table(tmp_path / "out" / "predictions.csv")
    assert [float(row["target_eV"]) for row in rows] == pytest.approx(labels)
    line = error_of(capsys, *command, str(tmp_path / "other.extxyz"))
    assert ("e_ads" in line and "--energy_key" in line) or "null" in line
    words = ("--device=cpu", "--data", tmp_path / "other.extxyz", "--energy_key=null")
    (name, found), *rest = results_of(run, *words, out=tmp_path / "out").items()
    assert (name, found["n"], rest) == ("other", 10, [])
    rows = table(tmp_path / "out" / "predictions.csv")
    energies = [atoms.get_potential_energy() for atoms in frames()]
    assert [float(row["target_eV"]) for row in rows] == pytest.approx(energies)


# --- folders of files ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("many")
    for number, atoms in enumerate(frames(11)):
        write_frames(root / "flat" / f"{number}.extxyz", [atoms])
    words = (*STEPS, "--data.val_fraction=0.3", "--model.readout=all")
    assert start(root / "flat", root / "run", *words) == 0
    return root / "run"


def poscars(folder: Path, names: list[str]) -> list[Atoms]:
    found = frames(len(names))
    for name, atoms in zip(names, found, strict=True):
        write_frames(folder / name, [atoms])
    return found


NESTED = [f"{i}/POSCAR" for i in (0, 1, 2, 10)]


def test_a_folder_is_predicted_and_inspected(many, tmp_path, capsys) -> None:
    names, atoms = NESTED, poscars(tmp_path / "data", NESTED)
    out = tmp_path / "energies.csv"
    words = ["predict", str(many), str(tmp_path / "data"), "--out", str(out), "--device=cpu"]
    assert main([*words, "--force"]) == 0  # POSCARs have no tags
    rows = table(out)
    assert [row["index"] for row in rows] == ["0", "1", "2", "3"]
    assert [row["file"] for row in rows] == [str(tmp_path / "data" / name) for name in names]
    assert [int(row["natoms"]) for row in rows] == [len(one) for one in atoms]
    assert inspected(capsys, tmp_path / "data")["systems"] == 4
    (tmp_path / "data" / NESTED[1]).write_text("no structure\n")
    told = printed(capsys, *words, "--force", "--skip-bad").err
    assert "1 bad structure skipped" in told
    assert [row["index"] for row in table(out)] == ["0", "2", "3"]


def test_several_files_and_patterns(many, tmp_path, capsys) -> None:
    poscars(tmp_path, NESTED)
    files = [str(tmp_path / name) for name in NESTED[:2]]
    found = {}
    for name, words in {
        "several": files,
        "braces": [str(tmp_path / "{0,1}" / "POSCAR")],
    }.items():
        out = tmp_path / f"{name}.csv"
        words = ["predict", str(many), *words, "--out", str(out), "--device=cpu", "--force"]
        assert main(words) == 0
        found[name] = out.read_text()
    assert len(set(found.values())) == 1 and files[1] in found["several"]
    assert main(["data", "convert", *files, str(tmp_path / "two.safetensors")]) == 0
    assert len(open_dataset(tmp_path / "two.safetensors")) == 2
    assert len(molflt.load(many, "cpu").predict(files, force=True)) == 2
    assert "no file" in error_of(capsys, "predict", str(many), str(tmp_path / "*.nothing"))


def test_a_folder_is_split_and_evaluated(many, tmp_path) -> None:
    """The run was trained on such a folder; other folders are evaluated completely."""
    root = many.parent / "flat"
    assert DataSet(root).is_one
    assert results_of(many, "--device=cpu", out=tmp_path / "own")["val_id"]["n"] == 3
    for data in (root.parent / "copy", root.parent / "copy" / "*.extxyz"):
        for number, atoms in enumerate(frames(5)):
            write_frames(root.parent / "copy" / f"{number}.extxyz", [atoms])
        out = tmp_path / "out"
        (row,) = results_of(many, f"--data={data}", "--device=cpu", out=out).values()
        assert row["n"] == 5 and row["baseline_mae_eV"] > 0  # by energies of the training part
        files = [Path(one["file"]).name for one in table(out / "predictions.csv")]
        assert files == [f"{number}.extxyz" for number in range(5)]


def test_files_of_one_calculation_are_not_mixed(tmp_path) -> None:
    poscars(tmp_path, ["a/POSCAR", "a/CONTCAR", "b/POSCAR", "b/CONTCAR"])
    with pytest.raises(ValueError, match=r"CONTCAR.*a/\w+, .*pattern.*/\*/"):
        open_dataset(tmp_path)
    assert len(open_dataset(f"{tmp_path}/*/CONTCAR")) == 2


def test_names_of_structures_are_written(many, tmp_path) -> None:
    named = frames(3)
    names = ["ag-12", "007", "123456789012345678901"]
    for atoms, name in zip(named, names, strict=True):
        atoms.info["sid"] = name
    write(tmp_path / "a.traj", named)
    store = tmp_path / "b.safetensors"
    assert main(["data", "convert", str(tmp_path / "a.traj"), str(store)]) == 0
    for source in (tmp_path / "a.traj", store):
        out = tmp_path / "out.csv"
        words = ["predict", str(many), str(source), "--device=cpu", "--out"]
        assert main([*words, str(out)]) == 0
        assert [row["sid"] for row in table(out)] == names
