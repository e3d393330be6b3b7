import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from ase.data import atomic_numbers
from ase.io import read
from sklearn.metrics import roc_auc_score
from tiny_run import alone, error_of, printed, table

from molflt.commands.cli import main
from molflt.commands.evaluate import evaluate
from molflt.data.structures import open_dataset
from molflt.data.structures.store import write_store
from molflt.evaluation.calibration import LEVEL, Calibration, conformal_factor, is_set_aside

pytestmark = pytest.mark.usefixtures("undrawn")
SMALL = "val_ood_both"


@pytest.fixture(scope="module")
def runs(energy_runs: list[Path]) -> list[Path]:
    return energy_runs


@pytest.fixture(scope="module")
def evaluated(runs, tmp_path_factory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("out")
    splits = ["val_id", SMALL, "test_id"]
    options = {"splits": splits, "out": out, "device": "cpu", "batch_size": 8}
    return out, evaluate(runs[0], also=runs[1:], **options)


def energies(runs: list[Path], path: Path) -> np.ndarray:
    return np.array([alone(run, path) for run in runs]).T


def test_results_match_an_independent_computation(evaluated, runs, energy_data) -> None:
    out, results = evaluated
    assert json.loads((out / "results.json").read_text()) == results
    kept = json.loads((out / "uncertainty.json").read_text())
    assert kept["split"] == "val_id" and len(kept["members"]) == len(runs)
    for split in ("val_id", SMALL):
        path = energy_data / f"{split}.safetensors"
        by_run, target = energies(runs, path), open_dataset(path).y_relaxed
        error, spread = np.abs(by_run.mean(1) - target), by_run.std(1, ddof=1)
        uncertainty = kept["factor"] * np.sqrt(spread**2 + kept["floor_eV"] ** 2)
        rows = [row for row in table(out / "predictions.csv") if row["split"] == split]
        sids = np.array([int(row["sid"]) for row in rows])
        rest = ~is_set_aside(sids) if split == "val_id" else np.full(len(sids), True)
        for name, values in (
            ("energy_eV", by_run.mean(1)),
            ("spread_eV", spread),
            ("uncertainty_eV", uncertainty),
        ):
            np.testing.assert_allclose([float(row[name]) for row in rows], values, atol=1e-5)
        row = results[split]
        assert row["n"] == len(target) and row["coverage_n"] == rest.sum()
        assert row["mae_eV"] == pytest.approx(error.mean(), abs=1e-5)
        assert row["member_mae_eV"] == pytest.approx(np.abs(by_run - target[:, None]).mean(), 1e-4)
        inside = 100 * (error <= uncertainty)[rest].mean()
        assert row["coverage_percent"] == pytest.approx(inside)
        assert row["coverage_se_percent"] == pytest.approx(100 * (0.68 * 0.32 / rest.sum()) ** 0.5)
        assert row["uncertainty_eV"] == pytest.approx(uncertainty.mean(), rel=1e-4)
    aside = is_set_aside(np.arange(1000, 1060))
    assert kept["systems"] == aside.sum() and 20 <= aside.sum() <= 40
    nothing = results["test_id"]
    assert nothing["uncertainty_eV"] > 0 and nothing["coverage_percent"] is None


def test_calibration_covers_the_systems_set_aside(evaluated) -> None:
    out, _ = evaluated
    part = [row for row in table(out / "predictions.csv") if row["split"] == "val_id"]
    aside = is_set_aside(np.array([int(row["sid"]) for row in part]))
    ratio = [abs(float(r["error_eV"])) / float(r["uncertainty_eV"]) for r in part]
    held = np.array(ratio) <= 1 + 1e-6  # the error of one system is the end of its interval
    assert held[aside].sum() == np.ceil((aside.sum() + 1) * 0.68)
    columns = [[float(row[name]) for row in part] for name in ("error_eV", "spread_eV")]
    error, spread = np.abs(columns[0]), np.array(columns[1])
    crossed = [
        error[~half]
        <= Calibration.fit(error[half], spread[half], "s", ()).uncertainty(spread[~half])
        for half in (aside, ~aside)
    ]
    found = evaluated[1]["val_id"]["coverage_crossed_percent"]
    assert found == pytest.approx(100 * np.concatenate(crossed).mean())
    assert evaluated[1][SMALL]["coverage_crossed_percent"] is None


def test_new_elements_have_their_own_calibration(runs, energy_data, tmp_path, capsys) -> None:
    """Two thirds of the systems contain one of two new elements."""
    records = [one.clone() for one in list(open_dataset(energy_data / "val_id.safetensors")) * 2]
    new = np.array(["", "Rh", "Os"] * 40)
    for number, (record, kind) in enumerate(zip(records, new, strict=True)):
        record.sid = number
        if kind:
            record.atomic_numbers[:2] = atomic_numbers[kind]
            record.y_relaxed = record.y_relaxed + (1 if kind == "Rh" else 3)
    write_store(tmp_path / "new.safetensors", records)
    options = {"out": tmp_path / "out", "device": "cpu", "also": runs[1:]}
    (row,) = evaluate(runs[0], **options, data=tmp_path / "new.safetensors").values()
    kept = Calibration.read(tmp_path / "out" / "uncertainty.json")
    rows = table(tmp_path / "out" / "predictions.csv")
    error, spread = (np.abs([float(r[key]) for r in rows]) for key in ("error_eV", "spread_eV"))
    fitted = {
        kind: Calibration.fit(error[new == kind], spread[new == kind], "s", ())
        for kind in ("Rh", "Os")
    }
    both = Calibration.fit(error[new != ""], spread[new != ""], "s", ())
    assert kept.new.factor == pytest.approx(both.factor, rel=1e-3) and kept.new.systems == 80
    width = [float(r["uncertainty_eV"]) for r in rows]
    np.testing.assert_allclose(width, kept.uncertainty(spread, new != ""), rtol=1e-4)
    width = kept.uncertainty(spread)
    width[new == "Rh"] = fitted["Os"].uncertainty(spread[new == "Rh"])
    width[new == "Os"] = fitted["Rh"].uncertainty(spread[new == "Os"])
    inside = error <= width
    judged = ~is_set_aside(np.arange(len(new))) | (new != "")
    assert row["coverage_n"] == judged.sum()
    assert row["coverage_percent"] == pytest.approx(100 * inside[judged].mean(), abs=1)
    told = [float(x) for x in re.findall(r"(?:error|curve of) (\d\.\d\d)", capsys.readouterr().out)]
    bins = np.array_split(np.argsort(width[judged]), 10)
    expected, found = ([np.mean(x[judged][b] ** 2) ** 0.5 for b in bins] for x in (width, error))
    area = roc_auc_score(new[judged] != "", width[judged])
    assert told == pytest.approx([np.mean(np.abs(1 - np.divide(found, expected))), area], abs=0.01)


def test_the_training_split_calibrates_only_on_request(runs, energy_data, tmp_path, capsys) -> None:
    options = {"out": tmp_path, "device": "cpu", "also": runs[1:]}
    kept = tmp_path / "uncertainty.json"
    found = evaluate(runs[0], splits=["train"], **options)["train"]
    told = capsys.readouterr()
    assert "train, the training split" in told.err and told.out.count("spread / eV") == 1
    assert "coverage" not in told.out
    assert found["spread_eV"] > 0 and found["uncertainty_eV"] is None and not kept.exists()
    evaluate(runs[0], splits=[SMALL, "train"], calibration_split="train", **options)
    assert Calibration.read(kept).split == "train"
    other = shutil.copy(energy_data / "val_id.safetensors", tmp_path / "train.safetensors")
    found = evaluate(runs[0], data=other, **options)["train"]  # of other data
    assert found["coverage_percent"] is not None


def test_a_split_that_some_members_learned_is_refused(runs, energy_data, tmp_path, capsys) -> None:
    other = Path(shutil.copytree(runs[1], tmp_path / "other"))
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.replace("train_split: train", "train_split: val_id"))
    words = ["evaluate", str(runs[0]), "--out", str(tmp_path / "out"), "--also", str(other)]
    for more, run, split in (
        ([], other, "val_id"),
        (["--data", str(energy_data / "val_id.safetensors")], other, "val_id"),
        (["--splits", "val_ood_ads", "train"], runs[0], "train"),
    ):
        line = error_of(capsys, *words, *more)
        assert str(run) in line and f"{split} of {energy_data}" in line
    assert not (tmp_path / "out").exists()
    assert main([*words, "--splits", SMALL, "--device", "cpu"]) == 0


def test_predict_writes_spread_and_uncertainty(evaluated, runs, energy_data, tmp_path, capsys):
    calibration = Calibration.read(evaluated[0] / "uncertainty.json")
    source = energy_data / f"{SMALL}.safetensors"
    spread = energies(runs, source).std(1, ddof=1)
    also = ["--also", str(runs[2]), str(runs[1]), "--device", "cpu"]  # in another order
    words = ["predict", str(runs[0]), str(source), *also]
    for suffix in (".json", ".extxyz"):
        out = tmp_path / f"out{suffix}"
        file = str(evaluated[0] / "uncertainty.json")
        captured = printed(capsys, *words, "--out", out, "--calibration", file)
        assert "uncertainty_eV" in captured.out and not captured.err
        if suffix == ".extxyz":
            rows = [atoms.info for atoms in read(out, ":")]
        else:
            rows = json.loads(out.read_text())
            assert list(rows[0])[-3:] == ["energy_eV", "spread_eV", "uncertainty_eV"]
        for name, values in {
            "spread_eV": spread,
            "uncertainty_eV": calibration.uncertainty(spread),
        }.items():
            np.testing.assert_allclose([float(row[name]) for row in rows], values, atol=1e-5)
    printed(capsys, "predict", str(runs[0]), out, "--out", tmp_path / "one.extxyz")
    assert read(tmp_path / "one.extxyz").info.keys() == {"sid"}  # without those of the ensemble


def test_predict_without_a_calibration_warns(evaluated, runs, energy_data, tmp_path, capsys):
    copy = Path(shutil.copytree(runs[0], tmp_path / "copy"))
    source, out = str(energy_data / f"{SMALL}.safetensors"), tmp_path / "out.csv"
    words = ["predict", str(copy), source, "--out", str(out), "--device", "cpu", "--also"]
    # the calibration of other runs is ignored with a warning, and refused if it is named
    kept = copy / "ensemble" / "uncertainty.json"
    kept.parent.mkdir()
    shutil.copy(evaluated[0] / "uncertainty.json", kept)
    err = printed(capsys, *words, runs[1]).err
    assert "belongs to other weights" in err and "spread_eV" in err
    assert "uncertainty_eV" not in table(out)[0]
    line = error_of(capsys, *words, runs[1], "--calibration", kept)
    assert "other weights, of 3 members; expected the 2 members" in line


def test_bad_members_get_one_line(runs, tmp_path, capsys) -> None:
    one, two = str(runs[0]), str(runs[1])
    twin = shutil.copytree(runs[0], tmp_path / "twin")
    for words, parts in (
        (["--also", two, f"{one}/../{runs[0].name}"], ["has the same weights as"]),
        (["--also", str(twin)], [f"{twin}: has the same weights as {one}"]),
        (["--also", two, "--splits", "test_id", "--calibration-split", "val_id"],
         ["--calibration-split val_id", "test_id"]),
        (["--calibration_split", "val_id"], ["--also"]),
    ):  # fmt: skip
        line = error_of(capsys, "evaluate", one, *words, "--out", str(tmp_path / "out"))
        assert all(part in line for part in parts), line
    assert not (tmp_path / "out").exists()


# --- calibration ----------------------------------------------------------------------------------


NEW = 5000
MEMBERS = ("a" * 64, "b" * 64)


def drawn(kind: str, n: int, seed: int, follows: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Draws errors (eV) of varying scale, and predictions of four members with half the scale."""
    draw = np.random.default_rng(seed)
    size = np.exp(draw.normal(-2.5, 0.7, n)) if follows else np.full(n, 0.1)
    unit = draw.normal(size=n) if kind == "normal" else draw.laplace(size=n)
    spread = (0.5 * size[:, None] * draw.normal(size=(n, 4))).std(axis=1, ddof=1)
    return size * unit, spread


def coverage(calibration: Calibration, error: np.ndarray, spread: np.ndarray) -> float:
    return float((np.abs(error) <= calibration.uncertainty(spread)).mean())


@pytest.mark.parametrize("kind", ["normal", "laplace"])
@pytest.mark.parametrize("follows", [True, False])
def test_new_errors_are_covered(kind: str, follows: bool) -> None:
    calibration = Calibration.fit(*drawn(kind, 2000, 0, follows), "val_id", MEMBERS)
    error, spread = drawn(kind, NEW, 1, follows)
    assert coverage(calibration, error, spread) == pytest.approx(LEVEL, abs=0.03)
    uncertainty = calibration.uncertainty(spread)
    if follows:  # also among small and large uncertainties
        for part in np.array_split(np.argsort(uncertainty), 3):
            assert coverage(calibration, error[part], spread[part]) == pytest.approx(LEVEL, abs=0.1)
        assert uncertainty.max() > 5 * uncertainty.min()
    else:  # an uninformative spread has no effect
        assert np.quantile(uncertainty, 0.99) < 1.2 * np.quantile(uncertainty, 0.01)


def test_the_factor_has_the_rank_of_the_theorem() -> None:
    for n in range(20, 1000):
        assert conformal_factor(np.arange(1.0, n + 1)) == -(-(n + 1) * 68 // 100)


@pytest.mark.parametrize(("n", "off"), [(20, 0.05), (60, 0.03)])
def test_small_sets_calibrate_on_average(n: int, off: float) -> None:
    """Choosing the floor on the same systems as the factor keeps the coverage."""
    found = []
    for seed in range(100):
        calibration = Calibration.fit(*drawn("laplace", n, seed), "s", MEMBERS)
        found.append(coverage(calibration, *drawn("laplace", 300, seed + 5000)))
    assert np.mean(found) == pytest.approx(LEVEL, abs=off)
