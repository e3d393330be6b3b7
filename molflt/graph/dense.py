"""Atoms as dense tensors with a mask, in classes of graphs of similar size to reduce padding."""

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from molflt.attention.encodings import Encoding
from molflt.attention.keys import Keys
from molflt.graph.geometry import Geometry

# Number of padded atoms that cost as much time as starting one more class. On a CPU, 64 to 256 were
# the fastest of 32 to 512; on GPUs, starting an operation takes longer relative to computing it.
_START = {"cpu": 64}
_START_ELSEWHERE = 8192
# Number of nodes, images or (in a matrix) keys of each atom that doubles the time per atom.
_COLUMNS = 64
_PREPARED = 4  # factor for preparing nodes and pairs of each class separately


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
    least = 2 if torch.compiler.is_compiling() else 0  # Inductor's products expect more than 1
    most = cast(int, torch.cat((counts, counts.new_full((1,), least))).max().item())
    torch._check(most >= least)
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


class SizeClass(NamedTuple):
    """Graphs padded to the size of the largest graph, in the format that attention expects."""

    dense: DenseAtoms
    encoding: Encoding | None
    places: Tensor
    """(atoms,), indices of the atoms into the flattened mask of `dense`"""

    def apply(self, layer: Callable[..., Tensor], x: Tensor) -> Tensor:
        """Applies a layer as in `SizeClasses.apply`; `x` has only the atoms of this class."""
        tokens = padded(x, self.dense.mask, self.places)
        out = layer(tokens, encoding=self.encoding, **self.dense.keys)
        return out.flatten(0, 1).index_select(0, self.places)


class SizeClasses(NamedTuple):
    """Batch sorted into classes of graphs of similar size."""

    classes: list[SizeClass]
    atoms: Tensor | None = None
    """(atoms,), batch index of each atom, in the order of the classes; None for a single class"""

    @classmethod
    def of(
        cls,
        geometry: Geometry,
        encode: Callable[[Geometry, Tensor | None], SizeClass],
        columns: Tensor | None = None,
        separate: Tensor | None = None,
    ) -> "SizeClasses":
        """Sorts a batch into classes.

        `encode` builds a class from the geometry and the indices of its graphs, which are None for
        a class with all graphs. `columns` (graphs,) are numbers of nodes, images or keys per atom.
        Graphs in the mask `separate` (graphs,) do not share a class with other graphs.
        """
        if torch.compiler.is_compiling():  # one computation graph for all sizes
            return cls([encode(geometry, None)])
        start_cost = _START.get(geometry.pos.device.type, _START_ELSEWHERE)
        if columns is not None:
            start_cost *= _PREPARED
        members = _members(geometry.ptr, columns, start_cost, separate)
        if len(members) < 2:
            return cls([encode(geometry, None)])
        classes, atoms = [], []
        for indices in members:
            graphs = torch.tensor(indices, device=geometry.ptr.device)
            part, atoms_of_part = geometry.select(graphs)
            classes.append(encode(part, graphs))
            atoms.append(atoms_of_part)
        return cls(classes, torch.cat(atoms))

    def apply(self, layer: Callable[..., Tensor], x: Tensor) -> Tensor:
        """Applies a layer to every class: (atoms, dim) -> (atoms, dim).

        The layer maps tokens (graphs, atoms, dim), and takes `encoding` and `Keys` by keyword.
        """
        if not self.classes:  # without atoms
            return x.clone()
        if self.atoms is None:
            return self.classes[0].apply(layer, x)
        parts = x.index_select(0, self.atoms).split([len(c.places) for c in self.classes])
        outputs = [c.apply(layer, part) for c, part in zip(self.classes, parts, strict=True)]
        out = torch.cat(outputs)
        return torch.zeros_like(out).index_copy(0, self.atoms, out)


def _members(
    ptr: Tensor, columns: Tensor | None, start_cost: int, separate: Tensor | None
) -> list[list[int]]:
    """Sorts nonempty graphs by size, largest first; starts a new class if padding is costly."""
    sizes = ptr.diff().tolist()
    widths = [0.0] * len(sizes) if columns is None else columns.tolist()
    atom_costs = [1 + width / _COLUMNS for width in widths]  # relative to atoms without columns
    is_separate = [False] * len(sizes) if separate is None else separate.tolist()
    graphs = [graph for graph, size in enumerate(sizes) if size]
    graphs.sort(key=lambda graph: (not is_separate[graph], -sizes[graph] * atom_costs[graph]))
    classes: list[list[int]] = [[]]
    most_atoms, highest_cost, unpadded = 0, 0.0, 0.0
    for graph in graphs:
        size, atom_cost = sizes[graph], atom_costs[graph]
        members = classes[-1]
        most_atoms, highest_cost = max(most_atoms, size), max(highest_cost, atom_cost)
        unpadded += size * atom_cost
        padded_cost = (len(members) + 1) * most_atoms * highest_cost
        mixed = bool(members) and is_separate[members[-1]] != is_separate[graph]
        if mixed or padded_cost - unpadded > start_cost:
            classes.append([])
            most_atoms, highest_cost, unpadded = size, atom_cost, size * atom_cost
        classes[-1].append(graph)
    return classes
