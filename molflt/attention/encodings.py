"""Positional encodings evaluated at given positions; one class for each way they enter attention.

`mix` computes kernelized attention without the full matrix, which `dense` returns for reference.
`Bias` has only the matrix. In shapes, b is the batch size or 1, and h the number of heads or 1.
"""

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from molflt.attention.features import Features
from molflt.attention.features.base import Columns, Operand
from molflt.attention.mixing.causal import State, causal_linear
from molflt.attention.mixing.forms import (
    chunk_size,
    linear,
    linear_in_chunks,
    linear_with_kernel,
    matrix_is_cheaper,
    quadratic,
)
from molflt.attention.mixing.mesh import MeshKernel, linear_with_mesh
from molflt.attention.mixing.pairs import Pairs, SortedPairs, with_exact_pairs
from molflt.attention.mixing.ragged import Ragged, Waves, ragged
from molflt.attention.mixing.sums import Sums
from molflt.attention.mixing.toeplitz import dense_log_kernel, toeplitz
from molflt.attention.numerics import Shared, at_least_float32, products_of_all

SOFTMAX, KERNELIZED, TRITON = "softmax", "kernelized", "triton"

_Turn = Callable[[Tensor], Tensor]


class Terms(NamedTuple):
    """Inputs to the sums over keys, in at least float32; sums are computed without autocast."""

    query: Features
    key: Features
    value: Tensor  # (batch, heads, keys, dv)
    causal: bool = False  # each token attends only to itself and earlier tokens
    log_decay: Tensor | None = None  # see `causal_linear`
    state: State | None = None  # state of the preceding tokens, for causal attention


class Encoding:
    """Base class for encodings; an instance of it does not change attention."""

    supports: ClassVar[tuple[str, ...]] = (SOFTMAX, KERNELIZED)  #: supported kinds of attention
    decodes: ClassVar[bool] = True  #: True if causal attention keeps a state of constant size
    chunked = True  #: True if sums over many keys can be computed in chunks
    #: factors U (b, h, queries, p) and V (b, h, keys, p) of a multiplicative kernel, or None
    kernel: tuple[Tensor, Tensor] | None = None
    pairs: Pairs | None = None  #: corrections of a multiplicative kernel for individual pairs
    bias: Tensor | None = None  #: term added to the logits of softmax, (b, h, queries, keys)
    #: columns prepended to queries and to keys, each (b, h, tokens, .)
    columns: tuple[Columns | None, Columns | None] = (None, None)

    def transform(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Transforms scaled queries and keys, each of shape (batch, heads, tokens, d)."""
        return query, key

    def dense(self, queries: int, keys: int) -> Tensor | None:
        """Returns the matrix (b, h, queries, keys) of added terms or of factors, or None."""
        return None

    def attend(
        self,
        query: Operand,
        key: Operand,
        value: Tensor,
        *,
        form: str = "linear",
        causal: bool = False,
        gate: Tensor | None = None,
        state: State | None = None,
    ) -> tuple[Sums, State | None]:
        """Computes the sums of kernelized attention and, if causal and linear, the last state.

        Args:
            query, key: (batch, heads, tokens, d).
            value: (batch, heads, keys, dv).
            form: "linear", "quadratic", or "auto" for the cheaper of the two.
            causal: each token attends only to itself and earlier tokens.
            gate: logits of the fraction of the past that each token keeps, (batch, heads, tokens).
            state: state of the preceding tokens, for causal attention.
        """
        use_matrix = form == "quadratic"
        if form == "auto" and not causal:
            use_matrix = self._matrix_is_cheaper(query, key, value)
        if not (use_matrix or causal) and self.chunked and self.pairs is None:
            columns = 0 if self.kernel is None else self.kernel[0].shape[-1]
            size = chunk_size(query, key, value, columns)
            if size:
                return linear_in_chunks(query, key, value, size, self.kernel), None
        with torch.autocast(value.device.type, enabled=False):
            value = at_least_float32(value)
            phi_q, phi_k, log_decay = query.features(), key.features(), None
            if gate is not None:
                gate = at_least_float32(gate)
                phi_k, log_decay = phi_k.scaled(F.logsigmoid(-gate)), F.logsigmoid(gate)
            terms = Terms(phi_q, phi_k, value, causal, log_decay, state)
            if use_matrix:
                sums, new_state = self.by_matrix(terms), None
            else:
                sums, new_state = self.mix(terms)
            if self.pairs is not None and self.pairs.exact is not None:
                sums = with_exact_pairs(sums, query, key, value, self.pairs)
            return sums, new_state

    def by_matrix(self, terms: Terms) -> Sums:
        """Computes the sums from the N x N attention matrix, as a reference for `mix`."""
        query, key, value, causal, log_decay, _ = terms
        kernel = self._matrix_kernel(query.tokens, key.tokens)
        return quadratic(query, key, value, causal, log_decay=log_decay, **kernel)

    def _matrix_kernel(self, queries: int, keys: int) -> dict[str, Tensor]:
        """Returns the argument `kernel` or `log_kernel` of `quadratic`, if any."""
        return {}

    def mix(self, terms: Terms) -> tuple[Sums, State | None]:
        """Computes the sums without forming the attention matrix."""
        query, key, value, causal, log_decay, state = terms
        if causal:
            return causal_linear(query, key, value, log_decay, state)
        return linear(query, key, value), None

    def _matrix_is_cheaper(self, query: Operand, key: Operand, value: Tensor) -> bool:
        p = None if self.kernel is None else self.kernel[0].shape[-1]
        sizes = query.x.shape[2], key.x.shape[2], query.feature_map.width, value.shape[-1]
        return matrix_is_cheaper(*sizes, p)


class Bias(Encoding):
    """Bias f(r_i - r_j) that is added to the logits of softmax attention (FLT, eq. 1)."""

    supports = (SOFTMAX,)
    bias: Tensor

    def __init__(self, matrix: Tensor) -> None:
        self.bias = matrix

    def dense(self, queries: int, keys: int) -> Tensor:
        return self.bias


class Factors(Encoding):
    """Factors of the mask, prepended to queries and keys: q^ = [N1, q], k^ = [N2, k] (FLT, eq. 3).

    N1 is (b, h, queries, 2r) and N2 is (b, h, keys, 2r), unless both are randomly projected.
    """

    supports = (KERNELIZED,)

    columns: tuple[Columns, Columns]

    def __init__(self, left: Columns, right: Columns) -> None:
        self.columns = left, right

    def dense(self, queries: int, keys: int) -> Tensor | None:
        left, right = self.columns
        if isinstance(left, Tensor) and isinstance(right, Tensor):
            return products_of_all(left, right)
        return None


class _Multiplied(Encoding):
    """Base class for multiplicative positional kernels with corrections for individual pairs."""

    supports = (KERNELIZED,)

    def __init__(self, pairs: Pairs | None = None) -> None:
        self.pairs = pairs
        self._matrix: Shared[Tensor] = Shared()
        self._by_query: Shared[Pairs | SortedPairs] = Shared()

    def _sorted_pairs(self, terms: Terms) -> Pairs | SortedPairs | None:
        """Returns the pairs sorted by query, which all layers share."""
        if (pairs := self.pairs) is None:
            return None
        batch, queries, keys = terms.value.shape[0], terms.query.tokens, terms.key.tokens
        return self._by_query.get(lambda: pairs.by_query(batch, queries, keys))

    def _far_kernel(self, queries: int, keys: int) -> Tensor:
        """Returns the kernel without the corrections w: (b, h, queries, keys)."""
        raise NotImplementedError

    def dense(self, queries: int, keys: int) -> Tensor:
        def compute() -> Tensor:
            matrix = self._far_kernel(queries, keys)
            if self.pairs is None:
                return matrix
            return matrix + self.pairs.dense(matrix.shape[0], queries, keys)

        return self._matrix.get(compute)

    def _matrix_kernel(self, queries: int, keys: int) -> dict[str, Tensor]:
        return {"kernel": self.dense(queries, keys)}


class Kernel(_Multiplied):
    """Multiplicative positional kernel: A_ij = (U_i . V_j + w_ij) phi(q_i) . phi(k_j).

    U is (b, h, queries, p) and V is (b, h, keys, p). `pairs` contains w (the near field), and
    `pairs.exact` defines terms that are added to A_ij directly.
    """

    kernel: tuple[Tensor, Tensor]

    def __init__(self, left: Tensor, right: Tensor, pairs: Pairs | None = None) -> None:
        super().__init__(pairs)
        self.kernel = left, right

    def _far_kernel(self, queries: int, keys: int) -> Tensor:
        return products_of_all(*self.kernel)

    def mix(self, terms: Terms) -> tuple[Sums, State | None]:
        if not terms.causal:
            query, key, value = terms[:3]
            pairs = self._sorted_pairs(terms)
            return linear_with_kernel(query, key, value, self.kernel, pairs), None
        if self.pairs is not None:
            raise ValueError("causal attention does not support a near field; remove it")
        left, right = (factor.to(terms.value.dtype) for factor in self.kernel)
        query, key = terms.query.kronecker(left), terms.key.kronecker(right)
        return super().mix(terms._replace(query=query, key=key))


class MeshNodes(_Multiplied):
    """Multiplicative positional kernel on a mesh: A_ij = (h_ij + w_ij) phi(q_i) . phi(k_j).

    Queries and keys are the same tokens; `pairs` contains w, as in `Kernel`.
    """

    decodes = False
    chunked = False

    def __init__(self, on_mesh: MeshKernel, pairs: Pairs | None = None) -> None:
        super().__init__(pairs)
        self.on_mesh = on_mesh

    def _far_kernel(self, queries: int, keys: int) -> Tensor:
        return self.on_mesh.dense(queries)

    def mix(self, terms: Terms) -> tuple[Sums, State | None]:
        if terms.causal:
            raise ValueError("causal attention does not support a mesh; use reciprocal nodes")
        query, key, value = terms[:3]
        return linear_with_mesh(query, key, value, self.on_mesh, self._sorted_pairs(terms)), None

    def _matrix_is_cheaper(self, query: Operand, key: Operand, value: Tensor) -> bool:
        tokens, features, dim = query.x.shape[2], query.feature_map.width, value.shape[-1]
        return self.on_mesh.matrix_is_cheaper(tokens, features, dim)


class RaggedKernel(_Multiplied):
    """Positional kernel like `Kernel`, but with sums computed by Triton kernels; see `ragged`.

    The attention matrix cannot be formed.
    """

    supports = (TRITON,)
    decodes = False
    chunked = False

    def __init__(
        self,
        waves: Waves,
        positions: tuple[Tensor, Tensor],
        tokens: tuple[Ragged, Ragged],
        pairs: Pairs | None = None,
    ) -> None:
        super().__init__(pairs)
        self.waves, self.positions, self.tokens = waves, positions, tokens

    def mix(self, terms: Terms) -> tuple[Sums, State | None]:
        query, key, value = terms[:3]
        pairs = self._sorted_pairs(terms)
        return ragged(query, key, value, self.waves, self.positions, self.tokens, pairs), None


class Toeplitz(Encoding):
    """Multiplicative kernel that depends on offsets on a grid (NPRF, arXiv:2106.12566, sec. 3.2).

    See `molflt.attention.mixing.toeplitz.toeplitz` for the arguments.
    """

    supports = (KERNELIZED,)
    decodes = False
    chunked = False

    def __init__(self, log_kernel: Tensor, method: str = "auto") -> None:
        self.log_kernel = log_kernel
        self.method = method

    def dense(self, queries: int, keys: int) -> Tensor:
        return dense_log_kernel(self.log_kernel, queries, keys).exp()[None]

    def _matrix_kernel(self, queries: int, keys: int) -> dict[str, Tensor]:
        return {"log_kernel": dense_log_kernel(self.log_kernel, queries, keys)}

    def mix(self, terms: Terms) -> tuple[Sums, State | None]:
        query, key, value = terms[:3]
        return toeplitz(query, key, value, self.log_kernel, terms.causal, self.method), None

    def _matrix_is_cheaper(self, query: Operand, key: Operand, value: Tensor) -> bool:
        return False  # for few tokens, `toeplitz` chooses "blocks"


class Rotation(Encoding):
    """Encoding that transforms scaled queries and keys depending on their positions."""

    def __init__(self, turn_query: _Turn, turn_key: _Turn) -> None:
        self.turn_query, self.turn_key = turn_query, turn_key

    def transform(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return self.turn_query(query), self.turn_key(key)
