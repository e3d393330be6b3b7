"""PyG batches to dense tensors with a mask, and periodic images as extra keys."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Batch
from torch_geometric.utils import scatter, to_dense_batch

ADSORBATE = 2  # OC20 tag
IN_PLANE = [(a, b, 0) for a in (-1, 0, 1) for b in (-1, 0, 1) if (a, b) != (0, 0)]


class DenseAtoms(NamedTuple):
    """Geometry of a batch as attention sees it: queries are atoms, keys are atoms and images.

    Positions are relative to the mean position of each graph's atoms, Å.
    """

    mask: Tensor  # (graphs, atoms) bool
    positions: Tensor  # (graphs, atoms, 3)
    key_mask: Tensor  # (graphs, keys) bool
    key_positions: Tensor  # (graphs, keys, 3)
    key_index: (
        Tensor | None
    )  # (graphs, keys), atom of which each key is a copy; None: key j = atom j


def to_dense(batch: Batch, periodic: str = "none", image_cutoff: float = 8.0) -> DenseAtoms:
    """Centres and pads the atoms of a batch.

    Args:
        batch: pos (atoms, 3), batch, cell (graphs, 3, 3), pbc (graphs, 3), and perhaps tags.
        periodic: "images": copies of atoms as keys, of all that lie within `image_cutoff` of an
            atom; with tags 3D-Graphormer's recipe (arXiv:2203.04810), copies of substrate atoms in
            the 8 neighboring cells of the surface plane that lie within it of an adsorbate atom
            (in a graph without adsorbate, copies of any atom near any atom). "none", "reciprocal":
            atoms alone.
        image_cutoff: Å.

    Returns:
        Dense geometry; its mask restores atoms from (graphs, atoms, ...) as `x[mask]`.
    """
    graphs = len(batch.cell)
    centred = batch.pos - centres(batch, periodic == "reciprocal")[batch.batch]
    positions, mask = to_dense_batch(centred, batch.batch, batch_size=graphs)
    if periodic != "images":
        return DenseAtoms(mask, positions, mask, positions, None)
    tags = getattr(batch, "tags", None)
    if tags is None:
        cell = batch.cell.to(positions)
        steps = images_within(cell, batch.pbc, mask, positions, image_cutoff)
        return with_images(batch, mask, positions, image_cutoff, steps)
    tags, _ = to_dense_batch(tags, batch.batch, batch_size=graphs)
    adsorbate = (tags == ADSORBATE) & mask
    has_adsorbate = adsorbate.any(dim=1, keepdim=True)
    near = torch.where(has_adsorbate, adsorbate, mask)
    sources = torch.where(has_adsorbate, ~adsorbate & mask, mask)
    return with_images(batch, mask, positions, image_cutoff, IN_PLANE, near, sources)


def centres(batch: Batch, lattice: bool = False) -> Tensor:
    """Where each graph's positions are counted from, (graphs, 3) Å: their mean.

    Args:
        batch: as for `to_dense`.
        lattice: the part of the mean that is perpendicular to all periodic lattice vectors. Along
            these a mean would depend on the choice of cell and of images. So there the additive
            placement, whose features see the factors one by one, depends on where the crystal lies;
            the multiplicative one does not.
    """
    mean = scatter(batch.pos, batch.batch, dim=0, dim_size=len(batch.cell), reduce="mean")
    if not lattice:
        return mean
    vectors = (batch.cell * batch.pbc[..., None]).detach().to(mean)
    return mean - (mean[:, None] @ torch.linalg.pinv(vectors) @ vectors)[:, 0]


def images_within(
    cell: Tensor, pbc: Tensor, mask: Tensor, positions: Tensor, cutoff: float
) -> Tensor:
    """Steps n of all cells, n . cell away, whose atoms may be within a cutoff of an atom.

    Args:
        cell: (graphs, 3, 3), Å.
        pbc: (graphs, 3) bool.
        mask: (graphs, atoms) bool.
        positions: (graphs, atoms, 3), Å.
        cutoff: Å.

    Returns:
        (steps, 3) int64, enough for every graph, without (0, 0, 0).
    """
    inverse = torch.linalg.pinv((cell * pbc[..., None]).detach())  # columns: 1 / height of the cell
    fractional = positions.detach() @ inverse
    outside = ~mask[..., None]
    span = fractional.masked_fill(outside, -torch.inf).amax(dim=1) - fractional.masked_fill(
        outside, torch.inf
    ).amin(dim=1)
    reach = (span.clamp(min=0.0) + cutoff * inverse.norm(dim=1)) * pbc
    most = reach.amax(dim=0).floor().long().tolist()
    axes = [torch.arange(-n, n + 1, device=mask.device) for n in most]
    steps = torch.cartesian_prod(*axes).view(-1, 3)
    return steps[(steps != 0).any(dim=1)]


def with_images(
    batch: Batch,
    mask: Tensor,
    positions: Tensor,
    cutoff: float,
    steps: Sequence[tuple[int, int, int]] | Tensor,
    centres: Tensor | None = None,
    sources: Tensor | None = None,
) -> DenseAtoms:
    """Appends images behind the atoms, packed so that keys are as few as possible.

    Args:
        batch: with cell (graphs, 3, 3), Å, and pbc (graphs, 3).
        mask: (graphs, atoms) bool.
        positions: (graphs, atoms, 3), Å.
        cutoff: an image is kept if it is nearer than this to one of the centres, Å.
        steps: (steps, 3), cells that images may come from; steps along an axis that is not
            periodic are left out.
        centres: (graphs, atoms) bool; all atoms if None.
        sources: (graphs, atoms) bool, atoms that have images; all if None.
    """
    graphs, atoms = mask.shape
    centres = mask if centres is None else centres
    sources = mask if sources is None else sources
    steps = torch.as_tensor(steps, device=mask.device)
    shifts = steps.to(positions.dtype) @ batch.cell.to(positions.dtype)  # [g, k, 3]
    # An axis that is not periodic has no images along it.
    allowed = ((steps == 0) | batch.pbc.view(graphs, 1, 3)).all(dim=-1)  # [g, k]
    images = (positions[:, None] + shifts[:, :, None]).flatten(1, 2)  # [g, k n, 3]
    distance = torch.cdist(images.detach(), positions.detach())
    near = ((distance < cutoff) & centres[:, None]).any(dim=-1)
    kept = near & (allowed[:, :, None] & sources[:, None]).flatten(1)

    count = int(kept.sum(dim=1).max()) if kept.numel() else 0
    order = torch.argsort((~kept).to(torch.uint8), dim=1, stable=True)[:, :count]
    index = torch.arange(atoms, device=mask.device).expand(graphs, -1)
    return DenseAtoms(
        mask,
        positions,
        torch.cat((mask, kept.gather(1, order)), dim=1),
        torch.cat((positions, images.gather(1, order[..., None].expand(-1, -1, 3))), dim=1),
        torch.cat((index, order % max(atoms, 1)), dim=1),
    )
