"""FLT's relative positional encoding: a mask learned through its Fourier transform."""

import inspect
import math
from typing import Any, Self

import torch
from torch import Tensor

from molflt.attention.encoding import Encoding, Position, differences
from molflt.attention.kernels import ShiftInvariantKernel, one_of
from molflt.attention.mixing import at_least_float32
from molflt.attention.nodes import NODES, KernelNodes, Nodes
from molflt.attention.quadrature import ShellNodes, ShellWeights, hermitian
from molflt.attention.spectra import SPECTRA, Spectrum

GraphNodes = tuple[Tensor, Tensor]  # nodes (batch, r, l) and weights (batch, r) of each graph


class SpectralPosition(Position):
    """FLT: the mask is learned through its Fourier transform g, sampled at r nodes.

    f(r_i - r_j) ~= sum_s c_s Re[g(xi_s) exp(2 pi i xi_s . (r_i - r_j))] = N1_i . N2_j, with 2r
    columns. FLT (arXiv:2302.01925), eqs. 4-5. Real g give even masks, complex g asymmetric ones.

    The factors depend on the origin although their product does not: centre the positions of each
    graph before calling `factors`, both for the precision of the phases and because feature maps
    see the factors one by one. (Causal models count from their first token instead: a centre would
    tell earlier tokens how many come later.)

    Args:
        spectrum: family of g, with `spectrum(xi)` and `mask(delta)`.
        nodes: where g is sampled; called without arguments, returns nodes and weights.

    Raises:
        ValueError: if the nodes cannot sample the spectrum.
    """

    # Below this the two sides are no longer balanced, so that the gradient stays finite (and,
    # unlike that of two square roots, does not vanish) where the spectrum crosses zero.
    floor = 1e-4

    def __init__(self, spectrum: Spectrum, nodes: Nodes) -> None:
        super().__init__()
        nodes.expect(spectrum)
        self.spectrum = spectrum
        self.nodes = nodes
        self.dim = spectrum.dim

    @classmethod
    def build(
        cls,
        heads: int,
        dim: int = 3,
        spectrum: str = "gaussian_basis",
        num_nodes: int = 16,
        *,
        nodes: str | None = None,
        **options: Any,
    ) -> Self:
        """From the names of its parts, as in a configuration.

        Args:
            heads: number of heads.
            dim: dimension l of positions.
            spectrum: key of `SPECTRA`, or "shell_weights", which is sampled at shells alone.
            num_nodes: nodes r of random rules. Shells count theirs themselves and ignore it.
            nodes: key of `NODES`. None: "kernel", a kernel's own spectral density, where the
                spectrum is a kernel; "shells" for "shell_weights"; else "gaussian".
            options: further arguments of the spectrum, and those of the nodes with the prefix
                `node_`, such as `node_sigma`, or `node_diameter` and `node_k_max` of shells.

        Raises:
            ValueError: if a name is unknown, an option is unknown or missing, or the nodes cannot
                sample the spectrum.
        """
        spectra = {**SPECTRA, "shell_weights": ShellWeights}
        one_of("spectrum", spectrum, spectra)
        family: type[Spectrum] = spectra[spectrum]
        is_kernel, weighted = issubclass(family, ShiftInvariantKernel), family is ShellWeights
        default = "shells" if weighted else "kernel" if is_kernel else "gaussian"
        one_of("nodes", nodes or default, NODES)
        rule = NODES[nodes or default]
        if (weighted and rule is not ShellNodes) or (rule is KernelNodes and not is_kernel):
            raise ValueError(
                f"spectrum={spectrum!r} cannot be sampled at nodes={nodes!r}; expected "
                f"{default!r}{'' if weighted else ' or another rule'}"
            )
        own = {key: options.pop(key) for key in list(options) if key.startswith("node_")}
        if weighted:
            shells = _made(rule, own, "node_", dim=dim, normalized=True)
            return cls(_made(family, options, heads=heads, shells=shells), shells)
        g = _made(family, options, heads=heads, dim=dim)
        if rule is ShellNodes:
            return cls(g, _made(rule, own, "node_", dim=dim, normalized=False))
        if rule is KernelNodes:
            return cls(g, _made(rule, own, "node_", kernel=g, num_nodes=num_nodes, shared=True))
        return cls(g, _made(rule, own, "node_", heads=heads, num_nodes=num_nodes, dim=dim))

    def width(self, head_dim: int) -> int:
        """d + 2r: the factors append 2r columns to queries and keys."""
        return head_dim + 2 * self.nodes.num_nodes

    def forward(self, mixing: str, query_positions: Tensor, key_positions: Tensor) -> Encoding:
        """The exact mask for softmax, else its factors."""
        if mixing == "softmax":
            return Encoding(bias=self.bias(differences(query_positions, key_positions)))
        return Encoding(factors=self.factors(query_positions, key_positions))

    def bias(self, delta: Tensor) -> Tensor:
        """Exact mask: differences (batch, queries, keys, l) -> (batch, heads, queries, keys)."""
        with torch.autocast(delta.device.type, enabled=False):
            return self.spectrum.mask(at_least_float32(delta))

    def factors(
        self, query_positions: Tensor, key_positions: Tensor, nodes: GraphNodes | None = None
    ) -> tuple[Tensor, Tensor]:
        """Fourier factors of the mask.

        Args:
            query_positions: (batch, queries, l), centred per graph.
            key_positions: (batch, keys, l), from the same centre.
            nodes: nodes (batch, r, l) and weights (batch, r) of each graph, such as those of its
                reciprocal lattice, instead of the module's own.

        Returns:
            N1 (batch, heads, queries, 2r) and N2 (batch, heads, keys, 2r).
        """
        with torch.autocast(query_positions.device.type, enabled=False):
            xi, product, floor = self._sampled(nodes)
            # a b = product whatever a is; a = sqrt|product| minimizes the norms of both sides.
            square = (product.abs() + floor)[..., None, :]
            left = square.where(square > 0, 1.0).sqrt()
            right = product[..., None, :] / left
            left = left * (square > 0)
            cos, sin = _waves(query_positions, xi)
            same = key_positions is query_positions  # no images: the usual case, computed once
            key_cos, key_sin = (cos, sin) if same else _waves(key_positions, xi)
            if right.is_complex():
                # Re[(a + ib) exp(i(x - y))], the phase of a + ib put on the key's side
                a, b = right.real, right.imag
                key_cos, key_sin = a * key_cos + b * key_sin, a * key_sin - b * key_cos
            else:
                key_cos, key_sin = right * key_cos, right * key_sin
            return (
                torch.cat((left * cos, left * sin), dim=-1),
                torch.cat((key_cos, key_sin), dim=-1),
            )

    def _sampled(self, nodes: GraphNodes | None) -> tuple[Tensor, Tensor, Tensor | float]:
        """Frequencies, coefficients c_s g(xi_s) and the floor of their absolute values.

        Returns:
            xi (heads or 1, r, l), coefficients (heads, r) and a number; with nodes of each graph
            (batch, 1, r, l), (batch, heads, r) and (batch, 1, r), 0 where the weight is 0: nodes
            that are padding, or fade at the end of the spectrum, must not add to the factors.
        """
        if nodes is None:
            return *self.nodes.sample(self.spectrum), self.floor
        xi, weights = nodes
        graphs, r, _ = xi.shape
        g = hermitian(self.spectrum, xi.reshape(1, graphs * r, -1))  # [h, b r]
        product = weights[:, None] * g.unflatten(-1, (graphs, r)).transpose(0, 1)
        floor = self.floor * weights / weights.amax(dim=1, keepdim=True)
        return xi[:, None], product, floor.detach()[:, None]

    def radial_profile(self, distances: Tensor) -> Tensor:
        """Exact mask along a line: distances (n,) -> (heads, n), for plots."""
        delta = torch.zeros(1, len(distances), self.spectrum.dim).to(distances)
        delta[0, :, 0] = distances
        return self.bias(delta)[0]

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws new nodes in place; give a generator seeded alike on every rank."""
        self.nodes.redraw_(generator)


def _waves(positions: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of 2 pi xi_s . r_i.

    Args:
        positions: (batch, n, l).
        nodes: (heads or 1, r, l), or one set for each graph, (batch, 1, r, l).

    Returns:
        (batch, heads or 1, n, r) each.
    """
    positions = at_least_float32(positions)[:, None]
    phase = 2 * math.pi * positions @ nodes.to(positions.dtype).transpose(-1, -2)
    return phase.cos(), phase.sin()


def _made(part: type[Any], options: dict[str, Any], prefix: str = "", **fixed: Any) -> Any:
    """A spectrum or a rule from options of a configuration.

    Args:
        part: its class.
        options: its arguments by name, with the prefix.
        prefix: what the names begin with.
        fixed: arguments that are no options.
    """
    known = {
        prefix + name: parameter
        for name, parameter in inspect.signature(part).parameters.items()
        if name not in fixed
    }
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(
            f"{part.__name__} has no option {', '.join(unknown)}; expected some of "
            f"{', '.join(known)}"
        )
    required = [name for name, parameter in known.items() if parameter.default is parameter.empty]
    if missing := [name for name in required if name not in options]:
        raise ValueError(
            f"{part.__name__} needs {', '.join(required)}; got no {', '.join(missing)}"
        )
    return part(**fixed, **{name[len(prefix) :]: value for name, value in options.items()})
