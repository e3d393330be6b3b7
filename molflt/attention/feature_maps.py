"""Feature maps phi of kernelized attention, A_ij = phi(q_i) . phi(k_j).

A map sees queries and keys together, because the stabilizer of exponential features needs both.
Inputs are already scaled (x = q d^(-1/4)); keys outside `key_mask` get the features 0, so that they
leave the numerator and the normalizer alike.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from molflt.attention.projections import PROJECTIONS


class FeatureMap(nn.Module):
    """Base class: one `phi` applied to queries and keys, masked keys set to zero.

    A new map overrides `phi` (any non-negative function of the token) or, for exponentials, derives
    from `ExponentialFeatures` and overrides `log_features`.

    Args:
        dim: width of the queries and keys given to the map.
        heads: number of heads; every head has its own projection.
        num_features: number of features m; ignored by maps of fixed width.
        projection: key of `PROJECTIONS`; how the rows of a random matrix are drawn.

    Attributes:
        num_features: width of the features that `forward` returns.
    """

    random = False  # whether the map owns a random projection that `redraw_` can renew
    projection: Tensor

    def __init__(
        self, dim: int, heads: int, num_features: int = 64, projection: str = "orthogonal"
    ) -> None:
        super().__init__()
        if projection not in PROJECTIONS:
            raise ValueError(
                f"projection={projection!r} is unknown; expected one of {', '.join(PROJECTIONS)}"
            )
        if num_features < 1:
            raise ValueError(f"num_features must be at least 1; got {num_features}")
        self.dim = dim
        self.heads = heads
        self.num_features = num_features
        self.draw = PROJECTIONS[projection]
        if self.random:
            self.register_buffer("projection", torch.empty(heads, num_features, dim))
            self.redraw_()

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws a new random projection in place; does nothing for deterministic maps.

        Args:
            generator: CPU generator. Give one seeded alike on every rank of a distributed run.
        """
        if not self.random:
            return
        with torch.no_grad():
            self.projection.copy_(self._draw_rows(generator))

    def _draw_rows(self, generator: torch.Generator | None = None) -> Tensor:
        """One random matrix per head: (heads, m, dim) float64."""
        rows = [self.draw(self.num_features, self.dim, generator) for _ in range(self.heads)]
        return torch.stack(rows)

    def phi(self, x: Tensor) -> Tensor:
        """Features of tokens: (batch, heads, tokens, dim) -> (batch, heads, tokens, features)."""
        raise NotImplementedError

    def forward(
        self, query: Tensor, key: Tensor, key_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Maps queries and keys to features.

        Args:
            query: (batch, heads, queries, dim), scaled.
            key: (batch, heads, keys, dim), scaled.
            key_mask: broadcastable to (batch, heads, keys), True where a key exists.

        Returns:
            Features (batch, heads, queries, m) and (batch, heads, keys, m). Only their ratio
            phi_q . phi_k / sum_k phi_q . phi_k has a meaning.
        """
        features = self.phi(key)
        if key_mask is not None:
            features = features.masked_fill(~key_mask[..., None], 0.0)
        return self.phi(query), features

    def extra_repr(self) -> str:
        """Sizes, for `print(module)`."""
        return f"dim={self.dim}, heads={self.heads}, num_features={self.num_features}"


class ExponentialFeatures(FeatureMap):
    """Base class of exponential maps, given by their logarithm and stabilized without a floor."""

    def log_features(self, x: Tensor) -> Tensor:
        """log phi(x): (batch, heads, tokens, dim) -> (batch, heads, tokens, m)."""
        raise NotImplementedError

    def phi(self, x: Tensor) -> Tensor:
        """Features without stabilizer, for estimates of the kernel itself."""
        return self.log_features(x).exp()

    def forward(
        self, query: Tensor, key: Tensor, key_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `FeatureMap.forward`.

        The key's maximum over the valid tokens of the same graph, one per feature, is moved to the
        query's side, where the maximum over features is then subtracted. Both shifts cancel in the
        ratio, so nothing is detached from the gradient and nothing leaks between graphs; and the
        largest term of every normalizer is exactly 1 x 1, so no normalizer can underflow.
        """
        log_q, log_k = self.log_features(query), self.log_features(key)
        if key_mask is not None:
            log_k = log_k.masked_fill(~key_mask[..., None], -torch.inf)
        if log_k.shape[-2] == 0:
            return self.phi(query), log_k
        with torch.no_grad():
            key_max = log_k.amax(dim=-2, keepdim=True)
            key_max = torch.where(key_max.isfinite(), key_max, 0.0)  # no valid key at all
            query_max = (log_q + key_max).amax(dim=-1, keepdim=True)
        # In this order of operations the largest exponent is exactly 0.
        return (log_q + key_max - query_max).exp(), (log_k - key_max).exp()


class PositiveFeatures(ExponentialFeatures):
    """Positive random features: phi(x) = exp(w_s . x - |x|^2 / 2) / sqrt(m).

    Unbiased: E[phi(x) . phi(y)] = exp(x . y). Performer (arXiv:2009.14794), lemma 1; kernelized
    attention with RPE (arXiv:2106.12566), eq. 5.
    """

    random = True

    def log_features(self, x: Tensor) -> Tensor:
        """w_s . x - |x|^2 / 2 - log(m) / 2."""
        projected = x @ self.projection.to(x.dtype).transpose(-1, -2)
        shift = x.square().sum(dim=-1, keepdim=True) + math.log(self.num_features)
        return projected - shift / 2


class LearnableFeatures(ExponentialFeatures):
    """Exponential of a learned projection per head: phi(x) = exp(W x).

    FLT (arXiv:2302.01925), image experiments; W starts as a random draw of `projection`.
    """

    def __init__(
        self, dim: int, heads: int, num_features: int = 64, projection: str = "orthogonal"
    ) -> None:
        super().__init__(dim, heads, num_features, projection)
        self.weight = nn.Parameter(self._draw_rows().to(torch.get_default_dtype()))

    def log_features(self, x: Tensor) -> Tensor:
        """W x."""
        return x @ self.weight.to(x.dtype).transpose(-1, -2)


class ReluFeatures(FeatureMap):
    """Generalized attention with f = ReLU: phi(x) = relu(w_s . x) + eps.

    FAVOR (arXiv:2006.03555), section 2.2. eps > 0 keeps every normalizer positive.
    """

    random = True
    eps = 1e-3

    def phi(self, x: Tensor) -> Tensor:
        """relu(w_s . x) + eps."""
        return F.relu(x @ self.projection.to(x.dtype).transpose(-1, -2)) + self.eps


class EluFeatures(FeatureMap):
    """Linear Transformer: phi(x) = elu(x) + 1, of the width of x (arXiv:2006.16236, eq. 7)."""

    def __init__(
        self, dim: int, heads: int, num_features: int = 64, projection: str = "orthogonal"
    ) -> None:
        super().__init__(dim, heads, dim, projection)

    def phi(self, x: Tensor) -> Tensor:
        """elu(x) + 1."""
        return F.elu(x) + 1.0


FEATURE_MAPS: dict[str, type[FeatureMap]] = {
    "positive": PositiveFeatures,
    "relu": ReluFeatures,
    "elu": EluFeatures,
    "learnable": LearnableFeatures,
}
