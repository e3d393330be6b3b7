"""Time of a step of beam search, from the first token of a translation to the last.

In every round all mechanisms of configs/translation that have a state take turns. Each translates
the same sources together, with random weights that never end a sentence. A step adds one token to
every hypothesis; kit/decoding.py defines the numbers.
"""

import time
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from kit.decoding import decoders, draw_tenths, held, measure_tenths, tenths_table
from kit.rows import Rows
from torch import Tensor

from molflt.sequence import EncoderDecoder, beam_search

SIZES: dict[str, Any] = {"vocabulary": 5000, "heads": 4, "layers": 3, "ffn_dim": 512}
BEGIN, END = 0, 1
QUICK = {"tokens": 10, "sources": 2, "words": 3, "beam": 2, "rounds": 1}


def search(model: EncoderDecoder, source: Tensor, beam: int, tokens: int) -> list[float]:
    """Seconds of each step of a search that ends at its limit."""
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
    """Bytes of the state after the last token of all hypotheses."""
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
    """Times and sizes of states: `tokens` steps for `sources` sources of `words` tokens."""
    build = partial(EncoderDecoder, **SIZES, max_length=tokens + 1)
    models = decoders("translation", mechanisms, build)
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(END + 1, SIZES["vocabulary"], (sources, words), generator=generator)
    for model in models.values():
        model.head.weight.data[END] = 0.0  # far less likely than the best of all others
    return measure_tenths(
        models,
        lambda model, _: search(model, source, beam, tokens),
        lambda model: remembered(model, source, beam, tokens),
        rounds,
        sources,
    )


table = partial(tenths_table, step="token", sequences="sentences")
draw = partial(draw_tenths, step="token")
