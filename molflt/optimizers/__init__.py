"""Learned optimizers with the attention core as their memory."""

from molflt.optimizers.coordinate import CoordinateOptimizer
from molflt.optimizers.learned import LearnedOptimizer
from molflt.optimizers.population import PopulationModel, PopulationOptimizer

__all__ = ["CoordinateOptimizer", "LearnedOptimizer", "PopulationModel", "PopulationOptimizer"]
