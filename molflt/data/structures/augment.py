"""Structures made of others in training: rotated, or on the way to their relaxed positions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch_geometric.data import Batch

__all__ = ["interpolate", "random_orthogonal", "rotate"]


def random_orthogonal(count: int, about: Literal["z", "all"]) -> Tensor:
    """Random orthogonal matrices, half of them reflections: (count, 3, 3) float32.

    Args:
        count: how many.
        about: "z" keeps the direction of the third axis, the normal of a surface; "all" is uniform
            (Haar) over all orthogonal matrices.
    """
    if about == "all":
        q: Tensor
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


def rotate(batch: Batch, matrix: Tensor) -> Batch:
    """A shallow copy of the batch in which structure g is rotated by `matrix[g]`.

    Args:
        batch: pos, pos_relaxed (atoms, 3) and cell (structures, 3, 3), Å, rows are vectors.
        matrix: (structures, 3, 3), orthogonal.
    """
    matrix = matrix.to(batch.pos)
    rotated = batch.clone()
    per_atom = matrix[batch.batch]
    for key in ("pos", "pos_relaxed"):
        rotated[key] = torch.einsum("nij,nj->ni", per_atom, batch[key])
    rotated.cell = batch.cell @ matrix.transpose(1, 2)
    return rotated


def interpolate(batch: Batch, share: float, noise: float) -> Batch:
    """A shallow copy of the batch in which some structures start nearer to their relaxed positions.

    pos -> pos + t (pos_relaxed - pos) + noise, t uniform in [0, 1] for each structure, on free
    atoms; pos_relaxed is the minimum image of pos, so that atoms take the short way. The energy and
    the relaxed positions that are to be predicted stay what they are. Structures without relaxed
    positions stay as well.

    Args:
        batch: pos, pos_relaxed (atoms, 3), Å, the latter unwrapped or NaN; fixed, batch (atoms,).
        share: probability that a structure is moved.
        noise: standard deviation of the normal noise on the atoms of moved structures, Å.
    """
    graphs = batch.num_graphs
    t = torch.rand(graphs) * (torch.rand(graphs) < share)
    t = t.to(batch.pos)[batch.batch][:, None]
    target = batch.pos_relaxed - batch.pos
    rattle = noise * torch.randn(batch.pos.shape).to(batch.pos)
    known = torch.isfinite(target).all(dim=1, keepdim=True) & ~batch.fixed[:, None] & (t > 0)
    moved = batch.clone()
    moved.pos = torch.where(known, batch.pos + t * target + rattle, batch.pos)
    return moved
