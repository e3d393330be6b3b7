"""Atoms: PyG batches in and out of the dense attention core, and the IS2RE energy regressor."""

from molflt.graph.attention import GraphAttention
from molflt.graph.dense import DenseAtoms, to_dense
from molflt.graph.neighbors import Neighbors, neighbor_list
from molflt.graph.regressor import EnergyRegressor
from molflt.graph.transforms import PBCRadiusGraph

__all__ = [
    "DenseAtoms",
    "EnergyRegressor",
    "GraphAttention",
    "Neighbors",
    "PBCRadiusGraph",
    "neighbor_list",
    "to_dense",
]
