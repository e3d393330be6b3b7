"""Atom embedding, energy readout and position head."""

import math
import warnings
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from molflt.atoms import MAX_ATOMIC_NUMBER, Tag
from molflt.attention.checks import one_of, readable
from molflt.attention.numerics import fade
from molflt.graph.geometry import Geometry, _sum_by
from molflt.graph.messages import EquivariantMessages
from molflt.graph.neighbors import Neighbors, sum_in_pieces
from molflt.graph.radial import radial_bumps

_WAVES = 64  # number of functions of descriptors
_WAVE_NUMBER = 0.3  # wave number per standard deviation; keeps elements of a group close
_DROPPED = 0.5  # fraction of elements whose vectors a training step drops
_ONSET = 0.8  # fraction of the cutoff at which contacts start to fade
_HIDDEN, _NUM_BASIS = 64, 16  # of the position head: width of the pair network, radial basis
_NUM_ELEMENTS = MAX_ATOMIC_NUMBER + 1  # 0 is not used

_NOBLE_GASES = (0, 2, 10, 18, 36, 54, 86, 118)

# Electronegativities of elements 1 to 103 on Pauling's scale; nan if no bonds are known.
_ELECTRONEGATIVITY = """
2.20 nan
0.98 1.57 2.04 2.55 3.04 3.44 3.98 nan
0.93 1.31 1.61 1.90 2.19 2.58 3.16 nan
0.82 1.00 1.36 1.54 1.63 1.66 1.55 1.83 1.88 1.91 1.90 1.65 1.81 2.01 2.18 2.55 2.96 3.00
0.82 0.95 1.22 1.33 1.60 2.16 1.90 2.20 2.28 2.20 1.93 1.69 1.78 1.96 2.05 2.10 2.66 2.60
0.79 0.89 1.10 1.12 1.13 1.14 1.13 1.17 1.20 1.20 1.10 1.22 1.23 1.24 1.25 1.10 1.27
1.30 1.50 2.36 1.90 2.20 2.20 2.28 2.54 2.00 1.62 2.33 2.02 2.00 2.20 2.20
0.70 0.90 1.10 1.30 1.50 1.38 1.36 1.28 1.30 1.30 1.30 1.30 1.30 1.30 1.30 1.30 1.30
"""

# flags (slab, adsorbate), True if these atoms count by contact
READOUTS = {"all": (False, False), "adsorbate": (True, False), "contact": (True, True)}

MessagePairs = Literal["all", "adsorbate"]
ReadoutName = Literal["all", "adsorbate", "contact"]


def period_and_group(number: int) -> tuple[int, int]:
    """Returns the period and group of an element; lanthanides and actinides are in group 3."""
    period = next(i for i, last in enumerate(_NOBLE_GASES) if number <= last)
    column = number - _NOBLE_GASES[period - 1]
    if column <= 2 and number != 2:
        return period, column
    return period, max(3, 18 - (_NOBLE_GASES[period] - number))


def element_descriptors() -> Tensor:
    """Returns a float32 table (119, 8) of element descriptors; row indices are atomic numbers.

    Columns are period, group, covalent radius, electronegativity, and the numbers of s, p, d and f
    electrons, with mean 0 and standard deviation 1 over the elements for which all are known. The
    rows of number 0 and of elements without known bonds (He, Ne, Ar, and 104 to 118) are NaN.

    Sources: covalent radii from Cordero et al., doi:10.1039/b801115j, as in ASE;
    electronegativities on Pauling's scale from the CRC Handbook of Chemistry and Physics.
    """
    from ase.data import covalent_radii  # imported here: reading signatures must not load ASE

    # in NumPy, because torch computes no values when a model is built on the meta device
    rows = np.full((MAX_ATOMIC_NUMBER + 1, 8), np.nan)
    for number, electronegativity in enumerate(map(float, _ELECTRONEGATIVITY.split()), start=1):
        if not math.isnan(electronegativity):
            period, group = period_and_group(number)
            # electrons outside closed shells; He, for which this is wrong, has no electronegativity
            d = group - 2 if 3 <= group <= 12 else 0
            f = max(0, min(14, number - _NOBLE_GASES[period - 1] - 3))
            valence = min(2, group), max(0, group - 12), d, f if group == 3 and period >= 6 else 0
            rows[number] = period, group, covalent_radii[number], electronegativity, *valence
    rows = (rows - np.nanmean(rows, axis=0)) / np.nanstd(rows, axis=0)
    return torch.tensor(rows, dtype=torch.float32)


class ElementEmbedding(nn.Embedding):
    """Embedding of elements: atomic numbers (...) -> (..., dim).

    With `descriptors`, the initial vectors are 0, and a smooth function of
    `element_descriptors`, W sin(K x + b), is added. This function describes elements
    not seen in training by their position in the periodic table; without descriptors, vectors of
    such elements keep random initial values. Each training step drops the vectors of a random half
    of the elements, and the function learns to describe elements without vectors.
    """

    def __init__(self, dim: int, descriptors: bool = False) -> None:
        super().__init__(_NUM_ELEMENTS, dim)
        self.described = descriptors
        if descriptors:
            table = element_descriptors()
            self.has_descriptors = nn.Buffer(table.isfinite().all(dim=1))
            self.table = nn.Buffer(table.nan_to_num())
            self.waves = nn.Linear(table.shape[1], _WAVES)
            self.mix = nn.Linear(_WAVES, dim, bias=False)
            # Initial vectors have the size of random vectors; smaller vectors learn more slowly.
            nn.init.normal_(self.waves.weight, std=_WAVE_NUMBER)
            nn.init.uniform_(self.waves.bias, -math.pi, math.pi)
            nn.init.normal_(self.mix.weight, std=(2 / _WAVES) ** 0.5)
            nn.init.zeros_(self.weight)

    def forward(self, numbers: Tensor) -> Tensor:
        """Returns the vectors of elements; raises ValueError for elements without descriptors."""
        if not self.described:
            return super().forward(numbers)
        if readable(numbers):
            self.check(numbers)
        described = self.mix(self.waves(self.table.to(self.weight)).sin())
        vectors = self.weight
        if self.training:
            vectors = vectors * (torch.rand(len(vectors), 1, device=vectors.device) >= _DROPPED)
        return (vectors + described)[numbers]

    def check(self, numbers: Tensor) -> None:
        """Raises ValueError for elements without descriptors, if descriptors are used."""
        if self.described and (unknown := ~self.has_descriptors[numbers]).any():
            raise ValueError(
                f"element {int(numbers[unknown][0])} does not have descriptors; expected other "
                "elements; remove such structures, or train with --model.descriptors false"
            )


def by_contact(model: nn.Module) -> tuple[bool, bool]:
    """Returns flags for slab and adsorbate atoms, True if they count by contact in all readouts."""
    flags: list[Tensor] = [
        part.by_contact for part in model.modules() if isinstance(part, EnergyReadout)
    ]
    slab, adsorbate = torch.stack(flags).all(dim=0).tolist() if flags else (False, False)
    return slab, adsorbate


def undescribed(model: nn.Module) -> frozenset[int]:
    """Returns the atomic numbers for which a model or one of its members has no descriptors."""
    missing: set[int] = set()
    for part in model.modules():
        if isinstance(part, ElementEmbedding) and part.described:
            missing.update((~part.has_descriptors).nonzero().flatten().tolist())
    return frozenset(missing - {0})


class AtomEmbedding(nn.Module):
    """Embedding of atoms before attention: element, tag and, optionally, neighborhood.

    The radial summary, sum_j W b(|r_ij|) * u(Z_j), encodes the elements and distances of neighbors.
    Layers of messages add directions; see `molflt.graph.messages.EquivariantMessages`.

    Args:
        num_basis: size of the radial basis b; with 0, the summary is omitted.
        cutoff: radius of the neighborhood, in Å.
        descriptors, messages, message_pairs: see `EnergyRegressor`.
    """

    def __init__(
        self,
        dim: int,
        num_basis: int,
        cutoff: float,
        descriptors: bool,
        messages: int,
        message_pairs: MessagePairs,
    ) -> None:
        super().__init__()
        one_of("message_pairs", message_pairs, get_args(MessagePairs))
        self.num_basis = num_basis
        self.cutoff = cutoff
        self.element = ElementEmbedding(dim, descriptors)
        self.tag = nn.Embedding(len(Tag), dim)
        if num_basis:
            self.neighbor_element = ElementEmbedding(dim, descriptors)
            self.radial = nn.Linear(num_basis, dim, bias=False)
        self.messages = EquivariantMessages(dim, messages, cutoff) if messages else None
        self.message_pairs = message_pairs

    @property
    def sees_neighbors(self) -> bool:
        """True if the embedding of an atom depends on its neighbors."""
        return bool(self.num_basis) or self.messages is not None

    def forward(self, numbers: Tensor, geometry: Geometry, neighbors: Neighbors | None) -> Tensor:
        """Returns embeddings (atoms, dim) for atomic numbers (atoms,), tags and neighbors."""
        x = self.element(numbers) + self.tag(geometry.tags)
        if not self.sees_neighbors:
            return x
        assert neighbors is not None
        if self.num_basis:
            basis = radial_bumps(neighbors.distance, self.num_basis, self.cutoff)
            element = self.neighbor_element(numbers).index_select(0, neighbors.neighbor)
            message = self.radial(basis.to(x.dtype)) * element
            x = x + _sum_by(message, neighbors.center, len(x))
        if self.messages is None:
            return x
        if self.message_pairs == "adsorbate":
            assert geometry.tags is not None
            adsorbate = geometry.tags == Tag.ADSORBATE.value
            exchanges = adsorbate[neighbors.center] | adsorbate[neighbors.neighbor]
            neighbors = Neighbors(*(column[exchanges] for column in neighbors))
        return self.messages(x, neighbors, geometry)


class EnergyReadout(nn.Module):
    """Computes the energy as a sum over atoms of MLP(h) times a learned factor per tag.

    An atom counts either fully or by its contact with atoms on the other side of the interface
    between adsorbate and slab, with weight

        c_i = 1 - prod_j (1 - s(d_ij)),

    where s falls from 1 at 0.8 times the cutoff to 0 at the cutoff and is twice differentiable. The
    product includes periodic images.

    Args:
        atoms: atoms that count. "contact": all atoms by contact, for labels relative to the free
            molecule; the energies of a clean slab and of a molecule far from a slab are then 0.
            "adsorbate": adsorbate atoms fully and slab atoms by contact, for labels relative to
            other molecules, as in OC20. "all": atoms with tag > 0 fully, for total energies; all
            atoms of graphs without tags then count as surface atoms, with a warning.
        cutoff: cutoff of contacts, in Å.

    Attributes:
        by_contact: (2,) bool, buffer; flags for slab atoms and adsorbate atoms, True if they count
            by contact. Weights saved by earlier versions do not contain this buffer; with such
            weights, all atoms count fully.
    """

    def __init__(self, dim: int, atoms: ReadoutName = "all", cutoff: float = 5.0) -> None:
        super().__init__()
        one_of("readout", atoms, READOUTS)
        self.cutoff, self.sees_neighbors = cutoff, any(READOUTS[atoms])
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, 1))
        self.factor = nn.Embedding(len(Tag), 1)
        nn.init.constant_(self.factor.weight, 0.5 if self.sees_neighbors else 0.1)  # fewer atoms
        self.by_contact = nn.Buffer(torch.tensor(READOUTS[atoms]))

    @torch.no_grad()
    def scale_(self, factor: float) -> None:
        """Multiplies all contributions by a factor."""
        for weight in self.mlp[-1].parameters():
            weight.mul_(factor)

    def forward(
        self, h: Tensor, geometry: Geometry, neighbors: Neighbors | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the contribution of each atom to the energy.

        Takes tokens (atoms, dim), a geometry with tags and, if some atoms count by contact, the
        pairs within the cutoff. Returns normalized energies (atoms,) and contacts (pairs,), which
        are -log(1 - s(d)) across the interface and 0 elsewhere, or None if all atoms count fully.
        """
        counted, tags = self.counted(geometry)
        atomic = (self.mlp(h) * self.factor(tags)).squeeze(-1)
        if not self.sees_neighbors:
            return torch.where(counted, atomic, 0.0), None
        assert neighbors is not None
        adsorbate = tags == Tag.ADSORBATE.value
        across = adsorbate[neighbors.center] != adsorbate[neighbors.neighbor]
        apart = 1 - fade((neighbors.distance / self.cutoff - _ONSET) / (1 - _ONSET)) * across
        contacts = -apart.clamp(min=torch.finfo(apart.dtype).tiny).log()
        weight = 1 - _sum_by(contacts, neighbors.center, len(h)).neg().exp()
        by_contact = torch.where(adsorbate, self.by_contact[1], self.by_contact[0])
        return atomic * torch.where(by_contact, weight, counted.to(weight)), contacts

    def counted(self, geometry: Geometry) -> tuple[Tensor, Tensor]:
        """Returns a mask (atoms,) of atoms that count, and tags; raises ValueError without tags."""
        counted = geometry.above_subsurface()
        assert geometry.tags is not None
        untagged = counted & (geometry.tags == Tag.SUBSURFACE.value)
        if not torch.compiler.is_compiling() and bool(untagged.any()):
            graphs = len(geometry.batch[untagged].unique())
            what = f"{graphs} structure(s) without an atom with tag > 0"
            hint = "set tags, 1 surface and 2 adsorbate, for adsorption energies"
            if self.by_contact.any():
                raise ValueError(f"{what}; {hint}, or use readout='all' for total energies")
            warnings.warn(f"{what}; their energy sums over all atoms; {hint}", stacklevel=2)
        return counted, torch.where(untagged, Tag.SURFACE.value, geometry.tags)

    def on_adsorbates(
        self, energies: Tensor, contacts: Tensor, adsorbate: Tensor, neighbors: Neighbors
    ) -> Tensor:
        """Distributes energies of slab atoms among the adsorbate atoms in contact with them.

        Takes the results of `forward` and a mask of adsorbate atoms, (atoms,). Returns energies
        (atoms,), with the same sum for each graph and 0 for slab atoms that count by contact.
        """
        center, neighbor = neighbors.center, neighbors.neighbor
        total = _sum_by(contacts, center, len(energies))
        divided = (total > 0) & ~adsorbate
        share = contacts / torch.where(divided, total, 1.0)[center]
        received = _sum_by(share * (energies * divided)[center], neighbor, len(energies))
        return torch.where(divided, 0.0, energies) + received


class PositionHead(nn.Module):
    """Predicts displacements to the relaxed positions, in Å: sum_j w_ij (r_j - r_i).

    The sum is over neighbors j. The weights w_ij = MLP(h_i, h_j, b(|r_ij|)) depend only on
    invariants. Displacements therefore rotate with the structure, to the accuracy with which h is
    invariant. Pairs fade smoothly at the cutoff.

    Args:
        cutoff: radius of the neighborhood, in Å.
    """

    def __init__(self, dim: int, cutoff: float) -> None:
        super().__init__()
        self.cutoff = cutoff
        self.from_center = nn.Linear(dim, _HIDDEN)
        self.from_neighbor = nn.Linear(dim, _HIDDEN, bias=False)
        self.from_distance = nn.Linear(_NUM_BASIS, _HIDDEN, bias=False)
        self.weight = nn.Linear(_HIDDEN, _NUM_BASIS, bias=False)
        nn.init.zeros_(self.weight.weight)  # initially nothing moves

    def forward(self, h: Tensor, neighbors: Neighbors) -> Tensor:
        """Maps tokens (atoms, dim) and pairs of neighbors to displacements (atoms, 3), in Å."""
        return sum_in_pieces(self._moves, neighbors, self.from_center(h), self.from_neighbor(h))

    def _moves(self, pairs: Neighbors, from_center: Tensor, from_neighbor: Tensor) -> Tensor:
        """Sums w_ij (r_j - r_i) over pairs, from the first layer's terms (atoms, hidden)."""
        center, neighbor, vector, distance = pairs
        basis = radial_bumps(distance, _NUM_BASIS, self.cutoff).to(from_center.dtype)
        # For many pairs, each additional tensor costs as much as the computation.
        hidden = from_center.index_select(0, center)
        hidden = hidden.add_(from_neighbor.index_select(0, neighbor))
        hidden = torch.addmm(hidden, basis, self.from_distance.weight.T)
        # The basis also gates the weight, which vanishes smoothly at the cutoff.
        weight = (self.weight(nn.functional.silu(hidden)) * basis).sum(dim=-1, keepdim=True)
        return _sum_by(weight * vector, center, len(from_center))
