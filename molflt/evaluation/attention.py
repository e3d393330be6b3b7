"""Where the heads of a trained model look: attention matrices, and how local they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from molflt.attention import Attention
from molflt.metrics import locality

_Call = tuple[Attention, tuple[Any, ...], dict[str, Any]]


def _attention_of(
    stack: nn.Module, run: Callable[[], object], last: int | None = None
) -> list[Tensor]:
    """Attention matrices of layers, in the order in which they are applied.

    Args:
        stack: of a model in evaluation mode, or a part of it.
        run: calls the model once.
        last: only the last so many; all if None. Those of others are not made.

    Returns:
        One (batch, heads, queries, keys) per layer and pass; layers without attention have none.
    """
    calls: list[_Call] = []

    def note(layer: nn.Module, inputs: tuple[object, ...], options: dict[str, object]) -> None:
        calls.append((cast(Attention, layer), inputs, options))

    layers = [module for module in stack.modules() if isinstance(module, Attention)]
    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    with torch.no_grad():
        return [
            layer.weights(*inputs, **options)
            for layer, inputs, options in calls[-last if last else 0 :]
        ]


def _locality_of(
    matrices: list[Tensor], distances: Tensor, causal: bool
) -> dict[str, float | None]:
    """Attention on the nearest and the farthest 10 % of the tokens, mean over heads and layers.

    Args:
        matrices: (batch, heads, tokens, tokens) each, as from :func:`attention_of`.
        distances: (tokens, tokens), in any unit.
        causal: whether a token sees only those up to its own.

    Returns:
        "nearest" and "farthest", see `molflt.metrics.locality`; None where rows of attention are no
        probabilities (normalize "none" or "unmasked").
    """
    apart = distances.double().cpu().numpy()
    try:
        shares = [locality(w.double().cpu().numpy(), apart, causal=causal) for w in matrices]
    except ValueError:
        return {"nearest": None, "farthest": None}
    return {
        "nearest": float(np.mean([share.nearest for share in shares])),
        "farthest": float(np.mean([share.farthest for share in shares])),
    }
