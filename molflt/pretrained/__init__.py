"""Trained models to use and to share: one line loads them, from a run, an export or the Hub."""

from molflt.pretrained.energies import EnergyPredictor, Prediction
from molflt.pretrained.loading import load
from molflt.pretrained.pixels import ImageWriter
from molflt.pretrained.sentences import GapFiller, SentenceLabeler, Translator
from molflt.pretrained.tokens import ImageLabeler, TextWriter

__all__ = ["EnergyPredictor", "GapFiller", "ImageLabeler", "Prediction", "SentenceLabeler"]
__all__ += ["ImageWriter", "TextWriter", "Translator", "load"]
