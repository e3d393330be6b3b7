"""Functions of which backward keeps the arguments alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments); what it needs inside is computed again in backward, not kept.

    Args:
        function: without randomness, and of nothing that changes before backward.
        arguments: tensors, in tuples or not, and anything else.
    """
    if not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
