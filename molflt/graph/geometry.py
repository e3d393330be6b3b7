"""Where atoms are: the part of a PyG batch that attention reads, checked and in one form."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch_geometric.data import Data


class Geometry(NamedTuple):
    """Atoms of a batch of graphs; `Geometry.of` makes one from tensors in several forms."""

    pos: Tensor
    """(atoms, 3), Å"""
    batch: Tensor
    """(atoms,), graph of each atom, ascending"""
    ptr: Tensor
    """(graphs + 1,), first atom of each graph"""
    cell: Tensor
    """(graphs, 3, 3), Å, rows are lattice vectors"""
    pbc: Tensor
    """(graphs, 3) bool, which of them are periodic"""
    tags: Tensor | None = None
    """(atoms,), `molflt.atoms.Tag`"""

    @classmethod
    def of(
        cls,
        pos: Tensor | None,
        batch: Tensor | None = None,
        cell: Tensor | None = None,
        pbc: Tensor | None = None,
        tags: Tensor | None = None,
        *,
        graphs: int | None = None,
        atoms: int | None = None,
    ) -> "Geometry":
        """A geometry from what there is.

        Args:
            pos: (atoms, 3), Å.
            batch: (atoms,), ascending; all atoms in one graph if None.
            cell: (graphs, 3, 3) or (3, 3), Å.
            pbc: (graphs, 3) or (3,) bool; all periodic if there is a cell, else none.
            tags: (atoms,).
            graphs: their number, if the last ones may be empty.
            atoms: their number, if it is known.

        Raises:
            ValueError: shapes do not fit, or graphs are not in order.
        """
        if pos is None or pos.ndim != 2 or pos.shape != (len(pos) if atoms is None else atoms, 3):
            rows = "atoms" if atoms is None else atoms
            got = None if pos is None else tuple(pos.shape)
            raise ValueError(f"pos must have shape ({rows}, 3), Å; got {got}; pass positions")
        batch = _in_order(batch, pos, graphs)
        if graphs is None:
            graphs = int(batch[-1]) + 1 if len(batch) else 1
        if pbc is None:
            pbc = torch.full((3,), cell is not None, device=pos.device)
        cell = pos.new_zeros(3, 3) if cell is None else cell.to(pos)
        counts = torch.bincount(batch, minlength=graphs).cumsum(0)
        return cls(
            pos,
            batch,
            torch.cat((counts.new_zeros(1), counts)),
            _for_each("cell", cell, (3, 3), graphs),
            _for_each("pbc", pbc.to(pos.device).bool(), (3,), graphs),
            tags,
        )

    @classmethod
    def of_data(cls, data: "Data") -> "Geometry":
        """The geometry of a PyG structure, or of a batch of them, with its tags if it has any."""
        pos, batch, cell, pbc, tags = (
            data.get(name) for name in ("pos", "batch", "cell", "pbc", "tags")
        )
        # PyG joins cells of (3, 3), and axes of (3,), along their first axis.
        if cell is not None and cell.numel() % 9 == 0:
            cell = cell.reshape(-1, 3, 3)
        if pbc is not None and pbc.numel() % 3 == 0:
            pbc = pbc.reshape(-1, 3)
        return cls.of(pos, batch, cell, pbc, tags, graphs=getattr(data, "num_graphs", None))

    @property
    def graphs(self) -> int:
        """Number of graphs."""
        return len(self.ptr) - 1

    def sum(self, x: Tensor) -> Tensor:
        """Sums over the atoms of each graph: (atoms, ...) -> (graphs, ...)."""
        return _sum_by(x, self.batch, self.graphs)


def _in_order(batch: Tensor | None, atoms: Tensor, graphs: int | None) -> Tensor:
    """The graph of each atom, zeros if None.

    Args:
        batch: (atoms,) or None.
        atoms: anything with one row for each atom.
        graphs: their number, or None if nobody said.

    Raises:
        ValueError: another shape, graphs that are not ascending, or that are out of range.
    """
    if batch is None:
        return torch.zeros(len(atoms), dtype=torch.long, device=atoms.device)
    if batch.shape != atoms.shape[:1] or bool((batch[1:] < batch[:-1]).any()):
        raise ValueError(
            f"batch must be ascending, of shape ({len(atoms)},); got shape {tuple(batch.shape)}; "
            "sort atoms by graph, as PyG's Batch does"
        )
    if len(batch):
        first, last = batch[[0, -1]].tolist()
        if first < 0 or (graphs is not None and last >= graphs):
            raise ValueError(
                f"batch must count graphs from 0 to batch_size - 1; got {first} to {last} with "
                f"batch_size={graphs}; correct one of them"
            )
    return batch


def _sum_by(x: Tensor, index: Tensor, size: int) -> Tensor:
    """Sums of rows with one index: (n, ...), (n,) -> (size, ...)."""
    return x.new_zeros(size, *x.shape[1:]).index_add(0, index, x)


def _for_each(name: str, given: Tensor, shape: tuple[int, ...], graphs: int) -> Tensor:
    if given.shape not in (shape, (graphs, *shape)):
        raise ValueError(
            f"{name} must have shape {(graphs, *shape)} or {shape}; got {tuple(given.shape)}; "
            "give every graph its own"
        )
    return given.expand(graphs, *shape)
