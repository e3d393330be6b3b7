"""Atoms of a batch as dense tensors with a mask, the format that attention expects."""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from molflt.attention.keys import Keys
from molflt.graph.geometry import Geometry


class DenseAtoms(NamedTuple):
    """Padded atoms as queries and keys; with periodic="images", images are additional keys.

    Positions, in Å, are relative to the mean position of the atoms in each graph.
    """

    mask: Tensor
    """(graphs, atoms) bool"""
    positions: Tensor
    """(graphs, atoms, 3)"""
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
        return {
            "key_mask": self.key_mask,
            "key_weight": self.key_weight,
            "key_index": self.key_index,
        }

    @classmethod
    def of(cls, geometry: Geometry, lattice: bool = False) -> "DenseAtoms":
        """Centers and pads the atoms; all keys are atoms.

        With `lattice`, atoms are centered only perpendicular to all periodic lattice vectors. Along
        these vectors, the mean would depend on the choice of the cell and of images. As a
        consequence, features of the additive encoding depend on the position of a crystal; features
        of the multiplicative encoding do not.
        """
        mask = atom_mask(geometry)
        mean = geometry.sum(geometry.pos) / geometry.ptr.diff().clamp(min=1)[:, None]
        if lattice:
            vectors = geometry.cell.detach().to(mean)
            with torch.autocast(mean.device.type, enabled=False):
                mean = mean - (mean[:, None] @ torch.linalg.pinv(vectors) @ vectors)[:, 0]
        centred = geometry.pos - mean[geometry.batch]
        positions = padded(centred, mask, places_of(geometry, mask))
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
    number = torch.arange(geometry.batch.shape[0], device=mask.device)
    first = mask.shape[1] * torch.arange(geometry.graphs, device=mask.device)
    return number + (first - geometry.ptr[:-1])[geometry.batch]


def padded(x: Tensor, mask: Tensor, places: Tensor) -> Tensor:
    """Pads graphs to the size of the largest graph: (atoms, n) -> (graphs, largest size, n)."""
    out = x.new_zeros(mask.numel(), x.shape[1]).index_copy(0, places, x)
    return out.view(*mask.shape, x.shape[1])
