"""FLT's positional encoding: sums over nodes for the mask of `attention.spectra.base`, eq. 4."""

import functools
import math
import warnings
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from molflt.attention.checks import accepted, from_options, no_effect, one_of
from molflt.attention.encodings import Bias, Encoding, Factors
from molflt.attention.features.base import NUM_FEATURES, Projected
from molflt.attention.nodes import NODES, Nodes, ShellNodes
from molflt.attention.nodes.base import hermitian
from molflt.attention.numerics import at_least_float32, rand64, randn64
from molflt.attention.positions.base import Position, _real, differences
from molflt.attention.spectra import SPECTRA, Spectrum


class GraphNodes(NamedTuple):
    """Nodes and weights of each graph, such as the vectors of its reciprocal lattice."""

    xi: Tensor  # (batch, r, l)
    weights: Tensor  # (batch, r)


class SpectralPosition(Position):
    """FLT's mask, learned through its Fourier transform g, which is sampled at r nodes.

    f(r_i - r_j) ~= sum_s c_s Re[g(xi_s) exp(2 pi i xi_s . (r_i - r_j))] = N1_i . N2_j, where the
    factors have 2r columns (FLT, arXiv:2302.01925v1, eqs. 4-5). A real g gives an even mask, and a
    complex g gives an asymmetric mask.

    The factors depend on the origin, but their product does not. Center the positions of each graph
    before calling `factors`: phases are then precise, and outputs of feature maps, which receive
    the factors separately, do not depend on the origin. Causal models count positions from the
    first token, because a center would depend on later tokens.

    Args:
        spectrum: family of g, with `spectrum(xi)` and `mask(delta)`.
        nodes: rule that samples g; None if nodes come with each batch (see `factors`).
    """

    # Added to |c_s g(xi_s)| before the square root that balances the factors; keeps gradients
    # finite and nonzero where the spectrum crosses zero.
    floor = 1e-4
    taper: ClassVar[Literal["step", "positive"]] = "step"  # taper of reciprocal nodes
    own_options: ClassVar[tuple[str, ...]] = ()  # arguments of the class besides its two parts
    on_lattice = False  # True if nodes come with each batch, even for softmax
    paper: ClassVar[str] = "2302.01925v1, eqs. 3-5"
    cost: ClassVar[str] = "N m (d + 2r)"

    def __init__(self, spectrum: Spectrum, nodes: Nodes | None) -> None:
        super().__init__()
        if nodes is not None:
            nodes.check(spectrum)
        self.spectrum = spectrum
        self.nodes = nodes
        self.heads, self.dim = spectrum.heads, spectrum.dim

    @classmethod
    def build(
        cls,
        heads: int,
        dim: int = 3,
        spectrum: str = "gaussian_basis",
        num_nodes: int | None = None,
        *,
        nodes: str | None = None,
        sampled: bool = True,
        **options: object,
    ) -> Self:
        """Builds the position from the names of its parts, as in a configuration.

        Args:
            heads: number of heads.
            dim: dimension l of positions.
            spectrum: key of `SPECTRA`.
            num_nodes: number of nodes r of random rules, 16 by default; not supported by shells.
            nodes: key of `NODES`. The default depends on the spectrum: "density" for a kernel,
                "shells" for "shell_weights", and otherwise "gaussian".
            sampled: False builds a position without nodes: for softmax, which uses the exact mask,
                or for reciprocal lattices, whose nodes come with each batch.
            options: arguments of the class that `own_options` lists; arguments of the nodes, with
                the prefix `node_`, such as `node_sigma`; and arguments of the spectrum.
        """
        one_of("spectrum", spectrum, SPECTRA)
        family = SPECTRA[spectrum]
        name = nodes or family.nodes
        one_of("nodes", name, NODES)
        if not accepted(NODES[name], num_nodes=num_nodes):
            no_effect(f"with nodes={name!r}", num_nodes=num_nodes)
        own: dict[str, Any] = {key: options.pop(key) for key in cls.own_options if key in options}
        node_options = {key: options.pop(key) for key in [*options] if key.startswith("node_")}
        if family.on_shells:  # the shells are built first
            if name != "shells":
                raise ValueError(f"spectrum={spectrum!r} needs nodes='shells'; got {name!r}")
            shells = from_options(ShellNodes, node_options, "node_", dim=dim, normalized=True)
            g = from_options(family, options, heads=heads, dim=dim, radii=shells.shell_radius)
            return cls(g, shells, **own)
        g = from_options(family, options, heads=heads, dim=dim)
        if not sampled:
            why = "for softmax, which uses the exact mask, or where nodes come with each batch"
            no_effect(why, nodes=nodes, num_nodes=num_nodes, **node_options)
            node_options = {}
        count = {} if num_nodes is None else {"num_nodes": num_nodes}
        sizes = accepted(NODES[name], heads=heads, dim=dim, density=g, **count)
        rule = from_options(NODES[name], node_options, "node_", **sizes)
        # Other weights have the same values for a seed with and without nodes: all are drawn.
        return cls(g, rule if sampled else None, **own)

    def width(self, head_dim: int) -> int:
        return head_dim + (0 if self.nodes is None else 2 * self.nodes.num_nodes)

    def forward(self, mixing: str, positions: Tensor, key_positions: Tensor) -> Encoding:
        if mixing == "softmax":
            return Bias(self.bias(differences(positions, key_positions)))
        return Factors(*self.factors(positions, key_positions))

    def use_for(self, mixing: str) -> None:
        if mixing != "softmax" or self.on_lattice:
            return
        if self.nodes is not None:
            self.nodes.requires_grad_(False)
        fixed = [getattr(self.spectrum, name) for name in self.spectrum.without_slope]
        if any(parameter.requires_grad for parameter in fixed):
            names, kind = ", ".join(self.spectrum.without_slope), type(self.spectrum).__name__
            warnings.warn(
                f"{names} of the spectrum {kind} keeps its initial value with mixing='softmax': "
                "the exact mask has no slope in it; spectrum='smooth_local' learns it",
                stacklevel=2,
            )
            for parameter in fixed:
                parameter.requires_grad_(False)

    def bias(self, delta: Tensor) -> Tensor:
        with torch.autocast(delta.device.type, enabled=False):
            return self.spectrum.mask(_real(delta))

    def factors(
        self, positions: Tensor, key_positions: Tensor, nodes: GraphNodes | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns Fourier factors N1 (batch, heads, queries, 2r) and N2 (batch, heads, keys, 2r).

        Args:
            positions: (batch, queries, l), centered per graph.
            key_positions: (batch, keys, l), relative to the same center.
            nodes: nodes of each graph, used instead of the module's nodes.
        """
        with torch.autocast(positions.device.type, enabled=False):
            xi, coefficients, floor = self._sampled(nodes)
            # a b = c for any a; a = sqrt|c| minimizes the norms of both factors.
            magnitude = (coefficients.abs() + floor)[..., None, :]  # [..., h, 1, r]; 0 for padding
            left = magnitude.where(magnitude > 0, 1.0).sqrt()
            right = coefficients[..., None, :] / left
            left = left.where(magnitude > 0, 0.0)
            cos, sin = _waves(positions, xi)
            same = key_positions is positions  # the usual case, except with images
            key_cos, key_sin = (cos, sin) if same else _waves(key_positions, xi)
            if right.is_complex():
                # Re[(a + ib) exp(i(x - y))], with the phase of a + ib assigned to the key
                a, b = right.real, right.imag
                key_cos, key_sin = a * key_cos + b * key_sin, a * key_sin - b * key_cos
            else:
                key_cos, key_sin = right * key_cos, right * key_sin
            query_factors = torch.cat((left * cos, left * sin), dim=-1)
            return query_factors, torch.cat((key_cos, key_sin), dim=-1)

    def _sampled(self, nodes: GraphNodes | None) -> tuple[Tensor, Tensor, Tensor | float]:
        """Returns frequencies, coefficients c_s g(xi_s), and the amount to add to |c_s g(xi_s)|.

        Shapes are (heads or 1, r, l) and (heads, r), after (batch,) for nodes of each graph.
        """
        if nodes is None:
            if self.nodes is not None:
                return *self.nodes.sample(self.spectrum), self.floor
            raise ValueError(
                "the nodes come with each batch; expected GraphNodes as `nodes`; got None"
            )
        xi, weights = nodes  # nodes of weight 0, such as padding, have no floor
        floor = self.floor * weights / weights.amax(dim=1, keepdim=True)
        return xi[:, None], self.coefficients(nodes), floor.detach()[:, None]

    def coefficients(self, nodes: GraphNodes) -> Tensor:
        """Returns c_s g(xi_s) for the nodes of each graph: (batch, heads, r)."""
        xi, weights = nodes
        graphs, r, _ = xi.shape
        g = hermitian(self.spectrum, xi.reshape(1, graphs * r, -1))  # [h, b r]
        return weights[:, None] * g.unflatten(-1, (graphs, r)).transpose(0, 1)

    def radial_profile(self, distance: Tensor) -> Tensor:
        """Computes the exact mask along a line, for plots: distances (n,) -> (heads, n)."""
        return self.bias(F.pad(distance[None, :, None], (0, self.dim - 1)))[0]

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        if self.nodes is not None:
            self.nodes.redraw_(generator)


def _waves(positions: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cos and sin of 2 pi xi_s . r_i for xi of `_sampled`: (batch, heads or 1, n, r)."""
    scaled = 2 * math.pi * _real(positions)[:, None]
    nodes = nodes.to(scaled.dtype)
    if torch.compiler.is_compiling():  # Inductor cannot lower a product of unknown sizes
        axes = zip(scaled.unbind(dim=-1), nodes.unbind(dim=-1), strict=True)
        phase = functools.reduce(torch.add, (x[..., None] * k[..., None, :] for x, k in axes))
    else:
        phase = scaled @ nodes.mT
    return phase.cos(), phase.sin()


class FrequencyProjection(nn.Module):
    """Random projection of Fourier factors; its rows are functions of the frequency.

    The number of nodes of a reciprocal lattice differs between graphs, the order of the nodes
    depends on the choice of the cell, and each node represents both xi and -xi. The normal
    variables that multiply the cos and sin columns of a node are therefore computed from its
    frequency:

        eta(xi) = Phi^-1(frac(u . xi + (v . xi)(w . xi) + b)),
        (eta(xi) + eta(-xi)) / sqrt(2) for cos,  (eta(xi) - eta(-xi)) / sqrt(2) for sin.

    Over the draws of u, v, w (normal) and b (uniform), every eta is exactly normal. Values at
    different nodes are independent to the extent that 2 pi |u . (xi - xi')| is large, as in cells
    no larger than about `LENGTH`. `num_features` must be the same as for the feature map.
    """

    LENGTH = 100.0  # Å, standard deviation of u
    BEND = 30.0  # Å, standard deviation of v and w; breaks linear relations among lattice vectors

    def __init__(self, heads: int, num_features: int = NUM_FEATURES, dim: int = 3) -> None:
        super().__init__()
        self.vectors = nn.Buffer(torch.empty(3, heads, num_features, dim))  # u, v, w
        self.turns = nn.Buffer(torch.empty(heads, num_features))  # b
        self.redraw_()

    @torch.no_grad()
    def redraw_(self, generator: torch.Generator | None = None) -> None:
        u, *others = randn64(self.vectors.shape, generator=generator)
        scaled = (self.LENGTH * u, *(self.BEND * other for other in others))
        self.vectors.copy_(torch.stack(scaled))
        self.turns.copy_(rand64(self.turns.shape, generator=generator))

    def rows(self, nodes: Tensor) -> Tensor:
        """Computes the rows without gradients: nodes (batch, r, l) -> (batch, heads, 2r, m)."""
        xi = nodes.detach().double()[:, None]  # [b, 1, r, l]
        u, v, w = (xi @ vector.double().mT for vector in self.vectors)  # [b, h, r, m]
        even = v * w + self.turns.double()[:, None]
        ahead, behind = (_normal(even + u), _normal(even - u))
        # At xi = 0, eta(xi) and eta(-xi) are the same variable.
        scale = torch.where((xi == 0).all(dim=-1, keepdim=True), 0.5, 0.5**0.5)
        return torch.cat(((ahead + behind) * scale, (ahead - behind) * scale), dim=2)

    def forward(self, factors: tuple[Tensor, Tensor], nodes: Tensor) -> tuple[Projected, Projected]:
        with torch.autocast(nodes.device.type, enabled=False):
            rows = self.rows(nodes).to(at_least_float32(nodes).dtype)
            left, right = (
                Projected(x @ rows.to(x.dtype), x.square().sum(dim=-1, keepdim=True))
                for x in factors
            )
            return left, right


def _normal(turns: Tensor) -> Tensor:
    """Returns Phi^-1 of the fractional part of `turns`, which is clipped to avoid infinities."""
    return torch.special.ndtri(turns.remainder(1.0).clamp(1e-12, 1 - 1e-12))
