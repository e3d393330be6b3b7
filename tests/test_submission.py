"""The leaderboard file: like a real one, and what is refused before anything is written."""

from pathlib import Path

import numpy as np
import pytest

from molflt.data.splits import OC20_FILES
from molflt.evaluation.submission import (
    SUBMISSION_SPLITS,
    check_submission,
    read_submission,
    write_submission,
)

REAL = (
    Path(__file__).resolve().parents[2]
    / "shared/data/oc20/ocp_predictions/is2re_10k_test_evalai_submission.npz"
)


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
    write_submission(path, full())
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
    real = read_submission(REAL)
    write_submission(tmp_path / "again.npz", real)
    with np.load(REAL) as old, np.load(tmp_path / "again.npz") as new:
        assert sorted(old.files) == sorted(new.files)
        for name in old.files:
            assert old[name].dtype == new[name].dtype
            np.testing.assert_array_equal(old[name], new[name])


def test_other_counts_need_the_flag() -> None:
    with pytest.raises(ValueError, match=r"'id' must have the 24948 systems.*got 5"):
        check_submission(small())
    assert len(check_submission(small(), any_counts=True)) == 8


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
        write_submission(path, broken(change), any_counts=True)
    assert path.read_bytes() == b"the one before"
    assert [p.name for p in tmp_path.iterdir()] == ["submission.npz"]


def test_splits_are_exactly_four(tmp_path: Path) -> None:
    predictions = small()
    del predictions["ood_ads"]
    with pytest.raises(ValueError, match="exactly the splits id, ood_ads"):
        check_submission(predictions, any_counts=True)
    predictions = {f"test_{split}": value for split, value in small().items()}
    with pytest.raises(ValueError, match="got test_id"):
        check_submission(predictions, any_counts=True)


def test_name_must_be_npz(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in \.npz; got '.json'"):
        write_submission(tmp_path / "a.json", small(), any_counts=True)


def test_reading_refuses_pickles_and_other_files(tmp_path: Path) -> None:
    objects = {
        f"{split}_{part}": np.zeros(2) for split in SUBMISSION_SPLITS for part in ("energy",)
    }
    objects |= {f"{split}_ids": np.array([{}, []], dtype=object) for split in SUBMISSION_SPLITS}
    np.savez(tmp_path / "objects.npz", **objects)
    with pytest.raises(ValueError, match=r"objects\.npz: not a complete leaderboard file"):
        read_submission(tmp_path / "objects.npz")
    np.savez(tmp_path / "part.npz", id_ids=np.array(["1"]), id_energy=np.zeros(1))
    with pytest.raises(ValueError, match="lacks the keys ood_ads_ids"):
        read_submission(tmp_path / "part.npz")
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(ValueError, match=r"text\.npz: not a complete"):
        read_submission(tmp_path / "text.npz")
    with pytest.raises(FileNotFoundError):
        read_submission(tmp_path / "nothing.npz")
