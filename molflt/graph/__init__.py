"""Attention for atoms of PyG batches: layers, the energy regressor and the potential."""

from importlib import import_module
from typing import TYPE_CHECKING

from molflt.graph.attention import GraphAttention
from molflt.graph.potential import Potential
from molflt.graph.regressor import EnergyRegressor

if TYPE_CHECKING:
    from molflt.graph.transforms import PBCRadiusGraph

__all__ = ["EnergyRegressor", "GraphAttention", "PBCRadiusGraph", "Potential"]


def __getattr__(name: str) -> object:
    if name == "PBCRadiusGraph":
        return import_module("molflt.graph.transforms").PBCRadiusGraph
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
