"""Kernelized attention with a positional kernel, in Triton, for graphs of different sizes.

Each token needs memory for m features, and each graph for a state of 2 r m (dv + 1) numbers.
Fourier factors and products with them are not stored.
"""

import importlib.util
import itertools
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from molflt.attention.features import Features
from molflt.attention.mixing.pairs import Pairs, SortedPairs, _pair_sums
from molflt.attention.mixing.sums import Sums, _stable_query, with_ones
from molflt.attention.numerics import ceil_div, finite, next_power_of_two, recomputed, uncompiled

_BLOCK = 64  # tokens per program
_FEATURES = 64  # largest number of features per program; half as many for wide values
_LEAST_PIECE = 512  # minimum number of tokens per piece, except the last piece of a graph
_MOST_PIECES = 128  # maximum number of pieces per graph
_STATE = 2**26  # nodes are summed in chunks if the states of all pieces have more elements


def expect_triton() -> None:
    """Raises ValueError unless Triton kernels can run, on a GPU or in Triton's interpreter."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not (importlib.util.find_spec("triton") and (torch.cuda.is_available() or interpreted)):
        raise ValueError(
            "mixing='triton' needs a GPU with CUDA, or TRITON_INTERPRET=1 for tests on a CPU, and "
            "the package triton (pip install 'molflt[gpu]'); use mixing='auto'"
        )


class Waves(NamedTuple):
    """Nodes of a positional kernel h(z) = Re sum_s c_s exp(2 pi i xi_s . z)."""

    xi: Tensor  # (graphs or 1, heads or 1, r, l)
    coefficients: Tensor  # c (graphs or 1, heads, r), real or complex
    counts: Tensor | None = None  # (graphs,), nodes of each graph; None if all have r nodes


class _Phases(NamedTuple):
    """Tensors that determine the phases 2 pi xi_s . r_n of tokens."""

    pos: Tensor  # r (tokens, l)
    xi: Tensor  # (graphs, heads, r, l)
    counts: Tensor  # (graphs,), nodes of each graph


class Ragged(NamedTuple):
    """Tokens of consecutive graphs; rows of `pieces` are (graph, first token, end)."""

    graph: Tensor  # (tokens,), graph of each token, ascending
    pieces: Tensor  # (pieces, 3), for sums over tokens
    ends: Tensor  # (graphs + 1,), index of the first piece of each graph, then the number of pieces
    blocks: Tensor  # (blocks, 3), pieces of at most `_BLOCK` tokens
    block_ends: Tensor  # (graphs + 1,), like `ends`, for blocks

    @classmethod
    def of(cls, first: list[int], device: torch.device) -> "Ragged":
        """Cuts graphs into pieces.

        `first` lists the first token of each graph, followed by the total number of tokens.
        """
        counts = [stop - start for start, stop in itertools.pairwise(first)]
        graph = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.long))
        pieces, ends = _cut(
            first, [max(_LEAST_PIECE, ceil_div(count, _MOST_PIECES)) for count in counts]
        )
        blocks, block_ends = _cut(first, [_BLOCK] * len(counts))
        fields = graph, pieces, ends, blocks, block_ends
        return cls(*(x.to(device) for x in fields))

    @classmethod
    def of_rows(cls, positions: Tensor) -> "Ragged":
        """Cuts the rows of a batch with positions (batch, tokens, l), each of which is a graph."""
        batch, tokens, _ = positions.shape
        return cls.of([row * tokens for row in range(batch + 1)], positions.device)


def _cut(first: list[int], sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Cuts each graph into pieces of the length in `sizes`; returns `pieces` and `ends`."""
    rows: list[tuple[int, int, int]] = []
    ends = [0]
    for graph, (start, stop, size) in enumerate(zip(first[:-1], first[1:], sizes, strict=True)):
        rows += [(graph, begin, min(begin + size, stop)) for begin in range(start, stop, size)]
        ends.append(len(rows))
    return torch.tensor(rows, dtype=torch.long).view(-1, 3), torch.tensor(ends)


@uncompiled
def ragged(
    query: Features,
    key: Features,
    value: Tensor,
    waves: Waves,
    positions: tuple[Tensor, Tensor],
    tokens: tuple[Ragged, Ragged],
    pairs: Pairs | SortedPairs | None = None,
) -> Sums:
    """Computes `linear_with_kernel` within each graph; supports only first derivatives.

    Each row of the batch is one graph, but a batch with a single row may contain several graphs.
    Rows are joined before the computation.

    Args:
        query, key, value, pairs: see `linear_with_kernel`.
        waves: nodes and coefficients of the kernel.
        positions: positions of queries and keys, each (batch * tokens, l).
        tokens: tokens of the queries and of the keys.
    """
    batch, heads, _, width = value.shape
    phi_q, phi_k, shift = _stabilize(_join_rows(query), _join_rows(key), *tokens)
    value, dtype = _one_row(value), phi_q.dtype
    xi, c, counts = _per_graph(waves, len(tokens[0].ends) - 1, heads, dtype)
    r_q, r_k = (x.to(dtype).contiguous() for x in positions)
    states = max(len(x.pieces) for x in tokens) * heads * 2 * phi_q.shape[-1] * (width + 1)
    chunk = max(1, _STATE // max(1, states))
    several = chunk < xi.shape[2]
    sums = phi_q.new_zeros(heads, phi_q.shape[2], width + 1)
    for first in range(0, xi.shape[2], chunk):
        part = slice(first, first + chunk)
        nodes = xi[:, :, part], c[..., part], (counts - first).clamp(0, chunk)
        inputs = phi_q[0], phi_k[0], value[0], r_q, r_k, *nodes, *tokens
        sums = sums + recomputed(_node_sums, *inputs, several=several)
    sums = sums[None]
    if pairs is not None:
        sums = sums + _pair_sums(phi_q, phi_k, with_ones(value), pairs)
    shift = shift.expand(1, heads, phi_q.shape[2], 1)
    sums, shift = (x[0].unflatten(1, (batch, -1)).transpose(0, 1) for x in (sums, shift))
    return Sums.of(sums, shift)


def _per_graph(waves: Waves, graphs: int, heads: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Returns the fields of `Waves` for each graph; xi and real coefficients are in `dtype`."""
    xi, c, counts = waves
    xi = xi.to(dtype).contiguous().expand(graphs, heads, -1, -1)
    c = c.to(torch.promote_types(dtype, torch.complex64) if c.is_complex() else dtype)
    if counts is None:
        counts = torch.full((graphs,), xi.shape[2], device=xi.device)
    return xi, c.expand(graphs, -1, -1), counts


def _join_rows(features: Features) -> Features:
    return Features(*(None if x is None else _one_row(x) for x in features))


def _one_row(x: Tensor) -> Tensor:
    """Joins the rows of a batch: (batch, heads, tokens, n) -> (1, heads, batch tokens, n)."""
    return x.transpose(0, 1).flatten(1, 2)[None]


def _stabilize(
    query: Features, key: Features, queries: Ragged, keys: Ragged
) -> tuple[Tensor, Tensor, Tensor]:
    """Scales features as `sums._stabilize` does, but takes maxima over the keys of each graph."""
    log_k = key.log_scale
    if log_k is None:
        phi_q, shift = _stable_query(query, None)
        return phi_q, key.materialize(), shift
    index = keys.graph[:, None].expand_as(log_k)
    key_max = log_k.new_full((*log_k.shape[:2], len(keys.ends) - 1, log_k.shape[-1]), -torch.inf)
    key_max = finite(key_max.scatter_reduce(2, index, log_k.detach(), "amax"))
    phi_q, shift = _stable_query(query, key_max.index_select(2, queries.graph))
    return phi_q, key.shifted(key_max.index_select(2, keys.graph)), shift


def _node_sums(
    phi_q: Tensor,
    phi_k: Tensor,
    value: Tensor,
    r_q: Tensor,
    r_k: Tensor,
    xi: Tensor,
    c: Tensor,
    counts: Tensor,
    queries: Ragged,
    keys: Ragged,
) -> Tensor:
    """Returns the weighted sums of [v, 1] over keys: (heads, tokens, dv + 1)."""
    state = _State.apply(phi_k, value, r_k, xi, counts, keys)  # [g, h, r, 2, m, dv + 1]
    c = c[..., None, None]
    if c.is_complex():
        cosines, sines = state.unbind(3)
        cosines, sines = c.real * cosines + c.imag * sines, c.real * sines - c.imag * cosines
        state = torch.stack((cosines, sines), dim=3)
    else:
        state = c[..., None] * state
    return _Output.apply(phi_q, state, r_q, xi, counts, queries)


class _State(torch.autograd.Function):
    """Sums of exp(2 pi i xi . r) phi [v, 1] over the tokens of each graph."""

    @staticmethod
    def forward(
        ctx: Any, phi: Tensor, v: Tensor, pos: Tensor, xi: Tensor, counts: Tensor, tokens: Ragged
    ) -> Tensor:
        ctx.save_for_backward(phi, v, pos, xi, counts)
        ctx.tokens = tokens
        return _graph_sums(phi, v, _Phases(pos, xi, counts), tokens, ones=True)

    @staticmethod
    def backward(ctx: Any, by_state: Tensor) -> Any:
        _expect_first_derivative()
        phi, v, *phases = ctx.saved_tensors
        for_phases = any(ctx.needs_input_grad[2:4])
        by_v, by_phi, by_pos, by_xi = _token_sums(
            phi, v, by_state, _Phases(*phases), ctx.tokens, ones=True, for_phases=for_phases
        )
        return by_phi, by_v[..., :-1].to(v.dtype), by_pos, by_xi, None, None


class _Output(torch.autograd.Function):
    """Contraction of the state of a graph with exp(2 pi i xi . r) phi for each of its tokens."""

    @staticmethod
    def forward(
        ctx: Any, phi: Tensor, state: Tensor, pos: Tensor, xi: Tensor, counts: Tensor, tokens: Any
    ) -> Tensor:
        ctx.save_for_backward(phi, state, pos, xi, counts)
        ctx.tokens = tokens
        return _token_sums(phi, None, state, _Phases(pos, xi, counts), tokens)[0]

    @staticmethod
    def backward(ctx: Any, by_out: Tensor) -> Any:
        _expect_first_derivative()
        phi, state, *saved = ctx.saved_tensors
        phases, for_phases = _Phases(*saved), any(ctx.needs_input_grad[2:4])
        _, by_phi, by_pos, by_xi = _token_sums(
            phi, by_out, state, phases, ctx.tokens, for_phases=for_phases
        )
        return by_phi, _graph_sums(phi, by_out, phases, ctx.tokens), by_pos, by_xi, None, None


def _expect_first_derivative() -> None:
    if torch.is_grad_enabled():
        raise ValueError("mixing='triton' supports first derivatives only; use mixing='auto'")


def _graph_sums(
    phi: Tensor, w: Tensor, phases: _Phases, tokens: Ragged, ones: bool = False
) -> Tensor:
    """Returns sums of phi w times cos and sin of the phases: (graphs, heads, r, 2, m, width).

    With `ones`, a column of ones is appended to w.
    """
    from molflt.attention.mixing import triton_kernels as kernels

    pos, xi, counts = phases
    width = w.shape[-1] + 1 if ones else w.shape[-1]
    arguments = _arguments(phi, w, xi, w.shape[-1], ones)
    heads, _, m = phi.shape
    out = phi.new_empty(len(tokens.pieces), heads, xi.shape[2], 2, m, width)
    if out.numel():
        grid = len(out), heads, xi.shape[2] * ceil_div(m, arguments["M"])
        inputs = {"pos": pos, "counts": counts, "pieces": tokens.pieces}
        kernels.state_kernel[grid](**arguments, **inputs, out=out)
    return _summed(out, tokens.ends)


def _token_sums(
    phi: Tensor,
    w: Tensor | None,
    state: Tensor,
    phases: _Phases,
    tokens: Ragged,
    ones: bool = False,
    for_phases: bool = False,
) -> tuple[Any, ...]:
    """Returns contractions of a state with the factors of each token.

    The function F of `triton_kernels` is linear in w, phi and the phases. Returns its derivatives
    with respect to w (heads, tokens, width), phi, pos and xi. The derivative with respect to w is
    None if w is given without `ones`; that with respect to phi is None without w; the last two are
    None without `for_phases`.
    """
    from molflt.attention.mixing import triton_kernels as kernels

    pos, xi, counts = phases
    (heads, count, m), axes, blocks = phi.shape, pos.shape[1], tokens.blocks
    width = state.shape[-1]
    arguments = _arguments(phi, w, xi, width - 1 if ones else width, ones)
    to_w = phi.new_empty(heads, count, width) if w is None or ones else None
    to_phi = None if w is None else phi.new_empty(phi.shape)
    to_pos = to_xi = None
    if for_phases:
        to_pos = phi.new_empty(heads, count, axes)
        to_xi = phi.new_zeros(len(blocks), heads, ceil_div(m, arguments["M"]), xi.shape[2], axes)
    if phi.numel():
        out = {"to_w": to_w, "to_phi": to_phi, "to_pos": to_pos, "to_xi": to_xi}
        inputs = {"pos": pos, "counts": counts, "pieces": blocks, "state": state.contiguous()}
        kernels.token_kernel[len(blocks), heads](
            **arguments, **inputs, **out, all_tokens=count, PHASES=for_phases
        )
    if to_pos is None or to_xi is None:
        return to_w, to_phi, None, None
    return to_w, to_phi, to_pos.sum(dim=0), _summed(to_xi.sum(dim=2), tokens.block_ends)


def _arguments(phi: Tensor, w: Tensor | None, xi: Tensor, n: int, ones: bool) -> dict[str, Any]:
    """Returns the arguments that `state_kernel` and `token_kernel` share, for w of n columns."""
    arguments: dict[str, Any] = {"xi": xi, "xi_graph": xi.stride(0), "xi_head": xi.stride(1)}
    arguments |= {"xi_node": xi.stride(2), "nodes": xi.shape[2], "axes": xi.shape[3]}
    for name, x in {"phi": phi, "w": w}.items():
        x = x if x is None or x.stride(-1) == 1 else x.contiguous()
        strides = (0, 0) if x is None else x.stride()
        arguments |= {name: x, f"{name}_head": strides[0], f"{name}_token": strides[1]}
    # `tl.dot` needs blocks of at least 16 rows and columns.
    m, width = phi.shape[-1], max(16, next_power_of_two(n + 1 if ones else n))
    features = max(16, next_power_of_two(min(m, _FEATURES if width <= 64 else _FEATURES // 2)))
    arguments |= {"m": m, "n": n, "ONES": ones, "BLOCK": _BLOCK, "M": features, "N": width}
    # With one stage, blocks fit into 99 KiB of shared memory for values of up to 63 columns.
    return arguments | {"L": next_power_of_two(xi.shape[3]), "num_stages": 1}


def _summed(x: Tensor, ends: Tensor) -> Tensor:
    """Sums over the pieces of each graph, in order: (pieces, ...) -> (graphs, ...)."""
    from molflt.attention.mixing import triton_kernels as kernels

    out = x.new_empty(len(ends) - 1, *x.shape[1:])
    if out.numel():
        size = out[0].numel()
        kernels.sum_kernel[len(out), ceil_div(size, 1024)](x, ends, out, size, BLOCK=1024)
    return out
