"""Stochastic positional encoding (SPE): queries and keys are multiplied by correlated noise.

The method follows Liutkus et al., 2021 (arXiv:2105.08399). Queries and keys are multiplied by noise
Qbar_d(i, r) and Kbar_d(j, r), whose covariance is a kernel P_d(i - j) of positions. The noise is
independent across coordinates d and realizations r:

    q^_ir = sum_d q_id Qbar_d(i, r) / sqrt(R),   k^_jr = sum_d k_jd Kbar_d(j, r) / sqrt(R)
    E[q^_i . k^_j] = sum_d q_id P_d(i - j) k_jd

In expectation, logits then have a relative encoding, with a standard error of order 1 / sqrt(R). A
single realization depends on the origin; only the expectation is invariant under translations.

Differences from the authors' code: the noise changes only with `redraw_`, in training and
evaluation; kernels do not have a factor that depends on the number of sines; the caller passes
positions; the noise of the gate has the variance that makes its kernel exactly 1.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from molflt.attention.checks import at_least_one, is_traced, positive
from molflt.attention.encodings import Encoding, Rotation
from molflt.attention.numerics import at_least_float32, randn64, recomputed
from molflt.attention.positions.base import Position, check_tokens

_Code = Callable[[Tensor], Tensor]
"""x (batch, heads, n, d) -> sum_d x_id Qbar_d(i, r), (batch, heads, n, R)"""


class _StochasticPosition(Position):
    """Base class that multiplies queries and keys by noise and a gate.

    A subclass overrides `_code` and chooses the shape of the standard normal noise. The noise of
    the gate is the same for all positions, and for queries and keys.
    """

    weighs = False
    paper = "2105.08399"
    redraws = True

    def __init__(
        self,
        heads: int,
        head_dim: int,
        num_realizations: int,
        gated: bool,
        noise_shape: tuple[int, ...],
    ) -> None:
        super().__init__()
        at_least_one(heads=heads, head_dim=head_dim, num_realizations=num_realizations)
        self.heads = heads
        self.head_dim = head_dim
        self.num_realizations = num_realizations
        self.noise = nn.Buffer(torch.empty(noise_shape))
        self.gate: nn.Parameter | None = None
        if gated:
            self.gate = nn.Parameter(torch.randn(heads, head_dim))
            self.gate_noise = nn.Buffer(torch.empty(heads, head_dim, num_realizations))
        self.redraw_()

    def width(self, head_dim: int) -> int:
        return self.num_realizations

    def forward(self, mixing: str, positions: Tensor, key_positions: Tensor) -> Encoding:
        with torch.autocast(positions.device.type, enabled=False):
            query_code = self._code(positions[..., 0], query=True)
            key_code = self._code(key_positions[..., 0], query=False)
        encode_query = functools.partial(self._encode, query_code, positions.shape[1])
        encode_key = functools.partial(self._encode, key_code, key_positions.shape[1])
        return Rotation(encode_query, encode_key)

    @torch.no_grad()
    def redraw_(self, generator: torch.Generator | None = None) -> None:
        for buffer in self.buffers():
            buffer.copy_(randn64(buffer.shape, generator=generator))

    def _code(self, positions: Tensor, query: bool) -> _Code:
        """Returns a function that multiplies x by Qbar or Kbar at positions (b, n)."""
        raise NotImplementedError(f"{type(self).__name__} must override _code(positions, query)")

    def _encode(self, code: _Code, count: int, x: Tensor) -> Tensor:
        """Encodes queries or keys, in their dtype: (batch, heads, n, d) -> (batch, heads, n, R)."""
        check_tokens(count, x)
        with torch.autocast(x.device.type, enabled=False):
            full = at_least_float32(x)
            if self.gate is None:
                out = code(full)
            else:
                # Logarithms keep the gradient of the root of a saturated sigmoid finite.
                gate = self.gate.to(full.dtype)[:, None]  # [h, 1, d]
                constant = full * (0.5 * F.logsigmoid(gate)).exp()
                positional = full * (0.5 * F.logsigmoid(-gate)).exp()
                out = code(positional) + constant @ self.gate_noise.to(full.dtype)
            return (out * self.num_realizations**-0.5).to(x.dtype)


class SineSPE(_StochasticPosition):
    """Sinusoidal SPE: P_d(i - j) = sum_k lambda_dk^2 cos(2 pi f_dk (i - j) + theta_dk).

    This is "sineSPE" of arXiv:2105.08399. Qbar has the phases theta_dk, and Kbar has zero phases.
    Each frequency is max_frequency times the sigmoid of a parameter and is initially low. Each
    lambda is the softplus of a parameter. Initially, all lambda are equal, with sum_k lambda^2 = 1;
    the authors' code uses random values. Positions may be any real numbers.

    Args:
        head_dim: width d of queries and keys.
        num_realizations: number of realizations R, the width of the new queries and keys.
        num_sines: number of waves K per coordinate.
        gated: mix the kernel with a constant: delta_d + (1 - delta_d) P_d, with a learned delta_d =
            sigmoid(gate_d) for each head.
        max_frequency: largest f, in cycles per unit of length. Integer positions cannot distinguish
            frequencies above 0.5 from lower frequencies.
    """

    cost = "N d (K + m) R"

    def __init__(
        self,
        heads: int,
        head_dim: int,
        num_realizations: int = 64,
        num_sines: int = 5,
        gated: bool = True,
        max_frequency: float = 0.5,
    ) -> None:
        at_least_one(num_sines=num_sines)
        positive(max_frequency=max_frequency)
        noise_shape = (heads, head_dim, 2 * num_sines, num_realizations)
        super().__init__(heads, head_dim, num_realizations, gated, noise_shape)
        self.num_sines = num_sines
        self.max_frequency = max_frequency
        shape = (heads, head_dim, num_sines)
        self.frequency = nn.Parameter(torch.randn(shape) - 4)
        self.offset = nn.Parameter(torch.randn(shape))
        self.gain = nn.Parameter(torch.full(shape, math.log(math.expm1(num_sines**-0.5))))

    def _code(self, positions: Tensor, query: bool) -> _Code:
        positions = positions.to(torch.promote_types(positions.dtype, torch.float32))
        return functools.partial(self._multiply, positions, query)

    def _multiply(self, positions: Tensor, query: bool, x: Tensor) -> Tensor:
        """Multiplies x by Qbar or Kbar at positions (b, n)."""
        gain = F.softplus(self.gain).to(x.dtype)
        scaled = self.noise.to(x.dtype) * torch.cat((gain, gain), dim=-1)[..., None]
        angular = 2 * math.pi * self.max_frequency * self.frequency.sigmoid()
        out = x.new_zeros(())
        # One wave at a time takes (b, h, n, d) numbers instead of K times as many.
        for k in range(self.num_sines):
            offset = self.offset[:, None, :, k] if query else None
            cos_noise, sin_noise = scaled[:, :, k], scaled[:, :, self.num_sines + k]
            wave = (positions, angular[:, None, :, k], offset, cos_noise, sin_noise)
            out = out + recomputed(_wave, x, *wave, several=self.num_sines > 1)
        return out


class ConvSPE(_StochasticPosition):
    """Convolutional SPE: P_d(i - j) = sum_p phi^Q_d(p) phi^K_d(p + i - j), 0 for |i - j| >= P.

    This is "convSPE" of arXiv:2105.08399. White noise z_d on the grid of positions is filtered by
    one filter for queries and one for keys, Qbar_d(i) = sum_p phi^Q_d(p) z_d(i + p). Filters are
    initialized uniformly on [0, 2 / sqrt(P)]. The noise adds h d (max_tokens + P) R numbers to the
    state, and filtering takes P times as many operations per forward pass. Positions that all
    sequences share save much time in compiled code in the shape (1, n, 1).

    Args:
        head_dim, num_realizations, gated: see `SineSPE`.
        kernel_size: length P of the filters.
        max_tokens: positions are integers in [0, max_tokens).
    """

    cost = "N d (P + m) R"

    def __init__(
        self,
        heads: int,
        head_dim: int,
        num_realizations: int = 64,
        kernel_size: int = 128,
        gated: bool = True,
        max_tokens: int = 512,
    ) -> None:
        at_least_one(kernel_size=kernel_size, max_tokens=max_tokens)
        noise_shape = (heads, head_dim, max_tokens + kernel_size - 1, num_realizations)
        super().__init__(heads, head_dim, num_realizations, gated, noise_shape)
        self.kernel_size = kernel_size
        self.max_tokens = self.longest = max_tokens
        shape, top = (heads, head_dim, kernel_size), 2 / kernel_size**0.5
        self.query_filter = nn.Parameter(top * torch.rand(shape))
        self.key_filter = nn.Parameter(top * torch.rand(shape))

    def _code(self, positions: Tensor, query: bool) -> _Code:
        self.check_range(positions, self.max_tokens, integers=True)
        index = positions.long()
        kernel = self.query_filter if query else self.key_filter
        all_noise = None  # Qbar at all positions, (h, d, max_tokens, R)
        if index.shape[-1] * self.kernel_size > self.noise.shape[2]:
            full = at_least_float32(kernel).flatten(0, 1)[:, None, :, None]
            noise = self.noise.to(full.dtype).flatten(0, 1)[None]
            # A 2-D convolution with realizations last has a much faster backward pass.
            filtered = F.conv2d(noise, full, groups=len(full))[0]
            all_noise = filtered.unflatten(0, kernel.shape[:2])
        if not is_traced() and (index == index[:1]).all():
            index = index[:1]  # e.g. consecutive tokens; compiled code takes the branch below
        if len(index) == 1:
            return functools.partial(_product, self._noise_at(index[0], kernel, all_noise))
        return functools.partial(self._by_row, index, kernel, all_noise)

    def _noise_at(self, index: Tensor, kernel: Tensor, all_noise: Tensor | None) -> Tensor:
        """Returns Qbar at positions (n,): (h, d, n, R)."""
        if all_noise is not None:
            return all_noise[:, :, index]
        full = at_least_float32(kernel)
        steps = torch.arange(self.kernel_size, device=index.device)
        windows = self.noise[:, :, index[:, None] + steps].to(full.dtype)  # [h, d, n, p, r]
        return torch.einsum("hdnpr,hdp->hdnr", windows, full)

    def _by_row(self, index: Tensor, kernel: Tensor, noise: Tensor | None, x: Tensor) -> Tensor:
        """Multiplies one row of the batch at a time, because its noise is (h, d, n, R)."""
        rows = [x.new_zeros(0, *x.shape[1:-1], self.num_realizations)]
        for b, i in enumerate(index):
            row = x[b : b + 1]
            rows.append(recomputed(self._row, i, kernel, noise, row, several=len(index) > 1))
        return torch.cat(rows)

    def _row(self, index: Tensor, kernel: Tensor, noise: Tensor | None, x: Tensor) -> Tensor:
        return _product(self._noise_at(index, kernel, noise), x)


def _wave(
    x: Tensor,
    positions: Tensor,
    angular: Tensor,
    offset: Tensor | None,
    cos_z: Tensor,
    sin_z: Tensor,
) -> Tensor:
    """Multiplies x (b, h, n, d) by one wave of noise (h, d, R), evaluated at positions (b, n)."""
    phase = positions[:, None, :, None] * angular
    if offset is not None:
        phase = phase + offset
    phase = phase.to(x.dtype)
    return (x * phase.cos()) @ cos_z + (x * phase.sin()) @ sin_z


def _product(code: Tensor, x: Tensor) -> Tensor:
    """Computes sum_d x_id Qbar_d(i, r): x (b, h, n, d), Qbar (h, d, n, R) -> (b, h, n, R)."""
    return torch.einsum("bhnd,hdnr->bhnr", x, code.to(x.dtype))
