"""The file for the OC20 leaderboard; its refusals are in refusals/evaluation.py."""

from pathlib import Path

import numpy as np
import pytest

from molflt.data.structures.splits import OC20_FILES
from molflt.evaluation.energies import write_submission

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data" / "oc20"
REAL = SHARED / "ocp_predictions" / "is2re_10k_test_evalai_submission.npz"
SUBMISSION_SPLITS = ("id", "ood_ads", "ood_cat", "ood_both")


def full() -> dict:
    return {
        split: (np.arange(n).astype(str), np.linspace(-3.0, 1.0, n))
        for split in SUBMISSION_SPLITS
        for n in [OC20_FILES[f"all/test_{split}"].records]
    }


def test_full_submission_has_the_arrays_of_the_leaderboard(tmp_path: Path) -> None:
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


def test_real_submission_is_written_unchanged(tmp_path: Path) -> None:
    if not REAL.is_file():
        pytest.skip(f"{REAL} is missing")
    with np.load(REAL, allow_pickle=False) as file:
        real = {s: (file[f"{s}_ids"], file[f"{s}_energy"]) for s in SUBMISSION_SPLITS}
    write_submission(tmp_path / "again.npz", real)
    with np.load(REAL) as old, np.load(tmp_path / "again.npz") as new:
        assert sorted(old.files) == sorted(new.files)
        for name in old.files:
            assert old[name].dtype == new[name].dtype
            np.testing.assert_array_equal(old[name], new[name])
