"""Classes of graphs of similar size, to reduce padding."""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from molflt.attention.encodings import Encoding
from molflt.graph.dense import DenseAtoms, padded, places_of
from molflt.graph.geometry import Geometry

# Number of padded atoms that cost as much time as starting another class. On a CPU, 64 to 256 were
# the fastest of 32 to 512; on GPUs, starting an operation takes longer relative to computing it.
_START = {"cpu": 64}
_START_ELSEWHERE = 8192
# Number of nodes, images or, in a matrix, atoms per atom that doubles the time for an atom.
_COLUMNS = 64
_PREPARED = 4  # factor for preparing nodes and pairs of each class separately


class Sorted(NamedTuple):
    """Batch with its graphs sorted by size, the largest first, without empty graphs."""

    geometry: Geometry
    order: Tensor
    """(graphs,), index in the batch of each sorted graph"""
    atoms: Tensor
    """(atoms,), index in the batch of each sorted atom"""
    classes: list[slice]
    """graphs of each class"""

    @classmethod
    def of(cls, geometry: Geometry, columns: Tensor | None = None) -> "Sorted | None":
        """Sorts a batch into classes; returns None if one class for all graphs is best.

        Args:
            geometry: the batch.
            columns: (graphs,), nodes, images or keys per atom of each graph, if any.
        """
        if torch.compiler.is_compiling():  # one computation graph for all sizes
            return None
        start = _START.get(geometry.pos.device.type, _START_ELSEWHERE)
        start *= 1 if columns is None else _PREPARED
        order, classes = _classes(geometry.ptr, columns, start)
        if len(classes) < 2:
            return None
        places = torch.tensor(order, device=geometry.ptr.device)
        found, atoms = geometry.reordered(places)
        return cls(found, places, atoms, classes)


class SizeClass(NamedTuple):
    """Graphs padded to the largest of them, in the input format of attention."""

    dense: DenseAtoms
    encoding: Encoding | None
    places: Tensor
    """(atoms,), indices of the atoms into the flattened mask of `dense`"""

    @classmethod
    def of(
        cls, geometry: Geometry, dense: DenseAtoms, encoding: Encoding | None = None
    ) -> "SizeClass":
        """Builds one class from the atoms and keys of a geometry, with their encoding."""
        return cls(dense, encoding, places_of(geometry, dense.mask))

    def apply(self, layer: Callable[..., Tensor], x: Tensor) -> Tensor:
        """Applies a layer as in `SizeClasses.apply`; x are the atoms of this class."""
        tokens = padded(x, self.dense.mask, self.places)
        out = layer(tokens, encoding=self.encoding, **self.dense.keys)
        return out.flatten(0, 1).index_select(0, self.places)


class SizeClasses(NamedTuple):
    """Batch in classes of graphs of similar size."""

    classes: list[SizeClass]
    atoms: Tensor | None = None
    """(atoms,), index in the batch of each atom of the classes; None for a single class"""

    @classmethod
    def of(cls, geometry: Geometry) -> "SizeClasses":
        """Builds the classes of a batch without an encoding."""
        found = Sorted.of(geometry)
        if found is None:
            return cls([SizeClass.of(geometry, DenseAtoms.of(geometry))])
        parts = [found.geometry.part(graphs) for graphs in found.classes]
        return cls([SizeClass.of(part, DenseAtoms.of(part)) for part in parts], found.atoms)

    def apply(self, layer: Callable[..., Tensor], x: Tensor) -> Tensor:
        """Applies a layer to every class.

        Args:
            layer: function of tokens (graphs, atoms, dim), with `encoding` and `Keys` as keyword
                arguments.
            x: (atoms, dim).

        Returns:
            (atoms, dim).
        """
        if self.atoms is None:
            return self.classes[0].apply(layer, x)
        parts = x.index_select(0, self.atoms).split([len(each.places) for each in self.classes])
        pairs = zip(self.classes, parts, strict=True)
        out = torch.cat([each.apply(layer, part) for each, part in pairs])
        return torch.zeros_like(out).index_copy(0, self.atoms, out)


def _classes(ptr: Tensor, columns: Tensor | None, start: int) -> tuple[list[int], list[slice]]:
    """Returns nonempty graphs, largest first, and classes that end where padding is costly."""
    atoms = ptr.diff().tolist()
    each = [0.0] * len(atoms) if columns is None else columns.tolist()
    cost = [1 + number / _COLUMNS for number in each]  # of one atom of each graph
    graphs = [graph for graph, count in enumerate(atoms) if count]
    graphs.sort(key=lambda graph: -atoms[graph] * cost[graph])
    cuts, most, highest, needed = [0], 0, 0.0, 0.0
    for place, graph in enumerate(graphs):
        most, highest = max(most, atoms[graph]), max(highest, cost[graph])
        needed += atoms[graph] * cost[graph]
        if (place + 1 - cuts[-1]) * most * highest - needed > start:
            cuts.append(place)
            most, highest = atoms[graph], cost[graph]
            needed = most * highest
    return graphs, [slice(*ends) for ends in pairwise([*cuts, len(graphs)])]
