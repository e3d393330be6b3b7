"""Relaxed structures from the position head, beside those of the labels: IS2RS."""

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
from molflt.evaluation.report import align
from molflt.files import atomically

if TYPE_CHECKING:
    from torch_geometric.data import Data

__all__ = ["adwt", "position_error"]

_Numbers = NDArray[np.float64]
_THRESHOLDS = np.arange(0.01, 0.5, 0.001)  # Å, of OC20's evaluator


def adwt(distances: _Numbers) -> float:
    """OC20's average distance within threshold (arXiv:2010.09990, section 4.2), percent.

    The share of structures whose mean distance of atoms from where they belong is below a
    threshold, averaged over thresholds from 0.01 to 0.5 Å.

    Args:
        distances: of each structure, (structures,), Å, one at least.
    """
    return 100.0 * float((distances[:, None] < _THRESHOLDS).mean())


def position_error(pos: NDArray[np.floating], record: Data) -> float:
    """Mean distance of free atoms from their relaxed positions, Å, by the minimum image.

    Args:
        pos: (N, 3), Å.
        record: with relaxed positions; NaN without, or if no atom is free.
    """
    from ase.geometry import find_mic

    free = ~record.fixed.numpy()
    offset = (record.pos_relaxed.numpy() - pos)[free]
    if not len(offset) or not np.isfinite(offset).all():
        return float("nan")
    lengths = find_mic(offset, record.cell[0].numpy(), record.pbc[0].numpy())[1]
    return float(lengths.mean())


def _write_relaxed(
    model: nn.Module, datasets: Mapping[str, Structures], folder: Path | None, batch_size: int
) -> tuple[dict[str, dict[str, float | None]], str]:
    """Writes SPLIT.extxyz with the structures that the position head predicts, if it shall.

    Returns:
        Per split adwt_percent, initial_adwt_percent (of the initial positions) and
        position_error_A, None without relaxed positions; and a table of them.
    """
    from ase.io import write

    rows: dict[str, dict[str, float | None]] = {}
    if folder is None:
        return rows, ""
    lines = [["split", "ADwT / %", "ADwT of initial positions / %", "position error / Å"]]
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
        names = ("adwt_percent", "initial_adwt_percent", "position_error_A")
        rows[split] = dict.fromkeys(names)
        if known.any():
            found = adwt(errors[known]), adwt(start[known]), float(errors[known].mean())
            rows[split] = dict(zip(names, found, strict=True))
        lines.append([split, *("-" if x is None else f"{x:.3f}" for x in rows[split].values())])
    return rows, f"relaxed structures by the position head\n{align(lines)}"


def _displaced(
    model: nn.Module, dataset: Structures, batch_size: int, name: str
) -> list[tuple[int, NDArray[np.float32]]]:
    """Index and predicted relaxed positions (N, 3), Å, of each structure; fixed atoms stay."""
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
                    "--relaxed writes what a position head predicts; this model has none; train "
                    "with --model.position_head true, or leave --relaxed out"
                )
            pos = (batch.pos + out["displacement"] * ~batch.fixed[:, None]).cpu()
            parts = pos.split(batch.ptr.diff().tolist())
            found += [(i, part.numpy()) for i, part in zip(indices, parts, strict=True)]
            bar.update(len(indices))
    return found
