"""Images as tokens: patches on a two-dimensional grid for the attention core."""

from molflt.image.classifier import ImageClassifier

__all__ = ["ImageClassifier"]
