"""FNet's Fourier sublayer and its ablations: token mixers that replace attention.

See FNet (arXiv:2105.03824), sections 3 and 4.1. Mixers are linear maps of the tokens and use
neither queries nor positions. The result for a sequence does not depend on the batch or on padding,
because every transform includes only unmasked tokens.
"""

import math
from typing import Unpack

import torch
from torch import Tensor, nn

from molflt.attention.checks import at_least_one, no_effect
from molflt.attention.encodings import Encoding
from molflt.attention.keys import Keys, check_mask, check_width
from molflt.attention.numerics import at_least_float32, options_of

# Standard deviation of N(0, 1) truncated at 2; LeCun's truncated initialization divides by it.
_TRUNCATED_STD = math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / math.erf(math.sqrt(2)))


class Mixer(nn.Module):
    """Base class for token mixers, with the interface of `Attention`; subclasses override `mix`."""

    paper = "2105.03824, sec. 4.1"
    cost = "N² d + N d²"  # for N tokens of width d
    mixing: str  # key in `TOKEN_MIXERS`
    takes_max_tokens = False  # True if the mixer needs the length of the longest sequence
    extra_repr = options_of

    def __init__(self, dim: int) -> None:
        super().__init__()
        at_least_one(dim=dim)
        self.dim = dim

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        *,
        encoding: Encoding | None = None,
        **keys: Unpack[Keys],
    ) -> Tensor:
        """Mixes tokens (batch, tokens, dim) in at least float32, even under autocast.

        `key_mask` (batch, tokens) is True where a token exists; any pattern is allowed. The
        unmasked tokens, in order, form the sequence that is mixed; the result is 0 for masked
        tokens. Other arguments must be None.
        """
        key_mask = keys.pop("key_mask", None)
        why = f"with mixing={self.mixing!r}, which uses neither positions nor keys"
        no_effect(why, positions=positions, encoding=encoding, **keys)
        check_width(self.dim, x=x)
        check_mask(key_mask, x.shape[:2])
        with torch.autocast(x.device.type, enabled=False):
            full = at_least_float32(x)
            if key_mask is None:
                return self.mix(full, None).to(x.dtype)
            masked = ~key_mask[..., None]
            out = self.mix(full.masked_fill(masked, 0.0), key_mask).masked_fill(masked, 0.0)
            return out.to(x.dtype)

    def mix(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        """Mixes tokens; `x` is 0 for masked tokens, whose results are ignored."""
        raise NotImplementedError

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws new random matrices in place; use the same seed on all ranks."""


class FourierMixer(Mixer):
    """FNet's Fourier sublayer, y = Re(F_seq F_hidden x), without parameters.

    The transform (FNet, arXiv:2105.03824, eq. 3) is not normalized, as in the public code; y is
    therefore sqrt(tokens dim / 2) times as large as x. LayerNorm should follow the residual sum.

    Args:
        dim: width of the tokens.
        normalize: divide by sqrt(tokens dim), as in eq. 2. The result is 1 / sqrt(2) times as large
            as x. Use this option in blocks that apply LayerNorm first.
    """

    paper = "2105.03824, eq. 3"
    cost = "N d log(N d)"
    mixing = "fourier"

    def __init__(self, dim: int, normalize: bool = False) -> None:
        super().__init__(dim)
        self.normalize = normalize

    def mix(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        out = _real_dft(x) if key_mask is None else _dft_by_length(x, key_mask)
        if not self.normalize:
            return out
        if key_mask is None:
            return out * max(1, x.shape[1] * self.dim) ** -0.5
        lengths = key_mask.sum(dim=1).clamp(min=1)[:, None, None]
        return out * (lengths * self.dim).to(x.dtype).rsqrt()


class _LinearMixer(Mixer):
    """y = W_seq x W_hidden with learned matrices.

    A sequence of n tokens uses the first n rows and columns of W_seq.
    """

    mixing = "dense"
    takes_max_tokens = True

    def __init__(self, dim: int, max_tokens: int) -> None:
        super().__init__(dim)
        at_least_one(max_tokens=max_tokens)
        self.max_tokens = max_tokens
        self._make_weights()

    def _make_weights(self) -> None:
        # As in the public FNet code, both are drawn from N(0, 0.02^2), without bias.
        self.sequence_weight: Tensor = nn.Parameter(
            0.02 * torch.randn(self.max_tokens, self.max_tokens)
        )
        self.hidden_weight: Tensor = nn.Parameter(0.02 * torch.randn(self.dim, self.dim))

    def mix(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        tokens = x.shape[1]
        if tokens > self.max_tokens:
            # Only this check needs the number of real tokens; padding may exceed the limit.
            lengths = [tokens] if key_mask is None else key_mask.sum(dim=1).tolist()
            longest = max(lengths, default=0)
            if longest > self.max_tokens:
                raise ValueError(
                    f"expected at most max_tokens={self.max_tokens} tokens; got {longest}"
                )
        if key_mask is not None:
            unmasked_first = key_mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
            x = x.gather(1, unmasked_first[:, : self.max_tokens, None].expand(-1, -1, self.dim))
        n = x.shape[1]
        sequence_weight = at_least_float32(self.sequence_weight[:n, :n])
        out = sequence_weight @ (x @ at_least_float32(self.hidden_weight))
        if key_mask is None:
            return out
        rank = (key_mask.cumsum(dim=1) - 1).clamp(min=0)  # unmasked tokens before each token
        return out.gather(1, rank[..., None].expand(-1, -1, self.dim))


class _RandomMixer(_LinearMixer):
    """y = W_seq x W_hidden with constant random matrices, stored as buffers.

    Entries are normally distributed, truncated at two standard deviations, with variances 1 /
    max_tokens and 1 / dim, as in the public FNet code.
    """

    mixing = "random"

    def _make_weights(self) -> None:
        self.sequence_weight = nn.Buffer(torch.empty(self.max_tokens, self.max_tokens))
        self.hidden_weight = nn.Buffer(torch.empty(self.dim, self.dim))
        self.redraw_()

    @torch.no_grad()
    def redraw_(self, generator: torch.Generator | None = None) -> None:
        for weight in (self.sequence_weight, self.hidden_weight):
            draw = torch.empty(weight.shape, dtype=torch.float64, device="cpu")
            nn.init.trunc_normal_(draw, 0.0, 1.0, -2.0, 2.0, generator=generator)
            weight.copy_(draw / (_TRUNCATED_STD * math.sqrt(len(weight))))


class _NoMixer(Mixer):
    """No token mixing, y = 0, as in FNet's FF-only model; the residual sum of a block is then x."""

    cost = "0"
    mixing = "none"

    def mix(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        # Data-parallel training needs a gradient for a preceding LayerNorm.
        return 0.0 * x


def _real_dft(x: Tensor) -> Tensor:
    """Computes Re(F_seq F_hidden x) with unnormalized FFTs (FNet, eqs. 1 and 3)."""
    if not x.numel():
        return x.clone()
    half = torch.fft.rfft2(x).real  # [batch, tokens, dim // 2 + 1]
    # As x is real, Y[-k, -l] = conj(Y[k, l]) gives the other columns.
    mirrored = half[..., 1 : (x.shape[-1] + 1) // 2].flip(1).roll(1, 1).flip(2)
    return torch.cat((half, mirrored), dim=-1)


def _dft_by_length(x: Tensor, key_mask: Tensor) -> Tensor:
    """Applies `_real_dft` to the unmasked tokens, with one call per distinct sequence length."""
    batch, tokens, dim = x.shape
    if not x.numel():
        return x
    lengths = key_mask.sum(dim=1)
    order = lengths.argsort(stable=True)
    distinct, counts = (x.tolist() for x in lengths[order].unique_consecutive(return_counts=True))
    sequence, place = key_mask[order].nonzero(as_tuple=True)
    index = order[sequence] * tokens + place  # unmasked tokens, shortest sequences first
    sizes = [length * count for length, count in zip(distinct, counts, strict=True)]
    groups = zip(x.reshape(-1, dim)[index].split(sizes), distinct, counts, strict=True)
    mixed = [
        _real_dft(group.view(count, length, dim)).flatten(0, 1) for group, length, count in groups
    ]
    return x.new_zeros(batch * tokens, dim).index_copy(0, index, torch.cat(mixed)).view(x.shape)


TOKEN_MIXERS: dict[str, type[Mixer]] = {
    cls.mixing: cls for cls in (FourierMixer, _LinearMixer, _RandomMixer, _NoMixer)
}
