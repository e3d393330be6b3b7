"""Scaling of queries and keys before they are compared."""

import torch
from torch import Tensor, nn

from molflt.attention.checks import no_effect
from molflt.attention.numerics import at_least_float32, unit


class Scaling(nn.Module):
    """x d^(-1/4), or directions of x times the root of a temperature.

    Args:
        heads: number of heads.
        head_dim: width d of queries and keys.
        normalize: divide queries and keys by their norms. None: where the feature map asks for it.
        learn_temperature: logits of norm 1 are multiplied by a learned number per head, 1 at first.
            None: as for `normalize_qk`. unit_norm: whether the feature map asks for both.

    Raises:
        ValueError: a temperature of queries and keys whose norms are free already.
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        normalize: bool | None = None,
        learn_temperature: bool | None = None,
        unit_norm: bool = False,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = head_dim
        self.normalize = unit_norm if normalize is None else normalize
        if not self.normalize:
            no_effect("without normalize_qk", learn_temperature=learn_temperature or None)
        learned = unit_norm if learn_temperature is None else learn_temperature
        start = torch.zeros(heads) if self.normalize and learned else None
        self.log_temperature = None if start is None else nn.Parameter(start)

    def forward(self, x: Tensor) -> Tensor:
        """Returns scaled queries or keys (batch, heads, tokens, d)."""
        if not self.normalize:
            return x * self.head_dim**-0.25
        out = unit(at_least_float32(x))
        if self.log_temperature is not None:
            out = out * (self.log_temperature / 2).exp().to(out.dtype)[:, None, None]
        return out.to(x.dtype)

    def extra_repr(self) -> str:
        return f"normalize={self.normalize}"
