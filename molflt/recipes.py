"""What can be trained: for each kind of data, its model, data module and task."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

__all__ = ["RECIPES", "Recipe", "recipe_of"]


class Recipe(NamedTuple):
    """Names of the parts, ``module:name``; `load` imports one of them."""

    model: str
    data: str
    task: str
    evaluate: str
    """(run, splits, data, checkpoint, out, batch_size, device, ...) -> results per split"""

    def load(self, part: str) -> Any:
        """The class or function behind "model", "data", "task" or "evaluate"."""
        module, name = getattr(self, part).split(":")
        return getattr(importlib.import_module(module), name)


RECIPES: dict[str, Recipe] = {
    "is2re": Recipe(
        "molflt.graph.regressor:EnergyRegressor",
        "molflt.data.datamodule:IS2REData",
        "molflt.tasks.is2re:IS2RETask",
        "molflt.evaluation.energies:evaluate",
    ),
    "language": Recipe(
        "molflt.sequence.language_model:LanguageModel",
        "molflt.data.text:TextData",
        "molflt.tasks.language:LanguageTask",
        "molflt.evaluation.language:evaluate",
    ),
    "images": Recipe(
        "molflt.image.classifier:ImageClassifier",
        "molflt.data.image_data:ImageData",
        "molflt.tasks.images:ImageTask",
        "molflt.evaluation.images:evaluate",
    ),
}
DEFAULT = "is2re"


def recipe_of(config: Any) -> Recipe:
    """The recipe that a configuration names; configurations of before there were several name none.

    Raises:
        ValueError: if there is no such recipe.
    """
    name = config.get("recipe", DEFAULT)
    if name not in RECIPES:
        raise ValueError(f"recipe {name!r}; expected one of {', '.join(RECIPES)}")
    return RECIPES[name]
