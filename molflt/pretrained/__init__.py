"""Trained models to use and to hand on: one line loads them, whatever holds them."""

from molflt.pretrained.energies import EnergyPredictor, Prediction
from molflt.pretrained.loading import load
from molflt.pretrained.pixels import ImageWriter
from molflt.pretrained.sentences import GapFiller, SentenceLabeler, Translator
from molflt.pretrained.tokens import ImageLabeler, TextWriter

__all__ = ["EnergyPredictor", "GapFiller", "ImageLabeler", "Prediction", "SentenceLabeler"]
__all__ += ["ImageWriter", "TextWriter", "Translator", "load"]
