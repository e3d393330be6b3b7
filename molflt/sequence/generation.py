"""Token sampling from a language model, and beam search for the best target of each source."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from molflt.attention.checks import at_least_one, no_effect, not_negative, tensors, whole
from molflt.attention.decoder import DecoderState
from molflt.sequence.encoder_decoder import EncoderDecoder
from molflt.sequence.language_model import LanguageModel, LanguageState


def sample(
    model: LanguageModel,
    prompt: Tensor,
    count: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yields the next token of every prompt, as ids (batch,) on the CPU, `count` times.

    With a decoding state, the cost of a token is constant; for softmax, it grows with the number
    of earlier tokens. Without a state, the whole sequence is recomputed for each token (see
    `LanguageModel.decodes`).

    Args:
        model: model in evaluation mode.
        prompt: ids (batch, n), with n of at least 1.
        count: number of tokens to draw for each prompt.
        temperature: divisor of logits; 0 selects the most probable token.
        top_k: number of most probable tokens to draw from; None for all tokens.
        generator: CPU generator; the same seed gives the same tokens on every device.
    """
    if model.training:
        raise ValueError("sampling needs a model without dropout; call model.eval() first")
    tensors(prompt=prompt)
    if prompt.ndim != 2 or not prompt.numel():
        raise ValueError(
            "prompt must be ids of shape (batch, n) with n of at least 1; got "
            f"{tuple(prompt.shape)}; begin with a start token"
        )
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be at least 0 and finite; got {temperature}")
    at_least_one(top_k=1 if top_k is None else top_k)
    if not temperature:
        no_effect("with temperature=0", top_k=top_k)
    not_negative(count=count)
    needed = prompt.shape[1] + count - 1  # the last token drawn is never an input
    if count and model.longest is not None and needed > model.longest:
        raise ValueError(
            f"a prompt of {prompt.shape[1]} tokens and {count} more need a model for {needed}; "
            f"got a model for {model.longest}; reduce the number of new tokens"
        )

    @torch.no_grad()
    def drawn() -> Iterator[Tensor]:
        state: LanguageState | None = None
        tokens = prompt
        for _ in range(count):
            if model.decodes:
                hidden, state = model.advance(tokens, state)
            else:
                hidden = model(tokens)
            token = _choose(model.log_probabilities(hidden[:, -1]), temperature, top_k, generator)
            yield token
            new = token[:, None].to(prompt.device)
            tokens = new if model.decodes else torch.cat((tokens, new), dim=1)

    return drawn()  # a generator that checks its arguments before the first token


def _choose(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draws one id per row of logits: (batch, vocabulary) -> (batch,), on the CPU."""
    logits = logits.double().cpu()
    expect_finite(logits)
    if temperature == 0:
        return logits.argmax(dim=-1)
    index = torch.arange(logits.shape[-1], device="cpu").expand_as(logits)
    if top_k is not None:
        logits, index = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
    # the maximum is subtracted first, because quotients would overflow at low temperatures
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    drawn = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
    return index.gather(-1, drawn)[:, 0]


def expect_finite(log_p: Tensor) -> None:
    """Raises ValueError if a log-probability is not finite."""
    if not bool(log_p.isfinite().all()):
        raise ValueError("the probability of a token is not finite; use a different checkpoint")


class Hypothesis(NamedTuple):
    """Complete target."""

    tokens: list[int]
    """ids, without start and end tokens"""
    score: float
    """log p / length^penalty; the length includes the end token"""


@torch.no_grad()
def beam_search(
    model: EncoderDecoder,
    source: Tensor,
    source_mask: Tensor | None = None,
    *,
    begin: int,
    end: int,
    beam: int = 5,
    length_penalty: float = 1.0,
    limit: int | None = None,
) -> list[Hypothesis]:
    """Finds the best complete target of each source.

    The search continues `beam` hypotheses for each source and ends when `beam` hypotheses are
    complete (as in fairseq and, with `early_stopping`, in `transformers`). The returned target has
    the largest log p / length^length_penalty (arXiv:1609.08144, section 7, without its constants).
    A beam of 1 selects the most probable token at each step. Mechanisms without a state recompute
    the whole target at each step (see `EncoderDecoder.decodes`).

    Args:
        model: model in evaluation mode.
        source: ids (batch, n).
        source_mask: mask (batch, n), True where a token exists; None if all tokens exist.
        begin: id of the start token.
        end: id of the end token.
        beam: number of hypotheses per source.
        length_penalty: exponent of the length. 0 favors short targets; values above 1 favor long
            targets.
        limit: maximum length of a target, including the end token; by default 10 plus twice the
            length of its source, and at most the maximum length of the model.
    """
    if model.training:
        raise ValueError("beam_search needs a model without dropout; call model.eval() first")
    at_least_one(beam=beam, limit=1 if limit is None else limit)
    if beam == 1 and length_penalty != 1:
        no_effect("with a beam of 1", length_penalty=length_penalty)
    tensors(source=source, source_mask=source_mask)
    for name, token in (("begin", begin), ("end", end)):
        whole(name, torch.tensor(token), 0, model.vocabulary - 1, "an id of the vocabulary")
    mask = torch.ones_like(source) if source_mask is None else source_mask.long()
    limits = 2 * mask.sum(dim=1) + 10 if limit is None else mask.new_full((len(mask),), limit)
    limits = limits if model.longest is None else limits.clamp(max=model.longest)
    search = _Search(model, source, source_mask, begin, end, beam, length_penalty, limits)
    while search.open:
        search.step()
    return [max(complete, key=lambda target: target.score) for complete in search.complete]


class _Search:
    """Hypotheses of unfinished sources, `beam` rows each, of lengths up to `limits` (sources,)."""

    def __init__(
        self,
        model: EncoderDecoder,
        source: Tensor,
        mask: Tensor | None,
        begin: int,
        end: int,
        beam: int,
        penalty: float,
        limits: Tensor,
    ) -> None:
        self.model, self.encoded, self.mask = model, model.encode(source, mask), mask
        self.end, self.beam, self.penalty, self.limits = end, beam, penalty, limits
        count, device = len(source), source.device
        self.complete: list[list[Hypothesis]] = [[] for _ in range(count)]
        self.open = list(range(count))  # index of each source in the batch
        self.tokens = torch.full((count * beam, 1), begin, device=device)
        self.state = model.begin(self.encoded, mask) if model.decodes else None
        # Only one hypothesis of a source counts at the start, because all are equal.
        self.score = torch.full((count, beam), -torch.inf, dtype=torch.float64, device=device)
        self.score[:, 0] = 0.0

    def step(self) -> None:
        log_p = self._next().double().unflatten(0, (-1, self.beam))  # [source, beam, id]
        expect_finite(log_p)
        length = self.tokens.shape[1]  # includes the new token but not the start token
        last = length >= self.limits
        other = torch.arange(log_p.shape[-1], device=log_p.device) != self.end
        log_p = log_p.masked_fill(last[:, None, None] & other, -torch.inf)
        total = (self.score[..., None] + log_p).flatten(1)
        # At least `beam` continuations remain, because at most one per hypothesis ends it.
        best = total.topk(min(2 * self.beam, total.shape[1]), dim=1)
        token, parent = best.indices % log_p.shape[-1], best.indices // log_p.shape[-1]
        ended = (token == self.end) & best.values.isfinite()
        # an ended hypothesis counts if it is among the best `beam`, or at the last step
        ended[:, self.beam :] &= last[:, None]
        for i, rank in ended.nonzero().tolist():
            row = i * self.beam + int(parent[i, rank])
            score = float(best.values[i, rank]) / length**self.penalty
            self.complete[self.open[i]].append(Hypothesis(self.tokens[row, 1:].tolist(), score))
        unfinished = best.values.masked_fill(token == self.end, -torch.inf)
        kept = unfinished.topk(self.beam, dim=1)
        token, parent = token.gather(1, kept.indices), parent.gather(1, kept.indices)
        self._keep(last.tolist(), kept.values, token, parent)

    def _keep(self, last: list[bool], score: Tensor, token: Tensor, parent: Tensor) -> None:
        """Appends a token to each hypothesis and removes the sources that are finished."""
        complete = [len(self.complete[i]) for i in self.open]
        rows = [i for i, count in enumerate(complete) if count < self.beam and not last[i]]
        kept = torch.tensor(rows, dtype=torch.long, device=score.device)
        self.open = [self.open[i] for i in rows]
        self.score, self.limits = score[kept], self.limits[kept]
        parents = (kept[:, None] * self.beam + parent[kept]).flatten()
        self.tokens = torch.cat((self.tokens[parents], token[kept].flatten()[:, None]), dim=1)
        if self.state is None:
            self.encoded = self.encoded[kept]
            self.mask = None if self.mask is None else self.mask[kept]
            return
        memory, stack = self.state.decoder
        assert stack is not None  # at least one step has been made
        if len(rows) < len(score):
            memory = tree_map_only(Tensor, lambda part: part[kept], memory)
        blocks = tree_map_only(Tensor, lambda part: part[parents], stack.blocks)
        decoder = DecoderState(memory, stack._replace(blocks=blocks))
        self.state = self.state._replace(decoder=decoder)

    def _next(self) -> Tensor:
        if self.state is not None:
            hidden, self.state = self.model.advance(self.tokens[:, -1:], self.state)
        else:
            encoded = self.encoded.repeat_interleave(self.beam, dim=0)
            mask = None if self.mask is None else self.mask.repeat_interleave(self.beam, dim=0)
            hidden = self.model.decode(self.tokens, encoded, mask)
        return self.model.log_probabilities(hidden[:, -1])
