"""Positional kernel that multiplies the products of features, and its exact near field."""

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from molflt.attention.encodings import TRITON, Bias, Encoding, Kernel, RaggedKernel
from molflt.attention.mixing.mesh import MeshKernel
from molflt.attention.mixing.pairs import Pairs
from molflt.attention.mixing.ragged import Ragged, Waves
from molflt.attention.mixing.sparse import Pattern
from molflt.attention.nodes import Nodes
from molflt.attention.nodes.lattice import Lattice
from molflt.attention.nodes.mesh import Mesh
from molflt.attention.numerics import at_least_float32, distances, fade, options_of
from molflt.attention.positions.base import MIXINGS, differences
from molflt.attention.positions.spectral import GraphNodes, SpectralPosition
from molflt.attention.spectra import Spectrum


class MultiplicativePosition(SpectralPosition):
    """Learned positional kernel h: A_ij = h(r_i - r_j) phi(q_i) . phi(k_j).

    The kernel is h(z) = background + f(z), with f and its Fourier factors from `SpectralPosition`.
    Attention depends only on differences of positions, for any feature map. The kernel of cosFormer
    is a special case with r = 1. The kernel can become negative during training, or because of
    ripples if there are few nodes; see `Attention.sums` and `floor`.

    Args:
        spectrum: family of f.
        nodes: rule that samples the Fourier transform of f.
        background: value of the kernel between distant tokens. With 1, the kernel is initially
            almost the same for all pairs. Use 0 for periodic crystals, where the sum of a constant
            over pairs would grow with the cell.
    """

    positive = 1e-9  # lower bound on h before softmax attention takes its logarithm
    # Taper of the spectrum; a multiplicative kernel must not become negative.
    taper: ClassVar[Literal["step", "positive"]] = "positive"
    own_options: ClassVar[tuple[str, ...]] = ("background",)
    placement: ClassVar[tuple[str, str]] = ("log h", "h multiplies the weight")
    mixings: ClassVar[tuple[str, ...]] = (*MIXINGS, TRITON)
    paper: ClassVar[str] = "molflt"
    cost: ClassVar[str] = "N m 2r d"

    def __init__(self, spectrum: Spectrum, nodes: Nodes | None, background: float = 1.0) -> None:
        super().__init__(spectrum, nodes)
        self.background = background

    def width(self, head_dim: int) -> int:
        return head_dim

    def forward(self, mixing: str, positions: Tensor, key_positions: Tensor) -> Encoding:
        if mixing == "softmax":
            return Bias(self.bias(differences(positions, key_positions)))
        if mixing == TRITON:
            joined = positions.flatten(0, 1), key_positions.flatten(0, 1)
            tokens = Ragged.of_rows(positions), Ragged.of_rows(key_positions)
            return RaggedKernel(self.waves(), joined, tokens)
        return Kernel(*self.factors(positions, key_positions))

    def bias(self, delta: Tensor) -> Tensor:
        return self.kernel(delta).clamp(min=self.positive).log()

    def kernel(self, delta: Tensor) -> Tensor:
        """Computes the exact h: differences (batch, ..., l) -> (batch, heads, ...)."""
        return super().bias(delta) + self.background

    def factors(
        self, positions: Tensor, key_positions: Tensor, nodes: GraphNodes | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns factors U and V with U_i . V_j ~= h(r_i - r_j).

        They have 2r columns, or 2r + 1 with a background.
        """
        left, right = super().factors(positions, key_positions, nodes)
        if not self.background:
            return left, right
        return F.pad(left, (0, 1), value=1.0), F.pad(right, (0, 1), value=self.background)

    def waves(self, nodes: GraphNodes | None = None, counts: Tensor | None = None) -> Waves:
        """Returns the nodes and coefficients of h, with the background as the first node.

        `counts` (graphs,) contains the number of nodes of each graph, excluding padding.
        """
        device = next(self.parameters()).device.type if nodes is None else nodes.xi.device.type
        with torch.autocast(device, enabled=False):
            xi, c, _ = self._sampled(nodes)
        if nodes is None:
            xi, c = xi[None], c[None]
        if self.background:
            xi, c = F.pad(xi, (0, 0, 1, 0)), F.pad(c, (1, 0), value=self.background)
            counts = None if counts is None else counts + 1
        return Waves(xi, c, counts)

    def on_mesh(
        self, positions: Tensor, mask: Tensor, lattice: Lattice, max_frequency: float, order: int
    ) -> MeshKernel:
        """Builds the kernel h on one mesh per graph.

        Up to the interpolation error, the result equals h sampled at `reciprocal_nodes`. Positions
        (batch, tokens, 3) are in Å, `max_frequency` is in cycles/Å, and the mask is True where a
        token exists. The spectrum must be isotropic. See `nodes.mesh.OVERSAMPLING` for `order`.
        """
        dtype = torch.promote_types(positions.dtype, torch.float32)
        meshes = [Mesh.of(lattice, graph, max_frequency, order) for graph in range(len(mask))]
        rows, points, weights, coefficients = [], [], [], []
        num_points = 0  # of the meshes of earlier graphs
        for graph, mesh in enumerate(meshes):
            token = mask[graph].nonzero()[:, 0]
            r = positions[graph, token].to(lattice.dual.dtype)
            near, w = mesh.stencil((r[:, None] * lattice.dual[graph]).sum(dim=-1), order)
            order_in_space = near[:, 0].argsort()  # faster: neighbors are close in memory
            rows.append(token[order_in_space] + graph * mask.shape[1])
            points.append(near[order_in_space] + num_points)
            weights.append(w[order_in_space].to(dtype))
            num_points += mesh.points
            with torch.autocast(positions.device.type, enabled=False):
                c = self.coefficients(GraphNodes(mesh.xi[None], mesh.weights[None]))[0]
            is_zero = (mesh.xi == 0).all(dim=-1)
            coefficients.append((c + self.background * is_zero).to(dtype))
        point, weight = torch.cat(points), torch.cat(weights).flatten()
        row = torch.arange(len(point), device=point.device).repeat_interleave(point.shape[1])
        pattern = Pattern.of(row, point.flatten(), len(point), num_points)
        return MeshKernel(torch.cat(rows), pattern, weight, tuple(meshes), tuple(coefficients))


class NearField(nn.Module):
    """Correction that replaces a sampled positional kernel by an exact one for near pairs.

    The kernel is A_ij = [h_far + s(r_ij) (h_near - h_far)] phi(q_i) . phi(k_j) with h_near(z) =
    exp(f(z)). As in an Ewald sum, a few nodes represent the smooth far part, and pairs of neighbors
    represent the sharp near part. The switch s is twice differentiable and falls from 1 at half the
    cutoff to 0 at the cutoff. With `exact`, near pairs have the weights of softmax attention: A_ij
    = (1 - s) h_far phi(q_i) . phi(k_j) + s exp(q_i . k_j + f).

    Args:
        spectrum: family of f; only its exact mask is used.
        cutoff: largest distance of near pairs, in units of length (Å).
        exact: use the weights of softmax for near pairs; see above. Intended for feature maps that
            estimate exp(q . k).
    """

    extra_repr = options_of

    def __init__(self, spectrum: Spectrum, cutoff: float = 4.5, exact: bool = False) -> None:
        super().__init__()
        self.spectrum = spectrum
        self.cutoff = cutoff
        self.exact = exact

    def switch(self, distance: Tensor) -> Tensor:
        """Returns s(r), of the same shape as the distances."""
        return fade(2 * distance / self.cutoff - 1)

    def forward(self, pairs: Pairs, vector: Tensor, far: Tensor) -> Pairs:
        """Returns `pairs` with the corrections as weights.

        `vector` (pairs, l) is r_j - r_i, and `far` (heads, pairs) is h_far.
        """
        with torch.autocast(vector.device.type, enabled=False):
            vector = at_least_float32(vector)
            f, s = self.spectrum.mask(vector[None])[0], self.switch(distances(vector))
            if self.exact:
                return pairs._replace(weight=-s * far, exact=(f, s))
            return pairs._replace(weight=s * (f.exp() - far))
