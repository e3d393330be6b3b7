"""Search for the smallest shell rule that reproduces a mask of given width to a given error."""

import itertools
import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from molflt.attention.checks import positive
from molflt.attention.nodes.shells import _DEGREES, _DOUBLE, ShellNodes, _directions, shells
from molflt.attention.numerics import gauss_rule


class _SuggestedNodes(NamedTuple):
    """Suggested rule, and its error at the width where it is largest."""

    nodes: ShellNodes
    error: float


def suggest_nodes(
    radius: float, width: float, tol: float = 1e-2, widest: float | None = None
) -> _SuggestedNodes:
    """Finds a small shell rule for the masks of a molecule or cluster by measuring errors.

    Returns `nodes` and their `error`, the root-mean-square error of f(z) = exp(-|z|^2 / 2 width^2)
    for pairs of points distributed uniformly in a ball. The search varies the number of radii and
    the maximum frequency, and then raises the degree of one shell at a time. Wider Gaussians need
    more closely spaced shells; for a Gaussian basis, pass both the smallest and the largest width.
    The table lists the number of nodes and, in parentheses, the error for a single width:

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
    distance, share = _ball_pairs(ratio)
    without_nodes = ((-distance.square()).exp() @ share).sqrt().item()
    if tol > 0.5 * without_nodes:
        raise ValueError(
            f"tol must be at most half of {without_nodes:.2g}, the error without nodes; got {tol:g}"
        )
    num_widths = 1 if widest == width else 2 + int(math.log2(widest / width))
    widths = torch.logspace(0, math.log10(widest / width), num_widths, **_DOUBLE)[:, None]
    radial_rules = _radial_candidates(ratio, widths, tol)
    rules = [_prune(ratio, widths, tol, *radial) for radial in radial_rules]
    if not any(rules):
        raise ValueError(f"no shells reach tol={tol:g} for 2 radius / width = {ratio:.3g}")
    best = min(filter(None, rules), key=lambda rule: (rule.size, rule.error))
    end, degrees = best.max_frequency / width, best.degrees
    nodes = ShellNodes(2 * radius, end, len(degrees), radial=best.radial, degrees=degrees)
    return _SuggestedNodes(nodes, best.error)


_Radial = Literal["trapezoid", "midpoint"]


class _Pruned(NamedTuple):
    """Rule and its error; frequencies are in cycles per width of the narrowest Gaussian."""

    size: int
    error: float
    max_frequency: float
    radial: _Radial
    degrees: list[int]


def _ball_pairs(ratio: float) -> tuple[Tensor, Tensor]:
    """Returns distances of random points in a ball, in units of the width, and their weights."""
    share, weights = torch.tensor(gauss_rule(24), **_DOUBLE)  # fractions of the diameter
    density = 24 * share**2 * (1 - 1.5 * share + 0.5 * share**3)
    return ratio * share, density * weights / 2


def _radial_candidates(
    ratio: float, widths: Tensor, tol: float
) -> list[tuple[float, int, _Radial]]:
    """Returns (maximum frequency, radii, rule) with small errors, sorted by number of nodes."""
    distance, share = _ball_pairs(ratio)
    exact = (-0.5 * (distance / widths).square()).exp()  # [w, n]
    candidates = []
    rules: tuple[_Radial, ...] = ("trapezoid", "midpoint")
    for max_frequency in (0.03 * step for step in range(5, 34)):
        if 2 * math.pi * max_frequency * ratio > _DEGREES[-1]:
            break
        most = 2 + int(max_frequency * (ratio + 8 * widths[-1].item()))  # images are 8 widths away
        for count, radial in itertools.product(range(1, most), rules):
            radius, measure = shells(max_frequency, count, 3, radial)
            waves = torch.sinc(2 * distance[:, None] * radius)
            error = measure * _density(radius, widths) @ waves.T - exact
            if (error.square() @ share).max().sqrt() < 0.8 * tol:  # the rest is for directions
                guess = (2 * math.pi * 0.7 * radius * ratio + 3).square().sum().item()
                candidates.append((guess, max_frequency, count, radial))
    return [rule[1:] for rule in sorted(candidates)[:12]]


def _prune(
    ratio: float, widths: Tensor, tol: float, max_frequency: float, count: int, radial: _Radial
) -> _Pruned | None:
    """Raises the degrees of shells until the error is at most `tol`; returns None if this fails.

    Each step changes the shell and the degree that remove the most error per additional node.
    """
    distance, share = _ball_pairs(ratio)
    per_distance = 64
    # With the same directions for all distances, the degrees would be fitted to these directions.
    unit = _even_directions(per_distance * len(distance)).unflatten(0, (per_distance, -1))
    z = (distance[:, None] * unit).flatten(0, 1)
    share = share.repeat(per_distance) / per_distance
    error = -(-0.5 * z.square().sum(dim=-1) / widths.square()).exp()  # [w, n]
    radius, measure = shells(max_frequency, count, 3, radial)
    choices: list[list[tuple[int, int, Tensor]]] = []  # degree, number of nodes, values
    for k, weight in zip(radius, (measure * _density(radius, widths)).T, strict=True):
        of_shell = []
        for degree in (1, *_DEGREES):
            unit, shares = _directions(3, degree)
            values = weight[:, None] * ((2 * math.pi * k * z @ unit.T).cos() @ shares)
            of_shell.append((degree, len(unit), values))
            if degree > 2 * math.pi * k * ratio + 6:  # exact in practice
                break
        choices.append(of_shell)
        error = error + of_shell[0][2]
    chosen = [0] * count
    while (excess := _excess(error, share, tol)) > 0:
        steps = []
        for j, of_shell in enumerate(choices):
            _, nodes, values = of_shell[chosen[j]]
            for i, (_, more_nodes, new_values) in enumerate(of_shell):
                if i > chosen[j]:
                    removed = excess - _excess(error + new_values - values, share, tol)
                    steps.append((removed / (more_nodes - nodes), j, i))
        gain, j, i = max(steps, default=(0.0, 0, 0))
        if gain <= 0:
            return None
        error = error + choices[j][i][2] - choices[j][chosen[j]][2]
        chosen[j] = i
    final = [of_shell[i] for of_shell, i in zip(choices, chosen, strict=True)]
    size = sum(nodes for _, nodes, _ in final)
    largest = (error.square() @ share).max().sqrt().item()
    return _Pruned(size, largest, max_frequency, radial, [degree for degree, _, _ in final])


def _excess(error: Tensor, share: Tensor, tol: float) -> float:
    """Returns the amount by which mean square errors exceed tol^2, summed over the widths."""
    return (error.square() @ share - tol**2).clamp(min=0.0).sum().item()


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
