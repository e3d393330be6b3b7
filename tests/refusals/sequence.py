"""Refused options and inputs of models of tokens and images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from molflt.attention import Stack
from molflt.image import ImageClassifier
from molflt.sequence import (
    EncoderDecoder,
    LanguageModel,
    MaskedLanguageModel,
    PixelModel,
    SequenceClassifier,
    TokenEncoder,
    beam_search,
    generate,
)
from molflt.sequence.published import options_of
from refusals import Refusal

SMALL: dict[str, Any] = {"dim": 16, "heads": 2, "layers": 2, "ffn_dim": 16}
IDS = torch.zeros(2, 4, dtype=torch.long)
IMAGES = torch.zeros(2, 1, 8, 8)
LONG = torch.zeros(1, 13, dtype=torch.long)


def refused(call: Callable[[], Any], *words: str, error: type[Exception] = ValueError) -> Refusal:
    """Returns a row for a call that does not need a folder."""
    return Refusal(lambda _: call(), *words, error=error)


def make(kind: Callable[..., Any], **options: Any) -> Any:
    return kind(10, **{**SMALL, **options}).eval()


def language(**options: Any) -> Callable[[], LanguageModel]:
    return lambda: make(LanguageModel, **options)


def encoder(**options: Any) -> Callable[[], TokenEncoder]:
    return lambda: make(TokenEncoder, **options)


def translator(**options: Any) -> Any:
    return make(EncoderDecoder, max_length=12, **options)


def pixels(**options: Any) -> PixelModel:
    return PixelModel(1, 3, **{**SMALL, **options})


def image(**options: Any) -> Any:
    sizes = {"classes": 3, "channels": 1, "image_size": 8, "patch_size": 4}
    return ImageClassifier(**{**sizes, **SMALL, **options})


def generated(**arguments: Any) -> Any:
    return lambda: generate(make(LanguageModel), **{"prompt": IDS[:1], "count": 3, **arguments})


def published(**config: Any) -> Callable[[], Any]:
    return lambda: options_of(make(MaskedLanguageModel).state_dict(), config)


OF_SPACE = {"position": "spectral", "position_options": {"dim": 2}}
ROWS = [
    # options of models of tokens
    refused(lambda: LanguageModel(**SMALL), "vocabulary", "number of token ids"),
    refused(language(layer=2), "'layer'", "layers", error=TypeError),
    refused(language(absolute="both"), "absolute", "none, sinusoidal, learned", "'both'"),
    refused(language(absolute="learned"), "absolute", "max_length"),
    refused(language(absolute="sinusoidal", dim=15, heads=1), "absolute", "even dim", "15"),
    refused(language(position="spectral", position_scale=0.0), "position_scale", "positive", "0.0"),
    refused(language(position_scale=2.0), "position_scale", "no effect", "none"),
    refused(language(position="polar"), "position", "toeplitz", "'polar'"),
    refused(language(position="cosine", mixing="softmax"), "mixing", "does not go", "softmax"),
    refused(language(position="toeplitz", gate=True), "gate", "a running state"),
    refused(language(**OF_SPACE), "position_options", "one coordinate", "dim=2"),
    refused(language(adaptive_cutoffs=[9, 9]), "adaptive_cutoffs", "rise", "[9, 9]"),
    refused(language(adaptive_cutoffs=[2, 4, 6]), "adaptive_cutoffs", "at least 64", "16"),
    refused(encoder(causal=True), "'causal'", error=TypeError),
    refused(encoder(mixer="wavelet"), "mixer", "attention, fourier, dense", "'wavelet'"),
    refused(encoder(mixer="fourier", mixing="softmax"), "mixing='softmax'", "no effect"),
    refused(encoder(mixer="fourier", attention_layers=2), "attention_layers", "layers=2", "2"),
    refused(encoder(attention_layers=1), "attention_layers=1", "no effect", "mixer='attention'"),
    refused(encoder(mixer="fourier", position="rotary"), "position", "no block has any"),
    refused(lambda: Stack(16, 2, mixer="dense"), "mixer_options", "max_tokens"),
    refused(lambda: make(SequenceClassifier), "classes", "at least 1"),
    refused(lambda: translator(decoder={"positon": "none"}), "'positon'", error=TypeError),
    refused(lambda: translator(gate=True), "'gate'", error=TypeError),
    refused(published(hidden_act="silu"), "hidden_act", "gelu", "'silu'"),
    refused(
        published(position_embedding_type="relative_key"),
        "position_embedding_type",
        "absolute positions",
        "relative_key",
    ),
    # inputs of models of tokens
    *(
        refused(lambda cutoffs=cutoffs, x=x: language(adaptive_cutoffs=cutoffs)()(x), *words)
        for cutoffs in (None, [3, 6])
        for x, *words in (
            (IDS.float(), "tokens", "whole numbers", "torch.float32"),
            (IDS + 10, "tokens", "0 to 9", "10"),
            (IDS[0], "tokens", "(batch, length)", "(4,)"),
            (IDS.to("meta"), "tokens", "cpu", "meta"),
        )
    ),
    refused(lambda: language()()([[1, 2]]), "tokens", "torch.Tensor", "list", error=TypeError),
    refused(lambda: language()().log_likelihood(IDS, IDS + 10), "targets", "-1 to 9", "10"),
    refused(lambda: language()().log_likelihood(IDS, IDS.float()), "targets", "whole numbers"),
    refused(lambda: language()().log_likelihood(IDS, IDS[:, :3]), "targets", "(2, 4)", "(2, 3)"),
    refused(lambda: encoder(max_length=12)()(LONG), "max_length", "at most 12", "13"),
    refused(lambda: encoder()()(IDS, IDS[:, :3]), "types", "(2, 4)", "(2, 3)"),
    refused(lambda: encoder()()(IDS, IDS + 2), "types", "0 to 1", "2"),
    refused(lambda: make(MaskedLanguageModel).follows(torch.ones(1, 2, 16)), "next_sentence=True"),
    refused(lambda: make(MaskedLanguageModel).set_special(10, []), "ids", "0 to 9", "10"),
    refused(lambda: translator()(IDS, IDS[0]), "target", "(batch, length)", "(4,)"),
    refused(lambda: translator()(IDS, IDS, torch.ones(1, 5) > 0), "key_mask", "(2, 4)", "(1, 5)"),
    # generation
    refused(generated(prompt=IDS[:1, :0]), "prompt", "(batch, n)", "(1, 0)"),
    refused(generated(prompt=IDS), "prompt", "(1, n)", "(2, 4)"),
    refused(lambda: generate(make(LanguageModel, max_length=12), IDS[:1], 99), "99 more", "12"),
    refused(generated(temperature=-0.1), "temperature", "at least 0", "-0.1"),
    refused(lambda: generate(make(LanguageModel).train(), IDS[:1], 1), "eval"),
    refused(lambda: beam_search(translator().train(), IDS, begin=2, end=3), "eval"),
    refused(lambda: beam_search(translator(), IDS, begin=2, end=3, beam=0), "beam", "1", "0"),
    refused(lambda: beam_search(translator(), IDS, begin=2, end=99), "end", "0 to 9", "99"),
    # pixels
    refused(lambda: PixelModel(image_size=3), "channels", "numbers", "None, 3"),
    refused(lambda: pixels(**OF_SPACE), "position_options", "3 coordinates", "dim=2"),
    refused(lambda: pixels(vocabulary=9), "'vocabulary'", error=TypeError),
    refused(lambda: pixels().bytes_of(IMAGES), "images", "(batch, 1, 3, 3)", "(2, 1, 8, 8)"),
    refused(lambda: pixels().bytes_of(IMAGES[:, :, :3, :3]), "images", "bytes", "float32"),
    refused(lambda: pixels()(LONG[:, :10]), "max_length", "at most 9", "10"),
    # options of models of images
    refused(lambda: image(layer=3), "'layer'", "layers", error=TypeError),
    refused(lambda: image(patch_size=5), "patch_size=5", "divisor"),
    refused(lambda: image(image_size=None), "'image_size': None", "numbers"),
    refused(lambda: image(pool="max"), "pool", "mean, token", "'max'"),
    refused(lambda: image(absolute="sinusoidal", dim=18), "absolute", "4 divides", "18"),
    refused(lambda: image(position="toeplitz", pool="token"), "pool='token'", "not a patch"),
    refused(lambda: image(position="toeplitz", position_scale=0.5), "position_scale=0.5", "at 1"),
    refused(lambda: image(position="cosine", position_scale=0.5), "position_scale=0.5", "effect"),
    refused(lambda: image(position="spectral", position_options={"dim": 3}), "dim", "2", "3"),
    # images
    *(
        refused(lambda x=x: image()(x), "images", *words)
        for x, *words in (
            (IMAGES.movedim(1, -1), "(batch, 1, 8, 8)", "(2, 8, 8, 1)"),
            (IMAGES[:0], "(batch, 1, 8, 8)", "(0, 1, 8, 8)"),
            (IMAGES.to(torch.complex64), "", "torch.complex64"),
            (IMAGES.long() + 300, "0 to 255", "300"),
            (IMAGES.to("meta"), "cpu", "meta"),
        )
    ),
    refused(lambda: image()(np.zeros(4)), "images", "torch.Tensor", "ndarray", error=TypeError),
    refused(lambda: image().set_normalizer([0.5] * 2, [0.5] * 2), "mean", "1 channels", "[0.5"),
]
