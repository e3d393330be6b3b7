"""Linear-cost Transformers (FourierLearner-Transformer) for 3-D atomic structures."""

from importlib import import_module
from typing import TYPE_CHECKING

from molflt.version import __version__ as __version__

if TYPE_CHECKING:
    from molflt.attention import Attention, Stack
    from molflt.graph import EnergyRegressor, GraphAttention, PBCRadiusGraph, Potential
    from molflt.image import ImageClassifier
    from molflt.pretrained import load
    from molflt.pretrained.calculator import Calculator
    from molflt.sequence import LanguageModel

__all__ = ["Attention", "Calculator", "EnergyRegressor", "GraphAttention", "ImageClassifier"]
__all__ += ["LanguageModel", "PBCRadiusGraph", "Potential", "Stack", "load"]

_SUBPACKAGES = {
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
    """Imports models on first use, because `molflt --help` does not need them."""
    if name in _SUBPACKAGES:
        return getattr(import_module(f"molflt.{_SUBPACKAGES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
