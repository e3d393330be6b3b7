"""Feature maps phi of kernelized attention, A_ij = phi(q_i) . phi(k_j).

Inputs are already scaled (x = q d^(-1/4)). A map returns `Features`: exponentials give their
logarithm, so that the mixing can subtract what cancels before it evaluates them.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from molflt.attention.kernels import at_least_one, one_of
from molflt.attention.mixing import Features
from molflt.attention.parts import Part, Projected, joined, squared_norm, unit
from molflt.attention.projections import PROJECTIONS, Projection


class FeatureMap(nn.Module):
    """Base class: one map, applied to queries and to keys.

    A new map overrides `forward` and gets a line in `FEATURE_MAPS`.

    Args:
        dim: width of the queries and keys given to the map.
        heads: number of heads; every head has its own projection.
        num_features: rows m of the projection; ignored by maps that have none.
        projection: key of `PROJECTIONS`, how the rows of a random matrix are drawn; "orthogonal" by
            default. Maps without a projection refuse one.

    Attributes:
        width: number of features per token that `forward` returns.
        projection: the random matrix, or None.
        signed: whether features can be negative, so that normalizers can be 0 or negative: count
            those in `Attention.sums(...).normalizer`.
    """

    random = False  # whether the map owns a random projection that `redraw_` can renew
    learned = False  # whether it learns one that is drawn at the start
    signed = False
    per_row = 1  # features that each row of the projection makes
    projection: Projection | None

    def __init__(
        self, dim: int, heads: int, num_features: int = 64, projection: str | None = None
    ) -> None:
        super().__init__()
        if projection is not None and not (self.random or self.learned):
            raise ValueError(
                f"{type(self).__name__} projects nothing; got projection={projection!r}; leave it "
                "out"
            )
        projection = projection or "orthogonal"
        one_of("projection", projection, PROJECTIONS)
        at_least_one(num_features=num_features)
        self.dim = dim
        self.heads = heads
        self.width = self.per_row * num_features
        self.projection = PROJECTIONS[projection](heads, num_features, dim) if self.random else None

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws a new random projection in place; does nothing for deterministic maps.

        Args:
            generator: CPU generator. Give one seeded alike on every rank of a distributed run.
        """
        if self.projection is not None:
            self.projection.redraw_(generator)

    def forward(self, *parts: Part) -> Features:
        """Features of tokens: (batch, heads, tokens, dim) -> (batch, heads, tokens, width).

        Several parts stand for what they are joined to along their last axis, as in [N1, q], and
        spare most maps the copy.
        """
        raise NotImplementedError

    def project(self, *parts: Part) -> Tensor:
        """w_s . x: (batch, heads, tokens, dim), in parts -> (batch, heads, tokens, m)."""
        assert self.projection is not None, "the map has no random projection"
        out: Tensor = self.projection(*(part for part in parts if isinstance(part, Tensor)))
        return sum((part.products for part in parts if isinstance(part, Projected)), out)

    def extra_repr(self) -> str:
        """Sizes, for `print(module)`."""
        return f"dim={self.dim}, heads={self.heads}, width={self.width}"


class PositiveFeatures(FeatureMap):
    """Positive random features: phi(x) = exp(w_s . x - |x|^2 / 2) / sqrt(m).

    Unbiased: E[phi(x) . phi(y)] = exp(x . y). Performer (arXiv:2009.14794), lemma 1; kernelized
    attention with RPE (arXiv:2106.12566), eq. 5.
    """

    random = True

    def forward(self, *parts: Part) -> Features:
        """See `FeatureMap.forward`."""
        shift = squared_norm(*parts) + math.log(self.width)
        return Features(None, self.project(*parts) - shift / 2)


class TrigonometricFeatures(FeatureMap):
    """phi(x) = exp(|x|^2 / 2) [sin(w_s . x), cos(w_s . x)] / sqrt(m), of width 2m.

    Unbiased for exp(x . y), but signed: the variance explodes where exp(x . y) is small. NPRF
    (arXiv:2106.12566), eq. 4; safe on queries and keys of unit norm.
    """

    random = True
    signed = True
    per_row = 2

    def forward(self, *parts: Part) -> Features:
        """See `FeatureMap.forward`."""
        projected = self.project(*parts)
        waves = torch.cat((projected.sin(), projected.cos()), dim=-1)
        values = waves * (2 / self.width) ** 0.5
        return Features(values, squared_norm(*parts) / 2)


class Favor2020Features(FeatureMap):
    """FAVOR as first published: phi(x) = D_x sqrt(2 / m) cos(w_s . x + b_s).

    D_x = exp(|x|^2 / 2), which is exp(|q|^2 / 2 sqrt(d)) of the unscaled query: D_Q and D_K of
    FAVOR (arXiv:2006.03555), eqs. 5-12. b_s is uniform in [0, 2 pi). Unbiased for exp(x . y);
    signed.
    """

    random = True
    signed = True
    phase: Tensor

    def __init__(
        self, dim: int, heads: int, num_features: int = 64, projection: str | None = None
    ) -> None:
        super().__init__(dim, heads, num_features, projection)
        self.register_buffer("phase", torch.empty(heads, 1, num_features))
        self._draw_phase()

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws projection and phases."""
        super().redraw_(generator)
        self._draw_phase(generator)

    def _draw_phase(self, generator: torch.Generator | None = None) -> None:
        turns = torch.rand(self.phase.shape, dtype=torch.float64, generator=generator)
        with torch.no_grad():
            self.phase.copy_(2 * math.pi * turns)

    def forward(self, *parts: Part) -> Features:
        """See `FeatureMap.forward`."""
        projected = self.project(*parts)
        waves = (projected + self.phase.to(projected.dtype)).cos()
        return Features(waves * (2 / self.width) ** 0.5, squared_norm(*parts) / 2)


class GeneralizedFeatures(FeatureMap):
    """Generalized attention: phi(x) = f(w_s . x) + eps.

    FAVOR (arXiv:2006.03555), sections 2.2 and 4.3; `normalize="none"` of `Attention` switches off
    what that paper calls renormalization. eps > 0 keeps every normalizer of a non-negative f
    positive; with a signed f it would only hide a failure, so it is 0 there.
    """

    random = True
    eps = 1e-3

    @staticmethod
    def function(x: Tensor) -> Tensor:
        """f, element by element."""
        raise NotImplementedError

    def forward(self, *parts: Part) -> Features:
        """See `FeatureMap.forward`."""
        return Features(self.function(self.project(*parts)) + (0.0 if self.signed else self.eps))


def generalized(name: str, f: Callable[[Tensor], Tensor], signed: bool) -> type[FeatureMap]:
    """The generalized attention of one function f."""
    words = f"Generalized attention with f = {name}: see `GeneralizedFeatures`."
    fields = {"function": staticmethod(f), "signed": signed, "__doc__": words}
    title = "".join(word.capitalize() for word in name.split("_"))
    return type(f"{title}Features", (GeneralizedFeatures,), {**fields, "__module__": __name__})


class ExpFeatures(FeatureMap):
    """Generalized attention with f = exp: phi(x) = exp(w_s . x), through its logarithm.

    FAVOR (arXiv:2006.03555), section 4.3. Positive without an eps.
    """

    random = True

    def forward(self, *parts: Part) -> Features:
        """See `FeatureMap.forward`."""
        return Features(None, self.project(*parts))


class LearnableExpFeatures(FeatureMap):
    """Exponential of a learned projection per head: phi(x) = exp(W x).

    FLT (arXiv:2302.01925), image experiments; W starts as a random draw of `projection`.
    """

    learned = True

    def __init__(
        self, dim: int, heads: int, num_features: int = 64, projection: str | None = None
    ) -> None:
        super().__init__(dim, heads, num_features, projection)
        rows = PROJECTIONS[projection or "orthogonal"](heads, num_features, dim).matrix()
        self.weight = nn.Parameter(rows.to(torch.get_default_dtype()))

    def product(self, *parts: Part) -> Tensor:
        """W x: (batch, heads, tokens, dim), in parts -> (batch, heads, tokens, m)."""
        x = joined(*parts)
        return x @ self.weight.to(x.dtype).transpose(-1, -2)

    def forward(self, *parts: Part) -> Features:
        """See `FeatureMap.forward`."""
        return Features(None, self.product(*parts))


class LearnableReluFeatures(LearnableExpFeatures):
    """ReLU of a learned projection per head: phi(x) = relu(W x) + eps.

    FLT (arXiv:2302.01925), image experiments.
    """

    eps = GeneralizedFeatures.eps

    def forward(self, *parts: Part) -> Features:
        """See `FeatureMap.forward`."""
        return Features(F.relu(self.product(*parts)) + self.eps)


class EluFeatures(FeatureMap):
    """Linear Transformer: phi(x) = elu(x) + 1, of the width of x (arXiv:2006.16236, eq. 7)."""

    def __init__(
        self, dim: int, heads: int, num_features: int = 64, projection: str | None = None
    ) -> None:
        super().__init__(dim, heads, num_features, projection)
        self.width = dim

    def forward(self, *parts: Part) -> Features:
        """See `FeatureMap.forward`."""
        return Features(F.elu(joined(*parts)) + 1.0)


class CosformerFeatures(EluFeatures):
    """cosFormer: phi(x) = relu(x), of the width of x (arXiv:2202.08791, eq. 7).

    Its other half, the re-weighting by position, is `position="cosine"`.
    """

    def forward(self, *parts: Part) -> Features:
        """See `FeatureMap.forward`."""
        return Features(F.relu(joined(*parts)))


class RfaFeatures(FeatureMap):
    """Base of the features of random feature attention, RFA (arXiv:2103.02143), section 3.1.

    Queries and keys are divided by their norms and stretched by a learned scale per head and
    dimension, the reparametrized width of the random rows.
    """

    random = True

    def __init__(
        self, dim: int, heads: int, num_features: int = 64, projection: str | None = None
    ) -> None:
        super().__init__(dim, heads, num_features, projection)
        self.scale = nn.Parameter(torch.ones(heads, 1, dim))

    def project(self, *parts: Part) -> Tensor:
        """w_s . (scale x / |x|)."""
        x = joined(*parts)
        return super().project(unit(x) * self.scale.to(x.dtype))


class RfaGaussianFeatures(RfaFeatures):
    """RFA with a Gaussian kernel: phi(x) = [sin(w_s . x), cos(w_s . x)] / sqrt(m), of width 2m.

    Signed.
    """

    signed = True
    per_row = 2

    def forward(self, *parts: Part) -> Features:
        """See `FeatureMap.forward`."""
        projected = self.project(*parts)
        waves = torch.cat((projected.sin(), projected.cos()), dim=-1)
        return Features(waves * (2 / self.width) ** 0.5)


class RfaArccosFeatures(RfaFeatures):
    """RFA with the arc-cosine kernel of order 1: phi(x) = relu(w_s . x) / sqrt(m)."""

    def forward(self, *parts: Part) -> Features:
        """See `FeatureMap.forward`."""
        return Features(F.relu(self.project(*parts)) * self.width**-0.5)


FEATURE_MAPS: dict[str, type[FeatureMap]] = {
    "positive": PositiveFeatures,
    "trigonometric": TrigonometricFeatures,
    "favor2020": Favor2020Features,
    "relu": generalized("relu", F.relu, signed=False),
    "squared_relu": generalized("squared_relu", lambda x: F.relu(x).square(), signed=False),
    "sigmoid": generalized("sigmoid", torch.sigmoid, signed=False),
    "abs": generalized("abs", torch.abs, signed=False),
    "exp": ExpFeatures,
    "gelu": generalized("gelu", F.gelu, signed=True),
    "cos": generalized("cos", torch.cos, signed=True),
    "tanh": generalized("tanh", torch.tanh, signed=True),
    "identity": generalized("identity", lambda x: x, signed=True),
    "learnable_exp": LearnableExpFeatures,
    "learnable_relu": LearnableReluFeatures,
    "elu": EluFeatures,
    "cosformer": CosformerFeatures,
    "rfa_gaussian": RfaGaussianFeatures,
    "rfa_arccos": RfaArccosFeatures,
}
