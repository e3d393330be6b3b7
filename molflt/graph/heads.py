"""What goes in and what comes out: atom embedding, energy readout, position head."""

import math
import warnings

import torch
from torch import Tensor, nn

from molflt.atoms import MAX_ATOMIC_NUMBER, Tag
from molflt.attention.checks import at_hand
from molflt.graph import elements
from molflt.graph.geometry import Geometry, _sum_by
from molflt.graph.messages import EquivariantMessages
from molflt.graph.near import in_pieces
from molflt.graph.neighbors import Neighbors
from molflt.graph.radial import radial_bumps

_WAVES = 64  # functions of descriptors
_WAVE_NUMBER = 0.3  # 1 / standard deviation of a descriptor: elements of one group are neighbors
_NUM_ELEMENTS = MAX_ATOMIC_NUMBER + 1  # 0 is not used


class ElementEmbedding(nn.Embedding):
    """A vector for each element, (...) atomic numbers -> (..., dim).

    Args:
        dim: width.
        descriptors: a smooth function of `molflt.graph.elements.descriptors`, W sin(K x + b), plus
            a vector of its own, which starts at 0. So elements that training did not see are known
            by their place in the periodic table; otherwise their vectors stay as they were drawn.
    """

    def __init__(self, dim: int, descriptors: bool = False) -> None:
        super().__init__(_NUM_ELEMENTS, dim)
        self.described = descriptors
        if descriptors:
            table = elements.descriptors()
            self.register_buffer("has_descriptors", table.isfinite().all(dim=1))
            self.register_buffer("table", table.nan_to_num())
            self.waves = nn.Linear(table.shape[1], _WAVES)
            self.mix = nn.Linear(_WAVES, dim, bias=False)
            # At the start of the size of vectors that are drawn: smaller ones learn more slowly.
            nn.init.normal_(self.waves.weight, std=_WAVE_NUMBER)
            nn.init.uniform_(self.waves.bias, -math.pi, math.pi)
            nn.init.normal_(self.mix.weight, std=(2 / _WAVES) ** 0.5)
            nn.init.zeros_(self.weight)

    def forward(self, numbers: Tensor) -> Tensor:
        """Raises ValueError for elements of which no descriptors are known."""
        if not self.described:
            return super().forward(numbers)
        if at_hand(numbers):
            self.check(numbers)
        x = self.get_buffer("table").to(self.weight)
        vectors: Tensor = self.weight + self.mix(self.waves(x).sin())
        return vectors[numbers]

    def check(self, numbers: Tensor) -> None:
        """Raises ValueError for elements of which no descriptors are known, if they are used."""
        if self.described and (unknown := ~self.get_buffer("has_descriptors")[numbers]).any():
            raise ValueError(
                f"no descriptors are known of element {int(numbers[unknown][0])}; expected a "
                "composition of others; leave such structures out, or train with "
                "--model.descriptors false"
            )


def undescribed(model: nn.Module) -> frozenset[int]:
    """Atomic numbers that a model cannot take, as it, or a member of it, has no descriptors."""
    missing: set[int] = set()
    for part in model.modules():
        if isinstance(part, ElementEmbedding) and part.described:
            missing.update((~part.get_buffer("has_descriptors")).nonzero().flatten().tolist())
    return frozenset(missing - {0})


class AtomEmbedding(nn.Module):
    """Element + tag + (optional) what stands around each atom, before any attention.

    The radial summary is sum_j W b(|r_ij|) * u(Z_j), what stands how far away; layers of messages
    add to it in which directions, see `molflt.graph.messages.EquivariantMessages`.

    Args:
        dim: width of the embedding.
        num_basis: size of the radial basis b; 0 leaves the summary out.
        cutoff: radius of the neighborhood, Å.
        descriptors: see `ElementEmbedding`.
        messages: layers of messages; 0 leaves them out.
    """

    def __init__(
        self,
        dim: int,
        num_basis: int = 0,
        cutoff: float = 6.0,
        descriptors: bool = False,
        messages: int = 0,
    ) -> None:
        super().__init__()
        self.num_basis = num_basis
        self.cutoff = cutoff
        self.element = ElementEmbedding(dim, descriptors)
        self.tag = nn.Embedding(len(Tag), dim)
        if num_basis:
            self.neighbor_element = ElementEmbedding(dim, descriptors)
            self.radial = nn.Linear(num_basis, dim, bias=False)
        self.messages = EquivariantMessages(dim, messages, cutoff) if messages else None

    @property
    def sees_neighbors(self) -> bool:
        """Whether anything but the atom itself enters its embedding."""
        return bool(self.num_basis) or self.messages is not None

    def forward(self, numbers: Tensor, tags: Tensor, neighbors: Neighbors | None) -> Tensor:
        """(atoms,) atomic numbers and tags, and pairs, to (atoms, dim)."""
        x = self.element(numbers) + self.tag(tags)
        if not self.sees_neighbors:
            return x
        if neighbors is None:
            raise ValueError("a radial summary and messages need neighbors; got None")
        if self.num_basis:
            basis = radial_bumps(neighbors.distance, self.num_basis, self.cutoff)
            message = self.radial(basis.to(x.dtype))
            element = self.neighbor_element(numbers).index_select(0, neighbors.neighbor)
            message = message * element
            x = x + _sum_by(message, neighbors.center, len(x))
        return x if self.messages is None else self.messages(x, neighbors)


class EnergyReadout(nn.Module):
    """E = sum over atoms with tag > 0 of MLP(h) times a learned factor per tag (3D-Graphormer).

    A graph in which no atom has tag > 0 (tags unknown) sums over all its atoms as if they were
    surface atoms, and warns once, instead of returning 0.

    Args:
        dim: width of tokens.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, 1))
        self.factor = nn.Embedding(len(Tag), 1)
        nn.init.constant_(self.factor.weight, 0.1)

    def forward(self, h: Tensor, geometry: Geometry) -> Tensor:
        """Tokens (atoms, dim) of atoms with tags -> energies (graphs,)."""
        counted = geometry.above_subsurface()
        assert geometry.tags is not None
        untagged = counted & (geometry.tags == Tag.SUBSURFACE.value)
        if not torch.compiler.is_compiling() and bool(untagged.any()):
            structures = len(geometry.batch[untagged].unique())
            warnings.warn(
                f"{structures} structure(s) have no atom with tag > 0; their energy sums over "
                "all atoms. Set tags (1 surface, 2 adsorbate) for adsorption energies.",
                stacklevel=2,
            )
        tags = torch.where(untagged, Tag.SURFACE.value, geometry.tags)
        atomic = (self.mlp(h) * self.factor(tags)).squeeze(-1)
        return geometry.sum(torch.where(counted, atomic, 0.0))


class PositionHead(nn.Module):
    """Displacement to the relaxed position: sum over neighbors of w_ij (r_j - r_i), in Å.

    The weights come from invariants only, w_ij = MLP(h_i, h_j, b(|r_ij|)), so the result turns with
    the structure as exactly as h stays unchanged. Pairs fade smoothly at the cutoff.

    Args:
        dim: width of tokens.
        hidden: width of the pair network.
        num_basis: size of the radial basis.
        cutoff: radius of the neighborhood, Å.
    """

    def __init__(
        self, dim: int, hidden: int = 64, num_basis: int = 16, cutoff: float = 5.0
    ) -> None:
        super().__init__()
        self.num_basis = num_basis
        self.cutoff = cutoff
        self.from_center = nn.Linear(dim, hidden)
        self.from_neighbor = nn.Linear(dim, hidden, bias=False)
        self.from_distance = nn.Linear(num_basis, hidden, bias=False)
        self.weight = nn.Linear(hidden, num_basis, bias=False)
        nn.init.zeros_(self.weight.weight)  # start from "nothing moves"

    def forward(self, h: Tensor, neighbors: Neighbors) -> Tensor:
        """Tokens (atoms, dim) and pairs -> displacements (atoms, 3), Å."""
        ends = self.from_center(h), self.from_neighbor(h)
        first, *others = in_pieces(self._moves, neighbors, *ends)
        return sum(others, first)

    def _moves(self, pairs: Neighbors, from_center: Tensor, from_neighbor: Tensor) -> Tensor:
        """What some pairs add: (atoms, 3), Å."""
        center, neighbor, vector, distance = pairs
        basis = radial_bumps(distance, self.num_basis, self.cutoff).to(from_center.dtype)
        # Pairs are many: each further tensor of them costs as much as computing with it.
        ends = from_center.index_select(0, center)
        ends = ends.add_(from_neighbor.index_select(0, neighbor))
        hidden = torch.addmm(ends, basis, self.from_distance.weight.T)
        # The basis also gates the weight: it vanishes smoothly at the cutoff.
        weight = (self.weight(nn.functional.silu(hidden)) * basis).sum(dim=-1, keepdim=True)
        return _sum_by(weight * vector, center, len(from_center))
