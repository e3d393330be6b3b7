"""Feature maps phi and their random projections."""

from typing import TYPE_CHECKING, Literal

from molflt.attention.features import maps
from molflt.attention.features.base import FeatureMap
from molflt.attention.features.base import Features as Features
from molflt.attention.features.polynomial import _PolynomialFeatures
from molflt.attention.features.projections import PROJECTIONS

FEATURE_MAPS: dict[str, type[FeatureMap]] = {
    "positive": maps._PositiveFeatures,
    "trigonometric": maps._TrigonometricFeatures,
    "favor2020": maps._Favor2020Features,
    "relu": maps._ReluFeatures,
    "squared_relu": maps._SquaredReluFeatures,
    "sigmoid": maps._SigmoidFeatures,
    "abs": maps._AbsFeatures,
    "exp": maps._ExpFeatures,
    "gelu": maps._GeluFeatures,
    "cos": maps._CosFeatures,
    "tanh": maps._TanhFeatures,
    "identity": maps._IdentityFeatures,
    "learnable_exp": maps._LearnableExpFeatures,
    "learnable_relu": maps._LearnableReluFeatures,
    "elu": maps._EluFeatures,
    "cosformer": maps._CosformerFeatures,
    "rfa_gaussian": maps._RfaGaussianFeatures,
    "rfa_arccos": maps._RfaArccosFeatures,
    "polynomial": _PolynomialFeatures,
}

# The command line takes the choices of this option from its type.
if TYPE_CHECKING:
    FeatureMapName = str
    ProjectionName = str
else:
    FeatureMapName = Literal[tuple(FEATURE_MAPS)]
    ProjectionName = Literal[tuple(PROJECTIONS)]
