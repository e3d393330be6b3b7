"""Trained models, loaded from a run, from an export or from the Hugging Face Hub."""

from molflt.pretrained.energies import EnergyPredictor, Prediction
from molflt.pretrained.loading import load
from molflt.pretrained.tokens import (
    GapFiller,
    ImageLabeler,
    ImageWriter,
    SentenceLabeler,
    TextWriter,
    Translator,
)

__all__ = ["EnergyPredictor", "GapFiller", "ImageLabeler", "Prediction", "SentenceLabeler"]
__all__ += ["ImageWriter", "TextWriter", "Translator", "load"]
