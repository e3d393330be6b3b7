"""Sums over keys with a positional kernel on a mesh, at constant cost per token."""

from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from molflt.attention.features import Features
from molflt.attention.mixing.pairs import Pairs, SortedPairs, _pair_sums
from molflt.attention.mixing.sparse import Pattern, gather, spread
from molflt.attention.mixing.sums import Sums, _stabilize, with_ones
from molflt.attention.nodes.mesh import Mesh
from molflt.attention.numerics import recomputed, uncompiled

_CHANNELS = 272  # largest number of feature-value products on the mesh; more is not faster
_ON_MESH = 2**22  # maximum number of mesh values at a time; a single feature may exceed it
_SPARSE = 4  # time of a multiplication in a sparse product relative to that in a dense product


class MeshKernel(NamedTuple):
    """Kernel h(r_i - r_j) for the tokens of a batch, with one mesh per graph."""

    rows: Tensor  # (tokens,), index of each token in the flattened batch
    pattern: Pattern  # mesh points of each token, for all graphs and meshes
    weight: Tensor  # (tokens s,), spline weights of the s points around each token
    meshes: tuple[Mesh, ...]
    coefficients: tuple[Tensor, ...]  # (heads or 1, r) for each graph

    @property
    def heads(self) -> int:
        return len(self.coefficients[0])

    def matrix_is_cheaper(self, tokens: int, features: int, dim: int) -> bool:
        on_mesh = 2 * _SPARSE * len(self.weight) // max(1, len(self.rows))
        return tokens * (features + dim + on_mesh) < features * dim * on_mesh

    def apply(self, x: Tensor, head: int) -> Tensor:
        """Returns sum_j h(r_i - r_j) x_j over the tokens of each graph: (tokens, channels)."""
        head = 0 if self.heads == 1 else head  # all heads may share a kernel
        weight = self.weight.to(x.dtype)
        grids = spread(weight, x, self.pattern).split([mesh.points for mesh in self.meshes])
        graphs = zip(self.meshes, grids, self.coefficients, strict=True)
        convolved = [mesh.convolve(grid, c[head].to(x.dtype)) for mesh, grid, c in graphs]
        # torch.cat would copy a single grid
        joined = convolved[0] if len(convolved) == 1 else torch.cat(convolved)
        return gather(weight, joined, self.pattern)

    @uncompiled
    def dense(self, tokens: int) -> Tensor:
        """Returns the matrix of the kernel, of shape (batch, heads or 1, tokens, tokens)."""
        graph, token = self.rows // tokens, self.rows % tokens
        with torch.autocast(token.device.type, enabled=False):
            identity = self.weight.new_zeros(len(token), tokens)  # that of each graph
            identity[torch.arange(len(token), device=token.device), token] = 1.0
            chunks = identity.split(_CHANNELS, dim=1)
            by_head = [
                torch.cat([recomputed(self.apply, chunk, head) for chunk in chunks], dim=1)
                for head in range(self.heads)
            ]
            out = identity.new_zeros(len(self.meshes), tokens, self.heads, tokens)
            return out.index_put((graph, token), torch.stack(by_head, dim=1)).transpose(1, 2)


@uncompiled
def linear_with_mesh(
    query: Features,
    key: Features,
    value: Tensor,
    kernel: MeshKernel,
    pairs: Pairs | SortedPairs | None = None,
) -> Sums:
    """Computes sums with A_ij = (h(r_i - r_j) + w_ij) phi(q_i) . phi(k_j) in linear time.

    sum_a phi_a(q_i) sum_j h(r_i - r_j) [phi_a(k_j) v_j] is computed for one head and a few features
    at a time and is recomputed in the backward pass.
    """
    phi_q, phi_k, shift = _stabilize(query, key)
    value = with_ones(value)
    batch, heads, tokens, width = value.shape
    points = sum(mesh.points for mesh in kernel.meshes)
    at_once = max(1, min(_CHANNELS, _ON_MESH // max(1, points)) // width)  # features
    several = heads > 1 or at_once < phi_q.shape[-1]
    by_head = []
    # without slices, whose gradients would have the size of the whole tensor
    operands = zip(phi_q.unbind(1), phi_k.unbind(1), value.unbind(1), strict=True)
    for head, (q, k, v) in enumerate(operands):
        features = zip(q.split(at_once, dim=-1), k.split(at_once, dim=-1), strict=True)
        sums = (
            recomputed(_head_sums, phi_i, phi_j, v, kernel, head, several=several)
            for phi_i, phi_j in features
        )
        by_head.append(reduce(torch.add, sums))
    out = value.new_zeros(batch * tokens, heads, width)
    out = out.index_copy(0, kernel.rows, torch.stack(by_head, dim=1))
    out = out.unflatten(0, (batch, tokens)).transpose(1, 2)
    if pairs is not None:
        out = out + _pair_sums(phi_q, phi_k, value, pairs)
    return Sums.of(out, shift)


def _head_sums(query: Tensor, key: Tensor, value: Tensor, kernel: MeshKernel, head: int) -> Tensor:
    """Returns the sums of one head over the given features: (tokens of the kernel, dv)."""
    q, k, v = (x.flatten(0, 1).index_select(0, kernel.rows) for x in (query, key, value))
    products = (k[:, :, None] * v[:, None, :]).flatten(1)
    mixed = kernel.apply(products, head).unflatten(1, (k.shape[1], -1))
    return torch.einsum("na,nav->nv", q, mixed)
