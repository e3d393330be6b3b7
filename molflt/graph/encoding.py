"""Relative encoding of the atoms of a batch: mask or kernel, periodicity, near field."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from molflt.attention.checks import no_effect, one_of, positive
from molflt.attention.encodings import Bias, Encoding, Factors, Kernel, MeshNodes
from molflt.attention.features import FEATURE_MAPS
from molflt.attention.layer import DEFAULT_MAP
from molflt.attention.mixing.pairs import Pairs
from molflt.attention.numerics import distances, products_of_all
from molflt.attention.positions import make_position
from molflt.attention.positions.base import differences
from molflt.attention.positions.multiplicative import MultiplicativePosition, NearField
from molflt.attention.positions.spectral import FrequencyProjection, GraphNodes, SpectralPosition
from molflt.attention.spectra import GaussianBasis
from molflt.graph.dense import DenseAtoms
from molflt.graph.geometry import Geometry
from molflt.graph.memory import _expect_memory
from molflt.graph.near import NearPairs, _bound, _Found, in_pieces
from molflt.graph.neighbors import Neighbors, neighbor_list
from molflt.graph.periodic import Open
from molflt.graph.schemes import make_periodic
from molflt.graph.sizes import SizeClass, SizeClasses, Sorted

_NARROWEST = 0.2  # Å, narrowest Gaussian of the near field
_GRAPH_POSITIONS = ("none", "spectral", "multiplicative")

if TYPE_CHECKING:
    GraphPositionName = str
else:
    GraphPositionName = Literal[_GRAPH_POSITIONS]


class GraphEncoding(nn.Module):
    """Relative encoding of a batch of structures, shared by all layers that use it.

    Args:
        heads: number of heads.
        position: "spectral" adds f(r_i - r_j) to the logit, exp(q.k + f), as in FLT
            (arXiv:2302.01925, eq. 3). "multiplicative" multiplies phi(q).phi(k) by a kernel h(r_i -
            r_j) (`MultiplicativePosition`).
        position_options: further arguments of the position, see `SpectralPosition.build`: spectrum,
            nodes, num_nodes, arguments of the spectrum, and arguments of the nodes with the prefix
            `node_`.
        periodic: see `EnergyRegressor`, also for `image_cutoff`, `max_frequency`, `mesh_order`,
            `near_field` and `near_exact`; or a scheme of `molflt.graph.periodic`.
        mixing: see `GraphAttention`, also for `feature_map` and `num_features`.

    Attributes:
        position: mask or kernel.
    """

    def __init__(
        self,
        heads: int,
        *,
        position: GraphPositionName = "spectral",
        position_options: Mapping[str, object] | None = None,
        periodic: str | Open = "none",
        image_cutoff: float | None = None,
        max_frequency: float | None = None,
        mesh_order: int | None = None,
        near_field: float | None = None,
        near_exact: bool = False,
        mixing: str = "linear",
        feature_map: str | None = None,
        num_features: int | None = None,
    ) -> None:
        super().__init__()
        one_of("position", position, _GRAPH_POSITIONS[1:])
        feature_map = feature_map or DEFAULT_MAP
        one_of("feature_map", feature_map, FEATURE_MAPS)
        self.periodic = make_periodic(
            periodic,
            image_cutoff=image_cutoff,
            max_frequency=max_frequency,
            mesh_order=mesh_order,
        )
        self.mixing, self.softmax = mixing, mixing == "softmax"
        options = dict(position_options or {})
        spectrum = str(options.get("spectrum", "gaussian_basis"))
        options = {**self.periodic.defaults(position, spectrum), **options}
        if self.periodic.lattice:
            options["sampled"] = False
        made = make_position(position, heads, 0, mixing=mixing, **{"dim": 3, **options})
        self.position = cast(SpectralPosition, made)
        self.position.on_lattice = self.periodic.lattice
        self.periodic.check(self.position, self.softmax)
        self.near_field: NearField | None = None
        self.frequency_projection: FrequencyProjection | None = None
        if near_field:
            self._check_near_field(position, spectrum, near_field)
            # Near kernels learn much faster if they start differently in each head.
            basis = GaussianBasis(heads, 32, width_range=(_NARROWEST, near_field), amplitude=0.7)
            self.near_field = NearField(basis, near_field, exact=near_exact)
        if near_exact:
            self._check_exact(mixing, feature_map)
        if self.periodic.lattice and position == "spectral" and not self.softmax:
            self._check_projected(feature_map)
            sizes = {} if num_features is None else {"num_features": num_features}
            self.frequency_projection = FrequencyProjection(heads, **sizes)

    def _check_near_field(self, position: str, spectrum: str, near_field: float) -> None:
        positive(near_field=near_field)
        if near_field <= _NARROWEST:
            raise ValueError(
                f"near_field must be above {_NARROWEST} Å, the width of its narrowest Gaussian; "
                f"got {near_field}; no atoms are nearer"
            )
        if position != "multiplicative":
            raise ValueError(
                f"near_field={near_field} corrects a kernel that multiplies; got position="
                f"{position!r}; use 'multiplicative'"
            )
        self.periodic.check_near_field(spectrum)

    def _check_exact(self, mixing: str, feature_map: str) -> None:
        if self.near_field is None:
            no_effect("without near_field", near_exact=True)
        if mixing == "softmax":
            no_effect("with mixing='softmax', whose q.k is exact everywhere", near_exact=True)
        if not FEATURE_MAPS[feature_map].estimates_exp:
            known = (name for name, phi in FEATURE_MAPS.items() if phi.estimates_exp)
            raise ValueError(
                f"near_exact=True joins exp(q.k) of near pairs to features that estimate it; got "
                f"feature_map={feature_map!r}; use one of {', '.join(known)}"
            )

    def _check_projected(self, feature_map: str) -> None:
        if not FEATURE_MAPS[feature_map].takes_projected:
            known = (name for name, phi in FEATURE_MAPS.items() if phi.takes_projected)
            raise ValueError(
                f"position='spectral' with reciprocal nodes gives random projections of its "
                f"factors; feature_map={feature_map!r} needs the factors; use one of "
                f"{', '.join(known)}"
            )

    def forward(self, geometry: Geometry, neighbors: Neighbors | None = None) -> SizeClasses:
        """Evaluates the encoding in classes of graphs of similar size.

        Args:
            geometry: the batch.
            neighbors: all pairs within the cutoff of the near field, if known.
        """
        found = self._found(geometry, neighbors)
        compiling = torch.compiler.is_compiling()
        columns = None if compiling else self._columns(geometry, found)
        by_size = Sorted.of(geometry, columns)
        if by_size is None:
            return SizeClasses([self.padded(geometry, found)])
        found, classes = found.reordered(by_size.order), []
        for graphs in by_size.classes:
            part = by_size.geometry.part(graphs)
            classes.append(self.padded(part, found.part(graphs)))
        return SizeClasses(classes, by_size.atoms)

    def padded(self, geometry: Geometry, found: _Found | None = None) -> SizeClass:
        """Evaluates the encoding with all graphs padded to the size of the largest."""
        found = self._found(geometry) if found is None else found
        by_cell = geometry.cell.requires_grad and torch.is_grad_enabled()
        if by_cell and self.frequency_projection is not None:
            raise ValueError(
                "position='spectral' with reciprocal nodes lacks a gradient of the cell: random "
                "features of frequencies jump when these move; got a cell that requires one; "
                "use position='multiplicative' for stress"
            )
        dense = self.periodic.dense(geometry)
        mesh = self.periodic.mesh(geometry, dense, self.position)
        if mesh is not None and isinstance(self.position, MultiplicativePosition):
            encoding: Encoding = MeshNodes(mesh, self._near(found, self.position))
        else:
            encoding = self._evaluate(dense, found)
        return SizeClass.of(geometry, dense, encoding)

    def _found(self, geometry: Geometry, neighbors: Neighbors | None = None) -> _Found:
        """Finds neighbors and nodes once for the whole batch; errors can then name its graphs."""
        nodes = self.periodic.nodes(geometry, self.position)
        if nodes is not None:
            _expect_memory(nodes.weights, geometry, self.position.spectrum.heads)
        alone, near = self.periodic.without_nodes(geometry), self.near_field
        if near is None and alone is None:
            return _Found(nodes)
        cutoff = 0.0 if near is None else near.cutoff
        around = self.periodic.neighborhood(geometry)
        if around is not geometry or neighbors is None:
            neighbors = neighbor_list(around, cutoff) if cutoff else None
        return _Found(nodes, alone, NearPairs.of(geometry, neighbors, alone))

    def _columns(self, geometry: Geometry, found: _Found) -> Tensor | None:
        """Returns the cost per atom, (graphs,): number of nodes, images or, for a matrix, atoms."""
        if found.nodes is None:
            return self.periodic.images(geometry)
        atoms, nodes = geometry.ptr.diff(), found.counts()
        if self.mixing == "linear":
            return nodes
        return torch.minimum(atoms, nodes) if self.mixing == "auto" else atoms

    def _evaluate(self, dense: DenseAtoms, found: _Found) -> Encoding:
        """Runs the forward pass on tensors only."""
        nodes = found.nodes
        if self.softmax and nodes is None:
            return self._exact(dense, found)
        dtype = torch.promote_types(dense.positions.dtype, torch.float32)
        rounded = None if nodes is None else GraphNodes(*(x.to(dtype) for x in nodes))
        factors = self.position.factors(dense.positions, dense.key_positions, rounded)
        if isinstance(self.position, MultiplicativePosition):
            encoding = Kernel(*factors, self._near(found, self.position, factors))
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
        """Computes the exact mask for softmax, including the near field, without nodes."""
        positions, keys = dense.positions, dense.key_positions
        if self.near_field is None or not isinstance(self.position, MultiplicativePosition):
            encoding: Encoding = self.position("softmax", positions, keys)
            return encoding
        kernel = self.position.kernel(differences(positions, keys))
        pairs = self._near(found, self.position, exact=True)
        if pairs is not None:
            batch, queries, _ = positions.shape
            kernel = kernel + pairs.dense(batch, queries, keys.shape[1])
        return Bias(kernel.clamp(min=self.position.positive).log())

    def _near(
        self,
        found: _Found,
        position: MultiplicativePosition,
        factors: tuple[Tensor, Tensor] | None = None,
        exact: bool = False,
    ) -> Pairs | None:
        """Returns pairs in the near field, including each atom with itself, with corrections."""
        if found.near is None:
            return None
        near, alone = found.near, found.alone
        cutoff = 0.0 if self.near_field is None else self.near_field.cutoff
        farthest = cutoff if alone is None else _bound(distances(near.vector), cutoff)
        parts = in_pieces(self._added, near, alone, position, factors, farthest, exact)
        weight, *own = (torch.cat(x, dim=-1) for x in zip(*parts, strict=True))
        return near.pairs()._replace(weight=weight, exact=(own[0], own[1]) if own else None)

    def _added(
        self,
        near: NearPairs,
        alone: Tensor | None,
        position: MultiplicativePosition,
        factors: tuple[Tensor, Tensor] | None,
        farthest: float,
        exact: bool,
    ) -> tuple[Tensor, ...]:
        """Computes the corrections of some pairs: the weight and the terms of `Pairs.exact`."""
        vector, pairs, distance = near.vector, near.pairs(), distances(near.vector)
        if exact:
            far = position.kernel(vector[None])[0]
        else:
            far = self.periodic.far(position, factors, pairs, distance, farthest)
        out = pairs._replace(weight=torch.zeros_like(far))
        if self.near_field is not None:
            out = self.near_field(pairs, vector, far)
        weight = out.weight
        if alone is not None:
            weight = weight + far * alone[pairs.batch]
        return weight, *(out.exact or ())

    @torch.no_grad()
    def radial_profile(self, distance: Tensor) -> Tensor:
        """Returns the contribution of a pair to its logit, f or log h, for plots.

        Maps distances (n,), Å, to (heads, n). The contribution is that of one image and, if nodes
        sample the mask, that of the exact mask.
        """
        if not isinstance(self.position, MultiplicativePosition):
            return self.position.radial_profile(distance)
        kernel = self.periodic.radial_profile(self.position, distance)
        if self.near_field is not None:
            vector = distance.new_zeros(1, len(distance), 3)
            vector[0, :, 0] = distance
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


def _make_encoding(
    heads: int, position: str, kind: dict[str, Any], periodic: str | Open | None, **where: Any
) -> GraphEncoding | None:
    """Builds a `GraphEncoding`, or None for position "none"; `kind`: options of attention."""
    one_of("position", position, _GRAPH_POSITIONS)
    if position != "none":
        return GraphEncoding(heads, position=position, periodic=periodic or "none", **where, **kind)
    scheme = None if periodic == "none" else periodic
    idle = {"periodic": scheme, **where}
    no_effect("with position='none'", **{name: value or None for name, value in idle.items()})
    return None


def _encode(
    encoding: GraphEncoding | None, geometry: Geometry, neighbors: Neighbors | None = None
) -> SizeClasses:
    """Returns a batch in the input format of attention."""
    return SizeClasses.of(geometry) if encoding is None else encoding(geometry, neighbors)
