"""Images as tokens: patches on a grid of two dimensions for the attention core."""

from molflt.image.classifier import ImageClassifier

__all__ = ["ImageClassifier"]
