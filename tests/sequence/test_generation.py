"""Generation: with and without a state, reproducible, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from test_language_model import MECHANISMS, VOCABULARY, ids, tiny

from molflt.sequence.generation import _choose, generate
from molflt.sequence.language_model import LanguageModel


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_greedy_is_the_most_probable_token_of_the_whole_prefix(mechanism):
    model = tiny(mechanism)
    tokens = ids(1, 5)
    drawn = list(generate(model, tokens, 9, temperature=0))
    assert len(drawn) == 9
    for token in drawn:
        log_p = model.log_probabilities(model(tokens)[:, -1])[0]
        assert log_p[token] > log_p.max() - 1e-5
        tokens = torch.cat((tokens, torch.tensor([[token]])), dim=1)


def test_a_state_and_the_whole_prefix_draw_the_same(monkeypatch):
    model = tiny("flt-gaussian-mixture").double()
    both = []
    for decodes in (True, False):
        monkeypatch.setattr(LanguageModel, "decodes", decodes)
        draw = torch.Generator().manual_seed(5)
        both.append(list(generate(model, ids(1, 4), 20, 1.3, generator=draw)))
    assert both[0] == both[1] and len(set(both[0])) > 5


def test_seed_top_k_and_temperature():
    model = tiny("performer")
    prompt = ids(1, 4)

    def draw(seed: int, **options) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return list(generate(model, prompt, 12, generator=generator, **options))

    assert draw(0) == draw(0) != draw(1)
    greedy = draw(0, temperature=0)
    assert draw(0, top_k=1) == greedy == draw(1, temperature=1e-12)
    assert draw(0, top_k=VOCABULARY + 5, temperature=2.0) != greedy


def test_draws_follow_the_probabilities():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).repeat(20_000, 1)
    draw = torch.Generator().manual_seed(0)
    for options, allowed in (({}, 4), ({"top_k": 2}, 2), ({"temperature": 0.5}, 4)):
        found = _choose(logits, generator=draw, **options).bincount(minlength=4) / len(logits)
        scaled = logits[0] / options.get("temperature", 1.0)
        scaled[scaled < scaled.sort(descending=True).values[allowed - 1]] = -math.inf
        assert (found - scaled.softmax(0)).abs().max() < 0.015  # 4 standard errors


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_probabilities_that_are_not_finite_choose_nothing(value):
    logits = torch.zeros(2, 4)
    logits[1, 2] = value
    for options in ({}, {"temperature": 0}, {"top_k": 1}):
        with pytest.raises(ValueError, match="probability of a token is not finite; expected a"):
            _choose(logits, **options)
