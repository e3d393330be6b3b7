"""Absolute positions, which are added to tokens before any attention."""

import torch
from torch import Tensor

ABSOLUTE = ("none", "sinusoidal", "learned")


def sinusoids(index: Tensor, dim: int) -> Tensor:
    """Sinusoidal positions, arXiv:1706.03762, section 3.5: (n,) -> (n, dim) float64.

    Sines are in the first half of the columns and cosines in the second. The result is float64,
    because the phase at 10^4 has no more than 3 digits in float32.
    """
    half = torch.arange(dim // 2, dtype=torch.float64, device=index.device)
    phase = index.double()[:, None] * torch.pow(10000.0, -2 * half / dim)
    return torch.cat((phase.sin(), phase.cos()), dim=-1)
