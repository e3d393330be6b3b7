"""Triton kernels for `ragged`; imported on first use.

The function F = sum_n sum_s sum_ab phi_na w_nb [cos(theta_ns) C_sab + sin(theta_ns) S_sab], with
theta_ns = 2 pi xi_s . r_n, is linear in phi, in w and in the state (C, S) of a graph.
`state_kernel` computes the gradient of F with respect to the state, and `token_kernel` computes the
gradients with respect to w, phi and theta. These gradients yield the outputs of attention and their
derivatives. Sums have a fixed order.

Shapes: phi (heads, tokens, m); w (heads, tokens, width); r (tokens, l); xi (graphs, heads, r, l),
where a graph uses only its first `counts` (graphs,) nodes; the state (graphs, heads, r, 2, m,
width); pieces (pieces, 3), with the graph, the first token and the end of each piece.
"""

import triton
import triton.language as tl


@triton.jit
def _phase(pos, xi):
    """Computes cos and sin of 2 pi r . xi, of shape (block,), from r (block, l) and xi (l,)."""
    turns = tl.sum(pos * xi[None, :], axis=1)
    angle = (turns - tl.floor(turns + 0.5)) * 6.283185307179586
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def _rows(x, stride, tokens, valid, column, width):
    """Loads the rows of tokens from x, of shape (block, columns); 0 outside of x."""
    inside = valid[:, None] & (column < width)[None, :]
    return tl.load(x + tokens[:, None] * stride + column[None, :], inside, 0.0)


@triton.jit
def state_kernel(
    phi, w, pos, xi, counts, pieces, out,
    phi_head, phi_token, w_head, w_token, xi_graph, xi_head, xi_node,
    m, width, axes, nodes,
    BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Computes the contribution of one piece to the state, for a head, a node and M features."""
    piece, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    parts = tl.cdiv(m, M)
    node, part = tl.program_id(2) // parts, tl.program_id(2) % parts
    graph = tl.load(pieces + 3 * piece)
    start, stop = tl.load(pieces + 3 * piece + 1), tl.load(pieces + 3 * piece + 2)
    stop = tl.where(node < tl.load(counts + graph), stop, start)
    dtype: tl.constexpr = phi.dtype.element_ty
    precision: tl.constexpr = "tf32x3" if dtype == tl.float32 else "ieee"
    feature, column, axis = part * M + tl.arange(0, M), tl.arange(0, N), tl.arange(0, L)
    wave = xi + graph * xi_graph + head * xi_head + node * xi_node
    frequency = tl.load(wave + axis, axis < axes, 0.0)
    cosines = tl.zeros((M, N), dtype)
    sines = tl.zeros((M, N), dtype)
    for first in range(start, stop, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        valid = tokens < stop
        x = _rows(phi + head * phi_head, phi_token, tokens, valid, feature, m)
        value = _rows(w + head * w_head, w_token, tokens, valid, column, width).to(dtype)
        position = _rows(pos, axes, tokens, valid, axis, axes)
        cos, sin = _phase(position, frequency)
        cosines += tl.dot(tl.trans(x * cos[:, None]), value, input_precision=precision)
        sines += tl.dot(tl.trans(x * sin[:, None]), value, input_precision=precision)
    address = out + ((piece * tl.num_programs(1) + head) * nodes + node) * 2 * m * width
    address += feature[:, None] * width + column[None, :]
    inside = (feature < m)[:, None] & (column < width)[None, :]
    tl.store(address, cosines, inside)
    tl.store(address + m * width, sines, inside)


@triton.jit
def token_kernel(
    phi, w, pos, xi, counts, pieces, state, to_w, to_phi, to_pos, to_xi,
    phi_head, phi_token, w_head, w_token, xi_graph, xi_head, xi_node, all_tokens,
    m, width, axes, nodes,
    BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Computes the gradients with respect to w, phi, r and xi for one piece and head.

    Outputs that are None are skipped. Shapes: to_w (heads, tokens, width), to_phi (heads, tokens,
    m), to_pos (heads, tokens, l) and to_xi (pieces, heads, parts, r, l).
    """
    piece, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    parts = tl.cdiv(m, M)
    graph = tl.load(pieces + 3 * piece)
    start, stop = tl.load(pieces + 3 * piece + 1), tl.load(pieces + 3 * piece + 2)
    count = tl.load(counts + graph)
    dtype: tl.constexpr = phi.dtype.element_ty
    precision: tl.constexpr = "tf32x3" if dtype == tl.float32 else "ieee"
    column, axis = tl.arange(0, N), tl.arange(0, L)
    tokens = start + tl.arange(0, BLOCK)
    valid = tokens < stop
    row = head * all_tokens + tokens[:, None]  # row of the outputs
    position = _rows(pos, axes, tokens, valid, axis, axes)
    if w is not None:
        value = _rows(w + head * w_head, w_token, tokens, valid, column, width).to(dtype)
    by_w = tl.zeros((BLOCK, N), dtype)
    by_position = tl.zeros((BLOCK, L), dtype)
    for part in range(parts):
        feature = part * M + tl.arange(0, M)
        x = _rows(phi + head * phi_head, phi_token, tokens, valid, feature, m)
        by_phi = tl.zeros((BLOCK, M), dtype)
        for node in range(count):
            wave = xi + graph * xi_graph + head * xi_head + node * xi_node
            frequency = tl.load(wave + axis, axis < axes, 0.0)
            cos, sin = _phase(position, frequency)
            cos, sin = cos[:, None], sin[:, None]
            state_mask = (feature < m)[:, None] & (column < width)[None, :]
            address = state + ((graph * tl.num_programs(1) + head) * nodes + node) * 2 * m * width
            address += feature[:, None] * width + column[None, :]
            cosines = tl.load(address, state_mask, 0.0)
            sines = tl.load(address + m * width, state_mask, 0.0)
            if to_w is not None:
                by_w += tl.dot(x * cos, cosines, input_precision=precision)
                by_w += tl.dot(x * sin, sines, input_precision=precision)
            if to_phi is not None:
                cosines = tl.dot(value, tl.trans(cosines), input_precision=precision)
                sines = tl.dot(value, tl.trans(sines), input_precision=precision)
                by_phi += cos * cosines + sin * sines
                if to_pos is not None:
                    by_phase = 6.283185307179586 * tl.sum(x * (cos * sines - sin * cosines), axis=1)
                    by_position += by_phase[:, None] * frequency[None, :]
                    by_node = tl.sum(by_phase[:, None] * position, axis=0)
                    index = ((piece * tl.num_programs(1) + head) * parts + part) * nodes + node
                    tl.store(to_xi + index * axes + axis, by_node, axis < axes)
        if to_phi is not None:
            inside = valid[:, None] & (feature < m)[None, :]
            tl.store(to_phi + row * m + feature[None, :], by_phi, inside)
    if to_w is not None:
        inside = valid[:, None] & (column < width)[None, :]
        tl.store(to_w + row * width + column[None, :], by_w, inside)
    if to_pos is not None:
        inside = valid[:, None] & (axis < axes)[None, :]
        tl.store(to_pos + row * axes + axis[None, :], by_position, inside)


@triton.jit
def sum_kernel(x, ends, out, size, BLOCK: tl.constexpr):
    """Sums over the pieces of each graph, in order: (pieces, size) -> (graphs, size)."""
    graph = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    start, stop = tl.load(ends + graph), tl.load(ends + graph + 1)
    total = tl.zeros((BLOCK,), x.dtype.element_ty)
    for piece in range(start, stop):
        total += tl.load(x + piece * size + column, inside, 0.0)
    tl.store(out + graph * size + column, total, inside)
