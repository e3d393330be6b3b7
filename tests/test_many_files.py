import json
from pathlib import Path

import pytest
from ase import Atoms
from ase.io import write
from test_own_data import STEPS, frames
from tiny_run import error_of, inspected, printed, start, table

import molflt
from molflt.commands.cli import main
from molflt.data.structures import open_dataset
from molflt.data.structures.data_set import DataSet

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("many")
    for number, atoms in enumerate(frames(11)):
        write(single(root / "flat", f"{number}.extxyz"), atoms)
    assert (
        start(root / "flat", root / "run", *STEPS, "--data.val_fraction=0.3", "--model.readout=all")
        == 0
    )
    return root / "run"


def single(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


def poscars(folder: Path, names: list[str]) -> list[Atoms]:
    found = frames(len(names))
    for name, atoms in zip(names, found, strict=True):
        write(single((folder / name).parent, Path(name).name), atoms, format="vasp")
    return found


NESTED = [f"{i}/POSCAR" for i in (0, 1, 2, 10)]


def test_a_folder_is_predicted_and_inspected(run, tmp_path, capsys) -> None:
    names, atoms = NESTED, poscars(tmp_path / "data", NESTED)
    out = tmp_path / "energies.csv"
    words = ["predict", str(run), str(tmp_path / "data"), "--out", str(out), "--device=cpu"]
    assert main([*words, "--force"]) == 0  # POSCARs have no tags
    rows = table(out)
    assert [row["index"] for row in rows] == ["0", "1", "2", "3"]
    assert [row["file"] for row in rows] == [str(tmp_path / "data" / name) for name in names]
    assert [int(row["natoms"]) for row in rows] == [len(one) for one in atoms]
    assert inspected(capsys, tmp_path / "data")["systems"] == 4
    (tmp_path / "data" / NESTED[1]).write_text("no structure\n")
    told = printed(capsys, *words, "--force", "--skip-bad").err
    assert "1 bad structure(s) left out" in told
    assert [row["index"] for row in table(out)] == ["0", "2", "3"]


def test_several_files_and_patterns(run, tmp_path, capsys) -> None:
    poscars(tmp_path, NESTED)
    files = [str(tmp_path / name) for name in NESTED[:2]]
    found = {}
    for name, words in {
        "several": files,
        "braces": [str(tmp_path / "{0,1}" / "POSCAR")],
    }.items():
        out = tmp_path / f"{name}.csv"
        words = ["predict", str(run), *words, "--out", str(out), "--device=cpu", "--force"]
        assert main(words) == 0
        found[name] = out.read_text()
    assert len(set(found.values())) == 1 and files[1] in found["several"]
    assert main(["data", "convert", *files, str(tmp_path / "two.safetensors")]) == 0
    assert len(open_dataset(tmp_path / "two.safetensors")) == 2
    assert len(molflt.load(run, "cpu").predict(files, force=True)) == 2
    assert "no file" in error_of(capsys, "predict", str(run), str(tmp_path / "*.nothing"))


def test_a_folder_is_split_and_evaluated(run, tmp_path) -> None:
    """The run was trained on such a folder; other folders are evaluated completely."""
    root = run.parent / "flat"
    assert DataSet(root).is_one
    assert main(["evaluate", str(run), "--device=cpu", "--out", str(tmp_path / "own")]) == 0
    assert json.loads((tmp_path / "own" / "results.json").read_text())["val_id"]["n"] == 3
    for data in (root.parent / "copy", root.parent / "copy" / "*.extxyz"):
        for number, atoms in enumerate(frames(5)):
            write(single(root.parent / "copy", f"{number}.extxyz"), atoms)
        out = tmp_path / "out"
        words = ["evaluate", str(run), "--data", str(data), "--out", str(out), "--device=cpu"]
        assert main(words) == 0
        (row,) = json.loads((out / "results.json").read_text()).values()
        assert row["n"] == 5 and row["baseline_mae_eV"] > 0  # by energies of the training part
        files = [Path(one["file"]).name for one in table(out / "predictions.csv")]
        assert files == [f"{number}.extxyz" for number in range(5)]


def test_files_of_one_calculation_are_not_mixed(tmp_path) -> None:
    poscars(tmp_path, ["a/POSCAR", "a/CONTCAR", "b/POSCAR", "b/CONTCAR"])
    with pytest.raises(ValueError, match="CONTCAR.*pattern.*a/"):
        open_dataset(tmp_path)
    assert len(open_dataset(f"{tmp_path}/*/CONTCAR")) == 2


def test_names_of_structures_are_written(run, tmp_path) -> None:
    named = frames(3)
    for atoms, name in zip(named, ["ag-12", "cu-3", "pt/7"], strict=True):
        atoms.info["sid"] = name
    write(tmp_path / "a.extxyz", named)
    store = tmp_path / "b.safetensors"
    assert main(["data", "convert", str(tmp_path / "a.extxyz"), str(store)]) == 0
    for source in (tmp_path / "a.extxyz", store):
        out = tmp_path / "out.csv"
        words = ["predict", str(run), str(source), "--device=cpu", "--out"]
        assert main([*words, str(out)]) == 0
        assert [row["sid"] for row in table(out)] == ["ag-12", "cu-3", "pt/7"]
