"""Positional kernel that multiplies the products of features."""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from molflt.attention.encodings import Bias, Encoding, Kernel
from molflt.attention.mixing.mesh import MeshKernel
from molflt.attention.mixing.sparse import Pattern
from molflt.attention.nodes import Nodes
from molflt.attention.nodes.lattice import Lattice
from molflt.attention.nodes.mesh import Mesh
from molflt.attention.positions.base import differences
from molflt.attention.positions.spectral import GraphNodes, SpectralPosition
from molflt.attention.spectra import Spectrum


class MultiplicativePosition(SpectralPosition):
    """Learned positional kernel h: A_ij = h(r_i - r_j) phi(q_i) . phi(k_j).

    The kernel is h(z) = background + f(z), with f and its Fourier factors from `SpectralPosition`.
    Attention depends only on differences of positions, for any feature map. With the additive
    encoding, in contrast, phi sees single factors, which depend on positions. The kernel of
    cosFormer is the case r = 1.

    h can become negative, through learning or through ripples of few nodes. Count such rows in
    `Attention.sums(...).normalizer`, and bound them with `Attention(floor=...)`.

    Args:
        spectrum: family of f.
        nodes: rule that samples the Fourier transform of f.
        background: kernel between distant tokens. With 1, the kernel is nearly equal for all pairs
            at the start. Use 0 for periodic crystals, where the sum of a constant over pairs would
            grow with the cell.
    """

    positive = 1e-9  # smallest h whose logarithm softmax attention takes
    # Taper of the spectrum; a multiplicative kernel must not become negative.
    taper: ClassVar[Literal["step", "positive"]] = "positive"
    placement: ClassVar[tuple[str, str]] = ("log h", "h multiplies the weight")
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
        return Kernel(*self.factors(positions, key_positions))

    def bias(self, delta: Tensor) -> Tensor:
        return self.kernel(delta).clamp(min=self.positive).log()

    def kernel(self, delta: Tensor) -> Tensor:
        """Computes the exact h: differences (batch, ..., l) -> (batch, heads, ...)."""
        return super().bias(delta) + self.background

    def factors(
        self, positions: Tensor, key_positions: Tensor, nodes: GraphNodes | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns U, V: U_i . V_j ~= h(r_i - r_j); 2r columns, or 2r + 1 with a background."""
        left, right = super().factors(positions, key_positions, nodes)
        if not self.background:
            return left, right
        one, constant = left.new_ones(()), right.new_full((), self.background)
        return (
            torch.cat((left, one.expand_as(left[..., :1])), dim=-1),
            torch.cat((right, constant.expand_as(right[..., :1])), dim=-1),
        )

    def check_isotropic(self) -> None:
        """Raises ValueError if h cannot be computed on a mesh."""
        if not self.spectrum.isotropic:
            raise ValueError(
                f"a mesh needs an isotropic spectrum; got {type(self.spectrum).__name__}; use "
                "another, or reciprocal nodes"
            )

    def on_mesh(
        self, positions: Tensor, mask: Tensor, lattice: Lattice, max_frequency: float, order: int
    ) -> MeshKernel:
        """Computes h on meshes; equals that of `reciprocal_nodes` up to the interpolation error.

        Args:
            positions: (batch, tokens, 3), Å.
            mask: (batch, tokens) bool, True where a token exists.
            lattice: lattice of each graph.
            max_frequency: end of the spectrum, cycles/Å.
            order: order of the splines; see `OVERSAMPLING`.
        """
        self.check_isotropic()
        dtype = torch.promote_types(positions.dtype, torch.float32)
        meshes = [Mesh.of(lattice, graph, max_frequency, order) for graph in range(len(mask))]
        rows, places, weight, coefficients, before = [], [], [], [], 0
        for graph, mesh in enumerate(meshes):
            number = mask[graph].nonzero()[:, 0]
            tokens = positions[graph, number].to(lattice.dual.dtype)
            near, w = mesh.stencil((tokens[:, None] * lattice.dual[graph]).sum(dim=-1), order)
            by_place = near[:, 0].argsort()  # faster: spatial neighbors are close in memory
            rows.append(number[by_place] + graph * mask.shape[1])
            places.append(near[by_place] + before)
            weight.append(w[by_place].to(dtype))
            before += mesh.points
            with torch.autocast(positions.device.type, enabled=False):
                c = self.coefficients(GraphNodes(mesh.xi[None], mesh.weights[None]))[0]
            zero = (mesh.xi == 0).all(dim=-1)
            coefficients.append((c + self.background * zero).to(dtype))
        place, w = torch.cat(places), torch.cat(weight).flatten()
        row = torch.arange(len(place), device=place.device).repeat_interleave(place.shape[1])
        pattern = Pattern.of(row, place.flatten(), len(place), before)
        turned = pattern.turned(w.detach())
        return MeshKernel(torch.cat(rows), pattern, w, turned, tuple(meshes), tuple(coefficients))
