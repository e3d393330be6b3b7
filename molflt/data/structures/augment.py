"""Augmentation of training structures: rotation, interpolation and repetition."""

import math
from typing import Literal

import torch
from torch import Tensor

from molflt.atoms import Batch, Tag


def random_orthogonal(count: int, about: Literal["z", "all"]) -> Tensor:
    """Draws random orthogonal matrices (count, 3, 3); each is a reflection with probability 1/2.

    With "z", the matrices preserve the direction of the third axis, the normal of a surface. With
    "all", they are uniformly distributed (Haar measure) over all orthogonal matrices.
    """
    if about == "all":
        q: Tensor
        q, r = torch.linalg.qr(torch.randn(count, 3, 3))
        # Without the signs of diag(R), the result is not uniform.
        return q * torch.sign(torch.diagonal(r, dim1=1, dim2=2))[:, None]
    angle = 2 * math.pi * torch.rand(count)
    mirror = torch.where(torch.rand(count) < 0.5, -1.0, 1.0)
    matrix = torch.zeros(count, 3, 3)
    matrix[:, 0, 0], matrix[:, 0, 1] = angle.cos(), -angle.sin() * mirror
    matrix[:, 1, 0], matrix[:, 1, 1] = angle.sin(), angle.cos() * mirror
    matrix[:, 2, 2] = 1.0
    return matrix


def rotate(batch: Batch, matrix: Tensor) -> Batch:
    """Rotates structure g by `matrix[g]`, in a shallow copy of the batch.

    `matrix` has shape (structures, 3, 3) and is orthogonal; positions and lattice vectors are rows.
    """
    matrix = matrix.to(batch.pos)
    rotated = batch.clone()
    per_atom = matrix[batch.batch]
    for key in ("pos", "pos_relaxed"):
        rotated[key] = torch.einsum("nij,nj->ni", per_atom, batch[key])
    rotated.cell = batch.cell @ matrix.transpose(1, 2)
    return rotated


def interpolate(batch: Batch, share: float, noise: float) -> Batch:
    """Moves some structures toward their relaxed positions, in a shallow copy of the batch.

    Free atoms move to pos + t (pos_relaxed - pos) + noise, where t is uniform in [0, 1] for each
    structure, and pos_relaxed is in the periodic image nearest to pos. Structures without relaxed
    positions do not change, and neither do targets.

    Args:
        batch: structures with pos, fixed and pos_relaxed, which is unwrapped or NaN.
        share: probability that a structure is moved.
        noise: standard deviation, in Å, of the normal noise on the atoms of moved structures.
    """
    graphs = batch.num_graphs
    t = torch.rand(graphs) * (torch.rand(graphs) < share)
    t = t.to(batch.pos)[batch.batch][:, None]
    displacement = batch.pos_relaxed - batch.pos
    rattle = noise * torch.randn(batch.pos.shape).to(batch.pos)
    known = torch.isfinite(displacement).all(dim=1, keepdim=True)
    moves = known & ~batch.fixed[:, None] & (t > 0)
    moved = batch.clone()
    moved.pos = torch.where(moves, batch.pos + t * displacement + rattle, batch.pos)
    return moved


_BOND = 2.0  # Å
_CELLS = ((2, 1), (1, 2), (2, 2))  # numbers of cells along the first two lattice vectors


def repeat(batch: Batch, share: float) -> Batch:
    """Repeats some slabs in the plane, without their adsorbates.

    Energies and the target positions in the first cell do not change. Target positions of the
    copies are unknown, because the adsorbate is far from them. Structures whose adsorbate may be
    bonded across the cell boundary are not repeated. `share` is the probability of a repetition.
    """
    graphs = batch.num_graphs
    sizes = torch.tensor(_CELLS)[torch.randint(len(_CELLS), (graphs,))]
    sizes[torch.rand(graphs) >= share] = 1
    sizes = sizes.to(batch.batch.device)
    sizes[_spans_boundary(batch) | ~batch.pbc.view(-1, 3)[:, :2].all(dim=1)] = 1
    keys = ("pos", "pos_relaxed", "atomic_numbers", "tags", "fixed", "batch")
    parts = [{key: batch[key] for key in keys}]
    slab = batch.tags != Tag.ADSORBATE.value
    for a, b in ((0, 1), (1, 0), (1, 1)):
        has_copy = (a < sizes[:, 0]) & (b < sizes[:, 1])
        if not has_copy.any():
            continue
        copied = has_copy[batch.batch] & slab
        copy = {key: batch[key][copied] for key in keys}
        shift = batch.cell.new_tensor([a, b, 0.0]) @ batch.cell  # (graphs, 3), in Å
        copy["pos"] = copy["pos"] + shift[copy["batch"]]
        copy["pos_relaxed"] = torch.full_like(copy["pos"], torch.nan)
        parts.append(copy)
    if len(parts) == 1:
        return batch
    out = batch.clone()
    joined = {key: torch.cat([part[key] for part in parts]) for key in keys}
    order = joined["batch"].argsort(stable=True)
    for key in keys:
        out[key] = joined[key][order]
    counts = out.batch.bincount(minlength=graphs)
    out.ptr = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    out.cell = batch.cell * torch.nn.functional.pad(sizes, (0, 1), value=1)[:, :, None]
    return out


def _spans_boundary(batch: Batch) -> Tensor:
    """Selects structures with adsorbate atoms near opposite ends of a cell: mask (structures,)."""
    adsorbate = batch.tags == Tag.ADSORBATE.value
    graph = batch.batch[adsorbate]
    inverse = torch.linalg.pinv(batch.cell)[:, :, :2]
    fractional = torch.einsum("ni,nij->nj", batch.pos[adsorbate], inverse[graph])
    index, zeros = graph[:, None].expand(-1, 2), fractional.new_zeros(len(inverse), 2)
    low = zeros.scatter_reduce(0, index, fractional, "amin", include_self=False)
    high = zeros.scatter_reduce(0, index, fractional, "amax", include_self=False)
    gap = (1 - (high - low)) / inverse.norm(dim=1)  # to the next image, in Å, between planes
    return (gap < _BOND).any(dim=1)
