"""The submission to OC20's IS2RE leaderboard: ids and energies of four test splits in one npz."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from molflt.data.structures.splits import OC20_FILES, TEST_SPLITS, VAL_SPLITS
from molflt.files import write_atomically

__all__ = ["expect_count", "is_trial", "submission_splits", "write_submission"]

_SPLITS = ("id", "ood_ads", "ood_cat", "ood_both")  # in the file, without the prefix test_

_Predictions = Mapping[str, tuple[Sequence[str] | NDArray[np.str_], ArrayLike]]


def submission_splits(path: Path, splits: Sequence[str]) -> dict[str, str]:
    """Maps splits of the leaderboard to splits of the data set."""
    _check_name(path)
    for group in (TEST_SPLITS, VAL_SPLITS):
        if set(splits) == set(group):
            return dict(zip(_SPLITS, group, strict=True))
    raise ValueError(
        f"{path}: a submission needs --splits {' '.join(TEST_SPLITS)} (or, for a trial, the four "
        f"val_ splits); got {' '.join(splits) or 'none'}"
    )


def is_trial(names: Mapping[str, str]) -> bool:
    """Returns True if splits of `submission_splits` are not test splits."""
    return not set(names.values()) <= set(TEST_SPLITS)


def write_submission(path: Path, predictions: _Predictions, *, any_counts: bool = False) -> None:
    """Checks predictions and writes the file for the leaderboard.

    Args:
        path: file to write, ending in .npz.
        predictions: (ids, energies in eV) of "id", "ood_ads", "ood_cat" and "ood_both".
        any_counts: accept other numbers of systems than OC20's, which the leaderboard rejects.
    """
    path = Path(path)
    _check_name(path)
    if set(predictions) != set(_SPLITS):
        raise ValueError(
            f"a submission needs exactly the splits {', '.join(_SPLITS)}; got "
            f"{', '.join(predictions) or 'none'}"
        )
    arrays: dict[str, NDArray[np.generic]] = {}
    for split in _SPLITS:
        ids, energy = (np.asarray(values) for values in predictions[split])
        _check_ids(split, ids)
        _check_energy(split, energy, len(ids))
        expect_count(split, len(ids), any_counts=any_counts)
        arrays[f"{split}_ids"] = ids
        arrays[f"{split}_energy"] = energy
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    write_atomically(path, buffer.getvalue())


def expect_count(split: str, count: int, *, any_counts: bool) -> None:
    """Raises ValueError for another number of systems than that of OC20's test split."""
    expected = OC20_FILES[f"all/test_{split}"].records
    if count != expected and not any_counts:
        raise ValueError(
            f"submission: split {split!r} must have the {expected} systems of OC20's "
            f"test_{split}; got {count}; predict the whole split"
        )


def _check_name(path: Path) -> None:
    if path.suffix != ".npz":
        raise ValueError(f"{path}: a submission must end in .npz; got {path.suffix!r}")


def _check_ids(split: str, ids: NDArray[np.generic]) -> None:
    if ids.ndim != 1 or ids.dtype.kind != "U":
        raise ValueError(
            f"submission: ids of split {split!r} must be strings of shape (systems,); got "
            f"{ids.dtype} {ids.shape}; convert each sid with str()"
        )
    values, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        raise ValueError(
            f"submission: ids of split {split!r} must be unique; got {values[counts > 1][0]} "
            f"{counts.max()} times; {int((counts > 1).sum())} ids are repeated"
        )


def _check_energy(split: str, energy: NDArray[np.generic], systems: int) -> None:
    if energy.dtype not in (np.float32, np.float64):
        # float16, the default of ocp, is off by up to 0.006 eV on real predictions
        raise ValueError(
            f"submission: energies of split {split!r} must be float64 or float32; got "
            f"{energy.dtype}"
        )
    if energy.shape != (systems,):
        raise ValueError(
            f"submission: split {split!r} must have one energy per id, shape ({systems},); got "
            f"{energy.shape}"
        )
    bad = np.flatnonzero(~np.isfinite(energy.astype(np.float64)))
    if len(bad):
        raise ValueError(
            f"submission: energies of split {split!r} must be finite; got {energy[bad[0]]} at "
            f"index {bad[0]}, {len(bad)} in all"
        )
