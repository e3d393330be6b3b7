"""Masked language models, sentence classifiers and translation models."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import ClassVar

import torch

from molflt.data.text.glue import TASKS, Example
from molflt.data.text.sentences import CLASSES
from molflt.data.text.tokenizer import TOKENIZER, Tokenizer
from molflt.evaluation.common import classes_of, tokenizer_of
from molflt.evaluation.sentences import logits_of
from molflt.evaluation.translation import translate
from molflt.pretrained.base import Pretrained
from molflt.pretrained.tokens import Label
from molflt.pretrained.trained import Trained
from molflt.sequence.classifier import SequenceClassifier
from molflt.sequence.encoder_decoder import EncoderDecoder
from molflt.sequence.masked import MaskedLanguageModel

__all__ = ["GapFiller", "SentenceLabeler", "Translator"]


class GapFiller(Pretrained):
    """Predicts masked tokens; see `molflt.load`."""

    models = (MaskedLanguageModel,)
    model: MaskedLanguageModel

    def __init__(self, trained: Trained) -> None:
        super().__init__(trained)
        self.tokenizer = _tokenizer(trained, self.model.vocabulary)

    @torch.inference_mode()
    def fill(self, text: str, count: int = 5) -> list[list[Label]]:
        """Returns the most probable tokens of each gap.

        Args:
            text: text with [MASK], or the mask token of the tokenizer, in each gap.
            count: number of tokens per gap.
        """
        tokenizer = self.tokenizer
        if not 1 <= count <= self.model.vocabulary:
            raise ValueError(
                f"count must be 1 to the vocabulary size, {self.model.vocabulary}; got {count}"
            )
        ids = [tokenizer.cls, *tokenizer.encode([text], special=True)[0], tokenizer.sep]
        gaps = [place for place, token in enumerate(ids) if token == tokenizer.mask]
        if not gaps:
            raise ValueError(
                f"expected {tokenizer.token(tokenizer.mask)} in each gap of the text; got none"
            )
        device = next(self.model.parameters()).device
        hidden = self.model(torch.tensor([ids], device=device))[0, gaps]
        best = self.model.log_probabilities(hidden).exp().topk(count, dim=-1)
        return [
            [Label(tokenizer.token(index), share) for share, index in zip(*pair, strict=True)]
            for pair in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]


class SentenceLabeler(Pretrained):
    """Classifies or scores sentences and pairs of sentences; see `molflt.load`."""

    models: ClassVar = (SequenceClassifier,)
    model: SequenceClassifier

    def __init__(self, trained: Trained) -> None:
        super().__init__(trained)
        self.tokenizer = _tokenizer(trained, self.model.vocabulary)
        content = json.dumps(trained.files.get(CLASSES)).encode()
        self.classes = classes_of(content, trained.label(CLASSES), self.model.classes)

    def classify(
        self,
        sentences: Sequence[str | tuple[str, str]],
        length: int | None = None,
        batch_size: int = 64,
    ) -> list[Label]:
        """Returns the class of each sentence or pair, or its score with the name "score".

        Args:
            sentences: texts, or pairs of texts for a task on pairs.
            length: maximum number of tokens, including special ones; longer texts are truncated
                with a warning. By default the maximum of the model.
            batch_size: sentences in a batch.
        """
        name = str(self.trained.task.get("name"))
        if name in TASKS and TASKS[name].form == "images":
            raise ValueError(
                f"{self.name}: expected gray levels of images, as in training on {name}; got text; "
                "use molflt evaluate RUN --data FOLDER"
            )
        _expect_list(sentences)
        pairs = [(one, None) if isinstance(one, str) else one for one in sentences]
        paired = "second" in TASKS[name].columns if name in TASKS else None
        for number, (_, second) in enumerate(pairs, 1):
            if paired is not None and paired != (second is not None):
                kinds = ("a pair", "one sentence") if paired else ("one sentence", "a pair")
                raise ValueError(
                    f"sentence {number:,}: expected {kinds[0]}, as in training on {name}; got "
                    f"{kinds[1]}"
                )
        examples = [Example(first, second, 0.0) for first, second in pairs]
        most = (self.model.encoder.longest or sys.maxsize) if length is None else length
        logits = logits_of(self.model, self.tokenizer, examples, most, batch_size, "sentences")
        if self.model.classes == 1:
            return [Label(self.classes[0], float(score)) for score in logits[:, 0]]
        shares = torch.from_numpy(logits).softmax(dim=1).max(dim=1)
        return [
            Label(self.classes[index], share)
            for share, index in zip(shares.values.tolist(), shares.indices.tolist(), strict=True)
        ]


class Translator(Pretrained):
    """Translates sentences; see `molflt.load`."""

    models: ClassVar = (EncoderDecoder,)
    model: EncoderDecoder

    def __init__(self, trained: Trained) -> None:
        super().__init__(trained)
        self.tokenizer = _tokenizer(trained, self.model.vocabulary)

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
            beam: beam size, see `molflt.sequence.beam_search`.
            length_penalty: length penalty, see `molflt.sequence.beam_search`.
            batch_size: sentences in a batch.
        """
        _expect_list(sentences)
        return translate(self.model, self.tokenizer, sentences, beam, length_penalty, batch_size)


def _expect_list(sentences: Sequence[object]) -> None:
    if isinstance(sentences, str) or not sentences:
        raise ValueError(f"expected a list of at least one sentence; got {sentences!r:.80}")


def _tokenizer(trained: Trained, size: int) -> Tokenizer:
    content = json.dumps(trained.files.get(TOKENIZER), ensure_ascii=False).encode()
    return tokenizer_of(content, trained.label(TOKENIZER), size)
