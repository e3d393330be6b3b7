"""The attention core: kernelized attention, relative positional encodings and reference forms.

    tokens x                                 positions r
       |                                          |
    queries q, keys k, values v              Position               positions/
       |                                     samples a Spectrum g   spectra/
    FeatureMap     features/                 at Nodes xi            nodes/
       |                                          |
    phi(q), phi(k)                           Encoding               encodings.py
       |                                     Bias, Factors, Kernel, MeshNodes, Toeplitz, Rotation
       |                                          |
       +-------------------+----------------------+
                           |
    sum_j w_ij v_j / sum_j w_ij              mixing/: softmax, quadratic, linear, causal, ...
                           |
    Attention  layer.py  ->  Block, Stack  stack.py  ->  Decoder  decoder.py

This package requires torch and, for quadrature rules, numpy and scipy.
"""

from molflt.attention.convert import convert_weights_
from molflt.attention.decoder import CrossAttention, Decoder
from molflt.attention.encodings import Encoding
from molflt.attention.features import FEATURE_MAPS, PROJECTIONS, FeatureMap, Features
from molflt.attention.fnet import TOKEN_MIXERS
from molflt.attention.layer import Attention
from molflt.attention.nodes import NODES, Nodes
from molflt.attention.nodes.shells import suggest_nodes
from molflt.attention.positions import POSITIONS, Position, make_position
from molflt.attention.positions.base import MIXINGS
from molflt.attention.spectra import SPECTRA, Spectrum
from molflt.attention.stack import Block, Stack

__all__ = [
    "FEATURE_MAPS",
    "MIXINGS",
    "NODES",
    "POSITIONS",
    "PROJECTIONS",
    "SPECTRA",
    "TOKEN_MIXERS",
    "Attention",
    "Block",
    "CrossAttention",
    "Decoder",
    "Encoding",
    "FeatureMap",
    "Features",
    "Nodes",
    "Position",
    "Spectrum",
    "Stack",
    "convert_weights_",
    "make_position",
    "suggest_nodes",
]
