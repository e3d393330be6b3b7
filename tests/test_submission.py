"""The leaderboard file: like a real one, and what is refused before anything is written."""

from pathlib import Path

import numpy as np
import pytest

from molflt.data.structures.splits import OC20_FILES
from molflt.evaluation.submission import _submission_names, _write_submission

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data" / "oc20"
REAL = SHARED / "ocp_predictions" / "is2re_10k_test_evalai_submission.npz"
SUBMISSION_SPLITS = ("id", "ood_ads", "ood_cat", "ood_both")


def small(count: int = 5) -> dict:
    return {
        split: (np.arange(100 * i, 100 * i + count).astype(str), np.linspace(-3.0, 1.0, count))
        for i, split in enumerate(SUBMISSION_SPLITS)
    }


def full() -> dict:
    return {
        split: (np.arange(n).astype(str), np.linspace(-3.0, 1.0, n))
        for split in SUBMISSION_SPLITS
        for n in [OC20_FILES[f"all/test_{split}"].records]
    }


def test_a_full_submission_is_what_the_leaderboard_reads(tmp_path: Path) -> None:
    path = tmp_path / "new" / "submission.npz"
    _write_submission(path, full())
    with np.load(path, allow_pickle=False) as file:
        assert sorted(file.files) == sorted(
            f"{split}_{part}" for split in SUBMISSION_SPLITS for part in ("ids", "energy")
        )
        assert len(file["ood_both_ids"]) == 24985
        assert file["ood_both_energy"].dtype == np.float64
        assert file["id_ids"].dtype.kind == "U"
    assert [p.name for p in path.parent.iterdir()] == ["submission.npz"]


def test_a_real_submission_passes_and_survives(tmp_path: Path) -> None:
    if not REAL.is_file():
        pytest.skip(f"{REAL} is not there")
    with np.load(REAL, allow_pickle=False) as file:
        real = {s: (file[f"{s}_ids"], file[f"{s}_energy"]) for s in SUBMISSION_SPLITS}
    _write_submission(tmp_path / "again.npz", real)
    with np.load(REAL) as old, np.load(tmp_path / "again.npz") as new:
        assert sorted(old.files) == sorted(new.files)
        for name in old.files:
            assert old[name].dtype == new[name].dtype
            np.testing.assert_array_equal(old[name], new[name])


def test_other_counts_need_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'id' must have the 24948 systems.*got 5"):
        _write_submission(tmp_path / "submission.npz", small())
    _write_submission(tmp_path / "submission.npz", small(), any_counts=True)


def broken(change) -> dict:
    predictions = small()
    ids, energy = predictions["ood_cat"]
    predictions["ood_cat"] = change(ids.copy(), energy.copy())
    return predictions


BAD = {
    "repeated id": (lambda i, e: (np.append(i[:-1], i[0]), e), "must be unique; got 200 2 times"),
    "integer ids": (lambda i, e: (i.astype(int), e), "must be strings"),
    "object ids": (lambda i, e: (i.astype(object), e), "must be strings"),
    "integer energies": (lambda i, e: (i, e.astype(int)), "must be float64 or float32; got int64"),
    "half precision": (lambda i, e: (i, e.astype(np.float16)), "got float16"),
    "not finite": (lambda i, e: (i, np.where(e > 0, np.nan, e)), "must be finite; got nan"),
    "lengths": (lambda i, e: (i, e[:-1]), r"one energy per id, shape \(5,\); got \(4,\)"),
    "column": (lambda i, e: (i, e[:, None]), r"got \(5, 1\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_predictions_are_refused_before_writing(tmp_path: Path, name: str) -> None:
    change, message = BAD[name]
    path = tmp_path / "submission.npz"
    path.write_bytes(b"the one before")
    with pytest.raises(ValueError, match=message):
        _write_submission(path, broken(change), any_counts=True)
    assert path.read_bytes() == b"the one before"
    assert [p.name for p in tmp_path.iterdir()] == ["submission.npz"]


def test_other_splits_and_names_are_refused(tmp_path: Path) -> None:
    three = {split: value for split, value in small().items() if split != "ood_ads"}
    others = {f"test_{split}": value for split, value in small().items()}
    for name, predictions, message in (
        ("a.npz", three, "exactly the splits id, ood_ads"),
        ("a.npz", others, "got test_id"),
        ("a.json", small(), r"must end in \.npz; got '.json'"),
    ):
        with pytest.raises(ValueError, match=message):
            _write_submission(tmp_path / name, predictions, any_counts=True)
    with pytest.raises(ValueError, match=r"must end in \.npz; got '.json'"):
        _submission_names(tmp_path / "a.json", [])
