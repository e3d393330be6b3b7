"""Multi-head attention: one layer for all feature maps, positional encodings and mixings."""

from typing import NamedTuple, Unpack, get_args

import torch
from torch import Tensor, nn

from molflt.attention.checks import _head_width, no_effect, not_negative, one_of, share
from molflt.attention.encodings import KERNELIZED, SOFTMAX, TRITON, Encoding
from molflt.attention.features import FEATURE_MAPS, FeatureMap, FeatureMapName, ProjectionName
from molflt.attention.features.base import Operand
from molflt.attention.keys import Keys, check_width, finite_positions, log_weights, without_masked
from molflt.attention.mixing.causal import DecodeState, KeyValues, State
from molflt.attention.mixing.forms import joined_bias, softmax
from molflt.attention.mixing.ragged import expect_triton
from molflt.attention.mixing.sums import NormalizeName, Sums, drop_keys
from molflt.attention.numerics import at_least_float32, options_of, unit
from molflt.attention.positions.base import MIXINGS, MixingName, Position, Positioned, check_tokens

DEFAULT_MAP = "positive"

_States = tuple[State, ...]  # of the sums and, for normalize="unmasked", of those without positions


class Scaling(nn.Module):
    """Scales queries and keys by d^(-1/4), or normalizes them and applies an optional temperature.

    See `Attention` for the options. `unit_norm` is the default value of both `normalize` and
    `learn_temperature`. Temperatures are initially 1.
    """

    extra_repr = options_of

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
        learned = self.normalize and (unit_norm if learn_temperature is None else learn_temperature)
        self.log_temperature = nn.Parameter(torch.zeros(heads)) if learned else None

    def forward(self, x: Tensor) -> Tensor:
        """Scales queries or keys of shape (batch, heads, tokens, d)."""
        if not self.normalize:
            return x * self.head_dim**-0.25
        out = unit(at_least_float32(x))
        if self.log_temperature is not None:
            out = out * (self.log_temperature / 2).exp().to(out.dtype)[:, None, None]
        return out.to(x.dtype)


class _Heads(NamedTuple):
    """Queries, keys and values split by head, each of shape (batch, heads, tokens, d)."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None  # broadcastable to (batch, heads, keys)
    log_weight: Tensor | None = None  # broadcastable to the same shape
    gate: Tensor | None = None  # logits of the fraction of the past that is kept, (b, h, tokens)


class _Inputs(Keys, total=False):
    """Keyword arguments of `Attention.forward`, which are documented there."""

    encoding: Encoding | None
    key_positions: Tensor | None
    context: Tensor | None


class Attention(Positioned):
    """Multi-head attention with a relative positional encoding.

    In kernelized attention, key j has the weight A_ij = phi(q^_i) . phi(k^_j) for query i. The
    encoding enters as FLT's factors, q^ = [N1, q d^(-1/4)] and k^ = [N2, k d^(-1/4)]
    (arXiv:2302.01925, eq. 3), as a positional kernel that multiplies the products, or as a rotation
    of q and k. In softmax attention, A_ij = exp(q_i . k_j / sqrt(d) + f(r_i - r_j)) (eq. 1).

    Args:
        dim: width of tokens; a multiple of `heads`.
        heads: number of heads.
        mixing: "linear" (O(N)), "quadratic" (the same sums from the N x N matrix, cheaper for few
            tokens), "auto" (the cheaper of the two; see `mixing.forms.matrix_is_cheaper`),
            "softmax", or "triton" (the linear sums of a multiplicative position, computed by GPU
            kernels whose speed has not been measured yet; second derivatives are not supported).
        causal: each token attends only to itself and earlier tokens.
        feature_map: key of `FEATURE_MAPS`, "positive" by default; not supported by softmax.
        num_features: number m of random or learned features per head, 64 by default, for maps that
            have such features.
        projection: distribution of the random features: a key of `PROJECTIONS`, "orthogonal" by
            default.
        position: positional encoding that `forward` evaluates. Its parameters belong to the layer
            or, in a `Stack`, to the stack.
        degree: degree of the feature map "polynomial", 2 (the default) or 3.
        normalize_qk: divide queries and keys by their norms (NPRF, arXiv:2106.12566, section 3.3).
            None normalizes them only if the feature map expects it, as "polynomial" does.
        learn_temperature: multiply the logits of normalized queries and keys by a learned number
            per head; None has the same meaning as for `normalize_qk`.
        normalize: divisor of kernelized attention. "masked": sum_j A_ij; "unmasked": the same sum
            without the factors or the positional kernel; "none": no division, in which case outputs
            grow with the number of keys (FAVOR, arXiv:2006.03555, section 4.3, without
            renormalization).
        floor: lower bound on |sum_j A_ij|, for signed features and kernels; see `Sums.ratio`.
        gate: let weights of earlier keys decay: for query i, the weight of key j is multiplied by
            (1 - g_j) prod_(j<l<=i) g_l with learned gates g per token and head (RFA,
            arXiv:2103.02143, section 3.2). Only for causal attention.
        dropout: dropout rate; softmax attention drops individual weights, and kernelized attention
            drops entire keys of a head.
    """

    extra_repr = options_of

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        mixing: MixingName = "linear",
        causal: bool = False,
        feature_map: FeatureMapName | None = None,
        num_features: int | None = None,
        projection: ProjectionName | None = None,
        position: Position | None = None,
        degree: int | None = None,
        normalize_qk: bool | None = None,
        learn_temperature: bool | None = None,
        normalize: NormalizeName = "masked",
        floor: float = 0.0,
        gate: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(position)
        self.head_dim = _head_width(dim, heads)
        one_of("mixing", mixing, (*MIXINGS, "auto", TRITON))
        one_of("normalize", normalize, get_args(NormalizeName))
        share(dropout=dropout)
        not_negative(floor=floor)
        self.dim = dim
        self.heads = heads
        self.mixing: str = mixing
        self.causal = causal
        self.normalize = normalize
        self.floor = floor
        self.dropout = dropout
        if mixing == "softmax":
            no_effect(
                "with mixing='softmax'",
                feature_map=feature_map,
                num_features=num_features,
                projection=projection,
                floor=floor or None,
                gate=gate or None,
                normalize=None if normalize == "masked" else normalize,
                degree=degree,
            )
        self._check_options(gate)
        if position is not None:
            position.use_for(self.encoded_for)
        self.to_query = nn.Linear(dim, dim)
        self.to_key = nn.Linear(dim, dim)
        self.to_value = nn.Linear(dim, dim)
        self.to_out = nn.Linear(dim, dim)
        self.to_gate = nn.Linear(dim, heads) if gate else None
        self.feature_map: FeatureMap | None = None
        if mixing != "softmax":
            name = feature_map or DEFAULT_MAP
            one_of("feature_map", name, FEATURE_MAPS)
            width = self.head_dim if position is None else position.width(self.head_dim)
            self.feature_map = FEATURE_MAPS[name](width, heads, num_features, projection, degree)
        unit_norm = self.feature_map is not None and self.feature_map.unit_norm
        self.scaling = Scaling(heads, self.head_dim, normalize_qk, learn_temperature, unit_norm)

    def _check_options(self, gate: bool) -> None:
        if gate and not self.causal:
            raise ValueError("gate=True needs causal=True; got causal=False; change one of them")
        has_kernel = self.position is not None and self.normalize != "unmasked"
        if self.mixing == TRITON and (self.causal or not has_kernel):
            raise ValueError(
                "mixing='triton' needs position='multiplicative', without causal and "
                f"normalize='unmasked'; got {type(self.position).__name__}; use mixing='auto'"
            )
        if self.normalize == "unmasked" and not (self.position and self.position.weighs):
            no_effect("without a position that weighs keys", normalize=self.normalize)
        if self.floor and self.normalize == "none":
            no_effect("with normalize='none'", floor=self.floor)
        if self.position is not None:
            self.position.check(self.encoded_for, gate, self.heads, self.head_dim)
        if self.mixing == TRITON:
            expect_triton()

    @property
    def encoded_for(self) -> str:
        """Mixing for which an encoding is evaluated; "linear" if mixing is "auto"."""
        return "linear" if self.mixing == "auto" else self.mixing

    def forward(
        self, x: Tensor, positions: Tensor | None = None, **inputs: Unpack[_Inputs]
    ) -> Tensor:
        """Mixes tokens x: (batch, tokens, dim) -> (batch, tokens, dim).

        Args:
            positions: (batch, tokens, l), for the encoding of the layer.
            encoding: evaluated encoding of these tokens, instead of positions; layers can share it.
            key_positions: (batch, keys, l), required if the keys differ from the tokens.
            key_mask, key_weight, key_index: (batch, keys); see `Keys`.
            context: (batch or 1, keys, dim), tokens to attend to instead of x (cross-attention).
        """
        heads, encoding = self._prepare(x, positions, **inputs)
        return self._join(self._mix(heads, encoding)[0])

    def decode(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        state: DecodeState | None = None,
        *,
        encoding: Encoding | None = None,
        key_positions: Tensor | None = None,
    ) -> tuple[Tensor, DecodeState]:
        """Applies causal attention to new tokens without recomputing earlier tokens.

        `forward(x)` equals `decode(x)[0]`, even if x is decoded in several calls.

        Args:
            x: (batch, new tokens, dim); a single token or a whole prompt.
            positions: (batch, new tokens, l).
            state: state returned by the previous call; None at the start. For linear attention, its
                size is constant; for softmax, it contains the keys and values of all tokens.
            encoding: see `forward`; for softmax, its keys must be all tokens decoded so far.
            key_positions: for softmax, the positions of all tokens, including earlier ones.
        """
        if not self.causal or self.mixing == "quadratic":
            raise ValueError(
                "decode needs causal=True and another mixing than 'quadratic'; got "
                f"causal={self.causal}, mixing={self.mixing!r}"
            )
        encoding = self._encode(x, encoding, positions, key_positions)
        if self.mixing != "softmax" and not encoding.decodes:
            raise ValueError("a Toeplitz kernel does not have a state; use a spectral position")
        heads = self._split(x)
        if state:
            self._check_state(state, len(x))
        if isinstance(state, KeyValues):
            key = torch.cat((state.key, heads.key), dim=2)
            value = torch.cat((state.value, heads.value), dim=2)
            heads, state = heads._replace(key=key, value=value), None
        out, states = self._mix(heads, encoding, state or ())
        return self._join(out), states or KeyValues(heads.key, heads.value)

    def _check_state(self, state: DecodeState, sequences: int) -> None:
        """Raises ValueError for the state of another kind of layer or number of sequences."""
        if isinstance(state, KeyValues):
            batch, fits = len(state.key), self.mixing == "softmax"
        else:
            parts = 2 if self.normalize == "unmasked" else 1
            batch, fits = len(state[0].sums), self.mixing != "softmax" and len(state) == parts
        if not fits or batch != sequences:
            raise ValueError(
                f"expected this layer's state of {sequences} sequences, as in x; got one of "
                f"{batch} or of another layer"
            )

    def weights(
        self, x: Tensor, positions: Tensor | None = None, **inputs: Unpack[_Inputs]
    ) -> Tensor:
        """Returns the attention matrix (batch, heads, queries, keys), for plots and tests.

        Takes the same arguments as `forward`. The matrix is computed without dropout, with unit
        vectors as values, and takes O(N^2) memory.
        """
        heads, encoding = self._prepare(x, positions, **inputs)
        eye = torch.eye(heads.key.shape[2], dtype=heads.key.dtype, device=heads.key.device)
        value = eye.expand(*heads.key.shape[:2], -1, -1)
        return self._mix(heads._replace(value=value), encoding, keep_all=True)[0]

    def sums(self, x: Tensor, positions: Tensor | None = None, **inputs: Unpack[_Inputs]) -> Sums:
        """Returns the numerators and normalizers of kernelized attention, before division.

        Takes the same arguments as `forward`. `(sums.normalizer <= 0).sum()` counts the rows whose
        weights are not an average, which signed features can cause.
        """
        if self.mixing == "softmax":
            raise ValueError("softmax attention does not compute features or sums; use weights()")
        heads, encoding = self._prepare(x, positions, **inputs)
        query, key = self._operands(heads, encoding)
        return self._sums(query, key, heads, encoding)[0]

    def _prepare(
        self,
        x: Tensor,
        positions: Tensor | None,
        encoding: Encoding | None = None,
        key_positions: Tensor | None = None,
        context: Tensor | None = None,
        **keys: Unpack[Keys],
    ) -> tuple[_Heads, Encoding]:
        """Checks the arguments of `forward`, and returns the heads and the encoding."""
        if context is not None and positions is not None and key_positions is None:
            raise ValueError("context needs its own positions; pass key_positions")
        check_width(self.dim, self.to_query, x=x, context=context)
        if unknown := [name for name in keys if name not in Keys.__annotations__]:
            raise TypeError(f"Attention.forward does not take the argument {unknown[0]!r}")
        heads = self._split(x, context, **keys)  # first, because it checks the mask
        positions, key_positions = finite_positions(positions, key_positions, keys)
        return heads, self._encode(x, encoding, positions, key_positions)

    def _encode(
        self,
        x: Tensor,
        encoding: Encoding | None,
        positions: Tensor | None,
        key_positions: Tensor | None,
    ) -> Encoding:
        """Evaluates the encoding of the layer at the positions, or checks the given encoding."""
        if encoding is None:
            return self._evaluate(self.encoded_for, x, positions, key_positions) or Encoding()
        if positions is not None or key_positions is not None:
            raise ValueError("got both positions and an encoding; pass one of them")
        kind = self.mixing if self.mixing in (SOFTMAX, TRITON) else KERNELIZED
        if kind not in encoding.supports:
            raise ValueError(
                f"the encoding is {type(encoding).__name__}, for {' and '.join(encoding.supports)} "
                f"attention; this layer has mixing={self.mixing!r}; evaluate it for this mixing"
            )
        return encoding

    def _split(self, x: Tensor, context: Tensor | None = None, **keys: Unpack[Keys]) -> _Heads:
        """Projects tokens to queries, keys, values and gates of all heads."""
        key_mask, key_index = keys.get("key_mask"), keys.get("key_index")
        if self.causal and (context is not None or key_index is not None):
            raise ValueError("context and key_index need causal=False; got True")
        x, source = without_masked(x, key_mask, key_index, context)
        query = self.scaling(self._project(self.to_query, x))
        key = self.scaling(self._project(self.to_key, source))
        value = self._project(self.to_value, source)
        if key_index is not None:
            index = key_index[:, None, :, None].expand(-1, self.heads, -1, self.head_dim)
            key, value = key.gather(2, index), value.gather(2, index)
        mask = None if key_mask is None else key_mask[:, None]
        weight = log_weights(keys.get("key_weight"), key_mask, key)
        gate = None if self.to_gate is None else self.to_gate(x).mT
        if gate is not None and mask is not None:
            gate = gate.masked_fill(~mask, torch.inf)  # masked tokens keep all of the past
        return _Heads(query, key, value, mask, weight, gate)

    def _project(self, projection: nn.Module, tokens: Tensor) -> Tensor:
        """Projects tokens and splits heads: (batch, tokens, dim) -> (batch, heads, tokens, d)."""
        return projection(tokens).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)

    def _mix(
        self, heads: _Heads, encoding: Encoding, states: _States = (), keep_all: bool = False
    ) -> tuple[Tensor, _States]:
        """Returns the outputs of all heads and the states after the last token, if any."""
        dropout = self.dropout if self.training and not keep_all else 0.0
        if self.mixing == "softmax":
            q, k = encoding.transform(heads.query, heads.key)
            bias = joined_bias(encoding.bias, heads.log_weight, q, k)
            return softmax(q, k, heads.value, bias, heads.mask, dropout, self.causal), ()
        if dropout:
            heads = heads._replace(mask=drop_keys(heads.key, heads.mask, dropout))
        query, key = self._operands(heads, encoding)
        sums, state = self._sums(query, key, heads, encoding, states)
        new_states = [state]
        if self.normalize == "unmasked":
            query, key = query.without_columns(), key.without_columns()
            unmasked, state = self._sums(query, key, heads, Encoding(), states[1:])
            new_states.append(state)
            out = sums.ratio(self.floor, unmasked)
        elif self.normalize == "masked":
            out = sums.ratio(self.floor)
        else:
            out = sums.extensive(1 - dropout)
        return out.to(heads.value.dtype), tuple(s for s in new_states if s is not None)

    def _operands(self, heads: _Heads, encoding: Encoding) -> tuple[Operand, Operand]:
        """Returns the inputs of the feature map for queries and keys."""
        phi = self.feature_map
        assert phi is not None  # softmax does not use operands
        query, key = encoding.transform(heads.query, heads.key)
        left, right = encoding.columns
        for factors, x in zip(encoding.kernel or encoding.columns, (query, key), strict=True):
            if isinstance(factors, Tensor):  # a single position would apply to all tokens
                check_tokens(factors.shape[-2], x)
        return Operand(phi, query, left), Operand(phi, key, right, heads.mask, heads.log_weight)

    def _sums(
        self, query: Operand, key: Operand, heads: _Heads, encoding: Encoding, states: _States = ()
    ) -> tuple[Sums, State | None]:
        """Returns the sums of kernelized attention and the first state after the last token."""
        causal, gate, state = self.causal, heads.gate, states[0] if states else None
        return encoding.attend(
            query, key, heads.value, form=self.mixing, causal=causal, gate=gate, state=state
        )

    def _join(self, out: Tensor) -> Tensor:
        """Joins and projects the outputs of all heads: (batch, heads, n, d) -> (batch, n, dim)."""
        return self.to_out(out.transpose(1, 2).flatten(2))

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws new random features in place; see `FeatureMap.redraw_`."""
        if self.feature_map is not None:
            self.feature_map.redraw_(generator)
