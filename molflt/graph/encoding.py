"""Relative encodings of the atoms of a batch: mask or kernel, periodicity and near field."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from molflt.attention import Encoding, KernelPosition, NearField, Pairs, SpectralPosition
from molflt.attention.kernels import one_of
from molflt.attention.multiplicative import products
from molflt.attention.periodic import FrequencyProjection, LatticeNodes
from molflt.attention.radial import distances
from molflt.attention.reciprocal import free_extent, reciprocal_nodes, tapered_mask
from molflt.attention.spectra import GaussianBasis
from molflt.graph.dense import DenseAtoms, to_dense
from molflt.graph.neighbors import neighbor_list

PLACEMENTS: dict[str, Callable[..., SpectralPosition]] = {
    "additive": SpectralPosition.build,
    "multiplicative": KernelPosition.build,
}
PERIODIC = ("none", "images", "reciprocal")
# At the end of the spectrum: a kernel that multiplies must not become negative.
TAPER: dict[str, Literal["step", "positive"]] = {"additive": "step", "multiplicative": "positive"}
ISOTROPIC = ("gaussian_basis", "gaussian", "laplace", "matern")


class Geometry(NamedTuple):
    """Where atoms are: the part of a PyG batch that encodings read."""

    pos: Tensor  # (atoms, 3) Å
    batch: Tensor  # (atoms,) graph of each atom, ascending
    ptr: Tensor  # (graphs + 1,) first atom of each graph
    cell: Tensor  # (graphs, 3, 3) Å, rows are lattice vectors
    pbc: Tensor  # (graphs, 3) bool
    tags: Tensor | None = None  # (atoms,) of OC20


class GraphEncoding(nn.Module):
    """The encoding of a batch of structures, shared by all layers that use it.

    Args:
        heads: number of heads.
        mixing: "softmax", for the exact mask, or a kernelized one.
        placement: "additive": f(r_i - r_j) is added to the logit, exp(q.k + f), FLT's form
            (arXiv:2302.01925, eq. 3). "multiplicative": a kernel h(r_i - r_j) multiplies
            phi(q).phi(k) (`KernelPosition`).
        spectrum: family of f or h, key of `molflt.attention.SPECTRA`.
        nodes: where its transform is sampled, key of `molflt.attention.NODES`; None for the default
            of the spectrum. Not used with "reciprocal".
        num_nodes: Fourier nodes r of the random rules.
        periodic: "none"; "images": periodic images as further keys, see `to_dense`; "reciprocal":
            nodes on each graph's reciprocal lattice, exactly periodic.
        image_cutoff: "images": Å.
        max_frequency: "reciprocal": largest |G|, cycles/Å; the number of nodes grows as its cube.
        near_field: Å; within it the kernel is the exponential of an exact mask of its own, through
            a neighbor list. Multiplicative placement, without "images".
        near_exact: within the near field, q.k is exact as well, as in softmax (`NearField`).
        num_features: "reciprocal", additive: features m that the factors are projected to.
        options: of the spectrum, of the nodes with the prefix `node_`, and `background` of
            `KernelPosition`; see `SpectralPosition.build`.

    Attributes:
        position: the mask or kernel.

    Raises:
        ValueError: choices that do not go together.
    """

    def __init__(
        self,
        heads: int,
        *,
        mixing: str = "linear",
        placement: str = "additive",
        spectrum: str = "gaussian_basis",
        nodes: str | None = None,
        num_nodes: int = 16,
        periodic: str = "none",
        image_cutoff: float = 8.0,
        max_frequency: float = 0.25,
        near_field: float | None = None,
        near_exact: bool = False,
        num_features: int = 64,
        **options: Any,
    ) -> None:
        super().__init__()
        one_of("placement", placement, PLACEMENTS)
        one_of("periodic", periodic, PERIODIC)
        if near_field is not None and (placement == "additive" or periodic == "images"):
            raise ValueError(
                "near_field corrects a kernel that multiplies, and finds images itself; got "
                f"placement={placement!r}, periodic={periodic!r}; use 'multiplicative' with "
                "'none' or 'reciprocal'"
            )
        if near_field is not None and periodic == "reciprocal" and spectrum not in ISOTROPIC:
            raise ValueError(
                f"near_field beside reciprocal nodes needs a spectrum of |xi| alone; got "
                f"{spectrum!r}; use one of {', '.join(ISOTROPIC)}"
            )
        self.placement, self.periodic, self.softmax = placement, periodic, mixing == "softmax"
        self.image_cutoff, self.max_frequency = image_cutoff, max_frequency
        if periodic == "reciprocal" and placement == "multiplicative":
            # Sums over images have to converge, and supercells to agree: a kernel that decays, and
            # nothing that every pair of atoms would see of each other.
            options.setdefault("background", 0.0)
            if spectrum == "gaussian_basis":
                options.setdefault("positive", True)
        self.position = PLACEMENTS[placement](
            heads, spectrum=spectrum, nodes=nodes, num_nodes=num_nodes, **options
        )
        self.near_field: NearField | None = None
        self.frequency_projection: FrequencyProjection | None = None
        if near_field is not None:
            # Near kernels that differ from head to head from the start learn much faster.
            basis = GaussianBasis(heads, 32, width_range=(0.2, near_field), amplitude=0.7)
            exact = near_exact and not self.softmax  # whose q.k is exact everywhere
            self.near_field = NearField(basis, near_field, exact=exact)
        if periodic == "reciprocal":
            self.position.nodes = LatticeNodes()
            if placement == "additive" and not self.softmax:
                self.frequency_projection = FrequencyProjection(heads, num_features)

    def forward(self, batch: Geometry) -> tuple[DenseAtoms, Encoding]:
        """Evaluates the encoding.

        Args:
            batch: a `Geometry`, or a PyG batch with the same fields.

        Returns:
            Atoms and keys as attention sees them, and the encoding between them.
        """
        dense = to_dense(batch, self.periodic, self.image_cutoff)
        nodes = self._nodes(batch, dense) if self.periodic == "reciprocal" else None
        positions, keys = dense.positions, dense.key_positions
        if self.softmax and nodes is None and self.near_field is None:
            return dense, self.position("softmax", positions, keys)
        dtype = torch.promote_types(positions.dtype, torch.float32)
        rounded = None if nodes is None else (nodes[0].to(dtype), nodes[1].to(dtype))
        factors = self.position.factors(positions, keys, rounded)
        if self.placement == "multiplicative":
            pairs = None if self.near_field is None else self._near(batch, factors)
            encoding = Encoding(kernel=factors, pairs=pairs)
            if self.softmax:
                kernel = encoding.dense_kernel()
                assert kernel is not None
                encoding = Encoding(bias=kernel.clamp(min=KernelPosition.positive).log())
        elif self.softmax:
            encoding = Encoding(bias=factors[0] @ factors[1].mT)
        elif self.frequency_projection is not None and nodes is not None:
            encoding = Encoding(factors=self.frequency_projection(factors, nodes[0]))
        else:
            encoding = Encoding(factors=factors)
        return dense, encoding

    def _nodes(self, batch: Geometry, dense: DenseAtoms) -> tuple[Tensor, Tensor]:
        """In double precision: random features are drawn as functions of frequency."""
        cell, pbc = batch.cell.double(), batch.pbc
        extent = free_extent(dense.positions.double(), dense.mask, cell, pbc)
        taper = TAPER[self.placement]
        return reciprocal_nodes(cell, pbc, self.max_frequency, extent, taper=taper)

    @torch.compiler.disable  # the neighbor list comes from a library of C
    def _near(self, batch: Geometry, factors: tuple[Tensor, Tensor]) -> Pairs:
        """Pairs within the near field, each atom and itself included, and what they add."""
        assert self.near_field is not None and isinstance(self.position, KernelPosition)
        if self.periodic == "none":  # pairs across a boundary that the far field does not know
            batch = Geometry(
                batch.pos, batch.batch, batch.ptr, batch.cell, torch.zeros_like(batch.pbc)
            )
        found = neighbor_list(batch, self.near_field.cutoff)
        own = torch.arange(len(batch.pos), device=batch.pos.device)
        query, key = (torch.cat((own, ends)) for ends in (found.center, found.neighbor))
        vector = torch.cat((torch.zeros_like(batch.pos), found.vector))
        graph = batch.batch[query]
        first = batch.ptr[graph]
        pairs = Pairs(graph, query - first, key - first, vector.new_zeros(1, 1))
        if self.periodic == "reciprocal":
            # The factors sum all images of a pair; each has a pair of its own here.
            far = self._tapered(distances(vector), self.near_field.cutoff)
        else:
            far = products(*factors, pairs)
        out: Pairs = self.near_field(pairs, vector, far)
        return out

    def _tapered(self, distance: Tensor, farthest: float) -> Tensor:
        taper = TAPER[self.placement]
        return tapered_mask(self.position.spectrum, distance, self.max_frequency, taper, farthest)

    @torch.no_grad()
    def radial_profile(self, distance: Tensor) -> Tensor:
        """What a pair of atoms adds to its logit, f or log h, for plots: (n,) Å -> (heads, n).

        Of one image; of the exact mask where nodes sample it.
        """
        if not isinstance(self.position, KernelPosition):
            return self.position.radial_profile(distance)
        if self.periodic == "reciprocal":
            kernel = self._tapered(distance, float(distance.max()))
        else:
            kernel = self.position.radial_profile(distance).exp()
        if self.near_field is not None:
            vector = torch.zeros(1, len(distance), 3).to(distance)
            vector[0, :, 0] = distance
            near = self.near_field.spectrum.mask(vector)[0].exp()
            kernel = kernel + self.near_field.switch(distance) * (near - kernel)
        return kernel.clamp(min=KernelPosition.positive).log()

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws new random features in place; give a generator seeded alike on every rank.

        Nodes of the mask stay as they are: the mask is learned with them.
        """
        if self.frequency_projection is not None:
            self.frequency_projection.redraw_(generator)

    def extra_repr(self) -> str:
        """Choices, for `print(module)`."""
        return f"placement={self.placement!r}, periodic={self.periodic!r}"


def shells_within(diameter: float, max_frequency: float) -> dict[str, Any]:
    """Options of shell nodes for masks of any width: so many that no copy of a mask is near.

    The trapezoid rule along the radius repeats a mask at a distance of number / frequency.

    Args:
        diameter: largest distance between two atoms, Å.
        max_frequency: end of the spectrum, cycles/Å.
    """
    count = math.ceil(2 * diameter * max_frequency)
    return {"node_diameter": diameter, "node_k_max": max_frequency, "node_num_shells": count}
