"""Deterministic features whose products are a polynomial in q . k, close to exp(q . k).

On the sphere |x|^2 = rho, exp(x . y) is a sum over spherical harmonics of all degrees. Truncating
the sum at degree p yields the polynomial of degree p with the smallest mean square error over
directions. The error of the Taylor polynomial at q . k = 0 is 1.5 to 2 times as large.
"""

import functools
import math
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from molflt.attention.checks import no_effect
from molflt.attention.features.base import Columns, FeatureMap, Features, _joined, _squared_norm
from molflt.attention.numerics import to_default

_WIDEST = 2**14  # largest number of features per head; with fewer tokens, softmax is faster
_TERMS = 6  # levels of the continued fraction
_MARGIN = 0.04  # relative margin of the conditions on the weights; see `harmonics`


class _PolynomialFeatures(FeatureMap):
    """All monomials of x up to degree 2 or 3: phi(x) . phi(y) approximates exp(x . y).

    For q and k of norm 1 and a temperature tau, x . y = tau cos(q, k). The products are then
    exp(x . y) without its spherical harmonics above degree 2 or 3; see `harmonics`. Degree 2 takes
    (d + 1)(d + 2) / 2 features, and degree 3 takes (d + 3) / 3 times as many. Products of degree 2
    are positive for all x and y. Products of degree 3 are positive for x and y of equal norm if tau
    <= 1.6.

    With fewer `num_features`, products of random projections replace the monomials of the highest
    degree. The estimate is unbiased, but products can be negative, and, with half of the features,
    the error is 11 to 21 times as large for tau = 1.
    """

    paper = "2402.18668; 1201.6530"
    cost = "N d³ / 2; degree 3: N d⁴ / 6"
    degrees = (2, 3)
    estimates_exp = True
    signed = True
    smooth = True
    unit_norm = True

    def __init__(
        self,
        dim: int,
        heads: int,
        num_features: int | None = None,
        projection: str | None = None,
        degree: int | None = None,
    ) -> None:
        self.degree = 2 if degree is None else degree
        if self.degree not in self.degrees:
            raise ValueError(f"degree must be 2 or 3; got {degree}; omit it for 2")
        lower = math.comb(dim + self.degree - 1, self.degree - 1)  # monomials of lower degrees
        total = math.comb(dim + self.degree, self.degree)
        if num_features is None:
            no_effect("without num_features: nothing is drawn", projection=projection)
        elif not lower < num_features < total:
            raise ValueError(
                f"num_features={num_features} of a polynomial of degree {self.degree} in {dim} "
                f"dimensions; expected {lower + 1} to {total - 1}; omit it for all {total}"
            )
        # The base class reads these three attributes.
        self.random = num_features is not None
        self.draws_per_head = self.degree  # the factors of one product must be independent
        self.positive_kernel = self.degree == 2 and not self.random
        width = num_features or total
        if width > _WIDEST:
            raise ValueError(
                f"a polynomial of degree {self.degree} in {dim} dimensions has {total} features; "
                f"expected at most {_WIDEST}; use more heads, degree=2 or num_features"
            )
        super().__init__(dim, heads, width - lower if self.random else None, projection)
        self.width = width
        for power in self._exact_powers():
            self.register_buffer(f"power_{power}", _monomials(dim, power), persistent=False)
        self.register_load_state_dict_post_hook(_restore)

    def _exact_powers(self) -> range:
        """Returns the powers above 1 whose monomials are all formed."""
        return range(2, self.degree if self.random else self.degree + 1)

    def forward(self, *columns: Columns) -> Features:
        x, square = _joined(*columns), _squared_norm(*columns)
        log_mean, weights = harmonics(square, self.dim, self.degree)
        roots = [weight.sqrt() for weight in weights]
        powers = [roots[0], roots[1] * x]
        for power in range(2, self.degree + 1):
            # The weight multiplies one factor, which is narrower than the product.
            powers.append(self._power(power, roots[power] * x, x))
        return Features(torch.cat(powers, dim=-1), log_mean / 2)

    def _power(self, power: int, first: Tensor, other: Tensor) -> Tensor:
        """Returns features whose products are (first . first') (other . other')^(power - 1)."""
        if power == self.degree and self.projection is not None:
            inputs = torch.stack([first] + [other] * (power - 1), dim=2)  # [b, h, power, n, d]
            projected = self.project(inputs.flatten(1, 2))  # one projection for each factor
            factors = projected.unflatten(1, (self.heads, power)).unbind(2)
            scale = factors[0].shape[-1] ** -0.5
        else:
            rows = self.get_buffer(f"power_{power}").to(other.dtype)
            factors = (first @ rows[0].sqrt(), *(other @ row for row in rows[1:]))
            scale = 1.0
        return functools.reduce(torch.mul, factors[1:], factors[0] * scale)


def harmonics(rho: Tensor, dim: int, degree: int) -> tuple[Tensor, list[Tensor]]:
    """Expands exp(x . y), where |x|^2 = |y|^2 = rho, in spherical harmonics up to degree 2 or 3.

    Returns log_mean, the logarithm of the mean of exp(x . y) over the sphere, and positive weights
    w_0 to w_degree with exp(x . y) ~= exp(log_mean) sum_n w_n (x . y)^n, obtained from Gegenbauer
    polynomials. `rho` may have any shape.

    With nu = d / 2 - 1 and r_n = I_(nu + n)(rho) / I_nu(rho), the weights up to degree 3 are w_0 =
    1 - (nu + 2) r_2, w_1 = 2 (nu + 1) (r_1 - (nu + 3) r_3) / rho, w_2 = 2 (nu + 1) (nu + 2) r_2 /
    rho^2 and w_3 = (4 / 3) (nu + 1) (nu + 2) (nu + 3) r_3 / rho^3. Features are real if no w_n is
    negative, and products of degree 2 are positive if w_1^2 < 4 w_0 w_2. If rho is too large for
    these conditions (above 3 for d = 8, 4 for d = 16 and 5.7 for d = 32), the smallest w_0 and the
    largest r_3 that satisfy both are used.
    """
    nu, order = dim / 2 - 1, dim / 2 - 1 + _TERMS
    rho2 = rho.square()  # the weights depend only on rho^2
    # I_(nu+k) / (rho I_(nu+k-1)) by recursion from k + 1 to k, starting from the asymptotic bound.
    ratios = [1 / (order - 1 + (rho2 + (order + 1) ** 2).sqrt())]
    log_mean = _log_mean(rho2, order - 1)
    for k in range(_TERMS - 1, 0, -1):
        ratios.append(1 / (2 * (nu + k) + rho2 * ratios[-1]))
        log_mean = log_mean - (2 * (nu + k) * ratios[-1]).log()
    third, second, first = ratios[-3:]  # k = 3, 2, 1
    s2 = first * second  # r_2 / rho^2
    weights = [1 - (nu + 2) * rho2 * s2, 2 * (nu + 1) * first, 2 * (nu + 1) * (nu + 2) * s2]
    if degree == 3:
        # Above this value, the weight of degree 1 would be negative; rho^2 is then far above 1.
        largest = (1 - _MARGIN) / ((nu + 3) * rho2.clamp(min=1.0) * second)
        s3 = s2 * torch.minimum(third, largest)  # r_3 / rho^3
        weights[1] = weights[1] - 2 * (nu + 1) * (nu + 3) * rho2 * s3
        weights.append(4 / 3 * (nu + 1) * (nu + 2) * (nu + 3) * s3)
    smallest = weights[1].square() / (4 * (1 - _MARGIN) * weights[2])
    weights[0] = torch.maximum(weights[0], smallest)
    return log_mean, weights


def _log_mean(rho2: Tensor, order: float) -> Tensor:
    """Returns log(Gamma(nu + 1) (2 / rho)^nu I_nu(rho)) from two terms of Debye's expansion.

    `rho2` is rho^2, and `order` is nu.
    """
    root = (1 + rho2 / order**2).sqrt()
    first = (3 / root - 5 / root**3 + 2) / (24 * order)
    return order * (root - 1 - ((1 + root) / 2).log()) - root.log() / 2 + first


def _restore(module: torch.nn.Module, _: object) -> None:
    """Computes buffers that are not saved, and that have no values after use of "meta"."""
    assert isinstance(module, _PolynomialFeatures)
    for power in module._exact_powers():
        name = f"power_{power}"
        buffer = module.get_buffer(name)
        device = "cpu" if buffer.is_meta else buffer.device
        rows = _monomials(module.dim, power).to(device, buffer.dtype)
        module.register_buffer(name, rows, persistent=False)


def _monomials(dim: int, power: int) -> Tensor:
    """Returns matrices (power, dim, features) that select the factors of each monomial of x."""
    factors = torch.tensor([*combinations_with_replacement(range(dim), power)], device="cpu")
    rows = torch.nn.functional.one_hot(factors, dim).double()  # [features, power, dim]
    orders = math.lgamma(power + 1) - torch.lgamma(rows.sum(dim=1) + 1).sum(dim=-1)
    rows[:, 0] *= orders.exp().round()[:, None]  # the number of orderings of the factors
    return to_default(rows.permute(1, 2, 0).contiguous())
