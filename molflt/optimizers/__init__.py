"""Learned optimizers with the attention core as their memory."""

from molflt.optimizers.coordinate import CoordinateOptimizer
from molflt.optimizers.learned import LearnedOptimizer
from molflt.optimizers.population import PopulationOptimizer
from molflt.optimizers.population_model import PopulationModel

__all__ = ["CoordinateOptimizer", "LearnedOptimizer", "PopulationModel", "PopulationOptimizer"]
