"""Relative encoding of the atoms of a batch: mask or kernel, periodicity, and near field."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from molflt.attention.checks import no_effect, one_of, positive
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
from molflt.attention.mixing.pairs import Pairs
from molflt.attention.mixing.ragged import Ragged
from molflt.attention.numerics import distances, products_of_all
from molflt.attention.positions import make_position
from molflt.attention.positions.base import differences
from molflt.attention.positions.multiplicative import MultiplicativePosition, NearField
from molflt.attention.positions.spectral import FrequencyProjection, GraphNodes, SpectralPosition
from molflt.attention.spectra import GaussianBasis
from molflt.graph.dense import DenseAtoms, places_of
from molflt.graph.geometry import Geometry
from molflt.graph.memory import _expect_memory
from molflt.graph.near import NearPairs, _bound, _Found, in_pieces
from molflt.graph.neighbors import Neighbors, neighbor_list
from molflt.graph.periodic import Auto, Images, Near, OnMesh, Open, Reciprocal, make_periodic
from molflt.graph.sizes import SizeClass, SizeClasses

_NARROWEST = 0.2  # Å, narrowest Gaussian of the near field
GraphPositionName = Literal["none", "spectral", "multiplicative"]
_GRAPH_POSITIONS = get_args(GraphPositionName)


class GraphEncoding(nn.Module):
    """Relative encoding of a batch of structures, shared by all layers that use it.

    Args:
        heads: number of heads.
        position: "spectral" adds f(r_i - r_j) to the logit, exp(q.k + f), as in FLT
            (arXiv:2302.01925, eq. 3). "multiplicative" multiplies phi(q).phi(k) by a kernel h(r_i -
            r_j) (`MultiplicativePosition`).
        position_options: further arguments of the position (see `SpectralPosition.build`):
            spectrum, nodes, num_nodes, arguments of the spectrum, and arguments of the nodes with
            the prefix `node_`.
        periodic: name as in `EnergyRegressor`, or a scheme of `molflt.graph.periodic`.
        near_field, near_exact, mixing, feature_map, num_features: see `EnergyRegressor`.
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
        one_of("position", position, _GRAPH_POSITIONS[1:])
        feature_map = feature_map or DEFAULT_MAP
        one_of("feature_map", feature_map, FEATURE_MAPS)
        self.periodic = make_periodic(periodic, **scheme)
        self.mixing, self.softmax = mixing, mixing == "softmax"
        options = dict(position_options or {})
        spectrum = str(options.get("spectrum", "gaussian_basis"))
        options = {**self.periodic.defaults(position, spectrum), **options}
        if self.periodic.lattice:
            options["sampled"] = False
        made = make_position(position, heads, 0, mixing=mixing, **{"dim": 3, **options})
        self.position = cast(SpectralPosition, made)
        self.position.on_lattice = self.periodic.lattice
        if self.periodic.lattice and self.position.spectrum.on_shells:
            raise ValueError(
                f"spectrum={spectrum!r} exists only on its shells, not on reciprocal lattices; got "
                f"periodic={self.periodic!r}; use another spectrum, or periodic='none' or 'images'"
            )
        self.periodic.check(self.position, self.softmax, bool(near_field))
        own = self.periodic
        if mixing == TRITON:
            smooth = isinstance(own, Reciprocal) and own.smooth
            if smooth or isinstance(own, Images | OnMesh | Near):
                raise ValueError(
                    "mixing='triton' requires periodic 'none', 'reciprocal' or 'auto'; got "
                    f"{own!r}; use one of them, or mixing='auto'"
                )
            if isinstance(own, Auto):
                own.nodes_only = True
        self.near_field: NearField | None = None
        self.frequency_projection: FrequencyProjection | None = None
        if near_field:
            positive(near_field=near_field)
            if near_field <= _NARROWEST or position != "multiplicative":
                raise ValueError(
                    f"near_field corrects a multiplicative kernel and must be above {_NARROWEST} "
                    f"Å, the width of its narrowest Gaussian; got near_field={near_field} and "
                    f"position={position!r}"
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
        if self.periodic.lattice and position == "spectral" and not self.softmax:
            why = "position='spectral' with reciprocal nodes needs a map of random projections"
            _expect_map(feature_map, "takes_projected", why)
            sizes = {} if num_features is None else {"num_features": num_features}
            self.frequency_projection = FrequencyProjection(heads, **sizes)

    def forward(self, geometry: Geometry, neighbors: Neighbors | None = None) -> SizeClasses:
        """Evaluates the encoding separately for each class of graphs of similar size.

        Args:
            geometry: the batch.
            neighbors: all pairs within the cutoff of the near field, if known.
        """
        found = self._found(geometry, neighbors)
        if self.mixing == TRITON:
            return SizeClasses([self._ragged(geometry, found)])
        compiling = torch.compiler.is_compiling()
        columns = None if compiling else self._columns(geometry, found)

        def encode(part: Geometry, graphs: Tensor | None) -> SizeClass:
            own = found if graphs is None else found.select(graphs, geometry.graphs)
            return self.padded(part, own)

        return SizeClasses.of(geometry, encode, columns, found.on_mesh)

    def _ragged(self, geometry: Geometry, found: _Found) -> SizeClass:
        """Evaluates the encoding of all graphs without padding, for mixing "triton"."""
        position, near = self.position, found.near
        assert isinstance(position, MultiplicativePosition)
        dense = self.periodic.dense(geometry)
        places = places_of(geometry, dense.mask)
        positions = dense.positions.flatten(0, 1).index_select(0, places)
        if found.nodes is None:
            waves = position.waves()
        else:
            waves = position.waves(
                GraphNodes(*(x.to(positions) for x in found.nodes)), found.counts()
            )
        factors = None
        if near is not None:  # all graphs are parts of one row
            first = geometry.ptr[near.graph]
            near = NearPairs(0 * first, near.query + first, near.key + first, near.vector)
            if found.nodes is None:
                factors = position.factors(positions[None], positions[None])
        far = partial(self.periodic.far, position, factors)
        pairs = self._near(found._replace(near=near), far)
        tokens = Ragged.of(geometry.ptr.tolist(), places.device)
        encoding = RaggedKernel(waves, (positions, positions), (tokens, tokens), pairs)
        there = torch.ones_like(places, dtype=torch.bool)[None]
        row = DenseAtoms(there, positions[None], there, positions[None])
        return SizeClass(row, encoding, torch.arange(len(places), device=places.device))

    def padded(self, geometry: Geometry, found: _Found | None = None) -> SizeClass:
        """Evaluates the encoding with all graphs padded to the size of the largest graph."""
        found = self._found(geometry) if found is None else found
        by_cell = geometry.cell.requires_grad and torch.is_grad_enabled()
        if by_cell and self.frequency_projection is not None:
            raise ValueError(
                "position='spectral' with reciprocal nodes has no gradient for the cell: random "
                "features jump when frequencies change; got a cell that requires a gradient; "
                "use position='multiplicative' for stress"
            )
        dense = self.periodic.dense(geometry)
        mesh = None
        if found.on_mesh is not None:
            mesh = self.periodic.mesh(geometry, dense, self.position, found.on_mesh)
        if mesh is not None and isinstance(self.position, MultiplicativePosition):
            far = partial(self.periodic.far, self.position, None)
            encoding: Encoding = MeshNodes(mesh, self._near(found, far))
        else:
            encoding = self._evaluate(dense, found)
        return SizeClass.of(geometry, dense, encoding)

    def _found(self, geometry: Geometry, neighbors: Neighbors | None = None) -> _Found:
        """Finds neighbors and nodes of the whole batch at once; errors thus refer to the batch."""
        alone, near = self.periodic.without_nodes(geometry), self.near_field
        large = self.periodic.on_mesh(geometry)
        nodes = self.periodic.nodes(geometry, self.position, large if alone is None else alone)
        if nodes is not None:
            _expect_memory(nodes.weights, geometry, self.position.spectrum.heads)
        if near is None and alone is None:
            return _Found(nodes, on_mesh=large)
        cutoff = 0.0 if near is None else near.cutoff
        if not self.periodic.lattice:
            neighbors = None
            geometry = geometry._replace(pbc=torch.zeros_like(geometry.pbc))
        if neighbors is None and cutoff:
            neighbors = neighbor_list(geometry, cutoff)
        return _Found(nodes, alone, NearPairs.of(geometry, neighbors, alone), large)

    def _columns(self, geometry: Geometry, found: _Found) -> Tensor | None:
        """Returns the number of nodes, images or keys per atom in each graph: (graphs,) or None."""
        if found.nodes is None:
            return self.periodic.images(geometry)
        atoms, nodes = geometry.ptr.diff(), found.counts()
        if self.mixing == "linear":
            return nodes
        return torch.minimum(atoms, nodes) if self.mixing == "auto" else atoms

    def _evaluate(self, dense: DenseAtoms, found: _Found) -> Encoding:
        # Uses only tensors, because exported programs require it.
        nodes = found.nodes
        if self.softmax and nodes is None:
            return self._exact(dense, found)
        dtype = torch.promote_types(dense.positions.dtype, torch.float32)
        rounded = None if nodes is None else GraphNodes(*(x.to(dtype) for x in nodes))
        factors = self.position.factors(dense.positions, dense.key_positions, rounded)
        if isinstance(self.position, MultiplicativePosition):
            far = partial(self.periodic.far, self.position, factors)
            encoding = Kernel(*factors, self._near(found, far))
            if not self.softmax:
                return encoding
            kernel = encoding.dense(dense.positions.shape[1], dense.key_positions.shape[1])
            return Bias(kernel.clamp(min=self.position.positive).log())
        if self.softmax:
            return Bias(products_of_all(*factors))
        if self.frequency_projection is not None and nodes is not None:
            return Factors(*self.frequency_projection(factors, nodes.xi))
        return Factors(*factors)

    def _exact(self, dense: DenseAtoms, found: _Found) -> Encoding:
        """Computes the exact mask for softmax, including the near field."""
        positions, keys, position = dense.positions, dense.key_positions, self.position
        if self.near_field is None or not isinstance(position, MultiplicativePosition):
            return position("softmax", positions, keys)
        kernel = position.kernel(differences(positions, keys))
        pairs = self._near(found, lambda some, _: position.kernel(-some.vector[None])[0])
        if pairs is not None:
            batch, queries, _ = positions.shape
            kernel = kernel + pairs.dense(batch, queries, keys.shape[1])
        return Bias(kernel.clamp(min=position.positive).log())

    def _near(self, found: _Found, far: Callable[[NearPairs, float], Tensor]) -> Pairs | None:
        """Returns near-field pairs and their corrections; each atom is also paired with itself."""
        if found.near is None:
            return None
        near, alone = found.near, found.alone
        cutoff = 0.0 if self.near_field is None else self.near_field.cutoff
        farthest = cutoff if alone is None else _bound(distances(near.vector), cutoff)

        def added(some: NearPairs) -> tuple[Tensor, ...]:
            pairs, kernel = some.pairs(), far(some, farthest)
            out = pairs._replace(weight=torch.zeros_like(kernel))
            if self.near_field is not None:
                out = self.near_field(pairs, some.vector, kernel)
            weight = out.weight
            if alone is not None:
                weight = weight + kernel * alone[some.graph]
            return weight, *(out.exact or ())

        parts = zip(*in_pieces(added, near), strict=True)
        weight, *own = (torch.cat(x, dim=-1) for x in parts)
        return near.pairs()._replace(weight=weight, exact=(own[0], own[1]) if own else None)

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
            vector = F.pad(distance[None, :, None], (0, 2))
            near = self.near_field.spectrum.mask(vector)[0].exp()
            kernel = kernel + self.near_field.switch(distance) * (near - kernel)
        return kernel.clamp(min=self.position.positive).log()

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws new random features in place; use the same seed on every rank.

        Nodes of the mask are kept, because the mask is learned with them.
        """
        if self.frequency_projection is not None:
            self.frequency_projection.redraw_(generator)

    def extra_repr(self) -> str:
        return f"position={type(self.position).__name__}, periodic={self.periodic!r}"


def _expect_map(feature_map: str, able: str, why: str) -> None:
    known = [name for name, phi in FEATURE_MAPS.items() if getattr(phi, able)]
    if feature_map not in known:
        raise ValueError(f"{why}; got feature_map={feature_map!r}; use one of {', '.join(known)}")


def _make_encoding(
    heads: int,
    position: GraphPositionName,
    kind: dict[str, Any],
    periodic: str | Open | None,
    **where: Any,
) -> GraphEncoding | None:
    one_of("position", position, _GRAPH_POSITIONS)
    if position != "none":
        return GraphEncoding(heads, position=position, periodic=periodic or "none", **where, **kind)
    where["periodic"] = None if periodic == "none" else periodic
    no_effect("with position='none'", **{name: value or None for name, value in where.items()})
    return None


def _encode(
    encoding: GraphEncoding | None, geometry: Geometry, neighbors: Neighbors | None = None
) -> SizeClasses:
    if encoding is not None:
        return encoding(geometry, neighbors)
    return SizeClasses.of(geometry, lambda part, _: SizeClass.of(part, DenseAtoms.of(part)))
