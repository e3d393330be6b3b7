"""Attention over the atoms of PyG batches, as a layer for PyG models."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from molflt.attention.checks import known_names, tensors
from molflt.attention.features import FeatureMapName
from molflt.attention.layer import Attention
from molflt.attention.numerics import at_least_float32
from molflt.attention.positions.base import MixingName
from molflt.attention.stack import Redrawn
from molflt.graph.encoding import GraphPositionName, _encode, _make_encoding
from molflt.graph.geometry import Geometry
from molflt.graph.periodic import Open


class GraphAttention(Redrawn):
    """Attention of each atom to all atoms of its graph, in O(atoms) time, for any PyG model.

    The additive form is FLT (`arXiv:2302.01925 <https://arxiv.org/abs/2302.01925>`_) with the
    random features of the Performer (`arXiv:2009.14794 <https://arxiv.org/abs/2009.14794>`_). The
    multiplicative position, reciprocal nodes and near field are specific to molflt. The output for
    a graph does not depend on the rest of the batch, on the order of atoms or, except with "mesh"
    and for periodic structures with "spectral" and "reciprocal", on translations. With
    "reciprocal", it also does not depend on the choice of the cell or of periodic images.

    Args:
        dim: width of the atom features, a multiple of `heads`.
        heads: number of heads.
        position: "spectral" (FLT's mask), "multiplicative" (a kernel) or "none" (a Performer).
        periodic: "none" ignores periodicity; "images", "reciprocal", "mesh" and "auto" account for
            it. With None and a position, periodic structures are rejected. Without tags, "images"
            uses images of all atoms along all periodic axes.
        position_options, image_cutoff, max_frequency: see `EnergyRegressor`.
        mesh_order, near_exact: see `EnergyRegressor`.
        near_field: see `EnergyRegressor`; None (the default) and 0 omit the near field.
        mixing, feature_map, num_features: see `EnergyRegressor`.
        attention: further arguments of `molflt.attention.Attention`: projection, normalize_qk,
            normalize, floor, dropout. With normalize="unmasked", outputs for crystals depend on the
            number of cells, even with "reciprocal" and "mesh".
    """

    def __init__(
        self,
        dim: int,
        heads: int = 8,
        *,
        position: GraphPositionName = "spectral",
        position_options: Mapping[str, object] | None = None,
        periodic: str | Open | None = None,
        image_cutoff: float | None = None,
        max_frequency: float | None = None,
        mesh_order: int | None = None,
        near_field: float | None = None,
        near_exact: bool = False,
        mixing: MixingName = "auto",
        feature_map: FeatureMapName | None = None,
        num_features: int | None = None,
        **attention: Any,
    ) -> None:
        super().__init__()
        known_names(GraphAttention, attention, Attention)
        kernel = dict[str, Any](mixing=mixing, feature_map=feature_map, num_features=num_features)
        encoding_options: dict[str, Any] = {
            "position_options": position_options,
            "periodic": periodic,
            "image_cutoff": image_cutoff,
            "max_frequency": max_frequency,
            "mesh_order": mesh_order,
            "near_field": near_field,
            "near_exact": near_exact,
        }
        options = {**encoding_options, **kernel, **attention}
        self._rebuild = partial(GraphAttention, dim, heads, position=position, **options)
        self.dim = dim
        self.periodic = periodic
        self.encoding = _make_encoding(heads, position, kernel, **encoding_options)
        own_position = None if self.encoding is None else self.encoding.position
        self.attention = Attention(
            dim, heads, causal=False, gate=False, position=own_position, **kernel, **attention
        )
        self.attention.share_position()

    def reset_parameters(self) -> None:
        """Draws new weights, masks and random features."""
        self.load_state_dict(self._rebuild().state_dict())

    _reset_parameters = reset_parameters  # name used by PyG's GPSConv

    def forward(
        self,
        x: Tensor,
        pos: Tensor | None = None,
        batch: Tensor | None = None,
        cell: Tensor | None = None,
        pbc: Tensor | None = None,
        batch_size: int | None = None,
    ) -> Tensor:
        """Mixes atoms within each graph: (atoms, dim) -> (atoms, dim).

        Args:
            x: (atoms, dim).
            pos: (atoms, 3), in Å; not needed with `position="none"`.
            batch: (atoms,), graph of each atom, ascending; None for a single graph.
            cell: (graphs, 3, 3) or (3, 3), lattice vectors as rows, in Å.
            pbc: (graphs, 3) or (3,) bool, True for periodic axes; by default, all axes are periodic
                if a cell is given.
            batch_size: number of graphs; required if the last graphs may be empty.
        """
        if torch.jit.is_tracing():
            raise ValueError(
                "torch.jit.trace keeps the nodes of one batch; use torch.compile or torch.export"
            )
        tensors(x=x, pos=pos, batch=batch, cell=cell, pbc=pbc)
        if x.ndim != 2 or x.shape[1] != self.dim:
            raise ValueError(f"x must have shape (atoms, {self.dim}); got {tuple(x.shape)}")
        if self.encoding is None:
            pos = x.new_zeros(x.shape[0], 3)  # not used
        else:
            if self.encoding.periodic.needs_cell:
                suffices = cell is not None
            else:
                suffices = self.periodic is not None or (cell is None and pbc is None)
            if not suffices and (pbc is None or torch.compiler.is_compiling() or bool(pbc.any())):
                raise ValueError(
                    "got a periodic structure, which needs cell, (graphs, 3, 3), Å, and periodic="
                    "'reciprocal' or 'images', or 'none' to ignore the boundaries; the layer has "
                    f"periodic={self.periodic!r}; pass pbc of False for molecules"
                )
            if pos is not None:  # ASE's positions are float64
                pos = pos.to(at_least_float32(next(self.encoding.parameters())).dtype)
        geometry = Geometry.of(pos, batch, cell, pbc, graphs=batch_size, atoms=x.shape[0])
        return _encode(self.encoding, geometry).apply(self.attention, x)
