"""The leaderboard file of OC20's IS2RE task: one npz with ids and energies of four test splits."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from molflt.data.splits import OC20_FILES
from molflt.files import write_atomically

__all__ = ["SUBMISSION_SPLITS", "check_submission", "read_submission", "write_submission"]

SUBMISSION_SPLITS = ("id", "ood_ads", "ood_cat", "ood_both")
"""Names in the file; the leaderboard writes them without the prefix test_."""

Predictions = Mapping[str, tuple[Sequence[str] | NDArray[np.str_], ArrayLike]]


def write_submission(path: Path, predictions: Predictions, *, any_counts: bool = False) -> None:
    """Checks predictions and writes the leaderboard file; it appears complete or not at all.

    Args:
        path: file to write, ending in .npz.
        predictions: (ids, energies in eV) of "id", "ood_ads", "ood_cat" and "ood_both".
        any_counts: accept other numbers of systems than OC20's test splits have; such a file has
            the right form, but the leaderboard refuses it.

    Raises:
        ValueError: as :func:`check_submission`, or if the name does not end in .npz.
        OSError: if the file cannot be written.
    """
    path = Path(path)
    check_submission_name(path)
    arrays = check_submission(predictions, any_counts=any_counts)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    write_atomically(path, buffer.getvalue())


def check_submission_name(path: Path) -> None:
    """Refuses a file name that the leaderboard would not take.

    Raises:
        ValueError: if it does not end in .npz.
    """
    if path.suffix != ".npz":
        raise ValueError(f"{path}: a submission must end in .npz; got {path.suffix!r}")


def check_submission(
    predictions: Predictions, *, any_counts: bool = False
) -> dict[str, NDArray[np.generic]]:
    """Checks predictions against what the leaderboard wants.

    Args:
        predictions: as in :func:`write_submission`.
        any_counts: as in :func:`write_submission`.

    Returns:
        The arrays of the file: {split}_ids, strings, and {split}_energy, float32 or float64, eV.

    Raises:
        ValueError: if a split is missing or unknown, or in one the lengths differ, the number of
            systems is not OC20's, an id is repeated or no string, or an energy is not finite or
            of lower precision than float32.
    """
    missing = [split for split in SUBMISSION_SPLITS if split not in predictions]
    surplus = [split for split in predictions if split not in SUBMISSION_SPLITS]
    if missing or surplus:
        raise ValueError(
            f"a submission needs exactly the splits {', '.join(SUBMISSION_SPLITS)}; got "
            f"{', '.join(predictions) or 'none'}"
        )
    arrays: dict[str, NDArray[np.generic]] = {}
    for split in SUBMISSION_SPLITS:
        ids, energy = (np.asarray(values) for values in predictions[split])
        _check_ids(split, ids)
        _check_energy(split, energy, len(ids))
        expected = OC20_FILES[f"all/test_{split}"].records
        if len(ids) != expected and not any_counts:
            raise ValueError(
                f"submission: split {split!r} must have the {expected} systems of OC20's "
                f"test_{split}; got {len(ids)}; predict the whole split"
            )
        arrays[f"{split}_ids"] = ids
        arrays[f"{split}_energy"] = energy
    return arrays


def read_submission(path: Path) -> dict[str, tuple[NDArray[np.str_], NDArray[np.floating]]]:
    """Reads a leaderboard file without unpickling anything.

    Args:
        path: an npz file.

    Returns:
        Per split, ids (systems,) and energies (systems,), eV.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no npz file, holds Python objects, or lacks a split.
    """
    names = [f"{split}_{part}" for split in SUBMISSION_SPLITS for part in ("ids", "energy")]
    try:
        with np.load(path, allow_pickle=False) as file:
            absent = [name for name in names if name not in file.files]
            if absent:
                raise ValueError(f"lacks the keys {', '.join(absent)}")
            arrays = {name: file[name] for name in names}
    except (ValueError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path}: not a complete leaderboard file: {error}") from None
    return {
        split: (arrays[f"{split}_ids"], arrays[f"{split}_energy"]) for split in SUBMISSION_SPLITS
    }


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
        # float16, which ocp wrote by default, is off by up to 0.006 eV on real predictions
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
