"""Language models that write and image classifiers that label."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from molflt.evaluation.images import classes_of
from molflt.evaluation.language import load_vocabulary, vocabulary_of
from molflt.image.classifier import ImageClassifier
from molflt.pretrained.base import Pretrained
from molflt.pretrained.trained import Trained
from molflt.sequence.generation import generate
from molflt.sequence.language_model import LanguageModel

__all__ = ["ImageLabeler", "Label", "TextWriter"]


class TextWriter(Pretrained):
    """Text that follows a prompt; `molflt.load` makes it."""

    models = (LanguageModel,)
    model: LanguageModel

    def __init__(self, trained: Trained) -> None:
        super().__init__(trained)
        if trained.path.is_dir():
            self.vocabulary = load_vocabulary(trained.path, self.model.vocabulary)
        else:
            content = json.dumps(trained.files.get("vocabulary.json")).encode()
            label = trained.label("vocabulary.json")
            self.vocabulary = vocabulary_of(content, label, self.model.vocabulary)

    def generate(
        self,
        prompt: str = "",
        tokens: int = 100,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
    ) -> str:
        """The prompt and a text that follows it; see `stream`."""
        return "".join(self.stream(prompt, tokens, temperature, top_k, seed))

    def stream(
        self,
        prompt: str = "",
        tokens: int = 100,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
    ) -> Iterator[str]:
        """Pieces of the same text as soon as they are known.

        Args:
            prompt: what the text begins with.
            tokens: how many are drawn.
            temperature: below 1, likely tokens become likelier; 0 takes the likeliest.
            top_k: draw from so many of the likeliest tokens alone; None for all.
            seed: of the draws.

        Raises:
            ValueError: for an option outside its range.
        """
        known = self.vocabulary.encode(prompt).tolist()
        device = next(self.model.parameters()).device
        ids = torch.tensor([[self.vocabulary.eos, *known]], device=device)
        generator = torch.Generator().manual_seed(seed)
        drawn = generate(self.model, ids, tokens, temperature, top_k, generator)
        line = known[:]  # of the text so far; decoded together, for spaces and bytes of a character
        written = self.vocabulary.decode(line)
        yield written
        for token in drawn:
            line.append(token)
            text = self.vocabulary.decode(line)
            if text.endswith("\ufffd"):  # the rest of a character may follow
                continue
            yield text[len(written) :]
            line, written = ([], "") if text.endswith("\n") else (line, text)
        yield self.vocabulary.decode(line)[len(written) :]


class Label(NamedTuple):
    """What a classifier makes of one image."""

    name: str
    """of the most probable class"""
    probability: float


class ImageLabeler(Pretrained):
    """Classes of images; `molflt.load` makes it."""

    models: ClassVar = (ImageClassifier,)
    model: ImageClassifier

    def __init__(self, trained: Trained) -> None:
        super().__init__(trained)
        content = json.dumps(trained.files.get("classes.json")).encode()
        label = trained.label("classes.json")
        self.classes = classes_of(content, label, self.model.classes)

    def classify(self, images: Tensor | NDArray[np.uint8], batch_size: int = 64) -> list[Label]:
        """The class of each image.

        Args:
            images: (n, channels, side, side) in the size of the training images, bytes, or real
                numbers in [0, 1].
            batch_size: images in a batch.

        Raises:
            ValueError: another shape or type, numbers beyond [0, 1], or batches without images.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1; got {batch_size}")
        given = torch.as_tensor(images)
        side = self.model.image_size
        shape = (self.model.channels, side, side)
        real = given.is_floating_point() or given.dtype == torch.uint8
        if given.ndim != 4 or tuple(given.shape[1:]) != shape or not real:
            raise ValueError(
                f"images must be bytes, or real numbers in [0, 1], of shape (n, {shape[0]}, {side},"
                f" {side}); got {given.dtype} {tuple(given.shape)}; resize them, and stack them"
            )
        if given.is_floating_point() and not bool(((given >= 0) & (given <= 1)).all()):  # NaN, too
            raise ValueError(
                "images of real numbers must be in [0, 1]; got "
                f"{float(given.min()):.4g} to {float(given.max()):.4g}; give bytes, or divide them "
                "by 255"
            )
        device = next(self.model.parameters()).device
        found: list[Label] = []
        with torch.inference_mode():
            for batch in given.split(batch_size):
                best = self.model(batch.to(device)).double().softmax(dim=1).max(dim=1)
                for share, index in zip(*(part.tolist() for part in best), strict=True):
                    found.append(Label(self.classes[index], share))
        return found
