"""Search for the smallest shell rule that reproduces a mask of given width to a given error."""

import itertools
import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from molflt.attention.checks import positive
from molflt.attention.nodes.shells import _DEGREES, _DOUBLE, ShellNodes, _directions, shells
from molflt.attention.numerics import gauss_rule

_MOST_RULES = 12  # radial rules whose degrees are searched, those with the fewest nodes


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
    best = min(found, key=lambda rule: (rule.size, rule.error))
    end, num_shells, radial = best.radial
    options: dict[str, Any] = {
        "diameter": 2 * radius,
        "max_frequency": end / width,
        "num_shells": num_shells,
        "radial": radial,
        "degrees": best.degrees,
    }
    by_name = {"nodes": "shells"} | {f"node_{name}": value for name, value in options.items()}
    return _SuggestedNodes(ShellNodes(**options), best.error, by_name)


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


class _Rule(NamedTuple):
    """Radii, degrees of the shells, total number of nodes, and error at the worst width."""

    radial: _Radial
    degrees: list[int]
    size: int
    error: float


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


def _raise_degrees(ratio: float, widths: Tensor, tol: float, radial: _Radial) -> _Rule | None:
    """Raises the degrees of shells until the error is at most `tol`; returns None if this fails.

    Each step changes the shell and the degree that remove the most error per additional node.
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
    size = sum(rule.size for rule in chosen)
    return _Rule(radial, [rule.degree for rule in chosen], size, largest)


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
