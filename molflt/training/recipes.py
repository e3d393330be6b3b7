"""Recipes: combinations of a model, data, a task and an evaluation."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from molflt.files import shown


class Recipe(NamedTuple):
    """References to the parts of a recipe, as ``module:name``; `load` imports one of them."""

    model: str
    data: str
    task: str
    evaluate: str = "molflt.evaluation.common:evaluate"
    """(run, model, config, out, ...) -> `molflt.evaluation.results.Evaluation`; the default
    function computes the metrics of the task on the validation set"""
    relatives: tuple[str, ...] = ()
    """other recipes with the same encoder, whose weights `--init` accepts"""

    @staticmethod
    def of(config: Mapping[str, object]) -> Recipe:
        """Returns the recipe of a configuration; the default is `DEFAULT`."""
        name = config.get("recipe", DEFAULT)
        if not isinstance(name, str) or name not in RECIPES:
            raise ValueError(f"recipe {shown(name)}; expected one of {', '.join(RECIPES)}")
        return RECIPES[name]

    def load(self, part: str) -> Callable[..., Any]:
        """Imports the class or function of a part: "model", "data", "task" or "evaluate"."""
        return pkgutil.resolve_name(getattr(self, part))


RECIPES: dict[str, Recipe] = {
    "is2re": Recipe(
        "molflt.graph.regressor:EnergyRegressor",
        "molflt.data.structures.datamodule:IS2REData",
        "molflt.tasks.is2re:IS2RETask",
        "molflt.evaluation.energies:evaluate",
    ),
    "potential": Recipe(
        "molflt.graph.potential:Potential",
        "molflt.data.structures.potential_data:PotentialData",
        "molflt.tasks.potential:PotentialTask",
        "molflt.evaluation.potentials:evaluate",
    ),
    "language": Recipe(
        "molflt.sequence.language_model:LanguageModel",
        "molflt.data.text.datamodule:TextData",
        "molflt.tasks.language:LanguageTask",
        "molflt.evaluation.language:evaluate",
    ),
    "masked_language": Recipe(
        "molflt.sequence.encoder:MaskedLanguageModel",
        "molflt.data.text.datamodule:TokenizedText",
        "molflt.tasks.masked:MaskedTask",
        "molflt.evaluation.language:evaluate_masked",
        relatives=("sentences",),
    ),
    "sentences": Recipe(
        "molflt.sequence.encoder:SequenceClassifier",
        "molflt.data.text.sentences:SentenceData",
        "molflt.tasks.sentences:SentenceTask",
        "molflt.evaluation.language:evaluate_sentences",
        relatives=("masked_language",),
    ),
    "translation": Recipe(
        "molflt.sequence.encoder_decoder:EncoderDecoder",
        "molflt.data.text.parallel:ParallelData",
        "molflt.tasks.translation:TranslationTask",
        "molflt.evaluation.translation:evaluate",
    ),
    "images": Recipe(
        "molflt.image.classifier:ImageClassifier",
        "molflt.data.images.datamodule:ImageData",
        "molflt.tasks.images:ImageTask",
        "molflt.evaluation.images:evaluate",
    ),
    "image_generation": Recipe(
        "molflt.sequence.language_model:PixelModel",
        "molflt.data.images.datamodule:PixelData",
        "molflt.tasks.language:PixelTask",
        "molflt.evaluation.images:evaluate_pixels",
    ),
    "learned_optimizer": Recipe(
        "molflt.optimizers.coordinate:CoordinateOptimizer",
        "molflt.data.optimizers:ProblemData",
        "molflt.tasks.optimizers:OptimizerTask",
        "molflt.evaluation.optimizers:evaluate",
    ),
    "population_optimizer": Recipe(
        "molflt.optimizers.population:PopulationModel",
        "molflt.data.optimizers:ProblemData",
        "molflt.tasks.optimizers:PopulationTask",
        "molflt.evaluation.optimizers:evaluate_population",
    ),
}

DEFAULT = next(iter(RECIPES))
"""Recipe of configurations that do not have the key `recipe`."""
