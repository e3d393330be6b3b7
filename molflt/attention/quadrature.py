"""Rules that sample a spectrum, and for three dimensions shells of directions, with their spectrum.

The integral of FLT (arXiv:2302.01925), eq. 4, by quadrature. Frequencies in cycles per unit of
length. Random rules, and all rules by name, are in `molflt.attention.nodes`; shells chosen by their
error in `molflt.attention.suggest`.
"""

import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from molflt.attention.kernels import Spectrum, at_least_one
from molflt.attention.radial import distances, sinc

# Degrees of Lebedev's rules. Those of 13, 25 and 27 are left out: some of their weights are
# negative, which would turn a positive mask into one with negative parts.
DEGREES = (3, 5, 7, 9, 11, 15, 17, 19, 21, 23, 29, 31, *range(35, 132, 6))


class Nodes(nn.Module):
    """Base class of the rules: nodes xi_s and weights c_s with integral g ~= sum_s c_s g(xi_s).

    Attributes:
        num_nodes: number of nodes r.
        dim: dimension l of positions.
    """

    num_nodes: int
    dim: int

    def forward(self) -> tuple[Tensor, Tensor]:
        """Nodes (heads or 1, r, l) in cycles per unit of length and weights (heads or 1, r)."""
        raise NotImplementedError(f"{type(self).__name__} must override forward()")

    def sample(self, spectrum: Spectrum) -> tuple[Tensor, Tensor]:
        """Returns nodes (heads or 1, r, l) and the coefficients c_s g(xi_s), (heads, r)."""
        xi, weights = self()
        return xi, weights * spectrum.spectrum(xi)

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws new nodes in place; give a generator seeded alike on every rank."""
        raise NotImplementedError(f"{type(self).__name__} must override redraw_(generator)")

    def log_density(self, xi: Tensor) -> Tensor:
        """log p(xi), to judge by g / p how well the nodes fit a spectrum.

        Args:
            xi: frequencies (heads or 1, n, l), in cycles per unit of length.

        Returns:
            (heads, n).
        """
        raise NotImplementedError(f"{type(self).__name__} must override log_density(xi)")

    def expect(self, spectrum: Spectrum) -> None:
        """Raises ValueError if these nodes cannot sample a spectrum."""
        if spectrum.dim != self.dim:
            raise ValueError(
                f"the spectrum has {spectrum.dim} dimensions and its nodes have {self.dim}; give "
                "both the dimension of the positions"
            )
        if isinstance(spectrum, ShellWeights):
            raise ValueError(
                f"ShellWeights live on shells alone; got {type(self).__name__}; sample them at the "
                "ShellNodes that they were made for"
            )


def hermitian(spectrum: Spectrum, xi: Tensor) -> Tensor:
    """(g(xi) + conj g(-xi)) / 2: the part of g that makes the mask.

    Both antipodes of a pair have the same columns cos and sin; with this part one node at twice the
    weight stands for both, whether masks are even or not.

    Args:
        spectrum: family of g.
        xi: frequencies (heads or 1, nodes, l), in cycles per unit of length.

    Returns:
        (heads, nodes), real or complex as g is.
    """
    return 0.5 * (spectrum.spectrum(xi) + spectrum.spectrum(-xi).conj())


class Directions(NamedTuple):
    """A quadrature of the unit sphere of which one of every two antipodes is kept."""

    unit: Tensor
    """(n, l), float64"""
    weights: Tensor
    """(n,), float64, sum 1"""


@functools.lru_cache(maxsize=64)
def directions(dim: int, degree: int) -> Directions:
    """Half of an antipodal quadrature of the sphere, exact for even polynomials up to a degree.

    The two points of the line for l = 1, equal angles for l = 2, Lebedev's rules with positive
    weights for l = 3 (`scipy.integrate.lebedev_rule`). Degree 1 is a single pair.

    Args:
        dim: dimension l, 1 to 3.
        degree: smallest degree; the next one that exists is taken.

    Raises:
        ValueError: if there is no such rule.
    """
    if dim not in (1, 2, 3):
        raise ValueError(f"dim must be 1, 2 or 3; got {dim}; use 'sobol' nodes in more dimensions")
    if dim == 1 or degree <= 1:
        axis = torch.eye(dim, dtype=torch.float64)[-1:]
        return Directions(axis, torch.ones(1, dtype=torch.float64))
    if dim == 2:
        pairs = degree // 2 + 1
        angle = torch.arange(pairs, dtype=torch.float64) * (math.pi / pairs)
        unit = torch.stack((angle.cos(), angle.sin()), dim=-1)
        return Directions(unit, torch.full_like(angle, 1 / pairs))
    known = [d for d in DEGREES if d >= degree]
    if not known:
        raise ValueError(
            f"degree must be at most {DEGREES[-1]} (Lebedev's largest rule); got {degree}; reduce "
            "k_max, the diameter or degree_factor"
        )
    from scipy.integrate import lebedev_rule

    points, weights = (torch.from_numpy(array) for array in lebedev_rule(known[0]))
    points = torch.where(points.T.abs() < 1e-9, 0.0, points.T)  # [n, 3]
    sign = torch.tensor([9.0, 3.0, 1.0], dtype=torch.float64) @ points.sign().T
    return Directions(points[sign > 0], weights[sign > 0] / (2 * math.pi))


class ShellNodes(Nodes):
    """Directions times radial shells: integral g = sum_k S_l k^(l-1) dk mean_u g(k u).

    S_l is the surface of the unit sphere: 2, 2 pi, 4 pi. All nodes of a shell share the radial
    weight, each has its direction's, and the mask is invariant under rotations to the accuracy of
    the directions. A wave of frequency k over the distance |z| <= diameter needs the degree
    x = 2 pi k diameter; outer shells matter less, so `degree_factor` x + 3 with 0.6 to 1 is enough.
    `molflt.attention.suggest.suggest_nodes` chooses all sizes for a mask and an error.

    Of two antipodes, which give the same columns, one is kept at twice the weight; `sample` puts
    g(xi) and conj g(-xi) together in it, which is right for every spectrum.

    Args:
        diameter: largest distance |z| at which the mask shall be right, 2 R, in units of length.
        k_max: where the spectrum is cut, in cycles per unit of length.
        num_shells: number of shells, not counting the origin.
        dim: dimension l, 1 to 3.
        radial: "trapezoid", radii j k_max / n; "midpoint", radii (j - 1/2) k_max / n; "gauss",
            Gauss-Legendre on [0, k_max]. The first two are exact up to images of the mask at the
            distance n / k_max - |z| if g vanishes beyond k_max; in two dimensions, where that does
            not hold, they are refused. None: "gauss" in two dimensions, else "trapezoid".
        degree_factor: see above.
        degrees: degree of every shell instead, innermost first; see `directions`.
        normalized: whether the weights of each shell sum to 1 instead, for `ShellWeights`.

    Attributes:
        shell: (r,) index of the shell of every node. The trapezoid rule in one dimension has the
            origin xi = 0, whose weight is not 0 there, as shell 0.
        shell_radius: (shells,) radii, in cycles per unit of length.

    Raises:
        ValueError: if a number is not positive, a choice is unknown or does not fit the others, or
            no rule has the degree asked for.
    """

    xi: Tensor
    weights: Tensor
    shell: Tensor
    shell_radius: Tensor

    def __init__(
        self,
        diameter: float,
        k_max: float,
        num_shells: int = 8,
        dim: int = 3,
        radial: Literal["trapezoid", "midpoint", "gauss"] | None = None,
        degree_factor: float = 0.8,
        degrees: Sequence[int] | None = None,
        normalized: bool = False,
    ) -> None:
        super().__init__()
        at_least_one(num_shells=num_shells)
        sizes = {"diameter": diameter, "k_max": k_max, "degree_factor": degree_factor}
        for name, value in sizes.items():
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be positive and finite; got {value}")
        if degrees is not None and len(degrees) != num_shells:
            raise ValueError(f"degrees must be {num_shells}, one per shell; got {len(degrees)}")
        radius, measure = shells(k_max, num_shells, dim, radial)
        if degrees is None:
            turns = (2 * math.pi * diameter * radius).tolist()
            degrees = [int(degree_factor * x + 3) for x in turns]
        parts = [directions(dim, degree) for degree in degrees]
        if normalized:
            measure = torch.ones_like(measure)
        elif dim == 1 and radial in (None, "trapezoid"):
            parts = [Directions(torch.zeros(1, 1).double(), torch.ones(1).double()), *parts]
            radius = torch.cat((radius.new_zeros(1), radius))
            measure = torch.cat((measure[:1] / 2, measure))
        self.dim = dim
        self.normalized = normalized
        count = torch.tensor([len(part.weights) for part in parts])
        self.num_nodes = int(count.sum())
        self.register_buffer("shell", torch.arange(len(parts)).repeat_interleave(count))
        xi = radius[self.shell, None] * torch.cat([part.unit for part in parts])
        weights = measure[self.shell] * torch.cat([part.weights for part in parts])
        dtype = torch.get_default_dtype()
        self.register_buffer("xi", xi.to(dtype)[None])
        self.register_buffer("weights", weights.to(dtype)[None])
        self.register_buffer("shell_radius", radius.to(dtype))

    def forward(self) -> tuple[Tensor, Tensor]:
        """Returns nodes (1, r, l) in cycles per unit of length and weights (1, r)."""
        return self.xi, self.weights

    def sample(self, spectrum: Spectrum) -> tuple[Tensor, Tensor]:
        """Returns nodes (1, r, l) and coefficients (heads, r), both antipodes in one."""
        return self.xi, self.weights * hermitian(spectrum, self.xi)

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Does nothing: a quadrature has nothing random."""

    def log_density(self, xi: Tensor) -> Tensor:
        """Raises ValueError: a quadrature has no density."""
        raise ValueError(
            "ShellNodes have no density; got a request for log p(xi); compare the masks instead"
        )

    def expect(self, spectrum: Spectrum) -> None:
        """Raises ValueError if a spectrum cannot be sampled at these nodes."""
        if not self.normalized:
            return super().expect(spectrum)
        if not isinstance(spectrum, ShellWeights):
            raise ValueError(
                f"shells with normalized=True are for ShellWeights; got {type(spectrum).__name__}; "
                "build them with normalized=False"
            )
        radius = spectrum.radius.to(self.shell_radius)
        if radius.shape != self.shell_radius.shape or not torch.allclose(radius, self.shell_radius):
            raise ValueError(
                f"the radii of ShellWeights must be those of the shells; got {len(radius)} other "
                f"ones for {len(self.shell_radius)} shells; build them for these shells"
            )

    def extra_repr(self) -> str:
        """Sizes, for `print(module)`."""
        k_max = self.shell_radius[-1].item()
        return f"num_nodes={self.num_nodes}, shells={len(self.shell_radius)}, outermost={k_max:.4g}"


class ShellWeights(Spectrum):
    """One learned weight per head and shell: f_h(z) = sum_k a_hk j(2 pi k |z|).

    j is the mean of a wave over all directions: sin(x) / x in three dimensions, cos(x) in one. The
    mask is a function of |z| alone; sampled at the shells it is so to the accuracy of their
    directions. g is a density relative to the shells' own measure, the sum over k of the mean over
    directions, hence `normalized` shells.

    Args:
        heads: number of heads.
        shells: the nodes that will sample it, `normalized=True`.
        amplitude: standard deviation of the initial a_hk, in the unit of the mask.

    Raises:
        ValueError: if the shells are not normalized, or have two dimensions.
    """

    radius: Tensor

    def __init__(self, heads: int, shells: ShellNodes, amplitude: float = 0.1) -> None:
        super().__init__(heads, shells.dim)
        if not shells.normalized:
            raise ValueError("shells must be normalized; got normalized=False; set it to True")
        if shells.dim == 2:
            raise ValueError(
                "shells must have dim 1 or 3; got 2, whose mask needs Bessel's J0, of which torch "
                "has no gradient; use 'gaussian_basis' there"
            )
        self.amplitude = nn.Parameter(amplitude * torch.randn(heads, len(shells.shell_radius)))
        self.register_buffer("radius", shells.shell_radius.clone())

    def spectrum(self, xi: Tensor) -> Tensor:
        """a_hk of the shell nearest to each frequency: (heads or 1, nodes, l) -> (heads, nodes)."""
        edges = 0.5 * (self.radius[1:] + self.radius[:-1])
        shell = torch.bucketize(xi.norm(dim=-1), edges.to(xi.dtype))
        return self.amplitude.gather(1, shell.expand(self.heads, -1))

    def mask(self, delta: Tensor) -> Tensor:
        """f(z) per head: differences (batch, ..., l) -> (batch, heads, ...)."""
        turns = 2 * distances(delta)[..., None] * self.radius  # [b, ..., k]
        waves = sinc(turns) if self.dim == 3 else (math.pi * turns).cos()
        return (waves @ self.amplitude.T).movedim(-1, 1)


def shells(
    k_max: float, count: int, dim: int = 3, radial: str | None = None
) -> tuple[Tensor, Tensor]:
    """Radii k and measures S_l k^(l-1) dk of shells, (count,) float64 each: see `ShellNodes`.

    Raises:
        ValueError: if dim or the radial rule is unknown, or one does not go with the other.
    """
    if dim not in (1, 2, 3):
        raise ValueError(f"dim must be 1, 2 or 3; got {dim}; use 'sobol' nodes in more dimensions")
    radial = radial or ("gauss" if dim == 2 else "trapezoid")
    if radial not in ("trapezoid", "midpoint", "gauss"):
        raise ValueError(f"radial must be 'trapezoid', 'midpoint' or 'gauss'; got {radial!r}")
    if radial != "gauss" and dim == 2:
        raise ValueError(f"radial must be 'gauss' in two dimensions; got {radial!r}")
    if radial == "gauss":
        import numpy as np

        points, weights = np.polynomial.legendre.leggauss(count)
        radius, step = torch.tensor(k_max * (points + 1) / 2), torch.tensor(k_max * weights / 2)
    else:
        index = torch.arange(1, count + 1, dtype=torch.float64)
        radius = k_max / count * (index - (0.5 if radial == "midpoint" else 0.0))
        step = torch.full_like(index, k_max / count)
    return radius, step * 2 * math.pi ** (dim / 2) / math.gamma(dim / 2) * radius ** (dim - 1)
