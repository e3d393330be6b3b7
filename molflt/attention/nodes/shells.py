"""Quadrature of a spectrum on spherical shells."""

import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from molflt.attention.checks import at_least_one, no_effect, one_of, positive
from molflt.attention.nodes.base import Nodes, hermitian
from molflt.attention.numerics import gauss_rule, to_default
from molflt.attention.spectra import Spectrum

# Degrees of Lebedev's rules. Degrees 13, 25 and 27 are omitted: some of their weights are negative,
# which could give a positive mask negative parts.
_DEGREES = (3, 5, 7, 9, 11, 15, 17, 19, 21, 23, 29, 31, *range(35, 132, 6))
# On the CPU, regardless of the default device: modules on "meta" share the cached rules.
_DOUBLE: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}


@functools.lru_cache(maxsize=64)
def _directions(dim: int, degree: int) -> tuple[Tensor, Tensor]:
    """Returns points (n, l), one of each antipodal pair, and weights exact for even `degree`."""
    if dim == 1 or degree <= 1:
        return torch.eye(dim, **_DOUBLE)[-1:], torch.ones(1, **_DOUBLE)
    if dim == 2:
        pairs = degree // 2 + 1
        angle = torch.arange(pairs, **_DOUBLE) * (math.pi / pairs)
        unit = torch.stack((angle.cos(), angle.sin()), dim=-1)
        return unit, torch.full_like(angle, 1 / pairs)
    known = [d for d in _DEGREES if d >= degree]
    if not known:
        raise ValueError(
            f"degree must be at most {_DEGREES[-1]}; got {degree}; reduce max_frequency or diameter"
        )
    from scipy.integrate import lebedev_rule

    points, weights = (torch.from_numpy(array) for array in lebedev_rule(known[0]))
    points = torch.where(points.T.abs() < 1e-9, 0.0, points.T)  # [n, 3]
    # The first nonzero coordinate of a point decides the sign of this sum; its antipode has -sum.
    half = torch.tensor([9.0, 3.0, 1.0], **_DOUBLE) @ points.sign().T > 0
    return points[half], weights[half] / (2 * math.pi)


class ShellNodes(Nodes):
    """Product rule of radii and directions: integral g = sum_k S_l k^(l-1) dk mean_u g(k u).

    S_l is the surface area of the unit sphere. The mask is rotationally invariant up to the
    accuracy of the directions. To resolve a wave of frequency k over distances |z| <= diameter, the
    rule for directions needs the degree x = 2 pi k diameter. Because outer shells contribute less,
    a degree of 0.8 x + 3 is sufficient. `suggest_nodes` chooses all sizes for a given mask and
    error. Only one point of each antipodal pair is kept, with twice the weight; see `hermitian`.

    Args:
        diameter: largest distance |z| at which the mask must be accurate, in units of length.
        max_frequency: upper end of the spectrum, in cycles per unit of length.
        num_shells: number of shells, not counting the origin. The default, 2 diameter
            max_frequency, keeps periodic copies away from masks of any width.
        dim: dimension l, 1 to 3.
        radial: "trapezoid", radii j k / n with k = max_frequency; "midpoint", radii (j - 1/2) k /
            n; "gauss", Gauss-Legendre on [0, k]. "trapezoid" and "midpoint" are not supported in
            two dimensions. If g vanishes beyond k, the only error of these two rules is an image of
            the mask at the distance n / k - |z|. The default is "gauss" in two dimensions and
            "trapezoid" otherwise.
        degrees: degree of each shell, innermost first; by default 0.8 x + 3; see above.
        normalized: normalize the weights of each shell to a sum of 1, for `ShellWeights`.

    Attributes:
        shell: (r,) index of the shell of every node. For the trapezoid rule in one dimension, shell
            0 is the origin xi = 0, which then has a nonzero weight.
        shell_radius: (shells,) radii, in cycles per unit of length.
    """

    paper: ClassVar[str] = "2302.01925v1, eq. 4 by quadrature"
    xi: Tensor
    weights: Tensor
    shell: Tensor
    shell_radius: Tensor

    def __init__(
        self,
        diameter: float,
        max_frequency: float,
        num_shells: int | None = None,
        dim: int = 3,
        radial: Literal["trapezoid", "midpoint", "gauss"] | None = None,
        degrees: Sequence[int] | None = None,
        normalized: bool = False,
    ) -> None:
        super().__init__()
        positive(diameter=diameter, max_frequency=max_frequency)
        if num_shells is None:  # the trapezoid rule repeats masks at the distance n / k
            num_shells = math.ceil(2 * diameter * max_frequency)
        at_least_one(num_shells=num_shells)
        if degrees is not None and len(degrees) != num_shells:
            raise ValueError(f"degrees must be {num_shells}, one per shell; got {len(degrees)}")
        radial = radial or ("gauss" if dim == 2 else "trapezoid")
        radius, measure = shells(max_frequency, num_shells, dim, radial)
        if degrees is None:
            degrees = [int(0.8 * x + 3) for x in (2 * math.pi * diameter * radius).tolist()]
        directions = [_directions(dim, degree) for degree in degrees]
        if normalized:
            measure = torch.ones_like(measure)
        elif dim == 1 and radial == "trapezoid":  # the origin is the first point of the rule
            directions = [(torch.zeros(1, 1, **_DOUBLE), torch.ones(1, **_DOUBLE)), *directions]
            radius = torch.cat((radius.new_zeros(1), radius))
            measure = torch.cat((measure[:1] / 2, measure))
        self.dim = dim
        self.normalized = normalized
        units, unit_weights = zip(*directions, strict=True)
        counts = torch.tensor([len(unit) for unit in units], device="cpu")
        self.num_nodes = int(counts.sum())
        shell = torch.arange(len(units), device="cpu").repeat_interleave(counts)
        xi = radius[shell, None] * torch.cat(units)  # [r, l]
        weights = measure[shell] * torch.cat(unit_weights)  # [r]
        buffers = {"shell": shell, "xi": xi[None], "weights": weights[None], "shell_radius": radius}
        for name, value in buffers.items():
            self.register_buffer(name, to_default(value))

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.xi, self.weights

    def sample(self, spectrum: Spectrum) -> tuple[Tensor, Tensor]:
        return self.xi, self.weights * hermitian(spectrum, self.xi)

    @classmethod
    def sizes(cls, spectrum: Spectrum, num_nodes: int | None) -> dict[str, object]:
        no_effect("with nodes='shells'", num_nodes=num_nodes)
        return {"dim": spectrum.dim}


def shells(max_frequency: float, count: int, dim: int, radial: str) -> tuple[Tensor, Tensor]:
    """Returns the radii k and measures S_l k^(l-1) dk of `ShellNodes`, as float64 (count,)."""
    if dim not in (1, 2, 3):
        raise ValueError(f"dim must be 1, 2 or 3; got {dim}; use 'sobol' nodes in more dimensions")
    one_of("radial", radial, ("trapezoid", "midpoint", "gauss"))
    if radial != "gauss" and dim == 2:
        raise ValueError(f"radial must be 'gauss' in two dimensions; got {radial!r}")
    if radial == "gauss":
        points, weights = (torch.tensor(x, **_DOUBLE) for x in gauss_rule(count))
        radius, step = max_frequency * points, max_frequency * weights
    else:
        index = torch.arange(1, count + 1, **_DOUBLE)
        radius = max_frequency / count * (index - (0.5 if radial == "midpoint" else 0.0))
        step = torch.full_like(index, max_frequency / count)
    # S_l = 2 pi^(l/2) / Gamma(l/2)
    return radius, step * 2 * math.pi ** (dim / 2) / math.gamma(dim / 2) * radius ** (dim - 1)
