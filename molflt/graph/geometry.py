"""Positions, cells and batch indices of a PyG batch, checked and converted to a uniform format."""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from molflt.atoms import FARTHEST, MAX_ATOMIC_NUMBER, Data, Tag
from molflt.attention.checks import graph_name, is_traced, readable, tensors, whole
from molflt.attention.numerics import at_least_float32, counts_of

_MOST_GRAPHS = 2**31  # limit on indices in `batch`; the last is the number of graphs minus 1


class Geometry(NamedTuple):
    """Atoms of a batch of graphs; `Geometry.of` accepts tensors in several forms."""

    pos: Tensor
    """(atoms, 3), in Å"""
    batch: Tensor
    """(atoms,), graph of each atom, ascending"""
    ptr: Tensor
    """(graphs + 1,), index of the first atom of each graph, followed by the number of atoms"""
    cell: Tensor
    """(graphs, 3, 3), lattice vectors as rows, in Å; 0 along axes that are not periodic"""
    pbc: Tensor
    """(graphs, 3) bool, True for periodic axes"""
    tags: Tensor | None = None
    """(atoms,), `molflt.atoms.Tag`"""
    charge: Tensor | None = None
    """(graphs,), total charge of each graph, in units of e; None if all are neutral"""

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
        """Builds and checks a geometry from the tensors that `GraphAttention.forward` takes.

        `graphs` is the number of graphs, which is required if the last graphs may be empty. `atoms`
        is the number of atoms, if known. Rows of the cell along nonperiodic axes are ignored.
        """
        tensors(pos=pos, batch=batch, cell=cell, pbc=pbc, tags=tags)
        pos = _checked_positions(pos, atoms)
        per_graph = ((cell, 3), (pbc, 2))  # tensors, with their axes if they have rows per graph
        # `len` would fix the size in exported programs
        rows = [x.shape[0] for x, axes in per_graph if x is not None and x.ndim == axes]
        if batch is not None:
            batch = _checked_batch(batch, pos, graphs)
        else:
            batch = torch.zeros(pos.shape[0], dtype=torch.long, device=pos.device)
            if pos.shape[0]:
                if graphs not in (None, 1):
                    raise ValueError(f"batch_size={graphs} needs batch, (atoms,); got None")
                graphs = 1
        if graphs is None:
            graphs = _number_of_graphs(batch, rows)
        if pbc is None:
            pbc = torch.full((3,), cell is not None, device=pos.device)
        cell = pos.new_zeros(3, 3) if cell is None else cell.to(pos)
        pbc = _per_graph("pbc", pbc.to(pos.device).bool(), (3,), graphs)
        cell = _per_graph("cell", cell, (3, 3), graphs).masked_fill(~pbc[..., None], 0.0)
        return cls(pos, batch, _starts(counts_of(batch, graphs)), cell, pbc, tags)

    @classmethod
    def of_data(cls, data: Data) -> "Geometry":
        """Builds the geometry of a PyG structure or batch, with tags if present."""
        if not hasattr(data, "stores"):  # all PyG data have `stores`; avoids loading PyG
            raise TypeError(
                f"expected PyG Data or Batch; got {type(data).__name__}; use Data(**mapping), "
                "Batch.from_data_list, or molflt.data.structures.records.make_record"
            )
        pos, batch, cell, pbc, tags = (
            data.get(name) for name in ("pos", "batch", "cell", "pbc", "tags")
        )
        tensors(cell=cell, pbc=pbc)
        # PyG concatenates cells (3, 3) and axes (3,) along the first dimension.
        if cell is not None and cell.numel() % 9 == 0:
            cell = cell.reshape(-1, 3, 3)
        if pbc is not None and pbc.numel() % 3 == 0:
            pbc = pbc.reshape(-1, 3)
        return cls.of(pos, batch, cell, pbc, tags, graphs=getattr(data, "num_graphs", None))

    @property
    def graphs(self) -> int:
        """Number of graphs."""
        return self.ptr.shape[0] - 1

    def select(self, graphs: Tensor) -> tuple["Geometry", Tensor]:
        """Returns the graphs with the given indices (n,), and the batch indices of their atoms."""
        counts = self.ptr.diff()[graphs]
        ptr = _starts(counts)
        batch = torch.arange(len(graphs), device=graphs.device).repeat_interleave(counts)
        atoms = torch.arange(len(batch), device=batch.device) + (self.ptr[graphs] - ptr[:-1])[batch]
        selected = Geometry(
            self.pos[atoms],
            batch,
            ptr,
            self.cell[graphs],
            self.pbc[graphs],
            None if self.tags is None else self.tags[atoms],
            None if self.charge is None else self.charge[graphs],
        )
        return selected, atoms

    def above_subsurface(self) -> Tensor:
        """Selects atoms with tag > 0, and all atoms of graphs without such atoms: mask (atoms,)."""
        assert self.tags is not None
        above = self.tags > Tag.SUBSURFACE.value  # in a form that compilers support
        tagged = self.sum(above.long()) > 0
        return above | ~tagged[self.batch]

    def sum(self, x: Tensor) -> Tensor:
        """Sums over the atoms of each graph: (atoms, ...) -> (graphs, ...)."""
        return _sum_by(x, self.batch, self.graphs)


def _sum_by(x: Tensor, index: Tensor, size: int) -> Tensor:
    """Sums the rows of `x` with the same `index` (n,): (n, ...) -> (size, ...)."""
    return x.new_zeros(size, *x.shape[1:]).index_add(0, index, x)


def _starts(counts: Tensor) -> Tensor:
    """Returns the first index of each group and the total number, for groups of given sizes."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def _checked_positions(pos: Tensor | None, atoms: int | None) -> Tensor:
    """Checks positions (atoms, 3), in Å, and casts them to at least float32."""
    is_matrix = pos is not None and pos.ndim == 2 and pos.shape[1] == 3
    if pos is None or not is_matrix or (atoms is not None and pos.shape[0] != atoms):
        rows = "atoms" if atoms is None else atoms
        got = None if pos is None else tuple(pos.shape)
        raise ValueError(f"pos must have shape ({rows}, 3), Å; got {got}; pass x, y and z")
    pos = at_least_float32(pos)
    if readable(pos):
        in_range = pos.detach().abs() <= FARTHEST  # False for NaN
        if not bool(in_range.all()):
            atom = int((~in_range).any(dim=1).nonzero()[0])
            raise ValueError(
                f"pos must be finite and within {FARTHEST:g} Å; got {pos[atom].tolist()} for atom "
                f"{atom}; correct it, move the structure or remove the atom"
            )
    return pos


def _checked_batch(batch: Tensor, pos: Tensor, graphs: int | None) -> Tensor:
    """Checks the graphs `batch` (atoms,) of the atoms at `pos`, and casts them to int64."""
    if batch.shape != pos.shape[:1]:
        raise ValueError(
            f"batch must have shape ({len(pos)},), the graph of each atom; got {tuple(batch.shape)}"
        )
    last = _MOST_GRAPHS if graphs is None else graphs - 1
    whole("batch", batch, 0, last, "the graph of each atom, below batch_size")
    batch = batch.long()
    if not torch.compiler.is_compiling() and bool((batch[1:] < batch[:-1]).any()):
        raise ValueError(
            "batch must be ascending; got a graph after a later one; sort the atoms by graph"
        )
    return batch


def _number_of_graphs(batch: Tensor, rows: list[int]) -> int:
    """Infers the number of graphs from the last batch index or the `rows` of cells and axes."""
    if torch.compiler.is_compiling():  # these are sizes, unlike the numbers in `batch`
        if rows:
            return max(rows)
        last = cast(int, batch[-1].item())
        torch._check(last >= 0)
        return last + 1
    return int(batch[-1]) + 1 if len(batch) else max(rows, default=1)


def _per_graph(name: str, x: Tensor, shape: tuple[int, ...], graphs: int) -> Tensor:
    """Checks that `x` has the shape `shape` or (graphs, *shape), and expands it to the latter."""
    if not torch.compiler.is_compiling() and x.shape not in (shape, (graphs, *shape)):
        raise ValueError(
            f"{name} must have shape {(graphs, *shape)} or {shape}; got {tuple(x.shape)}; store "
            f"{(1, *shape)} in the Data of each graph; pass batch_size if the last are empty"
        )
    return x.expand(graphs, *shape)


class Atoms(NamedTuple):
    """Atoms of a batch of graphs."""

    geometry: Geometry
    """geometry in the precision of the weights, with tags (0 by default) and charges"""
    numbers: Tensor
    """(atoms,) int64, atomic numbers, 1 to 118"""
    fixed: Tensor
    """(atoms,) bool, True for fixed atoms; by default all False"""

    @classmethod
    def of(cls, data: Data, weight: Tensor, charged: bool = False) -> "Atoms":
        """Reads the data that `EnergyRegressor.forward` accepts, in the precision of `weight`.

        Total charges other than 0 are rejected unless `charged` is True.
        """
        geometry = Geometry.of_data(data)
        pos, numbers = geometry.pos, data.get("atomic_numbers")
        if numbers is None:
            raise ValueError(
                "the data need atomic_numbers, (atoms,) int64; got "
                f"{', '.join(sorted(map(str, data.keys())))}; set data.atomic_numbers"
            )
        zeros = torch.zeros(len(pos), dtype=torch.long, device=pos.device)
        tags = zeros if geometry.tags is None else geometry.tags
        fixed = zeros.bool() if data.get("fixed") is None else data.fixed
        by_atom = {"atomic_numbers": numbers, "tags": tags, "fixed": fixed}
        tensors(**by_atom)
        for name, values in by_atom.items():
            if values.shape != pos.shape[:1]:
                raise ValueError(f"{name} must have shape ({len(pos)},); got {tuple(values.shape)}")
        whole("atomic_numbers", numbers, 1, MAX_ATOMIC_NUMBER, "elements")
        whole("tags", tags, min(Tag), max(Tag), "subsurface, surface, adsorbate; all 0 if unknown")
        dtype = at_least_float32(weight).dtype
        _numbers_of(data, geometry, "multiplicity", 1.0, "no model reads it")
        why = None if charged else "only potentials with total_charge=True read it"
        charge = _numbers_of(data, geometry, "charge", 0.0, why)
        geometry = geometry._replace(
            pos=pos.to(dtype),
            cell=geometry.cell.to(dtype),
            tags=tags.long(),
            charge=charge.to(dtype) if charged and charge is not None else None,
        )
        return cls(geometry, numbers.long(), fixed.bool())

    def without_subsurface(self) -> tuple["Atoms", Tensor]:
        """Removes the atoms with tag 0; returns the other atoms, and the mask that selects them.

        Graphs that have only atoms with tag 0 are not changed.
        """
        geometry, mask = self.geometry, self.geometry.above_subsurface()
        assert geometry.tags is not None
        remaining = geometry._replace(
            pos=geometry.pos[mask],
            batch=geometry.batch[mask],
            ptr=_starts(geometry.sum(mask.long())),
            tags=geometry.tags[mask],
        )
        return Atoms(remaining, self.numbers[mask], self.fixed[mask]), mask


def _numbers_of(
    data: Data, geometry: Geometry, name: str, usual: float, why: str | None
) -> Tensor | None:
    """Returns numbers (graphs,), with the `usual` one for NaN; None if the data lack them.

    Raises ValueError for unusual numbers without an effect; `why` is the reason, if there is one.
    """
    if (values := data.get(name)) is None:
        return None
    values = torch.as_tensor(values, device=geometry.pos.device).reshape(-1)
    if len(values) != geometry.graphs:
        raise ValueError(
            f"{name} must have shape ({geometry.graphs},), one per graph; got {tuple(values.shape)}"
        )
    values = torch.where(values.isnan(), usual, values)
    differs = values != usual
    if why is not None and not is_traced() and bool(differs.any()):
        graph = int(differs.nonzero()[0])
        raise ValueError(
            f"{name} of this model must be {usual:g}; got {float(values[graph]):g} of "
            f"{graph_name(graph, len(values))}; remove it, because {why}"
        )
    return values
