"""Inputs of the energy regressor, read from PyG data and checked."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from molflt.atoms import MAX_ATOMIC_NUMBER, Tag
from molflt.attention.checks import at_hand, beside_weights, in_transform, tensors, whole
from molflt.attention.numerics import at_least_float32
from molflt.graph.geometry import Geometry

if TYPE_CHECKING:
    from torch_geometric.data import Data


class Atoms(NamedTuple):
    """Atoms of a batch of graphs."""

    geometry: Geometry
    """geometry in the precision of the weights, with tags (0 by default) and charges"""
    numbers: Tensor
    """(atoms,) int64, 1 to 118"""
    fixed: Tensor
    """(atoms,) bool; none where the data do not say"""

    @classmethod
    def of(cls, data: "Data", weight: Tensor, charged: bool = False) -> "Atoms":
        """Reads one structure, or a batch of them.

        Args:
            data: as for `molflt.graph.EnergyRegressor.forward`.
            weight: any weight of the model.
            charged: the model takes total charges; otherwise a charge other than 0 is refused.
        """
        geometry = Geometry.of_data(data)
        _expect(data, geometry, weight)
        pos, numbers = geometry.pos, data.atomic_numbers
        none = torch.zeros(len(pos), dtype=torch.long, device=pos.device)
        tags = none if geometry.tags is None else geometry.tags
        fixed = none.bool() if data.get("fixed") is None else data.fixed
        for name, values in {"atomic_numbers": numbers, "tags": tags, "fixed": fixed}.items():
            tensors(**{name: values})
            if values.shape != pos.shape[:1] or values.device != pos.device:
                raise ValueError(
                    f"{name} must have shape ({len(pos)},), one for each atom, on {pos.device}; "
                    f"got {tuple(values.shape)} on {values.device}"
                )
        whole("atomic_numbers", numbers, 1, MAX_ATOMIC_NUMBER, "elements")
        whole("tags", tags, min(Tag), max(Tag), "subsurface, surface, adsorbate; all 0 if unknown")
        if fixed.dtype != torch.bool:
            raise ValueError(f"fixed must be bool, (atoms,); got {fixed.dtype}; use .bool()")
        dtype = at_least_float32(weight).dtype
        charge = _charges(data, geometry, charged)
        geometry = geometry._replace(
            pos=pos.to(dtype),
            cell=geometry.cell.to(dtype),
            tags=tags.long(),
            charge=None if charge is None else charge.to(dtype),
        )
        return cls(geometry, numbers.long(), fixed)

    def above_subsurface(self) -> tuple["Atoms", Tensor]:
        """Returns the graphs without atoms of tag 0, and the mask of the atoms that are kept.

        Graphs without an atom with tag > 0 are kept whole.
        """
        geometry, kept = self.geometry, self.geometry.above_subsurface()
        assert geometry.tags is not None
        ends = geometry.sum(kept.long()).cumsum(0)
        part = geometry._replace(
            pos=geometry.pos[kept],
            batch=geometry.batch[kept],
            ptr=torch.cat((ends.new_zeros(1), ends)),
            tags=geometry.tags[kept],
        )
        return Atoms(part, self.numbers[kept], self.fixed[kept]), kept


def _charges(data: "Data", geometry: Geometry, charged: bool) -> Tensor | None:
    """Total charges (graphs,), e, None if all are 0; NaN means 0."""
    found = None
    for name, usual, hint in (
        ("multiplicity", 1.0, "no model reads it"),
        ("charge", 0.0, "train a potential with long_range=[1] and total_charge=True"),
    ):
        values = data.get(name)
        if values is None:
            continue
        values = torch.as_tensor(values, device=geometry.pos.device).reshape(-1)
        if len(values) != geometry.graphs:
            raise ValueError(
                f"{name} must have shape ({geometry.graphs},), one for each graph; got "
                f"{tuple(values.shape)}"
            )
        values = torch.where(values.isnan(), usual, values)
        if name == "charge" and charged:
            found = values
        elif not (torch.compiler.is_compiling() or in_transform()) and (values != usual).any():
            graph = int((values != usual).nonzero()[0])
            raise ValueError(
                f"{name} of this model must be {usual:g}; got {float(values[graph]):g} of graph "
                f"{graph}; leave it out, or {hint}"
            )
    return found


def _expect(data: "Data", geometry: Geometry, weight: Tensor) -> None:
    """Raises ValueError for data on another device, or without required attributes."""
    beside_weights("pos", geometry.pos, weight)
    if data.get("atomic_numbers") is None:
        hint = "; set data.atomic_numbers = data.z" if "z" in data else ""
        raise ValueError(
            "the data need atomic_numbers, (atoms,) int64; got "
            f"{', '.join(sorted(map(str, data.keys())))}{hint}"
        )
    if data.get("cell") is None and at_hand(geometry.pbc) and bool(geometry.pbc.any()):
        raise ValueError(
            "pbc is True, which needs cell, (graphs, 3, 3), Å; got None; set it, or pbc to False"
        )
