import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.constraints import FixAtoms, FixBondLength
from ase.io import read, write
from safetensors.torch import load_file, save_file
from tiny_run import alone, error_of, on_slab, printed, structures, table

from molflt.commands.cli import main
from molflt.commands.evaluate import evaluate
from molflt.commands.predict import predict
from molflt.data.structures.base import to_atoms
from molflt.data.structures.in_memory import StructuresInMemory
from molflt.data.structures.sources import TEST_SPLITS, VAL_SPLITS
from molflt.data.structures.store import StructureStore, write_store
from molflt.evaluation.energies import _errors_by_group, _metrics, _results_table
from molflt.evaluation.predictions import Predictions, infer
from molflt.graph import EnergyRegressor
from molflt.training.checkpoint import load_run


@pytest.fixture(scope="module")
def run(energy_runs: list[Path]) -> Path:
    return energy_runs[0]


def test_results_and_files_match_an_independent_computation(run, energy_data, tmp_path) -> None:
    out, results = tmp_path, evaluate(run, out=tmp_path, batch_size=4, device="cpu")
    names = "results.json results_of.json predictions.npz predictions.csv errors_by_group.csv"
    pictures = "parity.png encoding.png"
    assert {path.name for path in out.iterdir()} == {*names.split(), *pictures.split()}
    assert json.loads((out / "results.json").read_text()) == results
    assert list(results) == list(VAL_SPLITS)
    median = np.median(StructureStore(energy_data / "train.safetensors").y_relaxed)
    with np.load(out / "predictions.npz", allow_pickle=False) as file:
        arrays = dict(file)
    assert arrays.keys() == {f"{s}_{p}" for s in VAL_SPLITS for p in ("ids", "energy")}
    for split, row in results.items():
        store = StructureStore(energy_data / f"{split}.safetensors")
        target, energy = store.y_relaxed, alone(run, store.path)
        error = np.abs(energy - target)
        assert set(row) == {"mae_eV", "ewt_percent", "baseline_mae_eV", "n"}
        assert row["n"] == len(target)
        assert row["mae_eV"] == pytest.approx(error.mean(), rel=1e-5)
        assert row["ewt_percent"] == pytest.approx(100 * (error < 0.02).mean())
        assert row["baseline_mae_eV"] == pytest.approx(np.abs(target - median).mean(), rel=1e-12)
        assert arrays[f"{split}_ids"].tolist() == [str(record.sid) for record in store]
        assert arrays[f"{split}_energy"].dtype == np.float64
        np.testing.assert_allclose(arrays[f"{split}_energy"], energy, atol=1e-5)
        part = [row for row in table(out / "predictions.csv") if row["split"] == split]
        errors = np.array([float(row["error_eV"]) for row in part])
        assert np.abs(errors).mean() == pytest.approx(row["mae_eV"], rel=1e-12)
        for own, record in zip(part, store, strict=True):
            adsorbate = Atoms(record.atomic_numbers[record.tags == 2].numpy())
            assert own["adsorbate"] == adsorbate.get_chemical_formula("hill")
            elements = {*Atoms(record.atomic_numbers[record.tags != 2]).symbols}
            assert own["slab"] == "-".join(sorted(elements))
            assert int(own["natoms"]) == record.natoms
            assert float(own["target_eV"]) == float(record.y_relaxed)
    groups = table(out / "errors_by_group.csv")
    for split in (*VAL_SPLITS, "all"):
        chosen = [results[name] for name in (VAL_SPLITS if split == "all" else (split,))]
        for kind in ("adsorbate", "slab", "natoms"):
            part = [row for row in groups if (row["split"], row["kind"]) == (split, kind)]
            assert sum(int(row["n"]) for row in part) == sum(row["n"] for row in chosen)
            weighted = sum(int(row["n"]) * float(row["mae_eV"]) for row in part)
            assert weighted == pytest.approx(sum(row["n"] * row["mae_eV"] for row in chosen))


@pytest.mark.usefixtures("undrawn")
def test_splits_without_labels_are_only_predicted(run, tmp_path, capsys) -> None:
    results = evaluate(run, splits=TEST_SPLITS, out=tmp_path, device="cpu")
    nothing = dict.fromkeys(("mae_eV", "ewt_percent", "baseline_mae_eV"))
    assert results["test_id"] == {**nothing, "n": 5}
    assert json.loads((tmp_path / "results.json").read_text()) == results
    captured = capsys.readouterr()
    line = next(line for line in captured.out.splitlines() if line.startswith("test_id"))
    assert line.split() == ["test_id", "5", "-", "-", "-"]
    assert "test_id: no labels" in captured.err
    assert "test_id: 5 of 24,948 systems; a submission needs all" in captured.err
    rows = [row for row in table(tmp_path / "predictions.csv") if row["split"] == "test_id"]
    assert {(row["target_eV"], row["error_eV"]) for row in rows} == {("", "")}
    names = ("id", "ood_ads", "ood_cat", "ood_both")  # as in OC20's submissions
    with np.load(tmp_path / "predictions.npz") as written:
        assert set(written.files) == {f"{n}_{p}" for n in names for p in ("ids", "energy")}
        assert written["id_ids"].dtype.kind == "U"


def predictions(natoms, energy, target, adsorbate) -> Predictions:
    count = len(natoms)
    unknown, words, new = np.full(count, np.nan), ["X"] * count, np.full(count, "")
    arrays = (np.array(natoms), np.array(energy)[:, None], np.array(target), unknown, new)
    return Predictions(
        np.arange(count), *arrays, words, adsorbate, words, [()] * count, {}, [None] * count
    )


def test_missing_labels_do_not_count_as_zero() -> None:
    part = predictions([5, 6, 7], [-1.0, -2.0, -3.0], [-1.5, np.nan, -3.01], ["O", "O", "H"])
    errors = {"mae_eV": 0.255, "ewt_percent": 50.0, "baseline_mae_eV": (0.5 + 1.01) / 2}
    assert _metrics(part, median=-2.0, adds_baseline=False) == pytest.approx(errors | {"n": 2})
    groups = [one for one in _errors_by_group({"val_id": part}) if one["split"] == "all"]
    names = [(one["group"], one["n"]) for one in groups if one["kind"] == "adsorbate"]
    assert names == [("H", 1), ("O", 1)]
    rows = {split: {**errors, "n": 2, "spread_eV": 0.1} for split in "ab"}
    rows["b"]["mae_eV"] = 0.355
    assert _results_table(rows).splitlines()[-1].split()[:3] == ["average", "4", "0.3050"]
    assert "spread" not in _results_table(rows)  # the spreads have their own table


@pytest.mark.parametrize("sizes", [[7], [1, 2], [7, 8, 9, 30, 31, 32, 80, 81], [5] * 9 + [99]])
def test_size_groups_contain_the_sizes_of_their_range(sizes) -> None:
    natoms, count = np.array(sizes), len(sizes)
    # the MAE of a group is its mean size
    part = predictions(sizes, np.zeros(count), natoms.astype(float), ["unknown"] * count)
    groups = [
        one
        for one in _errors_by_group({"s": part})
        if (one["split"], one["kind"]) == ("s", "natoms")
    ]
    ends = [[int(end) for end in group["group"].split("-")] for group in groups]
    for group, end in zip(groups, ends, strict=True):
        inside = natoms[(natoms >= end[0]) & (natoms <= end[-1])]
        assert group["n"] == len(inside) and group["mae_eV"] == pytest.approx(inside.mean())
    assert sum(group["n"] for group in groups) == count and ends == sorted(ends)


def test_an_evaluation_removes_files_of_an_earlier_one(run, tmp_path, monkeypatch) -> None:
    """A failed evaluation keeps them, and so does one in a folder without results."""
    done = Path(shutil.copytree(run, tmp_path / "run"))
    evaluate(done, splits=["val_ood_both"], device="cpu", pictures=["svg"])
    stale = {"errors_by_group.csv", "parity.png", "parity.svg"}
    assert {*stale, "results_of.json"} <= {path.name for path in done.iterdir()}
    kept = {path: path.read_bytes() for path in done.iterdir() if path.is_file()}
    with monkeypatch.context() as patched:
        patched.setattr("molflt.evaluation.energies._draw", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            evaluate(done, "last", splits=["test_id"], device="cpu")
    assert {path: path.read_bytes() for path in done.iterdir() if path.is_file()} == kept
    (done / "uncertainty.svg").touch()
    evaluate(done, splits=["test_id"], device="cpu")
    left = {path.name for path in done.iterdir()}
    assert "results.json" in left and not {*stale, "uncertainty.svg"} & left
    (other := tmp_path / "curves.csv").write_text("not of an evaluation")
    evaluate(done, splits=["test_id"], device="cpu", out=tmp_path)
    assert other.is_file() and (tmp_path / "results.json").is_file()


@pytest.mark.usefixtures("undrawn")
def test_replaced_results_are_named(run, tmp_path, capsys) -> None:
    words = ["evaluate", run, "--device=cpu", "--out", tmp_path, "--splits", "val_ood_both"]
    for more, gone in (
        (["test_id"], ""),
        ([], "(checkpoint 'best', splits test_id)"),
        (["test_ood_ads"], ""),
        (["--checkpoint", "last"], "(checkpoint 'best', splits val_ood_both, test_ood_ads)"),
    ):
        told = [line for line in printed(capsys, *words, *more).err.splitlines() if "repl" in line]
        assert len(told) == bool(gone) and all(gone in line and "--out" in line for line in told)
    (tmp_path / "results.json").write_text("{")
    assert "replaces" not in printed(capsys, *words).err


@pytest.mark.usefixtures("undrawn")
def test_data_elsewhere_and_no_training_split(run, energy_data, tmp_path, capsys, monkeypatch):
    model, saved = load_run(run)
    saved["data"]["root"] = "was/here"
    monkeypatch.setattr("molflt.commands.evaluate.load_run", lambda *_: (model, saved))
    with pytest.raises(FileNotFoundError, match="was/here.*--data"):
        evaluate(run, out=tmp_path, device="cpu")
    options = {"splits": ["val_id"], "data": energy_data, "out": tmp_path, "device": "cpu"}
    row = evaluate(run, **options)["val_id"]
    median = np.median(StructureStore(energy_data / "train.safetensors").y_relaxed)
    target = StructureStore(energy_data / "val_id.safetensors").y_relaxed
    assert row["baseline_mae_eV"] == pytest.approx(np.abs(target - median).mean())
    saved["data"]["train_split"] = "elsewhere"
    row = evaluate(run, **options)["val_id"]
    assert row["baseline_mae_eV"] is None and row["mae_eV"] > 0
    assert "no baseline, because" in capsys.readouterr().out


@pytest.mark.usefixtures("undrawn")
def test_the_matches_of_a_pattern_are_one_split(run, energy_data, tmp_path) -> None:
    pattern = energy_data / "val_ood_[a]*.safetensors"
    results = evaluate(run, data=pattern, out=tmp_path, device="cpu")
    assert list(results) == ["all"] and results["all"]["n"] == 30
    with pytest.raises(ValueError, match="no splits"):
        evaluate(run, data=pattern, out=tmp_path, device="cpu", splits=["val_id"])


@pytest.mark.usefixtures("undrawn")
def test_bad_structures(run, tmp_path, capsys) -> None:
    """A non-finite label is refused with its sid, and omitted with skip_bad."""
    path = tmp_path / "data" / "val_id.safetensors"
    write_store(path, structures(6, 1, 1000))
    columns = load_file(path)
    columns["y_relaxed"][2] = torch.inf
    header = {"format": "molflt-structures", "version": "1"}
    save_file(columns, path, metadata=header)
    words = ["evaluate", str(run), "--splits", "val_id", "--data", str(path.parent)]
    words += ["--out", str(tmp_path), "--device", "cpu"]
    assert "sid 1002" in error_of(capsys, *words)
    assert "1002" in printed(capsys, *words, "--skip-bad").err
    assert json.loads((tmp_path / "results.json").read_text())["val_id"]["n"] == 5


def slabs(tags: bool = True) -> list[Atoms]:
    frames = [on_slab("O", "Cu", 2), on_slab("H", "Pt", 3), on_slab("N", "Ni", 4)]
    for i, atoms in enumerate(frames):
        atoms.info["sid"] = 70 + i
        if not tags:
            atoms.set_tags(0)
    return frames


def test_predict_a_table(run, tmp_path, capsys) -> None:
    for model in (run, run / "checkpoints" / "best.safetensors"):
        assert f"{model}: a trained model; expected a file" in error_of(capsys, "predict", model)
    write(tmp_path / "in.extxyz", slabs())
    out = tmp_path / "new" / "out.csv"
    words = ["predict", str(run), str(tmp_path / "in.extxyz"), "--out", str(out)]
    captured = printed(capsys, *words, "--device", "cpu")
    assert "of 3 structures" in captured.out
    assert len(captured.err.splitlines()) == 2  # new elements, and structures outside
    rows = table(out)
    assert [(int(row["index"]), int(row["sid"])) for row in rows] == [(0, 70), (1, 71), (2, 72)]
    assert [row["formula"] for row in rows] == ["Cu8O", "HPt12", "NNi16"]
    assert [int(row["natoms"]) for row in rows] == [9, 13, 17]
    assert [row["outside"].count("; ") for row in rows] == [0, 0, 2]  # separators
    energy = [float(row["energy_eV"]) for row in rows]
    np.testing.assert_allclose(energy, alone(run, tmp_path / "in.extxyz"), atol=1e-5)


@pytest.mark.parametrize("suffix", [".extxyz", ".traj"])
def test_predict_structures(run, tmp_path, suffix, capsys) -> None:
    """All entries but the labels are kept."""
    frames = slabs()
    for atoms in frames:
        atoms.info |= {"source": "mine", "energy": 7.0}
        atoms.set_initial_charges(np.arange(len(atoms)) / 10)
        atoms.set_constraint([FixAtoms(indices=range(4)), FixBondLength(4, 5)])
    write(tmp_path / "in.traj", frames)
    out = tmp_path / f"out{suffix}"
    predict([run, tmp_path / "in.traj"], out=out, device="cpu")
    assert ("FixBondLengths" in capsys.readouterr().err) == (suffix == ".extxyz")
    written = read(out, ":")
    assert len(written) == 3
    energy = [atoms.get_potential_energy() for atoms in written]
    np.testing.assert_allclose(energy, alone(run, tmp_path / "in.traj"), atol=1e-5)
    for old, new in zip(frames, written, strict=True):
        np.testing.assert_allclose(old.positions, new.positions, rtol=0, atol=1e-8)
        np.testing.assert_allclose(old.cell.array, new.cell.array, rtol=0, atol=1e-8)
        assert new.info["source"] == "mine" and "energy" not in new.info
        np.testing.assert_allclose(new.get_initial_charges(), old.get_initial_charges())
        assert len(new.constraints) == (1 if suffix == ".extxyz" else 2)
        assert (old.numbers == new.numbers).all() and (old.get_tags() == new.get_tags()).all()
        assert (new.constraints[0].get_indices() == np.arange(4)).all()
        assert new.info["sid"] == old.info["sid"]
    assert {path.name for path in tmp_path.iterdir()} == {"in.traj", out.name}


def test_structures_without_tags_are_refused_unless_forced(run, tmp_path, capsys) -> None:
    write(tmp_path / "in.extxyz", slabs(tags=False)[:2] + slabs()[2:])
    out = tmp_path / "out.csv"
    words = ["predict", str(run), str(tmp_path / "in.extxyz"), f"--out={out}", "--batch_size=1"]
    told = error_of(capsys, *words)
    assert "no tags" in told and "--tags guess" in told and "--force" in told and not out.exists()
    told = printed(capsys, *words, "--force", "true").err
    assert "no tags, unlike the training data (2 structures)" in told
    assert [row["outside"].startswith("no tags") for row in table(out)] == [True, True, False]
    assert main([*words, "--skip_bad", "true"]) == 0
    assert [row["index"] for row in table(out)] == ["2"]
    told = printed(capsys, *words, "--tags", "guess").err
    assert "1 adsorbate O, 4 surface, 4 subsurface atoms" in told
    (atoms,) = slabs(tags=False)[:1]
    write(tmp_path / "bare.extxyz", Atoms(atoms.numbers, atoms.positions))
    told = error_of(capsys, "predict", run, tmp_path / "bare.extxyz", f"--out={out}")
    assert "store the cell" in told and "set tags" not in told


def test_figures_and_relaxed_structures_have_textual_sids(run, tmp_path, monkeypatch) -> None:
    frames, sids = [to_atoms(record) for record in structures(2)], ["ag-12", "pt-3"]
    for atoms, name in zip(frames, sids, strict=True):
        atoms.info = {"sid": name, "y_relaxed": -1.0}
    write(tmp_path / "named.traj", frames)
    drawn = []
    monkeypatch.setattr("molflt.plots.parity", lambda *args, **_: drawn.append(args))
    moved = tmp_path / "moved"
    evaluate(run, data=tmp_path / "named.traj", out=tmp_path, device="cpu", relaxed=moved)
    ((_, _, names),) = drawn
    assert [name.split()[1] for name in names["named"]] == sids
    assert [atoms.info["sid"] for atoms in read(moved / "named.extxyz", ":")] == sids


def test_use_of_a_mesh_is_said(monkeypatch, capsys) -> None:
    model = EnergyRegressor(8, 2, layers=1, ffn_dim=8, num_features=8).eval()
    data = StructuresInMemory(list(structures(3)))
    infer(model, data, 2, "small cells")
    assert "mesh" not in capsys.readouterr().err
    monkeypatch.setattr("molflt.graph.periodic._MOST_BY_NODES", 8)
    infer(model, data, 2, "large cells")
    expected = sum(len(record.pos) > 8 for record in structures(3))
    assert f"large cells: {expected} of 3 structures" in capsys.readouterr().err
