"""Relative encoding of the atoms of a batch: mask or kernel, periodicity, and near field."""

from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from molflt.attention.checks import no_effect, one_of, readable
from molflt.attention.encodings import (
    TRITON,
    Bias,
    Encoding,
    Factors,
    Kernel,
    MeshNodes,
    RaggedKernel,
)
from molflt.attention.features import FEATURE_MAPS
from molflt.attention.layer import DEFAULT_MAP
from molflt.attention.mixing.pairs import Pairs, products
from molflt.attention.mixing.ragged import Ragged
from molflt.attention.numerics import distances, products_of_all
from molflt.attention.positions import make_position
from molflt.attention.positions.base import differences
from molflt.attention.positions.multiplicative import MultiplicativePosition, NearField
from molflt.attention.positions.spectral import FrequencyProjection, GraphNodes, SpectralPosition
from molflt.attention.spectra import GaussianBasis
from molflt.graph.dense import DenseAtoms, SizeClass, SizeClasses, places_of
from molflt.graph.geometry import Geometry
from molflt.graph.neighbors import NearPairs, Neighbors, _bound, _Terms, in_pieces, neighbor_list
from molflt.graph.periodic import Auto, Images, Near, OnMesh, Open, Reciprocal, make_periodic
from molflt.memory import expect_memory

_NARROWEST = 0.2  # Å, narrowest Gaussian of the near field
_WAVES_PER_PHASE = 4  # cosine and sine, of queries and of keys
_WHILE_MADE = 1.5  # peak memory for computing waves of nodes, relative to their own memory
GraphPositionName = Literal["none", "spectral", "multiplicative"]
_GRAPH_POSITIONS = get_args(GraphPositionName)


class GraphEncoding(nn.Module):
    """Relative encoding of a batch of structures, shared by all layers that use it.

    Args:
        heads: number of heads.
        position: "spectral" adds f(r_i - r_j) to the logit, exp(q.k + f), as in FLT
            (arXiv:2302.01925, eq. 3). "multiplicative" multiplies phi(q).phi(k) by a kernel.
        position_options: further arguments of the position (see `SpectralPosition.build`):
            spectrum, nodes, num_nodes, arguments of the spectrum and, after `node_`, of the nodes.
        periodic: name as in `EnergyRegressor`, or a scheme of `molflt.graph.periodic`.
        near_field: see `EnergyRegressor`; None (the default) and 0 omit the near field.
        near_exact, mixing, feature_map, num_features: see `EnergyRegressor`.
        scheme: image_cutoff, max_frequency or mesh_order; see `EnergyRegressor`.
    """

    def __init__(
        self,
        heads: int,
        *,
        position: GraphPositionName = "spectral",
        position_options: Mapping[str, object] | None = None,
        periodic: str | Open = "none",
        near_field: float | None = None,
        near_exact: bool = False,
        mixing: str = "linear",
        feature_map: str | None = None,
        num_features: int | None = None,
        **scheme: float | None,
    ) -> None:
        super().__init__()
        feature_map = feature_map or DEFAULT_MAP
        self.periodic = make_periodic(periodic, **scheme)
        self.mixing, self.softmax = mixing, mixing == "softmax"
        options = position_options or {}
        self.position = _make_position(position, heads, mixing, self.periodic, options)
        self.periodic.check(self.position, self.softmax, bool(near_field))
        if mixing == TRITON:
            smooth = isinstance(self.periodic, Reciprocal) and self.periodic.smooth
            if smooth or isinstance(self.periodic, Images | OnMesh | Near):
                raise ValueError(
                    "mixing='triton' requires periodic 'none', 'reciprocal' or 'auto'; got "
                    f"{self.periodic!r}"
                )
            if isinstance(self.periodic, Auto):
                self.periodic.nodes_only = True
        self.near_field: NearField | None = None
        if near_field:
            if near_field <= _NARROWEST or position != "multiplicative":
                raise ValueError(
                    f"near_field corrects a multiplicative kernel and must be above {_NARROWEST} "
                    f"Å, the width of its narrowest Gaussian; got {near_field=} and {position=}"
                )
            # Near kernels learn much faster if their initial values differ between heads.
            basis = GaussianBasis(heads, 32, width_range=(_NARROWEST, near_field), amplitude=0.7)
            self.near_field = NearField(basis, near_field, exact=near_exact)
        if near_exact:
            if self.near_field is None:
                no_effect("without near_field", near_exact=True)
            if self.softmax:
                no_effect("with mixing='softmax', whose q.k is exact everywhere", near_exact=True)
            _expect_map(feature_map, "estimates_exp", "near_exact=True needs estimates of exp(q.k)")
        self.frequency_projection: FrequencyProjection | None = None
        if self.periodic.lattice and position == "spectral" and not self.softmax:
            why = "position='spectral' with reciprocal nodes needs a map with takes_projected"
            _expect_map(feature_map, "takes_projected", why)
            sizes = {} if num_features is None else {"num_features": num_features}
            self.frequency_projection = FrequencyProjection(heads, **sizes)

    def forward(self, geometry: Geometry, neighbors: Neighbors | None = None) -> SizeClasses:
        """Evaluates the encoding separately for each class of graphs of similar size.

        `neighbors` are all pairs within the cutoff of the near field, if known.
        """
        terms = self._terms(geometry, neighbors)
        if self.mixing == TRITON:
            return SizeClasses([self._ragged(geometry, terms)])
        columns = None if torch.compiler.is_compiling() else self._columns(geometry, terms)

        def encode(part: Geometry, graphs: Tensor | None) -> SizeClass:
            selected = terms if graphs is None else terms.select(graphs, geometry.graphs)
            return self.padded(part, selected)

        return SizeClasses.of(geometry, encode, columns, terms.on_mesh)

    def _ragged(self, geometry: Geometry, terms: _Terms) -> SizeClass:
        """Evaluates the encoding without padding, with all graphs in one row, for "triton"."""
        position, near = self.position, terms.near
        assert isinstance(position, MultiplicativePosition)
        dense = self.periodic.dense(geometry)
        places = places_of(geometry, dense.mask)
        positions = dense.positions.flatten(0, 1).index_select(0, places)  # (atoms, 3)
        if terms.nodes is None:
            waves = position.waves()
        else:
            waves = position.waves(_rounded(terms.nodes, positions), terms.node_counts())
        factors = None
        if near is not None:
            first = geometry.ptr[near.graph]
            row = torch.zeros_like(near.graph)
            near = NearPairs(row, near.query + first, near.key + first, near.vector)
            if terms.nodes is None:
                factors = position.factors(positions[None], positions[None])
        pairs = self._corrected_pairs(terms._replace(near=near), factors)
        tokens = Ragged.of(geometry.ptr.tolist(), places.device)
        encoding = RaggedKernel(waves, (positions, positions), (tokens, tokens), pairs)
        mask = torch.ones_like(places, dtype=torch.bool)[None]
        atoms = DenseAtoms(mask, positions[None], mask, positions[None])
        return SizeClass(atoms, encoding, torch.arange(len(places), device=places.device))

    def padded(self, geometry: Geometry, terms: _Terms | None = None) -> SizeClass:
        """Evaluates the encoding with all graphs padded to the size of the largest graph."""
        terms = self._terms(geometry) if terms is None else terms
        needs_cell_gradient = geometry.cell.requires_grad and torch.is_grad_enabled()
        if needs_cell_gradient and self.frequency_projection is not None:
            raise ValueError(
                "position='spectral' with reciprocal nodes has no gradient for the cell; got a "
                "cell that requires one; use position='multiplicative' for stress"
            )
        dense = self.periodic.dense(geometry)
        if terms.on_mesh is not None and bool(terms.on_mesh.any()):  # all graphs of a class
            assert isinstance(self.periodic, Auto)
            assert isinstance(self.position, MultiplicativePosition)
            mesh = self.periodic.mesh(geometry, dense, self.position)
            encoding: Encoding = MeshNodes(mesh, self._corrected_pairs(terms))
        else:
            encoding = self._evaluate(dense, terms)
        return SizeClass(dense, encoding, places_of(geometry, dense.mask))

    def _terms(self, geometry: Geometry, neighbors: Neighbors | None = None) -> _Terms:
        """Finds neighbors and nodes of the whole batch at once; errors thus refer to the batch."""
        without_nodes = self.periodic.without_nodes(geometry)
        on_mesh = self.periodic.on_mesh(geometry)
        # at most one of them is a mask, because schemes with a mesh are not smooth
        left_out = on_mesh if without_nodes is None else without_nodes
        nodes = self.periodic.nodes(geometry, self.position, left_out)
        if nodes is not None:
            _expect_memory(nodes.weights, geometry, self.position.spectrum.heads)
        if self.near_field is None and without_nodes is None:
            return _Terms(nodes, on_mesh=on_mesh)
        if not self.periodic.lattice:
            neighbors = None
            geometry = geometry._replace(pbc=torch.zeros_like(geometry.pbc))
        if neighbors is None and self.near_field is not None:
            neighbors = neighbor_list(geometry, self.near_field.cutoff)
        near = NearPairs.of(geometry, neighbors, without_nodes)
        return _Terms(nodes, without_nodes, near, on_mesh)

    def _columns(self, geometry: Geometry, terms: _Terms) -> Tensor | None:
        """Returns the number of nodes, images or keys per atom in each graph: (graphs,) or None."""
        if terms.nodes is None:
            return self.periodic.images(geometry)
        atoms, nodes = geometry.ptr.diff(), terms.node_counts()
        if self.mixing == "linear":
            return nodes
        return torch.minimum(atoms, nodes) if self.mixing == "auto" else atoms

    def _evaluate(self, dense: DenseAtoms, terms: _Terms) -> Encoding:
        """Evaluates the encoding without a mesh; exported programs require that all are tensors."""
        positions, keys, position = dense.positions, dense.key_positions, self.position
        if self.softmax and terms.nodes is None:
            pairs = self._corrected_pairs(terms)
            if pairs is None:
                return position("softmax", positions, keys)
            assert isinstance(position, MultiplicativePosition)
            batch, queries, _ = positions.shape
            kernel = position.kernel(differences(positions, keys))
            kernel = kernel + pairs.dense(batch, queries, keys.shape[1])
            return Bias(kernel.clamp(min=position.positive).log())
        nodes = None if terms.nodes is None else _rounded(terms.nodes, positions)
        factors = position.factors(positions, keys, nodes)
        if isinstance(position, MultiplicativePosition):
            encoding = Kernel(*factors, self._corrected_pairs(terms, factors))
            if not self.softmax:
                return encoding
            kernel = encoding.dense(positions.shape[1], keys.shape[1])
            return Bias(kernel.clamp(min=position.positive).log())
        if self.softmax:
            return Bias(products_of_all(*factors))
        if self.frequency_projection is not None and terms.nodes is not None:
            return Factors(*self.frequency_projection(factors, terms.nodes.xi))
        return Factors(*factors)

    def _far(
        self, near: NearPairs, farthest: float, factors: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Computes the far field of pairs: (heads, pairs); `farthest` bounds distances, in Å."""
        assert isinstance(self.position, MultiplicativePosition)
        if self.periodic.lattice:
            return self.periodic.profile(self.position, distances(near.vector), farthest)
        if factors is None:
            return self.position.kernel(-near.vector[None])[0]
        return products(*factors, near.pairs())

    def _corrected_pairs(
        self, terms: _Terms, factors: tuple[Tensor, Tensor] | None = None
    ) -> Pairs | None:
        """Returns near-field pairs and their corrections; each atom is also paired with itself.

        Open boundaries need the `factors` of the kernel, unless all pairs have the exact kernel.
        """
        if terms.near is None:
            return None
        near, without_nodes = terms.near, terms.without_nodes
        cutoff = 0.0 if self.near_field is None else self.near_field.cutoff
        farthest = cutoff if without_nodes is None else _bound(distances(near.vector), cutoff)

        def corrections(piece: NearPairs) -> tuple[Tensor, ...]:
            """Returns weights (heads, pairs) and, with exact pairs, the fields of `Pairs.exact`."""
            pairs, kernel = piece.pairs(), self._far(piece, farthest, factors)
            if self.near_field is None:
                pairs = pairs._replace(weight=torch.zeros_like(kernel))
            else:
                pairs = self.near_field(pairs, piece.vector, kernel)
            weight = pairs.weight
            if without_nodes is not None:  # these graphs have no other far field
                weight = weight + kernel * without_nodes[piece.graph]
            return (weight,) if pairs.exact is None else (weight, *pairs.exact)

        pieces = zip(*in_pieces(corrections, near), strict=True)
        weight, *exact = [torch.cat(parts, dim=-1) for parts in pieces]
        return near.pairs()._replace(weight=weight, exact=(exact[0], exact[1]) if exact else None)

    @torch.no_grad()
    def radial_profile(self, distance: Tensor) -> Tensor:
        """Computes the contribution of the distance to the logit of a pair, f or log h, for plots.

        Maps distances (n,), in Å, to contributions (heads, n). Only one periodic image is included.
        If nodes sample the mask, the exact mask is used instead.
        """
        if not isinstance(self.position, MultiplicativePosition):
            return self.position.radial_profile(distance)
        kernel = self.periodic.profile(self.position, distance, float(distance.max()))
        if self.near_field is not None:
            vector = nn.functional.pad(distance[None, :, None], (0, 2))  # (1, n, 3), along x
            near = self.near_field.spectrum.mask(vector)[0].exp()
            kernel = kernel + self.near_field.switch(distance) * (near - kernel)
        return kernel.clamp(min=self.position.positive).log()

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws new random features, not nodes, in place; use the same seed on every rank."""
        if self.frequency_projection is not None:
            self.frequency_projection.redraw_(generator)

    def extra_repr(self) -> str:
        return f"position={type(self.position).__name__}, periodic={self.periodic!r}"


def _make_position(
    name: str, heads: int, mixing: str, scheme: Open, position_options: Mapping[str, object]
) -> SpectralPosition:
    """Builds the position with the defaults of a periodic scheme, unless options override them."""
    spectrum = str(position_options.get("spectrum", "gaussian_basis"))
    options = {"dim": 3, **scheme.defaults(name, spectrum), **position_options}
    one_of("position_options dim", options["dim"], [3])
    if scheme.lattice:
        options["sampled"] = False
    position = cast(SpectralPosition, make_position(name, heads, 0, mixing=mixing, **options))
    position.on_lattice = scheme.lattice
    if scheme.lattice and position.spectrum.on_shells:
        raise ValueError(
            f"spectrum={spectrum!r} exists only on its shells, not on reciprocal lattices; got "
            f"periodic={scheme!r}; use another spectrum, or periodic='none' or 'images'"
        )
    return position


def _rounded(nodes: GraphNodes, positions: Tensor) -> GraphNodes:
    """Casts float64 nodes to the precision of the positions."""
    return GraphNodes(nodes.xi.to(positions), nodes.weights.to(positions))


def _expect_memory(weights: Tensor, geometry: Geometry, heads: int) -> None:
    """Raises MemoryError if waves of nodes exceed free CPU memory; `weights` is (graphs, nodes)."""
    if not readable(weights):
        return
    nodes, atoms = (weights != 0).sum(dim=1), geometry.ptr.diff()
    phases = nodes * atoms  # per graph, because classes of similar size have little padding
    waves = _WAVES_PER_PHASE * int(phases.sum()) * heads
    largest = int(phases.argmax()) if len(atoms) else 0
    expect_memory(
        _WHILE_MADE * waves * geometry.pos.element_size(),
        f"{int(nodes[largest]):,} reciprocal nodes x {int(atoms[largest]):,} atoms x {heads} heads "
        f"of the largest of {len(atoms)} structures, plus those of the others,",
        "reduce max_frequency, or use periodic='mesh' (predict: --mesh-order 5)",
    )


def _expect_map(feature_map: str, capability: str, why: str) -> None:
    """Raises ValueError unless the class of the feature map sets the attribute `capability`."""
    capable = [name for name, phi in FEATURE_MAPS.items() if getattr(phi, capability)]
    if feature_map not in capable:
        raise ValueError(f"{why}; got feature_map={feature_map!r}; use one of {', '.join(capable)}")


def _make_encoding(
    heads: int, position: GraphPositionName, kernel: dict[str, Any], **options: Any
) -> GraphEncoding | None:
    """Builds the encoding; with position "none", rejects its options and returns None."""
    one_of("position", position, _GRAPH_POSITIONS)
    options["periodic"] = options["periodic"] or "none"
    if position != "none":
        return GraphEncoding(heads, position=position, **options, **kernel)
    given = {name: value for name, value in options.items() if value and value != "none"}
    no_effect("with position='none'", **given)
    return None


def _encode(
    encoding: GraphEncoding | None, geometry: Geometry, neighbors: Neighbors | None = None
) -> SizeClasses:
    """Evaluates an encoding; None only pads the atoms."""
    if not geometry.pos.shape[0]:
        return SizeClasses([])
    if encoding is not None:
        return encoding(geometry, neighbors)

    def pad(part: Geometry, _: Tensor | None) -> SizeClass:
        dense = DenseAtoms.of(part)
        return SizeClass(dense, None, places_of(part, dense.mask))

    return SizeClasses.of(geometry, pad)
