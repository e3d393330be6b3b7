from collections.abc import Callable
from typing import Any

import torch

from molflt.image import ImageClassifier
from molflt.sequence import (
    EncoderDecoder,
    LanguageModel,
    MaskedLanguageModel,
    PixelModel,
    SequenceClassifier,
    TokenEncoder,
    sample,
)
from molflt.sequence.generation import _choose, beam_search
from molflt.sequence.published import options_of
from refusals import refused

SMALL: dict[str, Any] = {"dim": 16, "heads": 2, "layers": 2, "ffn_dim": 16}
SCALED: dict[str, Any] = {"mixing": "softmax", "position_scale": 0.5}
IDS = torch.zeros(2, 4, dtype=torch.long)
IMAGES = torch.zeros(2, 1, 8, 8)
LEFT = torch.arange(4) >= torch.tensor([[0], [2]])  # the second row is padded on the left
LONG = torch.zeros(1, 13, dtype=torch.long)


def make(kind: Callable[..., Any], **options: Any) -> Any:
    return kind(10, **{**SMALL, **options}).eval()


def language(**options: Any) -> Callable[[], LanguageModel]:
    return lambda: make(LanguageModel, **options)


def encoder(**options: Any) -> Callable[[], TokenEncoder]:
    return lambda: make(TokenEncoder, **options)


def pixels(**options: Any) -> PixelModel:
    return PixelModel(1, 3, **{**SMALL, **options})


def image(**options: Any) -> Any:
    sizes = {"classes": 3, "channels": 1, "image_size": 8, "patch_size": 4}
    return ImageClassifier(**{**sizes, **SMALL, **options})


def published(**config: Any) -> Callable[[], Any]:
    return lambda: options_of(make(MaskedLanguageModel).state_dict(), config)


ROWS = [
    # options of models of tokens
    refused(language(absolute="learned"), "absolute", "max_length"),
    refused(language(position="spectral", position_scale=0.0), "position_scale", "positive", "0.0"),
    *(
        refused(language(position=name, **SCALED), "position_scale=0.5", "integer offsets", "1")
        for name in ("toeplitz", "bucketed", "low_rank")
    ),
    refused(language(position="cosine", mixing="softmax"), "mixing", "does not support", "softmax"),
    *(
        refused(
            lambda made=made, dim=dim: made(position="spectral", position_options={"dim": dim}),
            *words,
        )
        for made, dim, *words in (
            (lambda **options: language(**options)(), 2, "position_options dim", "one of 1", "2"),
            (pixels, 2, "position_options dim", "one of 1, 3", "2"),
            (image, 3, "position_options dim", "one of 1, 2", "3"),
        )
    ),
    refused(language(adaptive_cutoffs=[3, 20]), "adaptive_cutoffs", "up to 9", "20"),
    refused(published(hidden_act="silu"), "hidden_act", "gelu", "'silu'"),
    refused(published(tie_word_embeddings=False), "tie_word_embeddings", "True", "False"),
    refused(published(model_type="roberta"), "model_type", "bert or fnet", "'roberta'"),
    # inputs of models of tokens
    *(
        refused(lambda cutoffs=cutoffs, x=x: language(adaptive_cutoffs=cutoffs)()(x), *words)
        for cutoffs in (None, [3, 6])
        for x, *words in (
            (IDS.float(), "tokens", "integers", "torch.float32"),
            (IDS + 10, "tokens", "0 to 9", "10"),
            (IDS[0], "tokens", "(batch, length)", "(4,)"),
        )
    ),
    refused(lambda: language()().log_likelihood(IDS, IDS + 10), "targets", "-1 to 9", "10"),
    refused(lambda: encoder(max_length=12)()(LONG), "max_length", "at most 12", "13"),
    refused(lambda: encoder()()(IDS, IDS + 2), "types", "0 to 1", "2"),
    refused(
        lambda: make(SequenceClassifier, classes=3)(IDS, key_mask=LEFT),
        *("key_mask", "after the tokens", "row 1"),
    ),
    refused(
        lambda: make(EncoderDecoder).encode(IDS, LEFT),
        *("source_mask", "after the tokens", "row 1"),
    ),
    refused(lambda: make(MaskedLanguageModel).follows(torch.ones(1, 2, 16)), "next_sentence=True"),
    # generation
    refused(lambda: sample(make(LanguageModel, max_length=12), IDS[:1], 99), "99 more", "12"),
    refused(lambda: sample(make(LanguageModel).train(), IDS[:1], 1), "eval"),
    *(
        refused(lambda o=o, x=x: _choose(torch.tensor([[0.0, x]]), **o), "probability", "finite")
        for o in ({}, {"temperature": 0}, {"top_k": 1})
        for x in (float("nan"), float("inf"))
    ),
    refused(lambda: sample(make(LanguageModel), IDS[:1], 1, top_k=0), "top_k", "at least 1", "0"),
    refused(lambda: sample(make(LanguageModel), IDS[:1], 1, 0.0, 3), "top_k=3", "temperature=0"),
    refused(lambda: sample(make(LanguageModel), IDS[:1], -5), "count", "at least 0", "-5"),
    refused(
        lambda: beam_search(
            make(EncoderDecoder), IDS, begin=1, end=2, beam=1, length_penalty=0.5, limit=2
        ),
        *("length_penalty", "a beam of 1", "0.5"),
    ),
    *(
        refused(
            lambda ids=ids: beam_search(make(EncoderDecoder), IDS, limit=2, **ids),
            *(name, "0 to 9", str(ids[name])),
        )
        for name, ids in (
            ("end", {"begin": 1, "end": 10}),
            ("end", {"begin": 1, "end": -1}),
            ("begin", {"begin": 10, "end": 1}),
        )
    ),
    # pixels
    refused(lambda: pixels().bytes_of(IMAGES), "images", "(batch, 1, 3, 3)", "(2, 1, 8, 8)"),
    # options of models of images
    refused(lambda: image(patch_size=5), "patch_size=5", "divisor"),
    # images
    *(
        refused(lambda x=x: image()(x), "images", *words)
        for x, *words in (
            (IMAGES.movedim(1, -1), "(batch, 1, 8, 8)", "(2, 8, 8, 1)"),
            (IMAGES.long() + 300, "0 to 255", "300"),
            (IMAGES + 255.0, "[0, 1]", "255"),
            (IMAGES - 1.0, "[0, 1]", "-1"),
            (IMAGES + torch.nan, "[0, 1]", "nan"),
        )
    ),
]
