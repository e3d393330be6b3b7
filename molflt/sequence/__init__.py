"""Sequences of tokens on the attention core: language models and generation."""

from molflt.sequence.generation import generate
from molflt.sequence.language_model import LanguageModel, LanguageState

__all__ = ["LanguageModel", "LanguageState", "generate"]
