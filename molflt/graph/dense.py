"""PyG batches to dense tensors with a mask, and periodic images as extra keys."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Batch
from torch_geometric.utils import scatter, to_dense_batch

ADSORBATE = 2  # OC20 tag


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
        batch: PyG batch with pos, batch, tags, cell, pbc.
        periodic: "none" (atoms alone) or "images" (3D-Graphormer's recipe, arXiv:2203.04810: the
            copies of substrate atoms in the 8 neighboring cells of the surface plane that lie
            within `image_cutoff` of an adsorbate atom; in a graph without adsorbate, copies of any
            atom near any atom).
        image_cutoff: Å.

    Returns:
        Dense geometry; its mask restores atoms from (graphs, atoms, ...) as `x[mask]`.
    """
    graphs = batch.num_graphs
    centre = scatter(batch.pos, batch.batch, dim=0, dim_size=graphs, reduce="mean")
    positions, mask = to_dense_batch(
        batch.pos - centre[batch.batch], batch.batch, batch_size=graphs
    )
    if periodic == "none":
        return DenseAtoms(mask, positions, mask, positions, None)
    tags, _ = to_dense_batch(batch.tags, batch.batch, batch_size=graphs)
    return with_images(batch, mask, positions, tags, image_cutoff)


def with_images(
    batch: Batch, mask: Tensor, positions: Tensor, tags: Tensor, cutoff: float
) -> DenseAtoms:
    """Appends the kept images behind the atoms, packed so that keys are as few as possible."""
    graphs, atoms = mask.shape
    adsorbate = (tags == ADSORBATE) & mask
    has_adsorbate = adsorbate.any(dim=1, keepdim=True)
    centres = torch.where(has_adsorbate, adsorbate, mask)
    sources = torch.where(has_adsorbate, ~adsorbate & mask, mask)

    steps = torch.tensor(
        [(a, b, 0) for a in (-1, 0, 1) for b in (-1, 0, 1) if (a, b) != (0, 0)],
        device=mask.device,
    )
    shifts = steps.to(positions.dtype) @ batch.cell.to(positions.dtype)  # [g, 8, 3]
    # An axis that is not periodic has no images along it.
    allowed = ((steps == 0) | batch.pbc.view(graphs, 1, 3)).all(dim=-1)  # [g, 8]
    images = (positions[:, None] + shifts[:, :, None]).flatten(1, 2)  # [g, 8 n, 3]
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
