"""Beam search for the most probable target of each source."""

from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from molflt.attention.checks import at_least_one, beside_weights
from molflt.attention.decoder import DecoderState
from molflt.sequence.encoder_decoder import EncoderDecoder, Translating

_Tree = TypeVar("_Tree")


class Hypothesis(NamedTuple):
    """A complete target."""

    tokens: list[int]
    """ids, without the start and the end token"""
    score: float
    """log p / length^penalty; the length includes the end token"""


class _Source(NamedTuple):
    """Encoded sources, one per row."""

    encoded: Tensor
    mask: Tensor | None


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

    The search keeps `beam` unfinished hypotheses for each source, and ends when the same number is
    complete (as in fairseq and, with `early_stopping`, in transformers). The result has the largest
    log p / length^length_penalty (arXiv:1609.08144, section 7, without its constants). A beam of 1
    selects the most probable token at each step. Mechanisms with a state do not recompute earlier
    tokens; others recompute the whole target at each step (see `EncoderDecoder.decodes`).

    Args:
        model: model in evaluation mode.
        source: ids (batch, n).
        source_mask: (batch, n) bool, True where a token exists; None if all tokens exist.
        begin: id of the start token.
        end: id of the end token.
        beam: hypotheses per source.
        length_penalty: 0 compares log p, which favors short targets; values above 1 favor long
            ones.
        limit: maximum length of a target, including the end token; by default 10 plus twice the
            length of its source. The model may allow less. Hypotheses of this length end there.
    """
    if model.training:
        raise ValueError("beam_search needs a model without dropout; call model.eval() first")
    at_least_one(beam=beam, limit=1 if limit is None else limit)
    for name, token in (("begin", begin), ("end", end)):
        if not 0 <= token < model.vocabulary:
            raise ValueError(
                f"{name} must be an id of 0 to {model.vocabulary - 1}; got {token}; take it from "
                "the tokenizer of this model"
            )
    beside_weights("source", source, model.head.weight)
    encoded = model.encode(source, source_mask)
    there = torch.ones_like(source, dtype=torch.bool) if source_mask is None else source_mask
    most = 2 * there.sum(dim=1) + 10 if limit is None else torch.full_like(source[:, 0], limit)
    if model.longest is not None:
        most = most.clamp(max=model.longest)
    search = _Search(model, _Source(encoded, source_mask), most, begin, end, beam, length_penalty)
    while search.open:
        search.step()
    return [max(found, key=lambda one: one.score) for found in search.found]


class _Search:
    """Hypotheses of all unfinished sources, with `beam` rows for each."""

    def __init__(
        self,
        model: EncoderDecoder,
        source: _Source,
        most: Tensor,
        begin: int,
        end: int,
        beam: int,
        penalty: float,
    ) -> None:
        self.model, self.source, self.most = model, source, most
        self.end, self.beam, self.penalty = end, beam, penalty
        count, device = len(most), most.device
        self.found: list[list[Hypothesis]] = [[] for _ in range(count)]
        self.open = list(range(count))  # index of each source in the batch
        self.tokens = torch.full((count * beam, 1), begin, device=device)
        self.state: Translating | None = model.begin(*source) if model.decodes else None
        # at first all hypotheses are equal, so only one counts
        self.score = torch.full((count, beam), -torch.inf, dtype=torch.float64, device=device)
        self.score[:, 0] = 0.0

    def step(self) -> None:
        """Extends every hypothesis by one token."""
        log_p = self._next().double().unflatten(0, (-1, self.beam))  # [source, beam, id]
        if not bool(log_p.isfinite().all()):
            raise ValueError(
                "the probability of a token is not finite; expected a number; use another "
                "checkpoint"
            )
        length = self.tokens.shape[1]  # with the new token, without the start token
        last = length >= self.most
        other = torch.arange(log_p.shape[-1], device=log_p.device) != self.end
        log_p = log_p.masked_fill(last[:, None, None] & other, -torch.inf)
        total = (self.score[..., None] + log_p).flatten(1)
        # At most one continuation of each hypothesis ends it: `beam` others remain.
        count = min(2 * self.beam, total.shape[1])
        best = total.topk(count, dim=1)
        token, parent = best.indices % log_p.shape[-1], best.indices // log_p.shape[-1]
        ended = (token == self.end) & best.values.isfinite()
        self._collect(best.values, parent, ended, length, last)
        going = best.values.masked_fill(token == self.end, -torch.inf)
        kept = going.topk(self.beam, dim=1)
        token, parent = token.gather(1, kept.indices), parent.gather(1, kept.indices)
        rows = [i for i, name in enumerate(self.open) if not self._finished(name, bool(last[i]))]
        self._keep(rows, kept.values, token, parent)

    def _finished(self, name: int, last: bool) -> bool:
        return last or len(self.found[name]) >= self.beam

    def _collect(
        self, total: Tensor, parent: Tensor, ended: Tensor, length: int, last: Tensor
    ) -> None:
        """Stores ended hypotheses: those in the best `beam`, or all of them at the last step."""
        ended[:, self.beam :] &= last[:, None]
        for i, place in ended.nonzero().tolist():
            row = i * self.beam + int(parent[i, place])
            score = float(total[i, place]) / length**self.penalty
            self.found[self.open[i]].append(Hypothesis(self.tokens[row, 1:].tolist(), score))

    def _keep(self, rows: list[int], score: Tensor, token: Tensor, parent: Tensor) -> None:
        """Keeps the unfinished sources and the chosen hypotheses of each."""
        kept = torch.tensor(rows, dtype=torch.long, device=score.device)
        self.open = [self.open[i] for i in rows]
        self.score, self.most = score[kept], self.most[kept]
        chosen = (kept[:, None] * self.beam + parent[kept]).flatten()
        self.tokens = torch.cat((self.tokens[chosen], token[kept].flatten()[:, None]), dim=1)
        fewer = len(rows) < len(score)
        if fewer:
            self.source = _rows(self.source, kept)
        if self.state is not None:
            memory, stack = self.state.decoder
            assert stack is not None  # there was a step
            memory = _rows(memory, kept) if fewer else memory
            stack = stack._replace(blocks=_rows(stack.blocks, chosen))
            self.state = self.state._replace(decoder=DecoderState(memory, stack))

    def _next(self) -> Tensor:
        """Computes log-probabilities of the next token of each hypothesis, (rows, vocabulary)."""
        if self.state is not None:
            hidden, self.state = self.model.advance(self.tokens[:, -1:], self.state)
        else:
            encoded, mask = (
                None if part is None else part.repeat_interleave(self.beam, dim=0)
                for part in self.source
            )
            hidden = self.model.decode(self.tokens, cast(Tensor, encoded), mask)
        return self.model.log_probabilities(hidden[:, -1])


def _rows(tree: _Tree, index: Tensor) -> _Tree:
    """Selects rows of every tensor in nested lists and tuples."""
    if isinstance(tree, Tensor):
        return cast(_Tree, tree[index])
    if isinstance(tree, list):
        return cast(_Tree, [_rows(part, index) for part in tree])
    if isinstance(tree, tuple):
        parts = [_rows(part, index) for part in tree]
        made = type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
        return cast(_Tree, made)
    return tree
