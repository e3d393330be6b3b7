"""Models of text and images: generation, classification, translation."""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from molflt.attention.checks import at_least_one
from molflt.data.text.sentences import CLASSES, TASKS, Example
from molflt.data.text.tokenizer import TOKENIZER, Tokenizer
from molflt.data.text.vocabulary import Vocabulary
from molflt.evaluation.common import device_of
from molflt.evaluation.language import text_logits
from molflt.evaluation.translation import translate
from molflt.image.classifier import ImageClassifier
from molflt.pretrained.base import Card, Pretrained
from molflt.sequence.encoder import MaskedLanguageModel, SequenceClassifier
from molflt.sequence.encoder_decoder import EncoderDecoder
from molflt.sequence.generation import sample
from molflt.sequence.language_model import START, LanguageModel, PixelModel

IMAGES = 8  # default number of generated images


class Label(NamedTuple):
    """Class of an image or a sentence, or a token for a gap."""

    name: str
    """name of the class, or the token"""
    probability: float


class TextWriter(Pretrained):
    """Continues a text; see `molflt.load`."""

    models: ClassVar = (LanguageModel,)
    card = Card(["text-generation"], "perplexity", 'print(model.generate("The"))')
    model: LanguageModel

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the training text."""
        return Vocabulary.from_json(*self.trained.content("vocabulary.json"))

    def generate(
        self,
        prompt: str = "",
        tokens: int = 100,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
    ) -> str:
        """Returns the prompt and its continuation; see `stream` for the options."""
        return "".join(self.stream(prompt, tokens, temperature, top_k, seed))

    def stream(
        self,
        prompt: str = "",
        tokens: int = 100,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
    ) -> Iterator[str]:
        """Yields the prompt and its continuation in pieces.

        Args:
            prompt: beginning of the text.
            tokens: number of tokens to generate.
            temperature: values below 1 favor likely tokens; 0 selects the most likely token.
            top_k: number of most likely tokens to draw from; None for all.
            seed: random seed.
        """
        known = self.vocabulary.encode(prompt).tolist()
        ids = torch.tensor([[self.vocabulary.eos, *known]], device=device_of(self.model))
        generator = torch.Generator().manual_seed(seed)
        drawn = map(int, sample(self.model, ids, tokens, temperature, top_k, generator))
        line = known[:]  # decoded together, because a character may consist of several tokens
        written = self.vocabulary.decode(line)
        yield written
        for token in drawn:
            line.append(token)
            text = self.vocabulary.decode(line)
            if text.endswith("\ufffd"):  # an incomplete character
                continue
            yield text[len(written) :]
            written = text
            if text.endswith("\n"):
                line, written = [], ""
        yield self.vocabulary.decode(line)[len(written) :]


class ImageWriter(Pretrained):
    """Generates images, or completes images from their upper rows; see `molflt.load`."""

    models: ClassVar = (PixelModel,)
    card = Card(
        ["unconditional-image-generation"],
        "bits_per_dim",
        "images = model.generate(4)  # (4, channels, side, side) bytes",
    )
    model: PixelModel

    def generate(
        self,
        count: int = IMAGES,
        given: Tensor | None = None,
        rows: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
        progress: bool = False,
    ) -> Tensor:
        """Generates images in one batch.

        Args:
            count: number of new images; has no effect with `given`.
            given: images to complete, as bytes (n, channels, side, side); None for new images.
            rows: number of upper rows of these images to keep; half of the rows by default.
            temperature: values below 1 favor likely bytes; 0 selects the most likely byte.
            top_k: number of most likely bytes to draw from; None for all.
            seed: random seed; the images also depend on their number.
            progress: show a progress bar.

        Returns:
            uint8 images (n, channels, side, side) on the CPU.
        """
        at_least_one(count=count)
        device, side = device_of(self.model), self.model.image_size
        known = torch.zeros(count, 0, dtype=torch.long, device=device)
        if given is not None:
            rows = side // 2 if rows is None else rows
            if not 1 <= rows < side:
                raise ValueError(
                    f"rows must be 1 to {side - 1}, less than the {side} rows of an image; got "
                    f"{rows}"
                )
            known = self.model.bytes_of(torch.as_tensor(given, device=device))
            known = known[:, : rows * side * self.model.channels]
        elif rows is not None:
            raise ValueError(f"rows={rows} has no effect without given images")
        prompt = torch.cat((known.new_full((len(known), 1), START), known), dim=1)
        left = self.model.longest - known.shape[1]
        generator = torch.Generator().manual_seed(seed)
        drawn = sample(self.model, prompt, left, temperature, top_k, generator)
        bar = tqdm(drawn, total=left, desc="bytes", disable=None if progress else True)
        return self.model.images_of(torch.cat((known.cpu(), torch.stack(list(bar), dim=1)), dim=1))


class _Classifier(Pretrained):
    model: Any

    @cached_property
    def classes(self) -> list[str]:
        """The names of the classes."""
        classes: Any = self.trained.files.get(CLASSES)
        return classes


class ImageLabeler(_Classifier):
    """Classifies images; see `molflt.load`."""

    models: ClassVar = (ImageClassifier,)
    card = Card(["image-classification"], "accuracy", "model.classify(images)[0].name")
    model: ImageClassifier

    def classify(self, images: Tensor | NDArray[np.uint8], batch_size: int = 64) -> list[Label]:
        """Returns the class of each image.

        Args:
            images: uint8 or floating-point images (n, channels, side, side) of the same size as the
                training images; floating-point values must be in [0, 1].
            batch_size: number of images in a batch.
        """
        pixels = torch.as_tensor(images)
        if pixels.is_floating_point() and not bool(((pixels >= 0) & (pixels <= 1)).all()):
            raise ValueError(
                f"floating-point images must be in [0, 1]; got {float(pixels.min()):.4g} to "
                f"{float(pixels.max()):.4g}; divide them by 255"
            )
        labels: list[Label] = []
        with torch.inference_mode():
            for batch in pixels.split(batch_size):
                logits = self.model(batch.to(device_of(self.model))).double()
                labels += _labels(self.classes.__getitem__, logits.softmax(dim=1).max(dim=1))
        return labels


class _Tokenized(Pretrained):
    model: Any

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the training text."""
        return Tokenizer.from_json(*self.trained.content(TOKENIZER))


class GapFiller(_Tokenized):
    """Predicts masked tokens; see `molflt.load`."""

    models: ClassVar = (MaskedLanguageModel,)
    card = Card(["fill-mask"], "perplexity", 'print(model.fill("A [MASK].")[0][0])')
    model: MaskedLanguageModel

    @torch.inference_mode()
    def fill(self, text: str, count: int = 5) -> list[list[Label]]:
        """Returns the most probable tokens of each gap.

        Args:
            text: text with [MASK], or another mask token of the tokenizer, in each gap.
            count: number of candidate tokens to return for each gap.
        """
        tokenizer = self.tokenizer
        ids = [tokenizer.cls, *tokenizer.encode([text], special=True)[0], tokenizer.sep]
        gaps = [place for place, token in enumerate(ids) if token == tokenizer.mask]
        if not gaps:
            raise ValueError(
                f"expected {tokenizer.token(tokenizer.mask)} in each gap of the text; got none"
            )
        hidden = self.model(torch.tensor([ids], device=device_of(self.model)))[0, gaps]
        likely = self.model.log_probabilities(hidden).exp()
        best = likely.topk(min(count, self.model.vocabulary), dim=-1)
        return [_labels(tokenizer.token, pair) for pair in zip(*best, strict=True)]


class SentenceLabeler(_Tokenized, _Classifier):
    """Classifies or scores sentences and pairs of sentences; see `molflt.load`."""

    models: ClassVar = (SequenceClassifier,)
    card = Card(["text-classification"], "accuracy", 'model.classify(["A text."])[0].name')
    model: SequenceClassifier

    def classify(
        self,
        sentences: Sequence[str | tuple[str, str]],
        length: int | None = None,
        batch_size: int = 64,
    ) -> list[Label]:
        """Returns the class of each sentence or pair.

        For a task that predicts scores, each label has the name "score", and its `probability` is
        the score.

        Args:
            sentences: texts, or pairs of texts for a task on pairs.
            length: maximum number of tokens, including special tokens; longer texts are truncated
                with a warning. The default is the maximum length of the model.
            batch_size: number of sentences in a batch.
        """
        name = str(self.trained.task.get("name"))
        if name in TASKS and TASKS[name].form == "images":
            raise ValueError(f"{self.name}: expected images, as in {name}; use molflt evaluate")
        _expect_list(sentences)
        if length is not None and length < 5:  # as in training
            raise ValueError(f"length must be at least 5; got {length}")
        pairs = [(one, None) if isinstance(one, str) else one for one in sentences]
        paired = "second" in TASKS[name].columns if name in TASKS else None
        for number, (_, second) in enumerate(pairs, 1):
            if paired is not None and paired != (second is not None):
                kinds = ("a pair", "one sentence") if paired else ("one sentence", "a pair")
                raise ValueError(
                    f"sentence {number:,}: expected {kinds[0]}, as in the training data, {name}; "
                    f"got {kinds[1]}"
                )
        examples = [Example(first, second, 0.0) for first, second in pairs]
        most = (self.model.encoder.longest or sys.maxsize) if length is None else length
        logits = text_logits(self.model, self.tokenizer, examples, most, batch_size, "sentences")
        if self.model.classes == 1:
            return [Label(self.classes[0], float(score)) for score in logits[:, 0]]
        shares = torch.from_numpy(logits).softmax(dim=1).max(dim=1)
        return _labels(self.classes.__getitem__, shares)


class Translator(_Tokenized):
    """Translates sentences; see `molflt.load`."""

    models: ClassVar = (EncoderDecoder,)
    card = Card(["translation"], "bleu", 'print(model.translate(["A text."])[0])')
    model: EncoderDecoder

    def translate(
        self,
        sentences: Sequence[str],
        beam: int = 5,
        length_penalty: float = 1.0,
        batch_size: int = 64,
    ) -> list[str]:
        """Returns the translation of each sentence.

        Args:
            sentences: texts to translate.
            beam, length_penalty: see `molflt.sequence.beam_search`.
            batch_size: number of sentences in a batch.
        """
        _expect_list(sentences)
        return translate(self.model, self.tokenizer, sentences, beam, length_penalty, batch_size)


def _labels(name: Callable[[int], str], best: tuple[Tensor, Tensor]) -> list[Label]:
    """Returns labels from `best`, which contains probabilities and class indices, each (n,)."""
    pairs = zip(*(part.tolist() for part in best), strict=True)
    return [Label(name(index), probability) for probability, index in pairs]


def _expect_list(sentences: Sequence[object]) -> None:
    if isinstance(sentences, str) or not sentences:
        raise ValueError(f"expected a list of at least one sentence; got {sentences!r:.80}")
