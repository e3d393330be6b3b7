"""Quadrature of a spectrum on spherical shells, and a search for the smallest rule for a mask."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from molflt.attention.checks import at_least_one, one_of, positive
from molflt.attention.nodes.base import Nodes, hermitian
from molflt.attention.numerics import gauss_rule, to_default
from molflt.attention.spectra import Spectrum

# Degrees of Lebedev's rules. Degrees 13, 25 and 27 are omitted: some of their weights are negative,
# which could give a positive mask negative parts.
_DEGREES = (3, 5, 7, 9, 11, 15, 17, 19, 21, 23, 29, 31, *range(35, 132, 6))
# On the CPU, regardless of the default device: modules on "meta" share the cached rules.
_DOUBLE: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
_MOST_RULES = 12  # radial rules whose degrees are searched, those with the fewest nodes


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


class _SuggestedNodes(NamedTuple):
    """Suggested rule, its error at the width where it is largest, and the options to build it."""

    nodes: ShellNodes
    error: float
    position_options: dict[str, Any]


def suggest_nodes(
    radius: float, width: float, tol: float = 1e-2, widest: float | None = None
) -> _SuggestedNodes:
    """Finds a small shell rule for the masks of a molecule or cluster by measuring errors.

    Returns `nodes` and their `error`, the root-mean-square error of f(z) = exp(-|z|^2 / 2 width^2)
    for pairs of points distributed uniformly in a ball, and `position_options`, with which
    `GraphAttention`, `EnergyRegressor` and `make_position` build these nodes. The search varies the
    number of radii and the maximum frequency, and then raises the degree of one shell at a time.
    Wider Gaussians need more closely spaced shells; for a Gaussian basis, pass both the smallest
    and the largest width. The table lists the number of nodes and, in parentheses, the error for a
    single width:

    | diameter / width | tol = 0.03 | 0.01 | 0.003 | 0.001 |
    |---|---|---|---|---|
    | 2 | 10 (1.2e-2) | 14 (6.2e-3) | 23 (2.1e-3) | 33 (6.4e-4) |
    | 5 | 20 (3.0e-2) | 51 (6.0e-3) | 84 (2.7e-3) | 124 (7.5e-4) |
    | 10 | 60 (3.0e-2) | 157 (9.8e-3) | 275 (2.9e-3) | 505 (9.7e-4) |
    | 20 | - | 444 (9.9e-3) | 1191 (2.9e-3) | 1954 (9.6e-4) |

    Args:
        radius: radius of the ball that contains the positions, in units of length.
        width: standard deviation of the narrowest Gaussian of the mask, in units of length.
        widest: standard deviation of the widest Gaussian; by default `width`.
        tol: largest root-mean-square error of a mask with f(0) = 1; at least 1e-6, and at most half
            the root mean square of the mask, which excludes narrow masks in a large ball.
    """
    widest = width if widest is None else widest
    positive(radius=radius, width=width, widest=widest)
    if widest < width:
        raise ValueError(f"widest must be at least width={width:g}; got {widest:g}")
    if not tol >= 1e-6:
        raise ValueError(f"tol must be at least 1e-6; got {tol}")
    ratio = 2 * radius / width
    distance, weight = _ball_pairs(ratio)
    without_nodes = ((-distance.square()).exp() @ weight).sqrt().item()  # root mean square of f
    if tol > 0.5 * without_nodes:
        raise ValueError(
            f"tol must be at most half of {without_nodes:.2g}, the error without nodes; got {tol:g}"
        )
    num_widths = 1 if widest == width else 2 + int(math.log2(widest / width))
    widths = torch.logspace(0, math.log10(widest / width), num_widths, **_DOUBLE)[:, None]
    rules = [_raise_degrees(ratio, widths, tol, each) for each in _radial_rules(ratio, widths, tol)]
    found = [rule for rule in rules if rule is not None]
    if not found:
        raise ValueError(f"no shells reach tol={tol:g} for 2 radius / width = {ratio:.3g}")
    _, error, degrees, (end, num_shells, radial) = min(found)
    options: dict[str, Any] = {
        "diameter": 2 * radius,
        "max_frequency": end / width,
        "num_shells": num_shells,
        "radial": radial,
        "degrees": degrees,
    }
    by_name = {"nodes": "shells"} | {f"node_{name}": value for name, value in options.items()}
    return _SuggestedNodes(ShellNodes(**options), error, by_name)


class _Radial(NamedTuple):
    """Radii of a rule; frequencies are in cycles per width of the narrowest Gaussian."""

    max_frequency: float
    num_shells: int
    rule: Literal["trapezoid", "midpoint"]


class _Directions(NamedTuple):
    """Rule for the directions of one shell."""

    degree: int
    size: int  # number of nodes
    mask: Tensor  # (w, n), contribution of the shell to the mask of each width at each difference


def _ball_pairs(ratio: float) -> tuple[Tensor, Tensor]:
    """Returns distances of random points in a ball, in units of the width, and their weights."""
    x, weight = torch.tensor(gauss_rule(24), **_DOUBLE)  # fractions of the diameter
    density = 24 * x**2 * (1 - 1.5 * x + 0.5 * x**3)
    return ratio * x, density * weight


def _radial_rules(ratio: float, widths: Tensor, tol: float) -> list[_Radial]:
    """Returns radii with small errors for exact directions, sorted by the number of nodes."""
    distance, weight = _ball_pairs(ratio)
    exact = (-0.5 * (distance / widths).square()).exp()  # [w, n]
    candidates = []
    rules: tuple[Literal["trapezoid", "midpoint"], ...] = ("trapezoid", "midpoint")
    # At the last frequency, 0.99 cycles per width, the spectrum has fallen by a factor of 4e-9.
    for max_frequency in (0.03 * step for step in range(5, 34)):
        if 2 * math.pi * max_frequency * ratio > _DEGREES[-1]:
            break
        most = 2 + int(max_frequency * (ratio + 8 * widths[-1].item()))  # images are 8 widths away
        for count, rule in itertools.product(range(1, most), rules):
            radius, measure = shells(max_frequency, count, 3, rule)
            waves = torch.sinc(2 * distance[:, None] * radius)
            error = measure * _density(radius, widths) @ waves.T - exact
            if (error.square() @ weight).max().sqrt() < 0.8 * tol:  # the rest is for directions
                size = (2 * math.pi * 0.7 * radius * ratio + 3).square().sum().item()  # estimate
                candidates.append((size, _Radial(max_frequency, count, rule)))
    return [radial for _, radial in sorted(candidates)[:_MOST_RULES]]


def _raise_degrees(
    ratio: float, widths: Tensor, tol: float, radial: _Radial
) -> tuple[int, float, list[int], _Radial] | None:
    """Raises the degrees of shells until the error is at most `tol`; returns None if this fails.

    Each step changes the shell and the degree that remove the most error per additional node.
    Returns the number of nodes, the error at the worst width, the degrees and the radii.
    """
    distance, weight = _ball_pairs(ratio)
    per_distance = 64
    # With the same directions for all distances, the degrees would be fitted to these directions.
    unit = _even_directions(per_distance * len(distance)).unflatten(0, (per_distance, -1))
    z = (distance[:, None] * unit).flatten(0, 1)  # [n, 3]
    weight = weight.repeat(per_distance) / per_distance
    choices = _direction_choices(ratio, widths, z, radial)
    chosen = [rules[0] for rules in choices]
    error = -(-0.5 * z.square().sum(dim=-1) / widths.square()).exp()  # [w, n]
    for rule in chosen:
        error = error + rule.mask
    while (excess := _excess(error, weight, tol)) > 0:
        steps = []
        for shell, (old, rules) in enumerate(zip(chosen, choices, strict=True)):
            for new in rules:
                if new.degree > old.degree:
                    removed = excess - _excess(error + new.mask - old.mask, weight, tol)
                    steps.append((removed / (new.size - old.size), shell, new))
        if not steps:
            return None
        gain, shell, new = max(steps)
        if gain <= 0:
            return None
        error = error + new.mask - chosen[shell].mask
        chosen[shell] = new
    largest = (error.square() @ weight).max().sqrt().item()
    return sum(rule.size for rule in chosen), largest, [rule.degree for rule in chosen], radial


def _direction_choices(
    ratio: float, widths: Tensor, z: Tensor, radial: _Radial
) -> list[list[_Directions]]:
    """Returns rules of increasing degree for each shell; the last rule is exact in practice."""
    radius, measure = shells(radial.max_frequency, radial.num_shells, 3, radial.rule)
    choices = []
    for k, density in zip(radius, (measure * _density(radius, widths)).T, strict=True):
        rules = []
        for degree in (1, *_DEGREES):
            unit, weights = _directions(3, degree)
            mask = density[:, None] * ((2 * math.pi * k * z @ unit.T).cos() @ weights)
            rules.append(_Directions(degree, len(unit), mask))
            if degree > 2 * math.pi * k * ratio + 6:
                break
        choices.append(rules)
    return choices


def _excess(error: Tensor, weight: Tensor, tol: float) -> float:
    """Returns the amount by which mean square errors exceed tol^2, summed over the widths."""
    return (error.square() @ weight - tol**2).clamp(min=0.0).sum().item()


def _even_directions(count: int) -> Tensor:
    """Returns even unit vectors (count, 3), which avoid the mirror planes of Lebedev's rules."""
    index = torch.arange(count, **_DOUBLE)
    height = 1 - (index + 0.5) / count
    angle = math.pi * (1 + math.sqrt(5)) * (index + 0.5)
    across = (1 - height.square()).sqrt()
    return torch.stack((across * angle.cos(), across * angle.sin(), height), dim=-1)


def _density(radius: Tensor, widths: Tensor) -> Tensor:
    """Returns the spectra (w, n) of Gaussians of widths (w, 1) at radii (n,)."""
    exponent = -2 * math.pi**2 * (widths * radius).square()
    return (2 * math.pi * widths.square()) ** 1.5 * exponent.exp()
