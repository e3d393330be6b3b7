"""Token models built on the attention core: language, translation, classification, pixels."""

from molflt.sequence.encoder import MaskedLanguageModel, SequenceClassifier, TokenEncoder
from molflt.sequence.encoder_decoder import EncoderDecoder
from molflt.sequence.generation import Hypothesis, beam_search, sample
from molflt.sequence.language_model import LanguageModel, LanguageState, PixelModel

__all__ = [
    "EncoderDecoder", "Hypothesis", "LanguageModel", "LanguageState", "MaskedLanguageModel",
    "PixelModel", "SequenceClassifier", "TokenEncoder", "beam_search", "sample",
]  # fmt: skip
