"""Positions, cells and batch indices of a PyG batch, checked and in a uniform format."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from molflt.atoms import FARTHEST, MAX_ATOMIC_NUMBER, Tag
from molflt.attention.checks import at_hand, beside_weights, in_transform, tensors, whole
from molflt.attention.numerics import at_least_float32, counts_of

if TYPE_CHECKING:
    from torch_geometric.data import Data


class Geometry(NamedTuple):
    """Atoms of a batch of graphs; `Geometry.of` accepts tensors in several forms."""

    pos: Tensor
    """(atoms, 3), Å"""
    batch: Tensor
    """(atoms,), graph of each atom, ascending"""
    ptr: Tensor
    """(graphs + 1,), index of the first atom of each graph, followed by the number of atoms"""
    cell: Tensor
    """(graphs, 3, 3), Å, lattice vectors in rows; 0 along axes that are not periodic"""
    pbc: Tensor
    """(graphs, 3) bool, True for periodic axes"""
    tags: Tensor | None = None
    """(atoms,), `molflt.atoms.Tag`"""
    charge: Tensor | None = None
    """(graphs,), e, total charge of each graph; None if all are neutral"""

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
        """Builds a geometry from the given tensors.

        Args:
            pos: (atoms, 3), Å.
            batch: (atoms,), ascending; None if all atoms are in one graph.
            cell: (graphs, 3, 3) or (3, 3), Å. Rows of nonperiodic axes are ignored.
            pbc: (graphs, 3) or (3,) bool; by default all True if there is a cell, otherwise all
                False.
            tags: (atoms,).
            graphs: number of graphs, needed if the last ones may be empty.
            atoms: number of atoms, if known.
        """
        tensors(pos=pos, batch=batch, cell=cell, pbc=pbc, tags=tags)
        pos = _points(pos, atoms)
        if pbc is not None and pbc.is_floating_point():
            raise ValueError(f"pbc must be bool, one for each axis; got {pbc.dtype}; use .bool()")
        if batch is None and pos.shape[0]:
            _expect_one_graph(graphs, cell, pbc)
            graphs = 1 if graphs is None else graphs
        batch = _in_order(batch, pos, graphs)
        if graphs is None:
            graphs = _number_of_graphs(batch, cell, pbc)
        if pbc is None:
            pbc = torch.full((3,), cell is not None, device=pos.device)
        cell = pos.new_zeros(3, 3) if cell is None else cell.to(pos)
        pbc = _for_each("pbc", pbc.to(pos.device).bool(), (3,), graphs)
        cell = _for_each("cell", cell, (3, 3), graphs).masked_fill(~pbc[..., None], 0.0)
        counts = counts_of(batch, graphs).cumsum(0)
        found = cls(
            pos,
            batch,
            torch.cat((counts.new_zeros(1), counts)),
            cell,
            pbc,
            tags,
        )
        if at_hand(pos) and not bool(found.cell.isfinite().all()):
            raise ValueError(
                "cell must be finite along periodic axes; got NaN or infinity; mend it"
            )
        return found

    @classmethod
    def of_data(cls, data: "Data") -> "Geometry":
        """Builds the geometry of a PyG structure or batch, with tags if they exist."""
        if not hasattr(data, "stores"):  # all PyG data have `stores`; avoids loading PyG
            raise TypeError(_no_data(data))
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

    def reordered(self, order: Tensor) -> tuple["Geometry", Tensor]:
        """Reorders graphs by indices (graphs,); also returns the previous index of each atom."""
        counts = self.ptr.diff()[order]
        ends = counts.cumsum(0)
        batch = torch.arange(len(order), device=order.device).repeat_interleave(counts)
        atoms = torch.arange(len(batch), device=order.device)
        atoms = atoms + (self.ptr[order] - ends + counts)[batch]
        found = Geometry(
            self.pos[atoms],
            batch,
            torch.cat((ends.new_zeros(1), ends)),
            self.cell[order],
            self.pbc[order],
            None if self.tags is None else self.tags[atoms],
            None if self.charge is None else self.charge[order],
        )
        return found, atoms

    def part(self, graphs: slice) -> "Geometry":
        """Returns consecutive graphs, with indices counted from 0."""
        ptr = self.ptr[graphs.start : graphs.stop + 1]
        first, end = ptr[[0, -1]].tolist()
        atoms = slice(first, end)
        return Geometry(
            self.pos[atoms],
            self.batch[atoms] - graphs.start,
            ptr - first,
            self.cell[graphs],
            self.pbc[graphs],
            None if self.tags is None else self.tags[atoms],
            None if self.charge is None else self.charge[graphs],
        )

    def above_subsurface(self) -> Tensor:
        """Returns the mask of atoms with tag > 0 and of graphs that lack such atoms: (atoms,)."""
        if self.tags is None:
            raise ValueError("tags, (atoms,), are needed; got None; set 0 where unknown")
        above = self.tags > Tag.SUBSURFACE.value  # in a form that compilers support
        tagged = self.sum(above.long()) > 0
        return above | ~tagged[self.batch]

    def sum(self, x: Tensor) -> Tensor:
        """Sums over the atoms of each graph: (atoms, ...) -> (graphs, ...)."""
        return _sum_by(x, self.batch, self.graphs)


def _no_data(given: object) -> str:
    hint = "make Data of it"
    if isinstance(given, Mapping):
        hint = "use torch_geometric.data.Data(**...)"
    elif isinstance(given, Sequence) and not isinstance(given, str):
        hint = "use torch_geometric.data.Batch.from_data_list(...)"
    if type(given).__module__.startswith("ase."):
        hint = (
            "use molflt.data.structures.records.make_record(pos=atoms.positions, "
            "atomic_numbers=atoms.numbers, cell=atoms.cell.array, pbc=atoms.pbc)"
        )
    return f"expected Data or a Batch of PyG; got {type(given).__name__}; {hint}"


def _points(pos: Tensor | None, atoms: int | None) -> Tensor:
    """Checks positions for `Geometry.of`."""
    if pos is None or pos.ndim != 2 or pos.shape != (pos.shape[0] if atoms is None else atoms, 3):
        rows = "atoms" if atoms is None else atoms
        got = None if pos is None else tuple(pos.shape)
        raise ValueError(f"pos must have shape ({rows}, 3), Å; got {got}; pass positions")
    if not pos.is_floating_point():
        raise ValueError(
            f"pos must be real numbers, Å; got {pos.dtype}; pass positions, no indices"
        )
    pos = at_least_float32(pos)
    if at_hand(pos) and not bool((near := pos.detach().abs() <= FARTHEST).all()):  # nor NaN
        atom = int((~near).any(dim=1).nonzero()[0])
        raise ValueError(
            f"pos must be finite and within {FARTHEST:g} Å; got {pos[atom].tolist()} for atom "
            f"{atom}; mend it, move the structure or remove the atom"
        )
    return pos


def _in_order(batch: Tensor | None, atoms: Tensor, graphs: int | None) -> Tensor:
    """Checks the graph of each atom, (atoms,), by default 0; `atoms` has one row per atom."""
    if graphs is not None and (isinstance(graphs, float) or graphs < 0):
        raise ValueError(f"batch_size must be the number of graphs; got {graphs}; correct it")
    if batch is None:
        return torch.zeros(atoms.shape[0], dtype=torch.long, device=atoms.device)
    if batch.is_floating_point() or batch.is_complex() or batch.dtype == torch.bool:
        raise ValueError(
            f"batch must be whole numbers, the graph of each atom; got {batch.dtype}; use .long()"
        )
    if batch.device != atoms.device:
        raise ValueError(
            f"batch is on {batch.device}, but pos on {atoms.device}; move one of them with .to()"
        )
    if batch.shape != atoms.shape[:1]:
        raise ValueError(
            f"batch must have shape ({len(atoms)},), the graph of each atom; got "
            f"{tuple(batch.shape)}; correct it"
        )
    batch = batch.long()
    if torch.compiler.is_compiling():
        return batch
    if bool((batch[1:] < batch[:-1]).any()):
        raise ValueError(
            "batch must be ascending; got a graph after a later one; sort atoms by graph, as PyG's "
            "Batch does"
        )
    if len(batch):
        first, last = batch[[0, -1]].tolist()
        if first < 0 or (graphs is not None and last >= graphs):
            raise ValueError(
                f"batch must count graphs from 0 to batch_size - 1; got {first} to {last} with "
                f"batch_size={graphs}; correct one of them"
            )
    return batch


def _expect_one_graph(graphs: int | None, cell: Tensor | None, pbc: Tensor | None) -> None:
    """Raises ValueError for cells or axes of several graphs if `batch` is missing."""
    found = {"batch_size": 1 if graphs is None else graphs, "cell or pbc": _of_none(cell, pbc)}
    for name, count in found.items():
        if count != 1:
            raise ValueError(
                f"batch is missing, and one graph expected; got {count} by {name}; pass batch, "
                "(atoms,), the graph of each atom"
            )


def _sum_by(x: Tensor, index: Tensor, size: int) -> Tensor:
    """Sums the rows with equal index: (n, ...), (n,) -> (size, ...)."""
    return x.new_zeros(size, *x.shape[1:]).index_add(0, index, x)


def _number_of_graphs(batch: Tensor, cell: Tensor | None, pbc: Tensor | None) -> int:
    """Returns the number of graphs from the last index, cells or axes."""
    if torch.compiler.is_compiling():  # these are sizes, unlike the numbers in `batch`
        stacked = (cell is not None and cell.ndim == 3) or (pbc is not None and pbc.ndim == 2)
        if stacked:
            return _of_none(cell, pbc)
        last = cast(int, batch[-1].item())
        torch._check(last >= 0)
        return last + 1
    return int(batch[-1]) + 1 if len(batch) else _of_none(cell, pbc)


def _of_none(cell: Tensor | None, pbc: Tensor | None) -> int:
    """Returns the number of graphs in a batch without atoms, from cells or axes, or 1."""
    cells = cell.shape[0] if cell is not None and cell.ndim == 3 else 1
    axes = pbc.shape[0] if pbc is not None and pbc.ndim == 2 else 1
    return axes if cells == 1 else cells


def _for_each(name: str, given: Tensor, shape: tuple[int, ...], graphs: int) -> Tensor:
    compiling = torch.compiler.is_compiling()
    if not compiling and given.shape not in (shape, (graphs, *shape)):
        hint = "give every graph its own"
        if given.shape[1:] == shape and len(given) > graphs:
            hint = f"if the last graphs are empty, pass batch_size={len(given)}"
        elif given.shape[1:] == shape[1:] and given.numel() % math.prod(shape) == 0:
            hint = f"PyG joins those of a batch so; store {(1, *shape)} in the Data of each graph"
        raise ValueError(
            f"{name} must have shape {(graphs, *shape)} or {shape}; got {tuple(given.shape)}; "
            f"{hint}"
        )
    return given.expand(graphs, *shape)


class Atoms(NamedTuple):
    """Atoms of a batch of graphs."""

    geometry: Geometry
    """geometry in the precision of the weights, with tags (0 by default) and charges"""
    numbers: Tensor
    """(atoms,) int64, atomic numbers, 1 to 118"""
    fixed: Tensor
    """(atoms,) bool, True for fixed atoms; by default all False"""

    @classmethod
    def of(cls, data: "Data", weight: Tensor, charged: bool = False) -> "Atoms":
        """Reads one structure or a batch of structures.

        Args:
            data: data as for `molflt.graph.EnergyRegressor.forward`.
            weight: any weight of the model.
            charged: True if the model takes total charges; otherwise charges other than 0 are
                refused.
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
        """Returns graphs without atoms of tag 0, and the mask of the atoms kept.

        Graphs that only have atoms of tag 0 are kept whole.
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
    """Returns total charges (graphs,), e, or None if not `charged` or missing; NaN counts as 0."""
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
    """Raises ValueError for data on another device or without required attributes."""
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
