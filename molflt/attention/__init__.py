"""The attention core: kernelized attention, relative positional encodings and oracles.

Depends on torch alone. It knows nothing of graphs, files or tasks; `molflt.graph` brings atoms.
"""

from molflt.attention.causal import causal
from molflt.attention.convert import convert_weights_
from molflt.attention.encoding import MIXINGS, Encoding, Pairs, Position
from molflt.attention.feature_maps import FEATURE_MAPS, FeatureMap
from molflt.attention.fourier import TOKEN_MIXERS
from molflt.attention.layer import Attention
from molflt.attention.mixing import NORMALIZE, Features, Sums, linear, quadratic, softmax
from molflt.attention.multiplicative import KernelPosition, NearField, linear_with_kernel
from molflt.attention.nodes import NODES, GaussianNodes, KernelNodes, OrthogonalNodes, SobolNodes
from molflt.attention.positions import POSITIONS, make_position
from molflt.attention.projections import PROJECTIONS
from molflt.attention.quadrature import ShellNodes, ShellWeights
from molflt.attention.reciprocal import free_extent, reciprocal_nodes
from molflt.attention.spectra import SPECTRA, GaussianBasis, GaussianMixture, Spectrum
from molflt.attention.spectral import SpectralPosition
from molflt.attention.stack import Block, Stack, make_stack
from molflt.attention.suggest import suggest_nodes
from molflt.attention.toeplitz import toeplitz

__all__ = [
    "FEATURE_MAPS",
    "MIXINGS",
    "NODES",
    "NORMALIZE",
    "POSITIONS",
    "PROJECTIONS",
    "SPECTRA",
    "TOKEN_MIXERS",
    "Attention",
    "Block",
    "Encoding",
    "FeatureMap",
    "Features",
    "GaussianBasis",
    "GaussianMixture",
    "GaussianNodes",
    "KernelNodes",
    "KernelPosition",
    "NearField",
    "OrthogonalNodes",
    "Pairs",
    "Position",
    "ShellNodes",
    "ShellWeights",
    "SobolNodes",
    "SpectralPosition",
    "Spectrum",
    "Stack",
    "Sums",
    "causal",
    "convert_weights_",
    "free_extent",
    "linear",
    "linear_with_kernel",
    "make_position",
    "make_stack",
    "quadratic",
    "reciprocal_nodes",
    "softmax",
    "suggest_nodes",
    "toeplitz",
]
