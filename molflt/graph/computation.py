"""Energies of a regressor as a function of tensors only, for export and compilation.

`EnergyInputs` contains all tensors whose sizes depend on values of the data: neighbors, reciprocal
nodes, padding. `EnergyComputation` is one computation graph for all sizes.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from molflt.atoms import Data
from molflt.attention import Attention
from molflt.attention.positions.spectral import GraphNodes
from molflt.graph.dense import DenseAtoms, SizeClass, places_of
from molflt.graph.geometry import Atoms, Geometry, _starts
from molflt.graph.neighbors import NearPairs, Neighbors, _Terms, neighbor_list
from molflt.graph.periodic import Auto, Images, OnMesh
from molflt.graph.regressor import EnergyRegressor

_MOST_IN_MATRIX = 2048
"""largest number of atoms per graph in machine code; larger N x N matrices would exhaust memory"""
_DIMENSIONS = {
    **dict.fromkeys(("numbers", "tags", "places"), ("atoms",)),
    "references": ("graphs",),
    **dict.fromkeys(("mask", "positions"), ("graphs", "width")),
    **dict.fromkeys(("nodes", "node_weights"), ("graphs", "nodes")),
    **dict.fromkeys(("pair_graphs", "pair_queries", "pair_keys", "pair_vectors"), ("pairs",)),
    **dict.fromkeys(("edge_centers", "edge_neighbors", "edge_vectors"), ("edges",)),
}
"""leading dimensions, whose sizes may change, of each field of `EnergyInputs`"""


class EnergyInputs(NamedTuple):
    """Arguments of `EnergyComputation`, in order; lengths are in Å and frequencies in cycles/Å.

    Graphs are padded to the size of the largest graph; use batches with graphs of similar size.
    """

    numbers: Tensor
    """(atoms,) int64, atomic numbers, without the atoms that the model omits"""
    tags: Tensor
    """(atoms,) int64, 0 for subsurface, 1 for surface and 2 for adsorbate atoms"""
    places: Tensor
    """(atoms,) int64, index of each atom into the flattened `mask`"""
    references: Tensor
    """(graphs,) float64, sums of element energies, in eV, which are added to the output"""
    mask: Tensor
    """(graphs, width) bool, True where an atom exists"""
    positions: Tensor
    """(graphs, width, 3), centered"""
    nodes: Tensor
    """(graphs, nodes, 3), nodes of the reciprocal lattice; zeros for models without nodes"""
    node_weights: Tensor
    """(graphs, nodes), in Å^-3; 0 for padding"""
    pair_graphs: Tensor
    """(pairs,) int64, graphs of near-field pairs; pairs of an atom with itself come first"""
    pair_queries: Tensor
    """(pairs,) int64, index of an atom within its graph, as in `pair_keys`"""
    pair_keys: Tensor
    pair_vectors: Tensor
    """(pairs, 3), from query to key"""
    edge_centers: Tensor
    """(edges,) int64, atom indices, as in `edge_neighbors`, for the embedding and the readout"""
    edge_neighbors: Tensor
    edge_vectors: Tensor
    """(edges, 3), from center to neighbor"""

    @classmethod
    def of(cls, model: EnergyRegressor, batch: Data) -> "EnergyInputs":
        """Checks and prepares a batch in the format of `EnergyRegressor.forward`."""
        expect_compilable(model)
        atoms = Atoms.of(batch, model.embedding.element.weight)
        references = atoms.geometry.sum(model._references(atoms))
        if model.subsurface is not True:
            atoms, _ = model.without_subsurface(atoms)
        geometry, numbers, _ = atoms
        model.embedding.element.check(numbers)
        model.readout.counted(geometry)  # compiled code does not check tags
        assert geometry.tags is not None
        encoding, neighbors = model.encoding, None
        if model.sees_neighbors:
            neighbors = neighbor_list(geometry, model.neighbor_cutoff)
        if encoding is None:
            dense, terms = DenseAtoms.of(geometry), _Terms(None)
        else:
            dense = encoding.periodic.dense(geometry)
            terms = encoding._terms(geometry, model._in_near_field(neighbors))
            if isinstance(encoding.periodic, Auto):  # one form for graphs of all sizes
                terms = terms._replace(nodes=encoding.periodic.nodes(geometry, encoding.position))
        # zeros for inputs that the model does not use
        no_nodes = geometry.pos.new_zeros(geometry.graphs, 2, 3)
        no_pairs, no_vectors = numbers.new_zeros(2), geometry.pos.new_zeros(2, 3)
        nodes = terms.nodes or GraphNodes(no_nodes, no_nodes[..., 0])
        near = terms.near or NearPairs(no_pairs, no_pairs, no_pairs, no_vectors)
        edges = neighbors or Neighbors(no_pairs, no_pairs, no_vectors, no_vectors[:, 0])
        return cls(
            numbers=numbers,
            tags=geometry.tags,
            places=places_of(geometry, dense.mask),
            references=references,
            mask=dense.mask,
            positions=dense.positions,
            nodes=nodes.xi.to(geometry.pos),
            node_weights=nodes.weights.to(geometry.pos),
            pair_graphs=near.graph,
            pair_queries=near.query,
            pair_keys=near.key,
            pair_vectors=near.vector,
            edge_centers=edges.center,
            edge_neighbors=edges.neighbor,
            edge_vectors=edges.vector,
        )


class EnergyComputation(nn.Module):
    """Computes the energies of graphs from `EnergyInputs` without inspecting values.

    With a near field or reciprocal nodes, attention uses the N x N matrix of each graph, which is
    faster for up to a few thousand atoms. The energies equal those of `model`, which is copied.
    """

    def __init__(self, model: EnergyRegressor) -> None:
        super().__init__()
        expect_compilable(model)
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        mixing = "quadratic" if takes_matrix(self.model) else "linear"
        for layer in self.model.modules():
            if isinstance(layer, Attention):
                layer.mixing = mixing

    def forward(self, *fields: Tensor) -> Tensor:
        """Computes float64 energies (graphs,), in eV, from the ordered fields of `EnergyInputs`."""
        inputs, model = EnergyInputs(*fields), self.model
        dense = DenseAtoms(inputs.mask, inputs.positions, inputs.mask, inputs.positions)
        encoding = nodes = near = edges = None
        if model.encoding is not None:
            if model.encoding.periodic.lattice:
                nodes = GraphNodes(inputs.nodes, inputs.node_weights)
            if model.encoding.near_field is not None:
                pairs = inputs.pair_graphs, inputs.pair_queries, inputs.pair_keys
                near = NearPairs(*pairs, inputs.pair_vectors)
            encoding = model.encoding._evaluate(dense, _Terms(nodes, near=near))
        if model.sees_neighbors:
            distance = inputs.edge_vectors.norm(dim=-1)
            ends = inputs.edge_centers, inputs.edge_neighbors
            edges = Neighbors(*ends, inputs.edge_vectors, distance)
        unused = inputs.positions.new_zeros(3)  # the encoding and the edges contain positions
        geometry = Geometry(
            pos=unused,
            batch=inputs.places // inputs.mask.shape[1],
            ptr=_starts(inputs.mask.sum(dim=1)),
            cell=unused,
            pbc=unused,
            tags=inputs.tags,
        )
        tokens = model.embedding(inputs.numbers, geometry, edges)
        graphs = SizeClass(dense, encoding, inputs.places)
        for _ in range(model.stack.refinements):
            tokens = graphs.apply(model.stack.one_pass, tokens)
        atomic, _ = model.readout(model.stack.norm(tokens), geometry, edges)
        energy = geometry.sum(atomic.double()) * model.energy_std + model.energy_mean
        return energy + inputs.references


def export_energies(model: EnergyRegressor, batch: Data) -> ExportedProgram:
    """Exports an `EnergyComputation` with `torch.export`, for any number of atoms and graphs.

    `batch` is an example with at least two graphs of at least two atoms. The `.module()` of the
    exported program maps the `EnergyInputs` of any batch to energies in eV.
    """
    computation, inputs = EnergyComputation(model), EnergyInputs.of(model, batch)
    dims = {name: Dim(name, min=1) for names in _DIMENSIONS.values() for name in names}
    ordered = tuple(
        {axis: dims[name] for axis, name in enumerate(_DIMENSIONS[field])}
        for field in EnergyInputs._fields
    )
    with torch.no_grad():
        return export(computation, tuple(inputs), dynamic_shapes=(ordered,), strict=True)


def takes_matrix(model: EnergyRegressor) -> bool:
    """Returns True if `EnergyComputation` forms the N x N matrix of each graph."""
    encoding = model.encoding
    return encoding is not None and bool(encoding.periodic.lattice or encoding.near_field)


def expect_compilable(model: nn.Module) -> None:
    """Raises ValueError for models whose energies `EnergyComputation` cannot compute."""
    if type(model) is not EnergyRegressor:
        raise ValueError(
            "potentials, ensembles and models of text or images cannot be compiled; got "
            f"{type(model).__name__}; export without --compiled"
        )
    scheme = None if model.encoding is None else model.encoding.periodic
    softmax = "softmax" in model.stack.mixings
    if model.move_atoms or softmax or isinstance(scheme, Images) or type(scheme) is OnMesh:
        raise ValueError(
            "models with move_atoms, mixing='softmax' and periodic='images' or 'mesh' cannot be "
            f"compiled; got move_atoms={model.move_atoms}, mixing of {model.stack.mixings} and "
            f"periodic={scheme!r}; use molflt.load(...)"
        )


def compile_energies(model: EnergyRegressor, path: Path) -> Path:
    """Compiles the `EnergyComputation` of a model for this processor; returns the .pt2 file's path.

    Compilation takes minutes. Raises ValueError without a C++ compiler.
    """
    from torch._inductor import aoti_compile_and_package
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ValueError(
            "compilation needs a C++ compiler; got none; install g++ or clang++, or set $CXX"
        ) from None
    aoti_compile_and_package(export_energies(model, _example(model)), package_path=str(path))
    return path


class CompiledEnergies(nn.Module):
    """Computes the energies of a regressor with compiled machine code.

    Args:
        model: regressor that was compiled; it prepares batches.
        path: package written by `compile_energies`. It contains machine code, which may do
            anything; load only files that you trust.
    """

    def __init__(self, model: EnergyRegressor, path: Path) -> None:
        super().__init__()
        from torch._inductor import aoti_load_package

        self.model = model
        self.program = aoti_load_package(str(path))
        self.matrix = takes_matrix(model)
        self.trained_elements, self.descriptors = model.trained_elements, model.descriptors
        self.element_energies = model.element_energies

    def forward(self, batch: Data) -> Mapping[str, Tensor]:
        """Computes float64 energies (graphs,), in eV, like `EnergyRegressor.forward`."""
        inputs = EnergyInputs.of(self.model, batch)
        if self.matrix and inputs.mask.shape[1] > _MOST_IN_MATRIX:  # too large for machine code
            return {"energy": self.model(batch)["energy"]}
        return {"energy": self.program(*inputs) + self.model.baseline(batch)}


def _example(model: EnergyRegressor) -> Data:
    """Returns two graphs, of three and two atoms, that every model accepts."""
    from torch_geometric.data import Data

    pos = [[0.0, 0.0, 0.0], [0.0, 0.0, 1.5], [1.5, 0.0, 3.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.5]]
    return Data(
        pos=torch.tensor(pos, dtype=model.embedding.element.weight.dtype),
        batch=torch.tensor([0, 0, 0, 1, 1]),
        atomic_numbers=torch.tensor([29, 29, 8, 29, 29]),
        tags=torch.tensor([1, 2, 2, 1, 2]),
        cell=8 * torch.eye(3).expand(2, 3, 3),
    )
