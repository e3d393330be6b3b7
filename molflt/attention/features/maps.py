"""Feature maps phi of kernelized attention; inputs are already scaled (x = q d^(-1/4))."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from molflt.attention.features.base import Columns, FeatureMap, Features, _joined, _squared_norm
from molflt.attention.features.projections import PROJECTIONS
from molflt.attention.numerics import by_head, rand64, unit


def _sin_cos(projected: Tensor) -> Tensor:
    """Returns [sin(x), cos(x)] / sqrt(m): (..., m) -> (..., 2m)."""
    waves = torch.cat((projected.sin(), projected.cos()), dim=-1)
    return waves * (1 / projected.shape[-1]) ** 0.5


class _PositiveFeatures(FeatureMap):
    """Unbiased positive random features: phi(x) = exp(w_s . x - |x|^2 / 2) / sqrt(m)."""

    paper = "2106.12566, eq. 5; 2009.14794, lemma 1"
    estimates_exp = True
    smooth = True
    random = True
    takes_projected = True

    def forward(self, *columns: Columns) -> Features:
        shift = _squared_norm(*columns) + math.log(self.width)
        # Adds -shift / 2, because the gradient of a subtraction is a negated copy.
        return Features(None, self.project(*columns).add_(shift / -2))


class _TrigonometricFeatures(FeatureMap):
    """Features phi(x) = exp(|x|^2 / 2) [sin(w_s . x), cos(w_s . x)] / sqrt(m), of width 2m.

    The estimate of exp(x . y) is unbiased. Features are signed, and the variance becomes very large
    where exp(x . y) is small.
    """

    paper = "2106.12566, eq. 4"
    estimates_exp = True
    positive_kernel = False
    smooth = True
    random = True
    takes_projected = True
    signed = True
    per_row = 2

    def forward(self, *columns: Columns) -> Features:
        return Features(_sin_cos(self.project(*columns)), _squared_norm(*columns) / 2)


class _Favor2020Features(_TrigonometricFeatures):
    """FAVOR as first published: phi(x) = D_x sqrt(2 / m) cos(w_s . x + b_s).

    In terms of the unscaled query q, D_x = exp(|x|^2 / 2) is exp(|q|^2 / (2 sqrt(d))), the D_Q or
    D_K of FAVOR. The phases b_s are uniform in [0, 2 pi). The estimate of exp(x . y) is unbiased.
    """

    paper = "2006.03555, eqs. 5-12"
    per_row = 1

    def _make_parameters(self, rows: int, projection: str) -> None:
        self.phase = nn.Buffer(torch.empty(self.heads, 1, rows))
        self._draw_phase()

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        super().redraw_(generator)
        self._draw_phase(generator)

    def _draw_phase(self, generator: torch.Generator | None = None) -> None:
        self.phase.copy_(2 * math.pi * rand64(self.phase.shape, generator=generator))

    def forward(self, *columns: Columns) -> Features:
        projected = self.project(*columns)
        waves = (projected + self.phase.to(projected.dtype)).cos()
        return Features(waves * (2 / self.width) ** 0.5, _squared_norm(*columns) / 2)


class _GeneralizedFeatures(FeatureMap):
    """Generalized attention: phi(x) = f(w_s . x) + eps (FAVOR, arXiv:2006.03555, section 2.2).

    A positive eps keeps the normalizers of a non-negative f positive.
    """

    paper = "2006.03555, sec. 2.2"
    random = True
    takes_projected = True
    eps = 1e-3
    function: Callable[[Tensor], Tensor]

    def forward(self, *columns: Columns) -> Features:
        return Features(self.function(self.project(*columns)) + self.eps)


class _ReluFeatures(_GeneralizedFeatures):
    function = staticmethod(F.relu)


class _SquaredReluFeatures(_GeneralizedFeatures):
    function = staticmethod(lambda x: F.relu(x).square())


class _SigmoidFeatures(_GeneralizedFeatures):
    smooth = True
    function = staticmethod(torch.sigmoid)


class _AbsFeatures(_GeneralizedFeatures):
    function = staticmethod(torch.abs)


class _SignedFeatures(_GeneralizedFeatures):
    """Generalized attention with a signed f and eps = 0.

    A nonzero eps would not make normalizers positive and would only hide failures.
    """

    signed = True
    positive_kernel = False
    smooth = True
    eps = 0.0


class _GeluFeatures(_SignedFeatures):
    function = staticmethod(F.gelu)


class _CosFeatures(_SignedFeatures):
    function = staticmethod(torch.cos)


class _TanhFeatures(_SignedFeatures):
    function = staticmethod(torch.tanh)


class _IdentityFeatures(_SignedFeatures):
    function = staticmethod(lambda x: x)


class _ExpFeatures(_GeneralizedFeatures):
    """Generalized attention with f = exp: phi(x) = exp(w_s . x), returned as its logarithm."""

    paper = "2006.03555, sec. 4.3"
    smooth = True

    def forward(self, *columns: Columns) -> Features:
        return Features(None, self.project(*columns))


class _LearnableExpFeatures(FeatureMap):
    """Exponential features phi(x) = exp(W x) with a learned, randomly initialized W per head."""

    paper = "2302.01925, app. B.2"
    smooth = True
    learned = True

    def _make_parameters(self, rows: int, projection: str) -> None:
        drawn = PROJECTIONS[projection](self.heads, rows, self.dim).matrix()
        self.weight = nn.Parameter(drawn.to(torch.get_default_dtype()))

    def project(self, *columns: Columns) -> Tensor:
        """Computes W x: (batch, heads, tokens, dim) -> (batch, heads, tokens, m)."""
        x = _joined(*columns)
        return by_head(x, self.weight.to(x.dtype).mT)

    def forward(self, *columns: Columns) -> Features:
        return Features(None, self.project(*columns))


class _LearnableReluFeatures(_LearnableExpFeatures):
    """ReLU features phi(x) = relu(W x) + eps with a learned, randomly initialized W per head."""

    smooth = False
    eps = _GeneralizedFeatures.eps

    def forward(self, *columns: Columns) -> Features:
        return Features(F.relu(self.project(*columns)) + self.eps)


class _EluFeatures(FeatureMap):
    """Feature map of the Linear Transformer: phi(x) = elu(x) + 1, of the same width as x."""

    paper = "2006.16236, eq. 7"
    cost = "N d²"

    def forward(self, *columns: Columns) -> Features:
        return Features(F.elu(_joined(*columns)) + 1.0)


class _CosformerFeatures(_EluFeatures):
    """Feature map of cosFormer: phi(x) = relu(x), of the same width as x.

    cosFormer combines this map with `position="cosine"`.
    """

    paper = "2202.08791, eq. 7"

    def forward(self, *columns: Columns) -> Features:
        return Features(F.relu(_joined(*columns)))


class _RfaFeatures(FeatureMap):
    """Base class for maps for random feature attention (RFA, arXiv:2103.02143, section 3.1).

    Queries and keys are divided by their norms and multiplied by a learned scale per head and
    dimension. This is equivalent to learning the standard deviations of the random rows.
    """

    paper = "2103.02143, sec. 3.1"
    random = True

    def _make_parameters(self, rows: int, projection: str) -> None:
        self.scale = nn.Parameter(torch.ones(self.heads, 1, self.dim))

    def project(self, *columns: Columns) -> Tensor:
        x = _joined(*columns)
        return super().project(unit(x) * self.scale.to(x.dtype))


class _RfaGaussianFeatures(_RfaFeatures):
    """RFA with a Gaussian kernel: phi(x) = [sin(w_s . x), cos(w_s . x)] / sqrt(m)."""

    positive_kernel = False
    smooth = True
    signed = True
    per_row = 2

    def forward(self, *columns: Columns) -> Features:
        return Features(_sin_cos(self.project(*columns)))


class _RfaArccosFeatures(_RfaFeatures):
    """RFA with the arc-cosine kernel of order 1: phi(x) = relu(w_s . x) / sqrt(m)."""

    def forward(self, *columns: Columns) -> Features:
        return Features(F.relu(self.project(*columns)) * self.width**-0.5)
