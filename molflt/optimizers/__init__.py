"""Learned optimizers with the attention core as their memory."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from molflt.optimizers.coordinate import CoordinateOptimizer
    from molflt.optimizers.learned import LearnedOptimizer
    from molflt.optimizers.population import PopulationOptimizer
    from molflt.optimizers.population_model import PopulationModel

__all__ = ["CoordinateOptimizer", "LearnedOptimizer", "PopulationModel", "PopulationOptimizer"]

_ROOMS = {
    "CoordinateOptimizer": "coordinate",
    "LearnedOptimizer": "learned",
    "PopulationModel": "population_model",
    "PopulationOptimizer": "population",
}


def __getattr__(name: str) -> object:
    """Loads classes on first use, because the command line does not need them."""
    if name in _ROOMS:
        return getattr(import_module(f"molflt.optimizers.{_ROOMS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
