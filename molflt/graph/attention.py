"""Attention over the atoms of PyG batches, as a layer for any PyG model."""

from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch_geometric.utils import to_dense_batch

from molflt.attention import Attention
from molflt.attention.mixing import at_least_float32
from molflt.graph.encoding import Geometry, GraphEncoding


class GraphAttention(nn.Module):
    """Attention of every atom to all atoms of its graph, O(atoms), for any PyG model.

    FLT (`arXiv:2302.01925 <https://arxiv.org/abs/2302.01925>`_) on random features of the Performer
    (`arXiv:2009.14794 <https://arxiv.org/abs/2009.14794>`_), additive placement; the multiplicative
    placement, reciprocal nodes and near field are molflt's own. A graph's output does not depend on
    what else is in the batch, on the order of its atoms or on where it lies in space; with
    "reciprocal" neither on the choice of its cell nor on which image of an atom is given.

    Args:
        channels: width of atoms, a multiple of `heads`.
        heads: number of heads.
        feature_map: key of `molflt.attention.FEATURE_MAPS`.
        num_features: random or learned features m per head.
        position: "spectral", or "none": a Performer, which needs no positions.
        placement: "additive": f(r_i - r_j) is added to the logit, exp(q.k + f), FLT's form.
            "multiplicative": a kernel h(r_i - r_j) multiplies phi(q).phi(k).
        spectrum: family of f or h, key of `molflt.attention.SPECTRA`.
        nodes: where its transform is sampled, key of `molflt.attention.NODES`; None for the default
            of the spectrum. Not used with `periodic="reciprocal"`.
        num_nodes: Fourier nodes r of the random rules.
        periodic: "none"; "images": copies in all cells within `image_cutoff` of any atom, as
            further keys; "reciprocal": nodes on each graph's reciprocal lattice, exactly periodic.
        image_cutoff: Å.
        max_frequency: "reciprocal": largest |G|, cycles/Å; the number of nodes grows as its cube.
        near_field: Å; within it the kernel is the exponential of an exact mask of its own, through
            a neighbor list. Multiplicative placement, without "images".
        near_exact: within the near field, q.k is exact as well, without random features.
        backend: "linear"; "quadratic": the same numbers through the N x N matrix, faster for few
            atoms; "auto": the cheaper of these two at the size at hand (`mixing.cheaper`);
            "softmax": softmax with the exact mask, O(atoms^2), another function than these.
        position_options: further options of the encoding: of the spectrum, of the nodes with the
            prefix `node_`, and `background`. See `SpectralPosition.build` and `KernelPosition`.
        options: further arguments of `molflt.attention.Attention`: projection, normalize_qk,
            normalize, floor, dropout.

    Raises:
        ValueError: choices that do not go together.
    """

    def __init__(
        self,
        channels: int,
        heads: int = 8,
        *,
        feature_map: str = "positive",
        num_features: int = 64,
        position: Literal["spectral", "none"] = "spectral",
        placement: Literal["additive", "multiplicative"] = "additive",
        spectrum: str = "gaussian_basis",
        nodes: str | None = None,
        num_nodes: int = 16,
        periodic: Literal["none", "images", "reciprocal"] = "none",
        image_cutoff: float = 8.0,
        max_frequency: float = 0.25,
        near_field: float | None = None,
        near_exact: bool = False,
        backend: Literal["auto", "linear", "quadratic", "softmax"] = "auto",
        position_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        given = locals()
        self._arguments = {name: given[name] for name in signature(GraphAttention).parameters}
        self._arguments |= self._arguments.pop("options")
        self.channels = channels
        self.encoding = None
        if position == "spectral":
            self.encoding = GraphEncoding(
                heads,
                mixing=backend,
                placement=placement,
                spectrum=spectrum,
                nodes=nodes,
                num_nodes=num_nodes,
                periodic=periodic,
                image_cutoff=image_cutoff,
                max_frequency=max_frequency,
                near_field=near_field,
                near_exact=near_exact,
                num_features=num_features,
                **(position_options or {}),
            )
        elif position != "none" or near_field is not None or periodic != "none":
            raise ValueError(
                f"position must be 'spectral', or 'none' without near_field and periodic; got "
                f"{position!r} with near_field={near_field}, periodic={periodic!r}"
            )
        self.attention = Attention(
            channels,
            heads,
            mixing=backend,
            feature_map=feature_map,
            num_features=num_features,
            position=None if self.encoding is None else self.encoding.position,
            **options,
        )

    def reset_parameters(self) -> None:
        """Draws all weights, masks and random features anew."""
        fresh = type(self)(**self._arguments)
        self.load_state_dict(fresh.state_dict())

    _reset_parameters = reset_parameters  # the name by which PyG's GPSConv calls it

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws new random features in place; give a generator seeded alike on every rank."""
        self.attention.redraw_(generator)
        if self.encoding is not None:
            self.encoding.redraw_(generator)

    def forward(
        self,
        x: Tensor,
        pos: Tensor | None = None,
        batch: Tensor | None = None,
        cell: Tensor | None = None,
        pbc: Tensor | None = None,
        batch_size: int | None = None,
    ) -> Tensor:
        """Mixes atoms within each graph.

        Args:
            x: (atoms, channels).
            pos: (atoms, 3), Å. Not needed with `position="none"`.
            batch: (atoms,), graph of each atom, ascending; all in one graph if None.
            cell: (graphs, 3, 3) or (3, 3), rows are lattice vectors, Å.
            pbc: (graphs, 3) or (3,) bool: periodic axes. None: all periodic if there is a cell.
            batch_size: number of graphs, if the last ones may be empty.

        Returns:
            (atoms, channels).

        Raises:
            ValueError: shapes do not fit, graphs are not in order, positions or cell are missing.
        """
        if x.ndim != 2 or x.shape[1] != self.channels:
            raise ValueError(f"x must have shape (atoms, {self.channels}); got {tuple(x.shape)}")
        batch = self._batch(x, batch, batch_size)
        if not len(x):
            return x.clone()
        graphs = batch_size or int(batch[-1]) + 1
        tokens, mask = to_dense_batch(x, batch, batch_size=graphs)
        if self.encoding is None:
            return self.attention(tokens, key_mask=mask)[mask]
        geometry = self._geometry(self.encoding, x, pos, batch, cell, pbc, graphs)
        dense, encoding = self.encoding(geometry)
        out: Tensor = self.attention(tokens, encoding, dense.key_mask, dense.key_index)
        return out[mask]

    @staticmethod
    def _batch(x: Tensor, batch: Tensor | None, graphs: int | None) -> Tensor:
        if batch is None:
            return torch.zeros(len(x), dtype=torch.long, device=x.device)
        if batch.shape != x.shape[:1] or bool((batch[1:] < batch[:-1]).any()):
            raise ValueError(
                f"batch must be ascending, of shape ({len(x)},); got shape {tuple(batch.shape)}; "
                "sort atoms by graph, as PyG's Batch does"
            )
        if len(batch):
            first, last = batch[[0, -1]].tolist()
            if first < 0 or (graphs and last >= graphs):
                raise ValueError(
                    f"batch must count graphs from 0 to batch_size - 1; got {first} to {last} with "
                    f"batch_size={graphs}; correct one of them"
                )
        return batch

    @staticmethod
    def _geometry(
        encoding: GraphEncoding,
        x: Tensor,
        pos: Tensor | None,
        batch: Tensor,
        cell: Tensor | None,
        pbc: Tensor | None,
        graphs: int,
    ) -> Geometry:
        """The arguments checked and in one form."""
        if pos is None or pos.shape != (len(x), 3):
            got = None if pos is None else tuple(pos.shape)
            raise ValueError(
                f"pos must have shape ({len(x)}, 3), Å; got {got}; pass positions, or build the "
                "layer with position='none'"
            )
        # ASE's positions are float64; masks are in the precision of their weights.
        pos = pos.to(at_least_float32(next(encoding.parameters())).dtype)
        axes = torch.ones(3, dtype=torch.bool, device=pos.device)
        if encoding.periodic == "none":
            cell, pbc = pos.new_zeros(3, 3), ~axes
        elif cell is None and (pbc is None or bool(pbc.any())):
            raise ValueError(
                f"periodic={encoding.periodic!r} needs cell, (graphs, 3, 3), Å; got None; "
                "pass it, or pbc of False for molecules"
            )
        cell = pos.new_zeros(3, 3) if cell is None else cell.to(pos)
        pbc = axes if pbc is None else pbc.to(axes.device).bool()
        for name, given, shape in (("cell", cell, (3, 3)), ("pbc", pbc, (3,))):
            if given.shape not in (shape, (graphs, *shape)):
                raise ValueError(
                    f"{name} must have shape {(graphs, *shape)} or {shape}; got "
                    f"{tuple(given.shape)}"
                )
        ptr = torch.bincount(batch, minlength=graphs).cumsum(0)
        return Geometry(
            pos,
            batch,
            torch.cat((ptr.new_zeros(1), ptr)),
            cell.expand(graphs, 3, 3),
            pbc.expand(graphs, 3),
        )

    def extra_repr(self) -> str:
        """Choices, for `print(module)`."""
        return f"{self.channels}, heads={self.attention.heads}"
