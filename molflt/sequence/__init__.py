"""Token models built on the attention core: language, translation, classification, pixels."""

from molflt.sequence.beam import Hypothesis, beam_search
from molflt.sequence.classifier import SequenceClassifier
from molflt.sequence.encoder import TokenEncoder
from molflt.sequence.encoder_decoder import EncoderDecoder
from molflt.sequence.generation import sample
from molflt.sequence.language_model import LanguageModel, LanguageState
from molflt.sequence.masked import MaskedLanguageModel
from molflt.sequence.pixels import PixelModel

__all__ = [
    "EncoderDecoder", "Hypothesis", "LanguageModel", "LanguageState", "MaskedLanguageModel",
    "PixelModel", "SequenceClassifier", "TokenEncoder", "beam_search", "sample",
]  # fmt: skip
