"""Random rotations and reflections: energies do not change, positions and cells turn along."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch_geometric.data import Batch

__all__ = ["random_orthogonal", "turn"]


def random_orthogonal(count: int, about: Literal["z", "all"]) -> Tensor:
    """Random orthogonal matrices, half of them reflections: (count, 3, 3) float32.

    Args:
        count: how many.
        about: "z" keeps the direction of the third axis, the normal of a surface; "all" is uniform
            (Haar) over all orthogonal matrices.
    """
    if about == "all":
        q, r = torch.linalg.qr(torch.randn(count, 3, 3))
        # Without the signs of diag(R) the result is not uniform.
        return q * torch.sign(torch.diagonal(r, dim1=1, dim2=2))[:, None]
    angle = 2 * math.pi * torch.rand(count)
    mirror = torch.where(torch.rand(count) < 0.5, -1.0, 1.0)
    matrix = torch.zeros(count, 3, 3)
    matrix[:, 0, 0], matrix[:, 0, 1] = angle.cos(), -angle.sin() * mirror
    matrix[:, 1, 0], matrix[:, 1, 1] = angle.sin(), angle.cos() * mirror
    matrix[:, 2, 2] = 1.0
    return matrix


def turn(batch: Batch, matrix: Tensor) -> Batch:
    """A shallow copy of the batch in which structure g is turned by `matrix[g]`.

    Args:
        batch: pos, pos_relaxed (atoms, 3) and cell (structures, 3, 3), Å, rows are vectors.
        matrix: (structures, 3, 3), orthogonal.
    """
    matrix = matrix.to(batch.pos)
    turned = batch.clone()
    per_atom = matrix[batch.batch]
    for key in ("pos", "pos_relaxed"):
        turned[key] = torch.einsum("nij,nj->ni", per_atom, batch[key])
    turned.cell = batch.cell @ matrix.transpose(1, 2)
    return turned
