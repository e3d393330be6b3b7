"""Sequences of tokens on the attention core: language models, generation, classifiers."""

from molflt.sequence.classifier import SequenceClassifier
from molflt.sequence.encoder import TokenEncoder
from molflt.sequence.generation import generate
from molflt.sequence.language_model import LanguageModel, LanguageState
from molflt.sequence.masked import MaskedLanguageModel

__all__ = ["LanguageModel", "LanguageState", "MaskedLanguageModel", "SequenceClassifier"]
__all__ += ["TokenEncoder", "generate"]
