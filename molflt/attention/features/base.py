"""Features, the base class for feature maps, and the inputs of feature maps."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from molflt.attention.checks import no_effect, one_of
from molflt.attention.features.projections import PROJECTIONS, Projection
from molflt.attention.numerics import at_least_float32, ceil_div, options_of

NUM_FEATURES = 64


class Features(NamedTuple):
    """Features phi = values * exp(log_scale) of queries or keys.

    Exponential maps return logarithms, because their features could overflow. Mixing subtracts from
    these logarithms the part that cancels in the ratio of sums.
    """

    values: Tensor | None
    """(batch, heads, tokens, m); None means 1"""
    log_scale: Tensor | None = None
    """(batch, heads, tokens, m) or (batch, heads, tokens, 1); None means 0"""

    @property
    def width(self) -> int:
        return self._either.shape[-1]

    @property
    def tokens(self) -> int:
        return self._either.shape[-2]

    @property
    def _either(self) -> Tensor:
        """The values or, if they are 1, the log scale; one of the two always exists."""
        tensor = self.log_scale if self.values is None else self.values
        assert tensor is not None
        return tensor

    def materialize(self) -> Tensor:
        """Returns phi itself, without stabilization."""
        return self.shifted(self._either.new_zeros(()))

    def shifted(self, shift: Tensor) -> Tensor:
        """Returns values * exp(log_scale - shift)."""
        if self.log_scale is None:
            return self._either
        scale = (self.log_scale - shift.to(self.log_scale)).exp_()  # in place, to save memory
        return scale if self.values is None else self.values * scale

    def masked(self, mask: Tensor | None) -> "Features":
        """Sets features to 0 where `mask`, broadcastable to (batch, heads, tokens), is False."""
        if mask is None:
            return self
        masked = ~mask[..., None]
        values, log_scale = self
        return Features(
            None if values is None else values.masked_fill(masked, 0.0),
            None if log_scale is None else log_scale.masked_fill(masked, -torch.inf),
        )

    def scaled(self, log_factor: Tensor) -> "Features":
        """Multiplies features by exp(log_factor), where log_factor is (batch, heads, tokens)."""
        factor = log_factor[..., None]
        return Features(self.values, factor if self.log_scale is None else self.log_scale + factor)

    def split(self, size: int) -> list["Features"]:
        """Splits features into parts of `size` tokens."""
        count = ceil_div(self.tokens, size)
        values, log_scales = (split_or_repeat(x, size, count) for x in self)
        return list(map(Features, values, log_scales))

    def kronecker(self, factors: Tensor) -> "Features":
        """Returns the Kronecker product of the features and `factors` (batch, heads, tokens, p).

        The inner product of two results is (phi_i . phi_j) (factors_i . factors_j).
        """
        values, log_scale = self
        if values is None:
            values = factors.new_ones(()).expand(*factors.shape[:-1], self.width)
        products = (values[..., :, None] * factors[..., None, :]).flatten(-2)
        if log_scale is not None and log_scale.shape[-1] > 1:
            log_scale = log_scale.repeat_interleave(factors.shape[-1], dim=-1)
        return Features(products, log_scale)

    def bounded(self) -> "Features":
        """Raises small features to a lower bound, relative to the largest feature of the token.

        The bound is e^-61 times the largest feature in float32 and e^-495 times in float64. It
        keeps normalizers from underflowing and their gradients from overflowing. Causal attention
        needs this bound because it cannot scale features by later keys.
        """
        if self.log_scale is None or self.log_scale.shape[-1] == 1:
            return self
        largest = self.log_scale.detach().amax(dim=-1, keepdim=True)
        log_bound = 0.7 * math.log(torch.finfo(self.log_scale.dtype).tiny)
        return Features(self.values, torch.maximum(self.log_scale, largest + log_bound))


class Projected(NamedTuple):
    """Columns x, represented by their random projections and their squared norms."""

    products: Tensor  # w_s . x, (batch, heads, tokens, m)
    square: Tensor  # |x|^2, (batch, heads, tokens, 1)


Columns = Tensor | Projected


def _joined(*columns: Columns) -> Tensor:
    """Concatenates columns along the last axis; a single part is not copied."""
    parts = cast(tuple[Tensor, ...], columns)  # `GraphEncoding` rejects projections for other maps
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _squared_norm(*columns: Columns) -> Tensor:
    """Returns |x|^2 of the concatenated columns: (batch, heads, tokens, 1)."""
    squares = (
        x.square if isinstance(x, Projected) else x.square().sum(dim=-1, keepdim=True)
        for x in columns
    )
    return functools.reduce(torch.add, squares)


class FeatureMap(nn.Module):
    """Base class for feature maps; the same map is applied to queries and keys.

    A new map overrides `forward`, sets its class attributes and is registered in `FEATURE_MAPS`.

    Args:
        dim: width of the queries and keys that the map receives.
        heads: number of heads; each has a separate projection.
        num_features: number of rows m of the projection, 64 by default.
        projection: distribution of the random rows: a key of `PROJECTIONS`, "orthogonal" by
            default. Maps without a projection reject `num_features` and `projection`.
        degree: degree of polynomial maps; other maps reject it.
    """

    paper = ""  #: source of the map: arXiv number and location
    cost = "N m d"  #: operations for N tokens, m features and head width d
    random = False  #: True if the map owns a random projection that `redraw_` replaces
    learned = False  #: True if the map learns a projection that is initially drawn at random
    signed = False  #: True if features can be negative
    positive_kernel = True  #: True if all phi(q) . phi(k), and thus all normalizers, are positive
    smooth = False  #: True if features have two continuous derivatives, which forces require
    estimates_exp = False  #: True if the products estimate exp(q . k)
    takes_projected = False  #: True if the map accepts `Projected` columns
    unit_norm = False  #: True if unit norm and a learned temperature are the default
    extra_repr = options_of
    degrees: tuple[int, ...] = ()  #: allowed degrees of a polynomial
    per_row = 1  #: number of features per row of the projection
    draws_per_head = 1  #: number of independent projections of each head
    width: int  #: number of features per token
    projection: Projection | None

    def __init__(
        self,
        dim: int,
        heads: int,
        num_features: int | None = None,
        projection: str | None = None,
        degree: int | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__.strip("_")
        projects = self.random or self.learned
        if not self.degrees:
            no_effect(f"in {name}, not a polynomial", degree=degree)
        if not projects:
            why = f"in {name}, which projects nothing"
            no_effect(why, num_features=num_features, projection=projection)
        rows = NUM_FEATURES if num_features is None else num_features
        projection = projection or "orthogonal"
        one_of("projection", projection, PROJECTIONS)
        self.dim = dim
        self.heads = heads
        self.width = self.per_row * rows if projects else dim
        self.projection = None
        if self.random:
            self.projection = PROJECTIONS[projection](heads * self.draws_per_head, rows, dim)
        self._make_parameters(rows, projection)

    def _make_parameters(self, rows: int, projection: str) -> None:
        """Creates parameters and buffers other than the random projection."""

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws a new random projection in place, if the map uses one; see `Projection.redraw_`."""
        if self.projection is not None:
            self.projection.redraw_(generator)

    def forward(self, *columns: Columns) -> Features:
        """Computes features: (batch, heads, tokens, dim) -> (batch, heads, tokens, width).

        `columns` are tensors whose concatenation along the last axis is the input, such as N1 and
        q. Most maps do not form the concatenation.
        """
        raise NotImplementedError(f"{type(self).__name__} must override forward(*columns)")

    def project(self, *columns: Columns) -> Tensor:
        """Computes w_s . x: (batch, heads, tokens, dim) -> (batch, heads, tokens, m)."""
        if self.projection is None:
            raise ValueError(f"project needs random=True; got False; set it in {type(self)}")
        out: Tensor = self.projection(*(x for x in columns if isinstance(x, Tensor)))
        return sum((x.products for x in columns if isinstance(x, Projected)), out)


class Operand(NamedTuple):
    """Queries or keys whose features are computed on demand, for all or some of the tokens."""

    feature_map: FeatureMap
    x: Tensor  # scaled, (batch, heads, tokens, d)
    columns: Columns | None = None  # N1 or N2, (b or 1, h or 1, tokens, .), prepended to x
    mask: Tensor | None = None  # broadcastable to (b, h, tokens), False where features are 0
    log_weight: Tensor | None = None  # logarithm of a factor of the features, same shape as mask

    def features(self) -> Features:
        """Returns phi([columns, x]) in at least float32."""
        with torch.autocast(self.x.device.type, enabled=False):
            x = at_least_float32(self.x)
            inputs: tuple[Columns, ...] = (x,)
            if isinstance(self.columns, Projected):
                inputs = self.columns, x
            elif self.columns is not None:
                inputs = self.columns.to(x.dtype).expand(*x.shape[:-1], -1), x
            features: Features = self.feature_map(*inputs)
            if features.values is None and self.mask is not None:
                # Adding one number per token avoids a copy of all features.
                weight = x.new_zeros(()) if self.log_weight is None else self.log_weight
                return features.scaled(torch.where(self.mask, weight, -torch.inf))
            if self.log_weight is not None:
                features = features.scaled(self.log_weight)
            return features.masked(self.mask)

    def without_columns(self) -> Self:
        """Replaces the columns with zeros, or removes them if x already has the full width."""
        missing = self.feature_map.dim - self.x.shape[-1]
        zeros = self.x.new_zeros(1, 1, 1, missing) if missing else None
        return self._replace(columns=zeros)

    def split(self, size: int) -> list["Operand"]:
        """Splits the operand into parts of `size` tokens.

        Slices are avoided, because their gradients would have the size of the whole tensor.
        """
        xs = self.x.split(size, dim=-2)
        masks = split_or_repeat(self.mask, size, len(xs), dim=-1)
        log_weights = split_or_repeat(self.log_weight, size, len(xs), dim=-1)
        columns: Sequence[Columns | None]
        if isinstance(self.columns, Projected):
            products, squares = (x.split(size, dim=-2) for x in self.columns)
            columns = list(map(Projected, products, squares))
        else:
            columns = split_or_repeat(self.columns, size, len(xs))
        parts = zip(xs, columns, masks, log_weights, strict=True)
        return [Operand(self.feature_map, *part) for part in parts]


def split_or_repeat(
    x: Tensor | None, size: int, pieces: int, dim: int = -2
) -> tuple[Tensor | None, ...]:
    """Splits x along an axis; if x is None or the axis has size 1, every piece is x itself."""
    if x is None or (x.shape[dim] == 1 and pieces != 1):
        return (x,) * pieces
    return x.split(size, dim=dim)
