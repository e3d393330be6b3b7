"""Linear-cost Transformers (FourierLearner-Transformer) on 3-D atomic structures."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from molflt.attention import Attention, Stack
    from molflt.graph import EnergyRegressor, GraphAttention, PBCRadiusGraph, Potential
    from molflt.image import ImageClassifier
    from molflt.pretrained import load
    from molflt.pretrained.calculator import Calculator
    from molflt.sequence import LanguageModel

__version__ = "0.1.0"
__all__ = [
    "Attention",
    "Calculator",
    "EnergyRegressor",
    "GraphAttention",
    "ImageClassifier",
    "LanguageModel",
    "PBCRadiusGraph",
    "Potential",
    "Stack",
    "load",
]

_ROOMS = {
    "Attention": "attention",
    "Calculator": "pretrained.calculator",
    "EnergyRegressor": "graph",
    "GraphAttention": "graph",
    "ImageClassifier": "image",
    "LanguageModel": "sequence",
    "PBCRadiusGraph": "graph",
    "Potential": "graph",
    "Stack": "attention",
    "load": "pretrained",
}


def __getattr__(name: str) -> object:
    """Models are loaded when they are asked for: `molflt --help` needs none."""
    if name in _ROOMS:
        return getattr(import_module(f"molflt.{_ROOMS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
