"""Time of a step of beam search, from the first token of a translation to the last.

In every round all mechanisms of configs/translation that have a state take turns, and each searches
for translations of the same sources at once, with random weights that never end a sentence.
`kit.tenths` says what the numbers are; a step brings one more token to every hypothesis.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from kit.decoders import decoders, held
from kit.rows import Promise, Rows
from kit.tenths import draw_tenths, measure_tenths, steepest, tenths_table
from torch import Tensor

from molflt.sequence import EncoderDecoder, beam_search

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "translation"
SIZES: dict[str, Any] = {"vocabulary": 5000, "heads": 4, "layers": 3, "ffn_dim": 512}
BEGIN, END = 0, 1
QUICK = {"tokens": 10, "sources": 2, "words": 3, "beam": 2, "rounds": 1}


def search(model: EncoderDecoder, source: Tensor, beam: int, tokens: int) -> list[float]:
    """Seconds of each step of a search that ends where its limit is."""
    marks: list[float] = []
    plain = model.log_probabilities

    def marked(hidden: Tensor) -> Tensor:  # called once in each step
        marks.append(time.thread_time())
        return plain(hidden)

    model.log_probabilities = marked  # type: ignore[method-assign]
    try:
        found = beam_search(model, source, begin=BEGIN, end=END, beam=beam, limit=tokens + 1)
    finally:
        del model.log_probabilities
    if any(len(one.tokens) < tokens for one in found):
        raise RuntimeError(f"a search ended before its limit of {tokens} tokens")
    return [after - before for before, after in pairwise(marks)]


def remembered(model: EncoderDecoder, source: Tensor, beam: int, tokens: int) -> int:
    """Bytes of the state behind the last token of all hypotheses."""
    target = torch.full((len(source) * beam, tokens), BEGIN)
    with torch.inference_mode():
        _, state = model.advance(target[:, 1:], model.begin(model.encode(source)))
        return held(model.advance(target[:, :1], state)[1])


def measure(
    tokens: int = 1000,
    sources: int = 4,
    words: int = 32,
    beam: int = 5,
    mechanisms: tuple[str, ...] = (),
    rounds: int = 5,
) -> Rows:
    """Times and sizes of states: of `sources` sources of `words` tokens, `tokens` steps."""
    models = decoders(CONFIGS, mechanisms, partial(EncoderDecoder, **SIZES, max_length=tokens + 1))
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(END + 1, SIZES["vocabulary"], (sources, words), generator=generator)
    for model in models.values():
        model.head.weight.data[END] = 0.0  # far less likely than the likeliest of all others
    return measure_tenths(
        models,
        lambda model, _: search(model, source, beam, tokens),
        lambda model: remembered(model, source, beam, tokens),
        rounds,
        sources,
    )


table = partial(tenths_table, step="token", sequences="sentences")
draw = partial(draw_tenths, step="token")

PROMISES = [
    Promise("time of a step with a state, last tenth / first", partial(steepest, least=500), 1.15)
]
