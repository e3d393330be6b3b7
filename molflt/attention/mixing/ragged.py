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

_Both = tuple[Tensor, Tensor]  # of queries and of keys


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


class _Inputs(NamedTuple):
    """Arguments of the function F of `triton_kernels`; the state or w is None if it is computed."""

    phi: Tensor  # features (heads, tokens, m)
    w: Tensor | None  # values and a 1, (heads, tokens, dv + 1)
    state: Tensor | None  # (graphs, heads, r, 2, m, dv + 1)
    pos: Tensor  # positions (tokens, l)
    xi: Tensor  # nodes (graphs, heads, r, l)
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
    positions: _Both,
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
    w, dtype = with_ones(_one_row(value)), phi_q.dtype
    xi, c, counts = _per_graph(waves, len(tokens[0].ends) - 1, heads, dtype)
    positions = positions[0].to(dtype).contiguous(), positions[1].to(dtype).contiguous()
    states = max(len(x.pieces) for x in tokens) * heads * 2 * phi_q.shape[-1] * (width + 1)
    chunk = max(1, _STATE // max(1, states))
    several = chunk < xi.shape[2]
    sums = phi_q.new_zeros(heads, phi_q.shape[2], width + 1)
    for first in range(0, xi.shape[2], chunk):
        part = slice(first, first + chunk)
        nodes = Waves(xi[:, :, part], c[..., part], (counts - first).clamp(0, chunk))
        inputs = (phi_q[0], phi_k[0]), w[0], positions, nodes, tokens
        sums = sums + recomputed(_node_sums, *inputs, several=several)
    sums = sums[None]
    if pairs is not None:
        sums = sums + _pair_sums(phi_q, phi_k, w, pairs)
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
    phi: _Both, w: Tensor, positions: _Both, nodes: Waves, tokens: tuple[Ragged, Ragged]
) -> Tensor:
    """Returns the weighted sums of w = [v, 1] over keys: (heads, tokens, dv + 1)."""
    xi, c, counts = nodes
    state = _Derivative.apply("state", tokens[1], phi[1], w, None, positions[1], xi, counts)
    c = c[..., None, None]
    if c.is_complex():
        cosines, sines = state.unbind(3)
        cosines, sines = c.real * cosines + c.imag * sines, c.real * sines - c.imag * cosines
        state = torch.stack((cosines, sines), dim=3)
    else:
        state = c[..., None] * state
    return _Derivative.apply("w", tokens[0], phi[0], None, state, positions[0], xi, counts)


class _Derivative(torch.autograd.Function):
    """dF / dx, where x is the state of each graph or w of each token.

    F is linear in x: a sum of g dF / dx is F with x = g. Its gradients are derivatives of this F.
    """

    @staticmethod
    def forward(ctx: Any, x: str, tokens: Ragged, *inputs: Any) -> Tensor:
        ctx.x, ctx.tokens = x, tokens
        ctx.save_for_backward(*inputs)
        return _derivatives([x], _Inputs(*inputs), tokens)[x]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise ValueError("mixing='triton' supports first derivatives only; use mixing='auto'")
        inputs = _Inputs(*ctx.saved_tensors)._replace(**{ctx.x: grad})
        needed = zip(_Inputs._fields, ctx.needs_input_grad[2:], strict=True)
        by = _derivatives([name for name, is_needed in needed if is_needed], inputs, ctx.tokens)
        return None, None, *map(by.get, _Inputs._fields)


def _derivatives(names: list[str], inputs: _Inputs, tokens: Ragged) -> dict[str, Tensor]:
    """Returns the derivatives of F with respect to the inputs in `names`, by name."""
    by = {"state": _by_state(inputs, tokens)} if "state" in names else {}
    of_tokens = [name for name in names if name != "state"]
    return by | _by_token(of_tokens, inputs, tokens) if of_tokens else by


def _by_state(inputs: _Inputs, tokens: Ragged) -> Tensor:
    """Returns dF / dstate, summed over the tokens of each graph."""
    from molflt.attention.mixing import triton_kernels as kernels

    phi, w, _, _, xi, _ = inputs
    assert w is not None
    arguments = _arguments(inputs, w.shape[-1])
    out = phi.new_empty(len(tokens.pieces), len(phi), xi.shape[2], 2, phi.shape[-1], w.shape[-1])
    if out.numel():
        grid = len(out), len(phi), xi.shape[2] * ceil_div(phi.shape[-1], arguments["M"])
        kernels.state_kernel[grid](**arguments, pieces=tokens.pieces, out=out)
    return _summed(out, tokens.ends)


def _by_token(names: list[str], inputs: _Inputs, tokens: Ragged) -> dict[str, Tensor]:
    """Returns the derivatives of F with respect to the inputs in `names`, which are of tokens."""
    from molflt.attention.mixing import triton_kernels as kernels

    phi, _, state, _, xi, _ = inputs
    assert state is not None
    (heads, count, m), (nodes, axes), blocks = phi.shape, xi.shape[2:], tokens.blocks
    arguments = _arguments(inputs, state.shape[-1])
    together = [] if {"pos", "xi"}.isdisjoint(names) else ["phi", "pos", "xi"]
    shapes = {
        "w": (heads, count, state.shape[-1]),
        "phi": (heads, count, m),
        "pos": (heads, count, axes),
        "xi": (len(blocks), heads, ceil_div(m, arguments["M"]), nodes, axes),
    }
    by = {name: phi.new_zeros(shapes[name]) for name in (*names, *together)}
    if phi.numel():
        arguments |= {f"to_{name}": by.get(name) for name in shapes}
        kernels.token_kernel[len(blocks), heads](
            **arguments, pieces=blocks, state=state.contiguous(), all_tokens=count
        )
    if "pos" in by:
        by |= {"pos": by["pos"].sum(dim=0), "xi": _summed(by["xi"].sum(dim=2), tokens.block_ends)}
    return {name: by[name] for name in names}


def _arguments(inputs: _Inputs, width: int) -> dict[str, Any]:
    """Returns the arguments that `state_kernel` and `token_kernel` share; w has `width` columns."""
    phi, w, _, pos, xi, counts = inputs
    arguments: dict[str, Any] = {"pos": pos, "xi": xi, "counts": counts}
    arguments |= zip(("xi_graph", "xi_head", "xi_node"), xi.stride()[:3], strict=True)
    for name, x in {"phi": phi, "w": w}.items():
        x = x if x is None or x.stride(-1) == 1 else x.contiguous()
        strides = (0, 0) if x is None else x.stride()
        arguments |= {name: x, f"{name}_head": strides[0], f"{name}_token": strides[1]}
    # `tl.dot` needs blocks of at least 16 rows and columns.
    m, axes, columns = phi.shape[-1], xi.shape[3], max(16, next_power_of_two(width))
    features = max(16, next_power_of_two(min(m, _FEATURES if columns <= 64 else _FEATURES // 2)))
    arguments |= {"m": m, "width": width, "axes": axes, "nodes": xi.shape[2]}
    arguments |= {"BLOCK": _BLOCK, "M": features, "N": columns, "L": next_power_of_two(axes)}
    # With one stage, blocks fit into 99 KiB of shared memory for values of up to 63 columns.
    return arguments | {"num_stages": 1}


def _summed(x: Tensor, ends: Tensor) -> Tensor:
    """Sums over the pieces of each graph, in order: (pieces, ...) -> (graphs, ...)."""
    from molflt.attention.mixing import triton_kernels as kernels

    out = x.new_empty(len(ends) - 1, *x.shape[1:])
    if out.numel():
        size = out[0].numel()
        kernels.sum_kernel[len(out), ceil_div(size, 1024)](x, ends, out, size, BLOCK=1024)
    return out
