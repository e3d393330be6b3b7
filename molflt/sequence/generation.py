"""Token sampling from a language model."""

from collections.abc import Iterator

import torch
from torch import Tensor

from molflt.attention.checks import at_least_one, no_effect, not_negative, tensors
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
