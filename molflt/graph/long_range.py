"""Long-range energies: inverse powers of distances between latent charges and their images.

    E = 1/2 sum_p sum_c s_pc k sum_ij' q_ipc q_jpc / |r_ij|^p, k = 14.4 eV Å^p.

The sum includes all pairs and images, except each atom paired with itself. Ewald sums split it into
near pairs within a cutoff and a smooth part on the reciprocal lattice of each graph
(`InversePower`). The split depends on the volume only in very large cells, to bound the number of
nodes. Energies do not depend on the split or on the choice of the cell.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from molflt.attention.checks import graph_name, not_negative, positive
from molflt.attention.nodes.lattice import Lattice, free_extent
from molflt.attention.nodes.reciprocal import reciprocal_nodes
from molflt.attention.numerics import at_least_float32, distances, fade, recomputed, uncompiled
from molflt.attention.spectra import InversePower
from molflt.graph.geometry import Geometry, _sum_by
from molflt.graph.neighbors import Neighbors, _all_pairs, neighbor_list, sum_in_pieces
from molflt.graph.radial import softened
from molflt.memory import expect_memory

COULOMB = 14.399645  # eV Å, for two elementary charges
_DEPTH = 4.0  # sharpness times cutoff; near terms fall below 1e-6 / r at the cutoff
_ONSET = 0.9  # fraction of the cutoff at which near pairs start to fade
_HIGHEST = 1.55  # largest frequency over sharpness; 1.44 leaves 3e-6 meV between distant slabs
_APART = 5.0  # gap between images of a slab, in units of 1 / sharpness; their interaction is 1e-12
_LARGEST = 550.0  # ratio volume / cutoff^3 above which the cutoff grows with the cell
_TRANSIENT = 2**21  # largest number of waves in one chunk of nodes
_CHARGE_SCALE = 0.02  # factor of the initial charges; energies are then a few meV per atom
_REACH = 5.0  # Å, largest distance between atoms that exchange charge
_PAIR_BYTES = 200  # bytes per pair of a molecule, measured
_MIN_WEIGHT = 1e-12  # added to the weights of the total charge; if all are 0, shares are equal


class ChargeShare(nn.Module):
    """Distributes the total charge Q of each graph among its atoms: Q_i = Q w_i / sum_j w_j.

    The weights are w_i = max(0, 1 + s . h_i)^4, with separate s for cations and anions. Weights are
    local: atoms of weight 0, such as atoms of a neutral molecule far from the ion, receive no
    charge and do not change the charges of other atoms. A supercell with the corresponding multiple
    of the charge has the same atomic charges.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.score = nn.Linear(dim, 2, bias=False)

    def forward(self, h: Tensor, geometry: Geometry) -> Tensor:
        """Maps features (atoms, dim) to charges (atoms,), in units of e; 0 for neutral graphs."""
        cation, anion = self.score(at_least_float32(h)).unbind(dim=1)
        if geometry.charge is None:
            return 0 * cation  # with gradients, which DDP expects
        score = torch.where(geometry.charge[geometry.batch] < 0, anion, cation)
        weight = (1 + score).clamp(min=0) ** 4 + _MIN_WEIGHT
        return weight * (geometry.charge / geometry.sum(weight))[geometry.batch]


class LongRange(nn.Module):
    """Energies of latent charges, which are derived from linear functions a_i of atom features.

    For p = 1 and 2, sums over a crystal converge only for neutral cells. Charges of these two
    powers flow between neighbors: q_i = sum_j w(r_ij) (a_j - a_i), where w falls smoothly from 1 to
    0 at 5 Å. Flows cancel in pairs. A group of atoms more than 5 Å from all other atoms is
    therefore neutral, and its interaction with other atoms vanishes with distance. For other
    powers, q_i = a_i.

    With `total_charge`, the first channel of p = 1 also contains the total charge of the graph,
    distributed by `ChargeShare`. The charges of this channel sum to Q, and a distant ion interacts
    only with this channel.

    With three periodic axes, a uniform background neutralizes charges (p = 1, 2), and the crystal
    is surrounded by a conductor, as in Ewald sums without a surface term. With two periodic axes,
    which only p = 1 supports, the slab is isolated, and a net charge has the field of a sheet.
    Without periodic axes, all pairs are computed, O(atoms^2).

    Args:
        powers: distinct values of p from 1, 2, 4, 6. p = 1 is the Coulomb interaction. For other p,
            odd channels (including the first) attract and even channels repel.
        channels: number of charges per atom and power.
        cutoff: cutoff of near pairs, in Å; a longer cutoff needs more pairs and fewer nodes.
        neutral: False sets q_i = a_i for all powers. Separate groups of atoms then have net
            charges. Use False for data with ions that the model can recognize by their neighbors.
        total_charge: True if graphs have total charges.
        smearing: sigma, in Å, of a spectrum that falls as exp(-sigma^2 k^2 / 2); latent Ewald
            summation (arXiv:2408.15165) uses 1. For p = 1, the interaction of a pair is erf(r /
            (sqrt(2) sigma)) / r; beyond 5 sigma it is 1 / r^p. 0 means point charges, whose
            interaction is bounded at distances below 0.1 Å.
    """

    def __init__(
        self,
        dim: int,
        powers: Sequence[int] = (1,),
        channels: int = 4,
        cutoff: float = 8.0,
        smearing: float = 1.0,
        neutral: bool = True,
        total_charge: bool = False,
    ) -> None:
        super().__init__()
        positive(long_range_cutoff=cutoff)
        not_negative(long_range_smearing=smearing)
        for power in powers:
            InversePower(power, _DEPTH / cutoff)  # rejects other powers
        if smearing >= cutoff / (_DEPTH * 2**0.5):
            raise ValueError(
                f"long_range_smearing must be below {cutoff / (_DEPTH * 2**0.5):.3g} Å, which the "
                f"nodes of long_range_cutoff={cutoff:g} resolve; got {smearing:g}; raise the cutoff"
            )
        if total_charge and not (neutral and 1 in powers):
            raise ValueError(
                "total_charge needs the power 1 and charges that are neutral without it; got "
                f"long_range={list(powers)}, long_range_neutral={neutral}; change one of them"
            )
        self.powers, self.channels = tuple(powers), channels
        self.cutoff, self.smearing = cutoff, smearing
        self.charge = nn.Linear(dim, len(powers) * channels, bias=False)
        with torch.no_grad():
            self.charge.weight.mul_(_CHARGE_SCALE)
        # stored with the weights; weights saved by earlier versions lack it and are not neutral
        self.neutral = nn.Buffer(torch.tensor(neutral))
        self.share = ChargeShare(dim) if total_charge else None

    def charges(self, h: Tensor, geometry: Geometry, neighbors: Neighbors) -> Tensor:
        """Computes charges (atoms, powers, channels) from features `h`; in units of e for p = 1."""
        local = self.charge(at_least_float32(h)).unflatten(1, (len(self.powers), self.channels))
        flowing = [i for i, power in enumerate(self.powers) if power < 3]
        center, neighbor = neighbors.center, neighbors.neighbor
        weight = fade(neighbors.distance / min(_REACH, self.cutoff)).to(local.dtype)[:, None, None]
        sources = local[:, flowing]
        flows = _sum_by(weight * (sources[neighbor] - sources[center]), center, len(local))
        charges = local.clone()
        charges[:, flowing] = torch.where(self.neutral, flows, sources)
        if self.share is not None:
            charges[:, self.powers.index(1), 0] += self.share(h, geometry)
        return charges

    def forward(self, h: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
        """Maps features (atoms, dim) to energies and charges.

        Returns the sharp and smooth parts of the energies, each float64 (graphs,) in eV, and
        `charges`.
        """
        neighbors = neighbor_list(geometry, self.cutoff)
        charges = self.charges(h, geometry, neighbors)
        near, far = inverse_power_sums(
            charges, geometry, self.powers, self.cutoff, self.smearing, neighbors
        )
        strength = charges.new_full(charges.shape[1:], COULOMB, dtype=torch.float64)
        for row, power in zip(strength, self.powers, strict=True):
            if power > 1:
                row[::2] *= -1  # attraction
        return (near * strength).sum(dim=(1, 2)), (far * strength).sum(dim=(1, 2)), charges


def dipole(charges: Tensor, geometry: Geometry) -> Tensor:
    """Computes dipoles (graphs, 3) of charges (atoms,) about mean positions; NaN if periodic."""
    batch, pos = geometry.batch, geometry.pos
    center = geometry.sum(pos) / geometry.ptr.diff()[:, None]
    moment = geometry.sum(charges[:, None] * (pos - center[batch]))
    return moment.masked_fill(geometry.pbc.any(dim=1)[:, None], torch.nan)


@uncompiled
def inverse_power_sums(
    charges: Tensor,
    geometry: Geometry,
    powers: Sequence[int],
    cutoff: float = 8.0,
    smearing: float = 0.0,
    neighbors: Neighbors | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes 1/2 sum_ij' q_i q_j / |r_ij|^p over all images, split into near and far parts.

    Args:
        charges: (atoms, powers, channels).
        geometry: the atoms.
        powers, cutoff, smearing: see `LongRange`.
        neighbors: pairs within the cutoff; None to search for them.

    Returns:
        Two tensors (graphs, powers, channels), float64, in charge^2 Å^-p, twice differentiable.
    """
    with torch.autocast(charges.device.type, enabled=False):
        charges = at_least_float32(charges)
        axes = geometry.pbc.sum(dim=1).tolist()
        for graph, count in enumerate(axes):
            if count == 1 or (count == 2 and max(powers) > 1):
                raise ValueError(
                    f"long_range={list(powers)} does not support {count} periodic axes; got those "
                    f"of {graph_name(graph, len(axes))}; set pbc to True along all axes, with "
                    "vacuum between"
                )
        laws = [InversePower(power, _DEPTH / cutoff) for power in powers]
        scale = _scales(geometry, cutoff).to(geometry.pos.dtype)
        scaled = geometry._replace(
            pos=geometry.pos / scale[geometry.batch, None],
            cell=geometry.cell / scale[:, None, None],
        )
        if neighbors is None or bool((scale > 1).any()):
            neighbors = neighbor_list(scaled, cutoff)
        near, far = _pair_sums(charges, scaled, scale.double(), laws, neighbors, smearing)
        far_of_graphs = list(far)
        for graph, (start, stop) in enumerate(pairwise(geometry.ptr.tolist())):
            if axes[graph]:
                pos, cell = scaled.pos[start:stop], scaled.cell[graph]
                part = _far_of_lattice(pos, charges[start:stop], cell, scaled.pbc[graph], laws)
                to_angstrom = scale[graph].double() ** -charges.new_tensor(powers)[:, None]
                far_of_graphs[graph] = far_of_graphs[graph] + part * to_angstrom
        return near, torch.stack(far_of_graphs) if far_of_graphs else far


def _scales(geometry: Geometry, cutoff: float) -> Tensor:
    """Returns units of length, in Å, that bound the number of nodes: (graphs,), usually 1."""
    cell, pbc = geometry.cell.detach().double(), geometry.pbc
    extent = free_extent(geometry.pos.detach().double(), geometry.batch, cell, pbc)
    margin = 2 * _APART * cutoff / _DEPTH  # above a slab, in Å
    volume = Lattice.of(cell, pbc, 2 * extent, margin).volume / (_LARGEST * cutoff**3)
    margin_share = torch.where(pbc.all(dim=1), 0.0, margin / (2 * extent[:, -1] + margin))
    scale = torch.ones_like(volume)
    for _ in range(9):  # fixed point, because the margin of a slab grows with the scale
        scale = (volume * (1 + margin_share * (scale - 1))).clamp(min=1.0) ** (1 / 3)
    return torch.where(pbc.any(dim=1), scale, 1.0)


def _pair_sums(
    charges: Tensor,
    geometry: Geometry,
    scale: Tensor,
    laws: Sequence[InversePower],
    neighbors: Neighbors,
    smearing: float,
) -> tuple[Tensor, ...]:
    """Computes near parts, and far parts of nonperiodic graphs, each (graphs, powers, channels).

    Lengths in `geometry` and `neighbors` are divided by `scale`, (graphs,) in Å.
    """
    molecule, cutoff = ~geometry.pbc.any(dim=1), _DEPTH / laws[0].sharpness
    counts = geometry.ptr.diff()[molecule]
    expect_memory(
        _PAIR_BYTES * float(counts.double().square().sum()),
        f"all pairs of up to {max(counts.tolist(), default=0):,} atoms without periodic axes",
        "omit long_range, or set pbc to True with vacuum between images",
    )
    periodic = ~molecule[geometry.batch[neighbors.center]]
    first, second = _all_pairs(geometry, molecule)
    center = torch.cat((neighbors.center[periodic], first))
    neighbor = torch.cat((neighbors.neighbor[periodic], second))
    vector = torch.cat((neighbors.vector[periodic], geometry.pos[second] - geometry.pos[first]))
    twice = charges.repeat(1, 2, 1)  # (atoms, 2 powers, channels), for near and far parts

    def sums(pairs: Neighbors) -> Tensor:
        square = pairs.vector.double().square().sum(dim=-1)
        near_weight = fade((pairs.distance / cutoff - _ONSET) / (1 - _ONSET))
        graph = geometry.batch[pairs.center]
        in_molecule, unit = molecule[graph], scale[graph]
        near, far = [], []  # of 1 / r^p, (pairs,) for each power
        for law in laws:
            if smearing:
                total = InversePower(law.power, 0.5**0.5 / smearing).smooth(square * unit**2)
            else:
                total = softened(square * unit**2) ** (-law.power / 2)
            near.append(near_weight * (total - law.smooth(square) * unit**-law.power))
            far.append((total - near[-1]) * in_molecule)
        weight = torch.stack((*near, *far), dim=1).to(charges.dtype)[..., None]
        field = _sum_by(weight * twice[pairs.neighbor], pairs.center, len(twice))
        return geometry.sum((twice * field).double()) / 2

    all_pairs = Neighbors(center, neighbor, vector, distances(vector.double()))
    return sum_in_pieces(sums, all_pairs).chunk(2, dim=1)


def _far_of_lattice(
    pos: Tensor, charges: Tensor, cell: Tensor, pbc: Tensor, laws: Sequence[InversePower]
) -> Tensor:
    """Computes the far part for one graph with periodic axes: (powers, channels) float64."""
    pos, cell, pbc = pos.double(), cell.double()[None], pbc[None]  # a batch of one cell
    sharpness = laws[0].sharpness
    # The box is twice as tall as the slab, plus margins; energies do not depend on its height.
    graph = torch.zeros(len(pos), dtype=torch.long, device=pos.device)
    height = 2 * free_extent(pos.detach(), graph, cell.detach(), pbc)
    margin = 2 * _APART / sharpness
    nodes, weights = reciprocal_nodes(cell, pbc, _HIGHEST * sharpness, height, margin)
    spectra = torch.cat([law.spectrum(nodes) for law in laws])  # [p, r]
    if not bool(pbc.all()):
        spectra = _cut_off(nodes, spectra, cell, pbc, height[0, -1] + margin)
    factors = (weights * spectra).T  # [r, p]
    chunk = max(1, _TRANSIENT // max(1, len(pos)))
    several = chunk < len(factors)
    total = factors.new_zeros(charges.shape[1:])
    for xi, factor in zip(nodes[0].split(chunk), factors.split(chunk), strict=True):
        total = total + recomputed(_sum_over_nodes, pos, charges, xi, factor, several=several)
    with_itself = charges.new_tensor([law.at_zero() for law in laws], dtype=torch.float64)
    return (total - with_itself[:, None] * charges.double().square().sum(dim=0)) / 2


def _sum_over_nodes(pos: Tensor, charges: Tensor, xi: Tensor, factor: Tensor) -> Tensor:
    """Returns sum_G w_G |sum_j q_j exp(2 pi i G . r_j)|^2: (powers, channels).

    The vectors G are `xi` (r, 3), and their weights w are `factor` (r, powers).
    """
    turns = xi @ pos.mT  # in float64; large phases would be inaccurate in float32
    phase = (2 * math.pi * (turns - turns.detach().round())).to(charges.dtype)  # [r, atom]
    flat = charges.flatten(1)
    square = (phase.cos() @ flat).square() + (phase.sin() @ flat).square()
    waves = square.unflatten(1, charges.shape[1:]).double()
    return (factor[..., None] * waves).sum(dim=0)


def _cut_off(nodes: Tensor, spectra: Tensor, cell: Tensor, pbc: Tensor, height: Tensor) -> Tensor:
    """Returns spectra (1, nodes) of 1 / r, cut off at half the height to exclude slab images."""
    # Spectra are multiplied by 1 - exp(-k R) cos(k_z R), with k in the plane and R half the height
    # (Rozzi et al., Phys. Rev. B 73, 205119, 2006). k_z R is a multiple of pi. At 0: -2 pi R^2.
    first, second = cell[0, pbc[0]]
    normal = nn.functional.normalize(torch.linalg.cross(first, second), dim=0)
    along = (nodes[0] * normal).sum(dim=-1)
    plane = distances(nodes[0] - along[:, None] * normal)
    odd = (along.detach() * height).round() % 2 != 0
    sign = torch.where(odd, -1.0, 1.0)
    cut = spectra * (1 - sign * (-math.pi * plane * height).exp())
    zero = (nodes[0] == 0).all(dim=-1)
    return torch.where(zero, -math.pi / 2 * height**2, cut)
