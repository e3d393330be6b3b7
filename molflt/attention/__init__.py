"""The attention core: kernelized attention, relative positional encodings and oracles.

Depends on torch alone. It knows nothing of graphs, files or tasks; `molflt.graph` brings atoms.
"""

from molflt.attention.feature_maps import FEATURE_MAPS, FeatureMap
from molflt.attention.layer import MIXINGS, Attention, Block, Stack
from molflt.attention.mixing import linear, quadratic, softmax
from molflt.attention.nodes import GaussianNodes
from molflt.attention.positions import POSITIONS, SpectralPosition
from molflt.attention.projections import PROJECTIONS
from molflt.attention.spectra import GaussianBasis

__all__ = [
    "FEATURE_MAPS",
    "MIXINGS",
    "POSITIONS",
    "PROJECTIONS",
    "Attention",
    "Block",
    "FeatureMap",
    "GaussianBasis",
    "GaussianNodes",
    "SpectralPosition",
    "Stack",
    "linear",
    "quadratic",
    "softmax",
]
