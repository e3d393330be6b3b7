"""Atoms of a batch as dense tensors with a mask, the format that attention expects."""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from molflt.attention.keys import Keys
from molflt.graph.geometry import Geometry


class DenseAtoms(NamedTuple):
    """Padded atoms as queries and keys; with periodic="images", images are additional keys."""

    mask: Tensor
    """(graphs, atoms) bool"""
    positions: Tensor
    """(graphs, atoms, 3), in Å, relative to the mean position of the atoms in each graph"""
    key_mask: Tensor
    """(graphs, keys) bool"""
    key_positions: Tensor
    """(graphs, keys, 3)"""
    key_index: Tensor | None = None
    """(graphs, keys), index of the atom that each key copies; None if key j is atom j"""
    key_weight: Tensor | None = None
    """(graphs, keys), below 1 for images near the cutoff; None if all are 1"""

    @property
    def keys(self) -> Keys:
        """Keyword arguments of attention layers that describe the keys."""
        # a literal, because Dynamo cannot trace the call `Keys(...)`
        mask, index, weight = self.key_mask, self.key_index, self.key_weight
        return {"key_mask": mask, "key_weight": weight, "key_index": index}

    @classmethod
    def of(cls, geometry: Geometry, lattice: bool = False) -> "DenseAtoms":
        """Centers and pads the atoms; all keys are atoms.

        With `lattice`, atoms are centered only perpendicular to all periodic lattice vectors. Along
        these vectors, the mean would depend on the choice of the cell and of images. Features of
        the additive encoding, unlike the multiplicative one, thus depend on a crystal's position.
        """
        mask = atom_mask(geometry)
        center = geometry.sum(geometry.pos) / geometry.ptr.diff().clamp(min=1)[:, None]
        if lattice:
            vectors = geometry.cell.to(center)
            with torch.autocast(center.device.type, enabled=False):
                center = center - (center[:, None] @ torch.linalg.pinv(vectors) @ vectors)[:, 0]
        centered = geometry.pos - center[geometry.batch]
        positions = padded(centered, mask, places_of(geometry, mask))
        return cls(mask, positions, mask, positions)


def atom_mask(geometry: Geometry) -> Tensor:
    """Returns the mask of real atoms after padding to the largest graph: (graphs, atoms)."""
    counts = geometry.ptr.diff()
    most = cast(int, torch.cat((counts, counts.new_zeros(1))).max().item())
    if torch.compiler.is_compiling():
        torch._check(most > 0)
    return torch.arange(most, device=counts.device) < counts[:, None]


def places_of(geometry: Geometry, mask: Tensor) -> Tensor:
    """Returns the index of each atom in the flattened mask: (atoms,)."""
    atoms = torch.arange(geometry.batch.shape[0], device=mask.device)
    first_places = mask.shape[1] * torch.arange(geometry.graphs, device=mask.device)
    return atoms + (first_places - geometry.ptr[:-1])[geometry.batch]


def padded(x: Tensor, mask: Tensor, places: Tensor) -> Tensor:
    """Pads graphs to the size of the largest graph: (atoms, n) -> (graphs, largest size, n)."""
    out = x.new_zeros(mask.numel(), x.shape[1]).index_copy(0, places, x)
    return out.view(*mask.shape, x.shape[1])
