"""Sequences of tokens on the attention core: language models, translation, classifiers."""

from molflt.sequence.beam import Hypothesis, beam_search
from molflt.sequence.classifier import SequenceClassifier
from molflt.sequence.encoder import TokenEncoder
from molflt.sequence.encoder_decoder import EncoderDecoder
from molflt.sequence.generation import generate
from molflt.sequence.language_model import LanguageModel, LanguageState
from molflt.sequence.masked import MaskedLanguageModel

__all__ = [
    "EncoderDecoder",
    "Hypothesis",
    "LanguageModel",
    "LanguageState",
    "MaskedLanguageModel",
    "SequenceClassifier",
]
__all__ += ["TokenEncoder", "beam_search", "generate"]
