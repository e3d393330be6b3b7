"""Energies of a regressor as a function of tensors only, for export.

`EnergyInputs` prepares everything whose number depends on the data: neighbors, reciprocal nodes,
padding. The rest has dynamic sizes only, and one graph of operations for all of them.
"""

import copy
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from molflt.attention import Attention
from molflt.attention.positions.spectral import GraphNodes
from molflt.graph.dense import DenseAtoms
from molflt.graph.geometry import Geometry
from molflt.graph.inputs import Atoms
from molflt.graph.mesh import OnMesh
from molflt.graph.near import NearPairs, _Found
from molflt.graph.neighbors import Neighbors, neighbor_list
from molflt.graph.periodic import Images
from molflt.graph.regressor import EnergyRegressor
from molflt.graph.sizes import SizeClass

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch_geometric.data import Data

_ATOMS, _GRAPHS, _WIDTH, _NODES, _PAIRS, _EDGES = range(6)
_DIMENSIONS = ("atoms", "graphs", "width", "nodes", "pairs", "edges")


class EnergyInputs(NamedTuple):
    """Arguments of `EnergyComputation`, in this order; Å and cycles/Å.

    Graphs are padded to the largest; batches should have graphs of similar size.
    """

    numbers: Tensor
    """(atoms,) int64, atomic numbers of the atoms that the model sees"""
    tags: Tensor
    """(atoms,) int64, 0 subsurface, 1 surface, 2 adsorbate"""
    places: Tensor
    """(atoms,) int64, index of each atom in the flattened `mask`"""
    references: Tensor
    """(graphs,) float64, eV, energies of the elements, which are added"""
    mask: Tensor
    """(graphs, width) bool, True where there is an atom"""
    positions: Tensor
    """(graphs, width, 3), centred"""
    nodes: Tensor
    """(graphs, nodes, 3), of the reciprocal lattice; zeros for models without nodes"""
    node_weights: Tensor
    """(graphs, nodes), Å^-3, 0 for padding"""
    pair_graphs: Tensor
    """(pairs,) int64, queries of pairs within the near field, each atom with itself first"""
    pair_queries: Tensor
    """(pairs,) int64, index of the query in its graph"""
    pair_keys: Tensor
    """(pairs,) int64, the other atom"""
    pair_vectors: Tensor
    """(pairs, 3), from query to key"""
    edge_centers: Tensor
    """(edges,) int64, atoms with neighbors, for the embedding"""
    edge_neighbors: Tensor
    """(edges,) int64"""
    edge_vectors: Tensor
    """(edges, 3), from center to neighbor"""

    @classmethod
    def of(cls, model: EnergyRegressor, batch: "Data") -> "EnergyInputs":
        """Checks and prepares a batch, as `EnergyRegressor.forward` takes it."""
        _check(model)
        atoms = Atoms.of(batch, model.embedding.element.weight)
        references = atoms.geometry.sum(model._references(atoms))
        if not model.subsurface:
            atoms, _ = atoms.above_subsurface()
        geometry, numbers, _ = atoms
        model.embedding.element.check(numbers)
        assert geometry.tags is not None
        encoding, nothing = model.encoding, geometry.pos.new_zeros(geometry.graphs, 2, 3)
        found = _Found(None)
        around = None
        if model.sees_neighbors:
            around = neighbor_list(geometry, model.neighbor_cutoff)
        if encoding is None:
            dense = DenseAtoms.of(geometry)
        else:
            dense = encoding.periodic.dense(geometry)
            found = encoding._found(geometry, model._near(around))
        nodes = found.nodes or GraphNodes(nothing, nothing[..., 0])
        none = numbers.new_zeros(2)
        near = found.near or NearPairs(none, none, none, geometry.pos.new_zeros(2, 3))
        edges = (none, none, geometry.pos.new_ones(2, 3))
        if around is not None:
            edges = around.center, around.neighbor, around.vector
        places = SizeClass.of(geometry, dense).places
        dtype = geometry.pos.dtype
        return cls(
            numbers,
            geometry.tags,
            places,
            references,
            dense.mask,
            dense.positions,
            nodes.xi.to(dtype),
            nodes.weights.to(dtype),
            *near,
            *edges,
        )


_SIZES = {
    "numbers": (_ATOMS,),
    "tags": (_ATOMS,),
    "places": (_ATOMS,),
    "references": (_GRAPHS,),
    "mask": (_GRAPHS, _WIDTH),
    "positions": (_GRAPHS, _WIDTH),
    "nodes": (_GRAPHS, _NODES),
    "node_weights": (_GRAPHS, _NODES),
    "pair_graphs": (_PAIRS,),
    "pair_queries": (_PAIRS,),
    "pair_keys": (_PAIRS,),
    "pair_vectors": (_PAIRS,),
    "edge_centers": (_EDGES,),
    "edge_neighbors": (_EDGES,),
    "edge_vectors": (_EDGES,),
}


class EnergyComputation(nn.Module):
    """Energies (graphs,), float64, eV, from `EnergyInputs`, without reading or checking numbers.

    Attention takes one form for all sizes. With a near field or reciprocal nodes this is the N x N
    matrix of each graph, O(width^2), which takes less time up to some thousand atoms; otherwise it
    is the linear form. Both give the sums of the model itself.

    Args:
        model: a trained regressor; it is copied.

    Raises:
        ValueError: periodic images, atoms that move between passes, softmax attention or a
            potential.
    """

    def __init__(self, model: EnergyRegressor) -> None:
        super().__init__()
        _check(model)
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        mixing = "quadratic" if takes_matrix(self.model) else "linear"
        for layer in self.model.modules():
            if isinstance(layer, Attention):
                layer.mixing = mixing

    def forward(self, *inputs: Tensor) -> Tensor:
        """Computes energies (graphs,) from the fields of `EnergyInputs`, in their order."""
        given, model = EnergyInputs(*inputs), self.model
        mask = given.mask
        dense = DenseAtoms(mask, given.positions, mask, given.positions)
        encoded = None
        if model.encoding is not None:
            lattice, near = model.encoding.periodic.lattice, None
            nodes = GraphNodes(given.nodes, given.node_weights) if lattice else None
            if model.encoding.near_field is not None:
                near = NearPairs(*given[_place("pair_graphs") : _place("edge_centers")])
            encoded = model.encoding._evaluate(dense, _Found(nodes, None, near))
        edges = None
        if model.sees_neighbors:
            center, neighbor, vector = given[_place("edge_centers") :]
            edges = Neighbors(center, neighbor, vector, vector.norm(dim=-1))
        ends = mask.sum(dim=1).cumsum(0)
        nowhere = given.positions.new_zeros(3)  # positions are in the encoding and the edges
        geometry = Geometry(
            nowhere,
            torch.div(given.places, mask.shape[1], rounding_mode="floor"),
            torch.cat((ends.new_zeros(1), ends)),
            nowhere,
            nowhere,
            given.tags,
        )
        x = model.embedding(given.numbers, geometry, edges)
        padded = SizeClass(dense, encoded, given.places)
        for _ in range(model.stack.refinements):
            x = padded.apply(model.stack.one_pass, x)
        energy: Tensor = model.readout(model.stack.norm(x), geometry, edges)
        return energy.double() * model.energy_std + model.energy_mean + given.references


def export_energies(model: EnergyRegressor, batch: "Data") -> "ExportedProgram":
    """`torch.export` of an `EnergyComputation`, for any number of atoms and graphs.

    Args:
        model: a trained regressor.
        batch: an example of at least two graphs with at least two atoms each.

    Returns:
        A program whose `.module()` maps `EnergyInputs` of any batch to energies, eV.
    """
    from torch.export import Dim, export

    computation, inputs = EnergyComputation(model), EnergyInputs.of(model, batch)
    dims = [Dim(name, min=1) for name in _DIMENSIONS]
    shapes = tuple(
        {axis: dims[d] for axis, d in enumerate(_SIZES[name])} for name in inputs._fields
    )
    with torch.no_grad():
        return export(computation, tuple(inputs), dynamic_shapes=(shapes,), strict=True)


def takes_matrix(model: EnergyRegressor) -> bool:
    """Returns True if its `EnergyComputation` forms the N x N matrix of each graph."""
    encoding = model.encoding
    return encoding is not None and bool(encoding.periodic.lattice or encoding.near_field)


def _place(name: str) -> int:
    return EnergyInputs._fields.index(name)


def _check(model: nn.Module) -> None:
    """Raises ValueError for a model whose energies are not a single function of tensors."""
    if type(model) is not EnergyRegressor:
        raise ValueError(
            f"expected one EnergyRegressor; got {type(model).__name__}, which cannot be exported; "
            "use molflt.load(...).predict"
        )
    encoding, why = model.encoding, None
    if model.move_atoms:
        why = "move_atoms=True searches neighbors between its passes"
    elif "softmax" in model.stack.mixings:
        why = "mixing='softmax' has another exact mask for each choice"
    elif encoding is not None and isinstance(encoding.periodic, Images):
        why = "periodic='images' has keys of its own"
    elif encoding is not None and isinstance(encoding.periodic, OnMesh):
        why = "periodic='mesh' has sparse matrices"
    if why:
        raise ValueError(f"the model cannot be exported: {why}; use molflt.load(...)")
