"""Multi-head attention: one layer for every feature map, positional encoding and mixing."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from molflt.attention import mixing as mix
from molflt.attention.causal import DecodeState, KeyValues, State, causal
from molflt.attention.encoding import MIXINGS, Encoding, Position
from molflt.attention.feature_maps import FEATURE_MAPS, FeatureMap
from molflt.attention.kernels import head_width, one_of
from molflt.attention.multiplicative import linear_with_kernel, with_exact_pairs
from molflt.attention.parts import unit
from molflt.attention.pieces import features_of, linear_in_pieces, piece_size
from molflt.attention.toeplitz import dense_log_kernel, toeplitz


class Attention(nn.Module):
    """Multi-head attention with a relative positional encoding.

    Kernelized: A_ij = phi(q^_i) . phi(k^_j), where the encoding enters as FLT's factors, q^ = [N1,
    q d^(-1/4)] and k^ = [N2, k d^(-1/4)] (arXiv:2302.01925, eq. 3), as a positional kernel that
    multiplies the products, or as a rotation of q and k. Softmax: A_ij = exp(q_i . k_j / sqrt(d) +
    f(r_i - r_j)), eq. 1.

    Args:
        dim: width of tokens; a multiple of `heads`.
        heads: number of heads.
        mixing: "linear" (O(N)), "quadratic" (the same through the N x N matrix, cheaper for few
            tokens), "auto" (either, see `mixing.cheaper`) or "softmax".
        causal: each token sees itself and those before it.
        feature_map: key of `FEATURE_MAPS`; not used by softmax.
        num_features: random or learned features m per head.
        projection: how random features are drawn, key of `PROJECTIONS`; None for the map's own
            default, "orthogonal", or nothing.
        position: the encoding whose evaluations `forward` will get. Only read, to fit widths and to
            refuse what does not go together; it stays where it is shared by all layers.
        normalize_qk: divide queries and keys by their norms, logits in [-1, 1] (NPRF,
            arXiv:2106.12566, section 3.3).
        normalize: what kernelized attention divides by. "masked": sum_j A_ij; "unmasked": the same
            without factors and positional kernel; "none": nothing, so that outputs grow with the
            number of keys (FAVOR, arXiv:2006.03555, section 4.3: renormalization off).
        floor: smallest absolute normalizer, see `Sums.ratio`; for signed features and kernels.
        gate: forget with a learned rate per token and head, sum_j of (1 - g_j) prod_(j<l<=i) g_l;
            causal only. RFA (arXiv:2103.02143), section 3.2.
        dropout: attention dropout. Softmax drops single weights; kernelized attention, which has
            no single weights, drops whole keys per head.

    Raises:
        ValueError: an unknown choice, choices that do not go together, or `dim` is no multiple of
            `heads`.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        mixing: str = "linear",
        causal: bool = False,
        feature_map: str = "positive",
        num_features: int = 64,
        projection: str | None = None,
        position: Position | None = None,
        normalize_qk: bool = False,
        normalize: str = "masked",
        floor: float = 0.0,
        gate: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.head_dim = head_width(dim, heads)
        one_of("mixing", mixing, (*MIXINGS, "auto"))
        one_of("feature_map", feature_map, FEATURE_MAPS)
        one_of("normalize", normalize, mix.NORMALIZE)
        self.dim = dim
        self.heads = heads
        self.mixing = mixing
        self.causal = causal
        self.normalize_qk = normalize_qk
        self.normalize = normalize
        self.floor = floor
        self.dropout = dropout
        self._refuse_misfits(position, gate)
        self.to_query = nn.Linear(dim, dim)
        self.to_key = nn.Linear(dim, dim)
        self.to_value = nn.Linear(dim, dim)
        self.to_out = nn.Linear(dim, dim)
        self.to_gate = nn.Linear(dim, heads) if gate else None
        self.feature_map: FeatureMap | None = None
        if mixing != "softmax":
            width = self.head_dim if position is None else position.width(self.head_dim)
            self.feature_map = FEATURE_MAPS[feature_map](width, heads, num_features, projection)

    def _refuse_misfits(self, position: Position | None, gate: bool) -> None:
        softmax = self.mixing == "softmax"
        if softmax and (self.normalize != "masked" or gate):
            option = "gate=True" if gate else f"normalize={self.normalize!r}"
            raise ValueError(
                f"mixing='softmax' goes without {option}; use 'linear' or leave it out"
            )
        if gate and not self.causal:
            raise ValueError("gate=True forgets the past and needs causal=True; set it, or no gate")
        if position is not None:
            position.expect("linear" if self.mixing == "auto" else self.mixing, self.causal, gate)

    def forward(
        self,
        x: Tensor,
        encoding: Encoding | None = None,
        key_mask: Tensor | None = None,
        key_index: Tensor | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        """Mixes tokens.

        Args:
            x: (batch, tokens, dim).
            encoding: what the position module returned for these tokens.
            key_mask: (batch, keys), True where a key exists.
            key_index: (batch, keys), the token that each key copies; by default key j is token j.
                Periodic images of an atom are keys with the atom's index and their own positions.
            context: (batch, keys, dim), tokens to attend to instead of x (cross-attention).

        Returns:
            (batch, tokens, dim).
        """
        return self._join(self._attend(x, encoding, key_mask, key_index, context)[0])

    def decode(
        self, x: Tensor, encoding: Encoding | None = None, state: DecodeState | None = None
    ) -> tuple[Tensor, DecodeState]:
        """Causal attention of new tokens to those before them, without going over these again.

        `forward(x)` equals `decode(x)[0]`, and decoding piece by piece gives the same.

        Args:
            x: (batch, new tokens, dim); one, or a whole prompt.
            encoding: evaluated for the new tokens; for softmax with all tokens so far as keys.
            state: returned by the call before; None at the beginning. Constant in size for linear
                attention; keys and values of all tokens for softmax.

        Raises:
            ValueError: for mechanisms without such a state.
        """
        if not self.causal or self.mixing == "quadratic":
            raise ValueError(
                f"decode needs causal=True and mixing 'linear' or 'softmax'; got causal="
                f"{self.causal}, mixing={self.mixing!r}"
            )
        if encoding is not None and encoding.toeplitz is not None:
            raise ValueError(
                "a Toeplitz kernel leaves no state of constant size to decode from; call forward "
                "on the whole sequence, or choose a spectral position"
            )
        out, state = self._attend(x, encoding, state=state)
        assert state is not None
        return self._join(out), state

    def weights(
        self,
        x: Tensor,
        encoding: Encoding | None = None,
        key_mask: Tensor | None = None,
        key_index: Tensor | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        """The attention matrix, for plots and tests: (batch, heads, queries, keys).

        Arguments as for `forward`. Whatever the mechanism, it is what comes out when the value of
        each key is a unit vector; so it costs O(N^2) memory, and no dropout is applied.
        """
        return self._attend(x, encoding, key_mask, key_index, context, unit=True)[0]

    def sums(
        self,
        x: Tensor,
        encoding: Encoding | None = None,
        key_mask: Tensor | None = None,
        key_index: Tensor | None = None,
        context: Tensor | None = None,
    ) -> mix.Sums:
        """Numerators and normalizers of kernelized attention before the division.

        Arguments as for `forward`. `(sums.normalizer <= 0).sum()` counts the rows that signed
        features have spoiled.
        """
        if self.mixing == "softmax":
            raise ValueError("softmax attention has no features and no sums; use weights()")
        return self._attend(x, encoding, key_mask, key_index, context, raw=True)[0]

    def _split(
        self, x: Tensor, context: Tensor | None = None, key_index: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Scaled queries and keys, and values: (batch, heads, tokens, d) each."""
        if self.causal and (context is not None or key_index is not None):
            raise ValueError("causal attention has no context and no key_index; set causal=False")
        source = x if context is None else context
        query, key, value = (
            to(tokens).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
            for to, tokens in ((self.to_query, x), (self.to_key, source), (self.to_value, source))
        )
        if self.normalize_qk:
            query, key = (unit(mix.at_least_float32(x)).to(x.dtype) for x in (query, key))
        else:
            scale = self.head_dim**-0.25
            query, key = query * scale, key * scale
        if key_index is not None:
            index = key_index[:, None, :, None].expand(-1, self.heads, -1, self.head_dim)
            key, value = key.gather(2, index), value.gather(2, index)
        return query, key, value

    def _join(self, out: Tensor) -> Tensor:
        return self.to_out(out.transpose(1, 2).flatten(2))

    def _gate(self, x: Tensor) -> Tensor | None:
        """Logits of what each token keeps of the past: (batch, heads, tokens)."""
        return None if self.to_gate is None else self.to_gate(x).transpose(1, 2)

    def _attend(
        self,
        x: Tensor,
        encoding: Encoding | None = None,
        key_mask: Tensor | None = None,
        key_index: Tensor | None = None,
        context: Tensor | None = None,
        state: DecodeState | None = None,
        unit: bool = False,
        raw: bool = False,
    ) -> tuple[Any, DecodeState | None]:
        """Outputs per head (raw: their sums), and the state after the last token, if causal."""
        encoding = encoding or Encoding()
        query, key, value = self._split(x, context, key_index)
        if unit:  # the value of each key is a unit vector, and nothing is dropped
            eye = torch.eye(key.shape[2], dtype=key.dtype, device=key.device)
            value = eye.expand(*key.shape[:2], -1, -1)
        rate = self.dropout if self.training and not (unit or raw) else 0.0
        mask = None if key_mask is None else key_mask[:, None]
        if isinstance(state, KeyValues):
            key = torch.cat((state.key, key), dim=2)
            value = torch.cat((state.value, value), dim=2)
        seen = KeyValues(key, value)
        if encoding.transform is not None:
            query, key = encoding.transform(query, key)
        if self.mixing == "softmax":
            out = mix.softmax(query, key, value, encoding.bias, mask, rate, self.causal)
            return out, seen
        if rate:
            mask = mix.drop_keys(key, mask, rate)
        if size := self._piece(query, key, value, encoding):
            sums = linear_in_pieces(self.feature_map, query, key, value, encoding, mask, size)
            out = sums.extensive() if self.normalize == "none" else sums.ratio(self.floor)
            return sums if raw else out.to(value.dtype), ()
        gate = self._gate(x)
        features = self._features(query, key, encoding, mask)
        bare = None
        if self.normalize == "unmasked":
            bare = self._features(query, key, encoding._replace(factors=None), mask)
        near = encoding.pairs if encoding.pairs is not None and encoding.pairs.exact else None
        close = None if near is None else (query, key)
        del query, key, seen  # backward does without them where factors are appended
        past = () if state is None or isinstance(state, KeyValues) else state
        first, second = (*past, None, None)[:2]
        sums, last = self._mix(*features, value, encoding, gate, first)
        if near is not None and close is not None:
            sums = with_exact_pairs(sums, *close, value, near)
        states = () if last is None else (last,)
        if raw:
            return sums, states
        if self.normalize == "none":
            return sums.extensive().to(value.dtype), states
        if bare is None:
            return sums.ratio(self.floor).to(value.dtype), states
        # The same queries and keys without their encoding, to normalize by; no values needed.
        other, last = self._mix(*bare, value[..., :0], Encoding(), gate, second)
        states = states if last is None else (*states, last)
        return sums.ratio_to(other, self.floor).to(value.dtype), states

    def _features(
        self, query: Tensor, key: Tensor, encoding: Encoding, mask: Tensor | None
    ) -> tuple[mix.Features, mix.Features]:
        """phi of [N1, q] and [N2, k], in float32 at least."""
        left, right = encoding.factors or (None, None)
        phi_q = features_of(self.feature_map, query, left)
        return phi_q, features_of(self.feature_map, key, right, mask)

    def _piece(self, query: Tensor, key: Tensor, value: Tensor, encoding: Encoding) -> int:
        """Tokens per piece where linear attention goes in pieces, else 0."""
        whole = self.causal or self.mixing == "quadratic" or self.normalize == "unmasked"
        if whole or encoding.toeplitz is not None or encoding.pairs is not None:
            return 0
        return piece_size(self.feature_map, query, key, value, encoding)

    def prepared(self, encoding: Encoding, queries: int, keys: int) -> Encoding:
        """The encoding with its kernel as a matrix, if this layer takes it so; layers share it."""
        if encoding.kernel is None or not self._quadratic(encoding, queries, keys, self.head_dim):
            return encoding
        return encoding._replace(matrix=encoding.dense_kernel())

    def _quadratic(self, encoding: Encoding, queries: int, keys: int, dim: int) -> bool:
        if self.mixing != "auto" or self.causal or encoding.toeplitz is not None:
            return self.mixing == "quadratic"
        assert self.feature_map is not None
        columns = 1 if encoding.kernel is None else encoding.kernel[0].shape[-1]
        return mix.cheaper(queries, keys, self.feature_map.width, dim, columns) == "quadratic"

    def _mix(
        self,
        query: mix.Features,
        key: mix.Features,
        value: Tensor,
        encoding: Encoding,
        gate: Tensor | None = None,
        state: State | None = None,
    ) -> tuple[mix.Sums, State | None]:
        offsets, kernel, log_decay = encoding.toeplitz, encoding.kernel, None
        if gate is not None:
            gate = mix.at_least_float32(gate)
            key, log_decay = key.scaled(F.logsigmoid(-gate)), F.logsigmoid(gate)
        if self._quadratic(encoding, query.tokens, key.tokens, value.shape[-1]):
            dense = encoding.dense_kernel()
            if offsets is not None:
                offsets = dense_log_kernel(offsets, query.tokens, value.shape[-2])
            return mix.quadratic(query, key, value, self.causal, dense, offsets, log_decay), None
        if offsets is not None:
            return toeplitz(query, key, value, offsets, causal=self.causal), None
        if self.causal:
            if encoding.pairs is not None:
                raise ValueError("causal attention has no near field; leave it out")
            if kernel is not None:
                left, right = (mix.at_least_float32(factor) for factor in kernel)
                query, key = query.times(left), key.times(right)
            return causal(query, key, value, log_decay, state)
        if kernel is not None:
            return linear_with_kernel(query, key, value, kernel, encoding.pairs), None
        return mix.linear(query, key, value), None

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws new random features in place (see `FeatureMap.redraw_`)."""
        if self.feature_map is not None:
            self.feature_map.redraw_(generator)

    def extra_repr(self) -> str:
        """Sizes, for `print(module)`."""
        causal = ", causal=True" if self.causal else ""
        return f"dim={self.dim}, heads={self.heads}, mixing={self.mixing!r}{causal}"
