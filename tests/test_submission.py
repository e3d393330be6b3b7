"""The file for the OC20 leaderboard; its refusals are in refusals/evaluation.py."""

from pathlib import Path

import numpy as np

from molflt.data.structures.splits import OC20_FILES
from molflt.evaluation.energies import write_submission

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
