"""Evaluation and prediction with a real run: trained for three steps, since errors may be large."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import add_adsorbate, fcc111
from ase.constraints import FixAtoms
from ase.io import read, write
from safetensors.torch import load_file, save_file
from tiny_run import config, structures
from torch_geometric.data import Batch

from molflt.cli import main
from molflt.data import open_dataset
from molflt.data.splits import TEST_SPLITS, VAL_SPLITS
from molflt.data.store import StructureStore, write_store
from molflt.evaluation.energies import evaluate, predict
from molflt.evaluation.inference import Predictions, infer
from molflt.evaluation.report import errors_by_group, metrics, published_table, results_table
from molflt.evaluation.submission import read_submission
from molflt.train import load_run, train


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data")
    write_store(root / "train.safetensors", structures(17))
    for i, split in enumerate(VAL_SPLITS):
        write_store(root / f"{split}.safetensors", structures(9 + i, i + 1, 1000 * (i + 1)))
    for i, split in enumerate(TEST_SPLITS):
        bare = structures(5 + i, i + 9, 9000 * (i + 1), labels=False)
        write_store(root / f"{split}.safetensors", bare)
    return root


@pytest.fixture(scope="module")
def run(tmp_path_factory, data: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    steps = ("--trainer.max_steps=3", "--trainer.val_every=3", "--trainer.checkpoint_every=3")
    assert train(config(data, folder, *steps)) == 0
    return folder


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory, run: Path) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("out")
    return out, evaluate(run, out=out, batch_size=4, device="cpu")


def labels(path: Path) -> np.ndarray:
    store = StructureStore(path)
    return np.array([float(store[i].y_relaxed) for i in range(len(store))])


def alone(run: Path, path: Path) -> np.ndarray:
    """Energies one structure at a time, by a way that shares nothing with the evaluation."""
    model, _ = load_run(run)
    dataset = open_dataset(path)
    with torch.no_grad():
        return np.array(
            [
                float(model(Batch.from_data_list([dataset[i]]))["energy"])
                for i in range(len(dataset))
            ]
        )


def test_results_are_those_of_an_independent_computation(evaluated, run, data) -> None:
    out, results = evaluated
    assert json.loads((out / "results.json").read_text()) == results
    assert list(results) == list(VAL_SPLITS)
    median = np.median(labels(data / "train.safetensors"))
    for split, row in results.items():
        target = labels(data / f"{split}.safetensors")
        error = np.abs(alone(run, data / f"{split}.safetensors") - target)
        assert set(row) == {"energy_mae", "energy_within_threshold", "baseline_mae", "n"}
        assert row["n"] == len(target)
        assert row["energy_mae"] == pytest.approx(error.mean(), rel=1e-5)
        assert row["energy_within_threshold"] == (error < 0.02).mean()
        assert row["baseline_mae"] == pytest.approx(np.abs(target - median).mean(), rel=1e-12)


def test_predictions_are_in_the_order_of_the_data(evaluated, run, data) -> None:
    out, _ = evaluated
    with np.load(out / "predictions.npz", allow_pickle=False) as file:
        assert sorted(file.files) == sorted(
            f"{s}_{p}" for s in VAL_SPLITS for p in ("ids", "energy")
        )
        for split in VAL_SPLITS:
            store = StructureStore(data / f"{split}.safetensors")
            assert file[f"{split}_ids"].dtype.kind == "U"
            assert file[f"{split}_ids"].tolist() == [str(r.sid) for r in store]
            assert file[f"{split}_energy"].dtype == np.float64
            expected = alone(run, data / f"{split}.safetensors")
            np.testing.assert_allclose(file[f"{split}_energy"], expected, atol=1e-5)


def test_predictions_csv(evaluated, data) -> None:
    out, results = evaluated
    with open(out / "predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(row["n"] for row in results.values())
    for split in VAL_SPLITS:
        part = [row for row in rows if row["split"] == split]
        errors = np.array([float(row["error_eV"]) for row in part])
        assert np.abs(errors).mean() == pytest.approx(results[split]["energy_mae"], rel=1e-12)
        store = StructureStore(data / f"{split}.safetensors")
        for row, record in zip(part, store, strict=True):
            adsorbate = Atoms(record.atomic_numbers[record.tags == 2].numpy())
            assert row["adsorbate"] == adsorbate.get_chemical_formula("hill")
            assert int(row["natoms"]) == record.natoms
            assert float(row["target_eV"]) == float(record.y_relaxed)


def test_errors_by_group_add_up(evaluated) -> None:
    out, results = evaluated
    with open(out / "errors_by_group.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for split in (*VAL_SPLITS, "all"):
        chosen = VAL_SPLITS if split == "all" else (split,)
        count = sum(results[name]["n"] for name in chosen)
        total = sum(results[name]["n"] * results[name]["energy_mae"] for name in chosen)
        for kind in ("adsorbate", "natoms"):
            part = [row for row in rows if (row["split"], row["kind"]) == (split, kind)]
            assert sum(int(row["n"]) for row in part) == count
            weighted = sum(int(row["n"]) * float(row["mae_eV"]) for row in part)
            assert weighted == pytest.approx(total)


def test_files_and_pictures(evaluated) -> None:
    out, _ = evaluated
    written = {path.name for path in out.iterdir()}
    assert written == {
        "results.json",
        "predictions.npz",
        "predictions.csv",
        "errors_by_group.csv",
        "parity.png",
        "errors.png",
        "encoding.png",
    }


def test_command_line_prints_a_table(run, data, tmp_path, capsys) -> None:
    words = ["evaluate", str(run), "--splits", "val_id", "val_ood_cat", "--out", str(tmp_path)]
    assert main([*words, "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results) == ["val_id", "val_ood_cat"]
    row = results["val_ood_cat"]
    line = next(line for line in text.splitlines() if line.startswith("val_ood_cat"))
    assert line.split()[1:3] == ["11", f"{row['energy_mae']:.4f}"]
    mean = np.mean([part["energy_mae"] for part in results.values()])
    average = next(line for line in text.splitlines() if line.startswith("average"))
    assert average.split()[1:3] == ["20", f"{mean:.4f}"]
    assert "published, on OC20 (other data than the above, so not comparable with it)" in text
    assert "MAE / eV" in text and "EwT / %" in text and "0.5046" in text


def test_splits_without_labels_are_only_predicted(run, data, tmp_path, capsys) -> None:
    results = evaluate(run, [*TEST_SPLITS, "val_id"], out=tmp_path, device="cpu")
    assert results["test_id"] == {
        "energy_mae": None,
        "energy_within_threshold": None,
        "baseline_mae": None,
        "n": 5,
    }
    assert json.loads((tmp_path / "results.json").read_text()) == results
    captured = capsys.readouterr()
    line = next(line for line in captured.out.splitlines() if line.startswith("test_id"))
    assert line.split() == ["test_id", "5", "-", "-", "-"]
    assert "warning: test_id: no labels; predicted only" in captured.err
    with open(tmp_path / "predictions.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == "test_id"]
    assert {(row["target_eV"], row["error_eV"]) for row in rows} == {("", "")}
    bare = tmp_path / "bare"
    evaluate(run, list(TEST_SPLITS), out=bare, device="cpu")
    assert not (bare / "parity.png").exists() and (bare / "predictions.npz").exists()


def test_missing_labels_do_not_count_as_zero(capsys) -> None:
    part = Predictions(
        sid=np.arange(3),
        natoms=np.array([5, 6, 7]),
        energy=np.array([-1.0, -2.0, -3.0]),
        target=np.array([-1.5, np.nan, -3.01]),
        formula=["X"] * 3,
        adsorbate=["O", "O", "H"],
        untagged=0,
        unknown=[],
    )
    row = metrics(part, median=-2.0)
    assert row == {
        "energy_mae": pytest.approx(0.255),
        "energy_within_threshold": 0.5,
        "baseline_mae": pytest.approx((0.5 + 1.01) / 2),
        "n": 2,
    }
    groups = errors_by_group({"val_id": part})["all"]["adsorbate"]
    assert [(group.group, group.n) for group in groups] == [("H", 1), ("O", 1)]


@pytest.mark.parametrize(
    "sizes", [[7], [7, 7, 7], [1, 2], [7, 8, 9, 30, 31, 32, 80, 81], [5] * 9 + [99]]
)
def test_size_groups_hold_what_they_say(sizes) -> None:
    natoms = np.array(sizes)
    count = len(sizes)
    part = Predictions(
        sid=np.arange(count),
        natoms=natoms,
        energy=np.zeros(count),
        target=natoms.astype(float),  # so that the MAE of a group is its mean size
        formula=["X"] * count,
        adsorbate=["unknown"] * count,
        untagged=count,
        unknown=[],
    )
    groups = errors_by_group({"s": part})["s"]["natoms"]
    ends = [[int(end) for end in group.group.split("-")] for group in groups]
    for group, end in zip(groups, ends, strict=True):
        inside = natoms[(natoms >= end[0]) & (natoms <= end[-1])]
        assert group.n == len(inside) and group.mae == pytest.approx(inside.mean())
    assert sum(group.n for group in groups) == count
    assert ends == sorted(ends)


def test_published_table_with_whole_oc20_splits() -> None:
    row = {"energy_mae": 0.5, "energy_within_threshold": 0.05, "baseline_mae": None, "n": 24943}
    text = published_table({"val_id": row}, is_oc20=True)
    assert text.splitlines()[-1].split()[:2] == ["this", "run"]
    assert text.splitlines()[-1].split()[-5:] == ["0.5000", "-", "-", "-", "5.00"]
    assert "not comparable" not in text
    assert results_table({"val_id": row}).splitlines()[-1].split() == [
        "val_id",
        "24,943",
        "0.5000",
        "5.00",
        "-",
    ]


def test_trial_submission_of_validation_splits(run, tmp_path, capsys) -> None:
    path = tmp_path / "submission.npz"
    evaluate(run, out=tmp_path, submission=path, device="cpu")
    written = read_submission(path)
    with np.load(tmp_path / "predictions.npz") as file:
        for split, (ids, energy) in written.items():
            np.testing.assert_array_equal(ids, file[f"val_{split}_ids"])
            np.testing.assert_array_equal(energy, file[f"val_{split}_energy"])
    assert "the leaderboard wants test splits" in capsys.readouterr().err


def test_submission_of_shortened_test_splits_is_refused(run, tmp_path) -> None:
    path = tmp_path / "submission.npz"
    with pytest.raises(ValueError, match=r"'id' must have the 24948 systems.*got 5"):
        evaluate(run, list(TEST_SPLITS), out=tmp_path, submission=path, device="cpu")
    assert not path.exists()


def test_submission_of_some_splits_is_refused_before_any_work(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"needs --splits test_id .*got val_id test_id"):
        evaluate(Path("no-run"), ["val_id", "test_id"], submission=tmp_path / "s.npz")
    with pytest.raises(ValueError, match=r"must end in \.npz"):
        evaluate(Path("no-run"), submission=tmp_path / "s.csv")


def error_of(words: list[str], capsys) -> str:
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("molflt: error: ")
    return lines[0]


def test_bad_input_gets_one_line(run, data, tmp_path, capsys) -> None:
    base = ["evaluate", str(run)]
    line = error_of([*base, "--splits", "val_it"], capsys)
    assert "'val_it'" in line and str(data) in line and "val_id.safetensors" in line
    line = error_of([*base, "--data", str(tmp_path / "nothing")], capsys)
    assert str(tmp_path / "nothing") in line
    line = error_of([*base, "--checkpoint", "worst.safetensors"], capsys)
    assert "worst.safetensors" in line
    line = error_of([*base, "--device", "abacus"], capsys)
    assert "device 'abacus': expected auto, cpu, cuda" in line
    line = error_of([*base, "--batch-size", "0"], capsys)
    assert "batch_size must be at least 1; got 0" in line
    line = error_of(["evaluate", str(tmp_path)], capsys)
    assert "config.yaml" in line


def test_moved_data_are_named(run, data, tmp_path, monkeypatch) -> None:
    import molflt.train

    model, saved = load_run(run)
    saved["data"]["root"] = "was/here"
    monkeypatch.setattr(molflt.train, "load_run", lambda *_: (model, saved))
    with pytest.raises(FileNotFoundError, match=r"was/here: no such folder.*--data"):
        evaluate(run, out=tmp_path, device="cpu")
    results = evaluate(run, ["val_id"], data=data, out=tmp_path, device="cpu")
    median = np.median(labels(data / "train.safetensors"))
    target = labels(data / "val_id.safetensors")
    assert results["val_id"]["baseline_mae"] == pytest.approx(np.abs(target - median).mean())


def test_no_training_split_no_baseline(run, data, tmp_path, capsys, monkeypatch) -> None:
    import molflt.train

    model, saved = load_run(run)
    saved["data"]["train_split"] = "elsewhere"
    monkeypatch.setattr(molflt.train, "load_run", lambda *_: (model, saved))
    results = evaluate(run, ["val_id"], out=tmp_path, device="cpu")
    assert results["val_id"]["baseline_mae"] is None and results["val_id"]["energy_mae"] > 0
    assert "no baseline, because" in capsys.readouterr().out


def test_bad_structures(run, tmp_path, capsys) -> None:
    """A non-finite label stops with the sid; with skip_bad it is left out and listed."""
    path = tmp_path / "data" / "val_id.safetensors"
    write_store(path, structures(6, 1, 1000))
    columns = load_file(path)
    columns["y_relaxed"][2] = torch.inf
    header = {"format": "molflt-structures", "version": "1"}
    save_file(columns, path, metadata=header)
    words = ["evaluate", str(run), "--splits", "val_id", "--data", str(path.parent)]
    words += ["--out", str(tmp_path), "--device", "cpu"]
    assert "sid 1002" in error_of(words, capsys)
    assert main([*words, "--skip-bad"]) == 0
    captured = capsys.readouterr()
    assert "1 bad structure(s) left out: 1002" in captured.err
    assert json.loads((tmp_path / "results.json").read_text())["val_id"]["n"] == 5
    columns["y_relaxed"][:] = torch.inf
    save_file(columns, path, metadata=header)
    assert main([*words, "--skip-bad"]) == 2
    assert "no structures; expected at least one; got 0 (6 left" in capsys.readouterr().err


class Broken(torch.nn.Module):
    """Fails for one structure of a batch, or forgets what a batch is."""

    def __init__(self, energies) -> None:
        super().__init__()
        self.energies = energies

    def forward(self, batch) -> dict[str, torch.Tensor]:
        return {"energy": self.energies(batch)}


def test_a_prediction_that_is_not_finite_is_refused(data) -> None:
    dataset = open_dataset(data / "val_id.safetensors")
    model = Broken(lambda batch: torch.where(batch.sid == 1004, torch.nan, 0.0))
    with pytest.raises(ValueError, match="sid 1004: the predicted energy is nan eV"):
        infer(model, dataset, 4, "cpu", "val_id")


def test_a_column_of_energies_is_refused(data) -> None:
    dataset = open_dataset(data / "val_id.safetensors")
    model = Broken(lambda batch: torch.zeros(batch.num_graphs, 1))
    with pytest.raises(ValueError, match=r"one energy per structure, \(4,\); got \(4, 1\)"):
        infer(model, dataset, 4, "cpu", "val_id")


def slabs(tags: bool = True) -> list[Atoms]:
    frames = []
    for i, (metal, adsorbate) in enumerate((("Cu", "O"), ("Pt", "H"), ("Ni", "N"))):
        atoms = fcc111(metal, (2, 2, 2 + i), vacuum=8.0, periodic=True)
        add_adsorbate(atoms, adsorbate, height=1.2, position="fcc")
        atoms.set_tags([1] * (len(atoms) - 1) + [2] if tags else [0] * len(atoms))
        atoms.set_constraint(FixAtoms(indices=range(4)))
        atoms.info["sid"] = 70 + i
        frames.append(atoms)
    return frames


@pytest.mark.parametrize("suffix", [".csv", ".json"])
def test_predict_a_table(run, tmp_path, suffix, capsys) -> None:
    write(tmp_path / "in.extxyz", slabs())
    out = tmp_path / "new" / f"out{suffix}"
    words = ["predict", str(run), str(tmp_path / "in.extxyz"), "--out", str(out)]
    assert main([*words, "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    assert "3 energies" in captured.out
    # all else about these structures is fine, so this is the only line
    assert "in.extxyz: N, Ni did not occur in training" in captured.err
    assert len(captured.err.splitlines()) == 1
    if suffix == ".csv":
        with open(out, newline="") as file:
            rows = list(csv.DictReader(file))
    else:
        rows = json.loads(out.read_text())
    assert [(int(row["index"]), int(row["sid"])) for row in rows] == [(0, 70), (1, 71), (2, 72)]
    assert [row["formula"] for row in rows] == ["Cu8O", "HPt12", "NNi16"]
    assert [int(row["natoms"]) for row in rows] == [9, 13, 17]
    energy = [float(row["energy_eV"]) for row in rows]
    np.testing.assert_allclose(energy, alone(run, tmp_path / "in.extxyz"), atol=1e-5)


@pytest.mark.parametrize("suffix", [".extxyz", ".traj"])
def test_predict_structures(run, tmp_path, suffix) -> None:
    frames = slabs()
    write(tmp_path / "in.traj", frames)
    out = tmp_path / f"out{suffix}"
    predict(run, tmp_path / "in.traj", out=out, device="cpu")
    written = read(out, ":")
    assert len(written) == 3
    energy = [atoms.get_potential_energy() for atoms in written]
    np.testing.assert_allclose(energy, alone(run, tmp_path / "in.traj"), atol=1e-5)
    for old, new in zip(frames, written, strict=True):
        np.testing.assert_allclose(old.positions, new.positions, atol=1e-5)
        np.testing.assert_allclose(old.cell.array, new.cell.array, atol=1e-5)
        assert (old.numbers == new.numbers).all() and (old.get_tags() == new.get_tags()).all()
        assert (new.constraints[0].get_indices() == np.arange(4)).all()
        assert new.info["sid"] == old.info["sid"]
    assert {path.name for path in tmp_path.iterdir()} == {"in.traj", out.name}


def test_predict_without_tags_says_so(run, tmp_path, capsys, recwarn) -> None:
    write(tmp_path / "in.extxyz", slabs(tags=False)[:2] + slabs()[2:])
    predict(run, tmp_path / "in.extxyz", out=tmp_path / "out.csv", batch_size=1, device="cpu")
    err = capsys.readouterr().err
    assert "2 of 3 structures have no atom with a tag above 0" in err
    assert "sum over all atoms" in err
    assert not [w for w in recwarn if "tag > 0" in str(w.message)]  # once, not per batch


def test_predict_refuses_bad_input(run, tmp_path, capsys) -> None:
    line = error_of(["predict", str(run), "x.xyz", "--out", "energies.txt"], capsys)
    assert "energies.txt: expected a name that ends in .csv, .json" in line
    line = error_of(["predict", str(run), str(tmp_path / "no.xyz"), "--out", "e.csv"], capsys)
    assert "no.xyz" in line
    line = error_of(["predict", str(run), str(tmp_path / "no.xyz")], capsys)
    assert "out" in line
