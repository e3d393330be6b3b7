"""Relaxed structures predicted by the position head, compared with the labels: IS2RS."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from tqdm import tqdm

from molflt.data.batches import SizeBucketedBatchSampler
from molflt.data.structures import Structures
from molflt.data.structures.base import to_atoms
from molflt.evaluation.output import Results, results_table
from molflt.files import atomically

if TYPE_CHECKING:
    from torch_geometric.data import Data

__all__ = ["adwt", "position_error", "write_relaxed"]

_Numbers = NDArray[np.float64]
_THRESHOLDS = np.arange(0.01, 0.5, 0.001)  # Å, as in OC20's evaluator
_COLUMNS = {
    "adwt_percent": ("ADwT / %", 3),
    "initial_adwt_percent": ("ADwT of initial positions / %", 3),
    "position_error_A": ("position error / Å", 3),
}


def adwt(distances: _Numbers) -> float:
    """Computes OC20's average distance within threshold (arXiv:2010.09990, section 4.2), percent.

    It is the share of structures whose mean distance of atoms from their relaxed positions is below
    a threshold, averaged over thresholds from 0.01 to 0.5 Å.

    Args:
        distances: mean distance of each structure, (structures,), Å.
    """
    return 100.0 * float((distances[:, None] < _THRESHOLDS).mean())


def position_error(pos: NDArray[np.floating], record: Data) -> float:
    """Returns the mean distance of free atoms from their relaxed positions, by minimum image, Å.

    Args:
        pos: (N, 3), Å.
        record: structure; the result is NaN without relaxed positions or without free atoms.
    """
    from ase.geometry import find_mic

    free = ~record.fixed.numpy()
    offset = (record.pos_relaxed.numpy() - pos)[free]
    if not len(offset) or not np.isfinite(offset).all():
        return float("nan")
    lengths = find_mic(offset, record.cell[0].numpy(), record.pbc[0].numpy())[1]
    return float(lengths.mean())


def write_relaxed(
    model: nn.Module, datasets: Mapping[str, Structures], folder: Path | None, batch_size: int
) -> tuple[Results, str]:
    """Writes FOLDER/SPLIT.extxyz with the structures that the position head predicts.

    Returns:
        Per split adwt_percent, initial_adwt_percent (of the initial positions) and
        position_error_A, None without relaxed positions; and a table of them.
    """
    from ase.io import write

    rows: Results = {}
    if folder is None:
        return rows, ""
    for split, dataset in datasets.items():
        errors, start = np.empty(len(dataset)), np.empty(len(dataset))
        frames = {}
        for index, pos in _displaced(model, dataset, batch_size, split):
            record = dataset[index]
            frames[index] = to_atoms(record)
            frames[index].set_positions(pos, apply_constraint=False)
            errors[index] = position_error(pos, record)
            start[index] = position_error(record.pos.numpy(), record)
        with atomically(folder / f"{split}.extxyz") as file:
            write(str(file), [frames[index] for index in sorted(frames)], format="extxyz")
        known = np.isfinite(errors)
        rows[split] = dict.fromkeys(_COLUMNS)
        if known.any():
            found = adwt(errors[known]), adwt(start[known]), float(errors[known].mean())
            rows[split] = dict(zip(_COLUMNS, found, strict=True))
    table = results_table("split", _COLUMNS, rows)
    return rows, f"relaxed structures by the position head\n{table}"


def _displaced(
    model: nn.Module, dataset: Structures, batch_size: int, name: str
) -> list[tuple[int, NDArray[np.float32]]]:
    """Returns the index and the predicted positions (N, 3), Å, of each structure."""
    from torch_geometric.data import Batch

    device = next(iter(model.state_dict().values()), torch.empty(0)).device
    found: list[tuple[int, NDArray[np.float32]]] = []
    bar = tqdm(total=len(dataset), desc=name, unit=" systems", leave=False, disable=None)
    with bar, torch.inference_mode():
        for indices in SizeBucketedBatchSampler(dataset.natoms, batch_size):
            batch = Batch.from_data_list([dataset[i] for i in indices]).to(device)
            out = model(batch)
            if "displacement" not in out:
                raise ValueError(
                    "--relaxed needs a model with a position head; train with "
                    "--model.position_head true, or omit --relaxed"
                )
            pos = (batch.pos + out["displacement"] * ~batch.fixed[:, None]).cpu()
            parts = pos.split(batch.ptr.diff().tolist())
            found += [(i, part.numpy()) for i, part in zip(indices, parts, strict=True)]
            bar.update(len(indices))
    return found
