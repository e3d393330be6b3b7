"""Classes of graphs of similar size, to reduce padding."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from molflt.attention.encodings import Encoding
from molflt.graph.dense import DenseAtoms, padded, places_of
from molflt.graph.geometry import Geometry

# Number of padded atoms that cost as much time as starting one more class. On a CPU, 64 to 256 were
# the fastest of 32 to 512; on GPUs, starting an operation takes longer relative to computing it.
_START = {"cpu": 64}
_START_ELSEWHERE = 8192
# Number of nodes, images or (in a matrix) keys of each atom that doubles the time per atom.
_COLUMNS = 64
_PREPARED = 4  # factor for preparing nodes and pairs of each class separately


class SizeClass(NamedTuple):
    """Graphs padded to the size of the largest graph, in the format that attention expects."""

    dense: DenseAtoms
    encoding: Encoding | None
    places: Tensor
    """(atoms,), indices of the atoms into the flattened mask of `dense`"""

    @classmethod
    def of(
        cls, geometry: Geometry, dense: DenseAtoms, encoding: Encoding | None = None
    ) -> "SizeClass":
        """Builds a class that contains all graphs of a geometry."""
        return cls(dense, encoding, places_of(geometry, dense.mask))

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
        apart: Tensor | None = None,
    ) -> "SizeClasses":
        """Sorts a batch into classes.

        `encode` builds a class from the geometry and the indices of its graphs, which are None for
        a class with all graphs. `columns` (graphs,) contains the number of nodes, images or keys
        per atom of each graph, if any. Graphs in the mask `apart` (graphs,) do not share a class
        with other graphs.
        """
        if torch.compiler.is_compiling():  # one computation graph for all sizes
            return cls([encode(geometry, None)])
        start = _START.get(geometry.pos.device.type, _START_ELSEWHERE)
        start *= 1 if columns is None else _PREPARED
        members = _members(geometry.ptr, columns, start, apart)
        if len(members) < 2:
            return cls([encode(geometry, None)])
        classes, atoms = [], []
        for each in members:
            graphs = torch.tensor(each, device=geometry.ptr.device)
            part, own = geometry.select(graphs)
            classes.append(encode(part, graphs))
            atoms.append(own)
        return cls(classes, torch.cat(atoms))

    def apply(self, layer: Callable[..., Tensor], x: Tensor) -> Tensor:
        """Applies a layer to every class: (atoms, dim) -> (atoms, dim).

        The layer maps tokens (graphs, atoms, dim) and takes `encoding` and `Keys` as keyword
        arguments.
        """
        if self.atoms is None:
            return self.classes[0].apply(layer, x)
        parts = x.index_select(0, self.atoms).split([len(each.places) for each in self.classes])
        pairs = zip(self.classes, parts, strict=True)
        out = torch.cat([each.apply(layer, part) for each, part in pairs])
        return torch.zeros_like(out).index_copy(0, self.atoms, out)


def _members(
    ptr: Tensor, columns: Tensor | None, start: int, apart: Tensor | None = None
) -> list[list[int]]:
    """Sorts nonempty graphs by size, largest first; starts a new class if padding is costly."""
    atoms = ptr.diff().tolist()
    each = [0.0] * len(atoms) if columns is None else columns.tolist()
    cost = [1 + number / _COLUMNS for number in each]  # per atom, for each graph
    kind = [False] * len(atoms) if apart is None else apart.tolist()
    graphs = [graph for graph, count in enumerate(atoms) if count]
    graphs.sort(key=lambda graph: (not kind[graph], -atoms[graph] * cost[graph]))
    classes: list[list[int]] = [[]]
    most, highest, needed = 0, 0.0, 0.0
    for graph in graphs:
        most, highest = max(most, atoms[graph]), max(highest, cost[graph])
        needed += atoms[graph] * cost[graph]
        other = classes[-1] and kind[classes[-1][-1]] != kind[graph]
        if other or (len(classes[-1]) + 1) * most * highest - needed > start:
            classes.append([])
            most, highest = atoms[graph], cost[graph]
            needed = most * highest
        classes[-1].append(graph)
    return classes
