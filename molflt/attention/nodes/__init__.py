"""Nodes xi_s at which a spectrum is sampled, and their weights."""

from molflt.attention.nodes.base import Nodes
from molflt.attention.nodes.random import DensityNodes, GaussianNodes, OrthogonalNodes, SobolNodes
from molflt.attention.nodes.shells import ShellNodes

NODES: dict[str, type[Nodes]] = {
    "gaussian": GaussianNodes,
    "orthogonal": OrthogonalNodes,
    "sobol": SobolNodes,
    "density": DensityNodes,
    "shells": ShellNodes,
}
