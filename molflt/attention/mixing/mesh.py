"""Sums over keys under a positional kernel on a mesh: its cost per token does not grow with N."""

from typing import NamedTuple

import torch
from torch import Tensor

from molflt.attention.features import Features
from molflt.attention.mixing.pairs import Pairs, _pair_sums
from molflt.attention.mixing.stencil import Stencil, gather, spread
from molflt.attention.mixing.sums import Sums, _stabilize
from molflt.attention.nodes.mesh import Mesh
from molflt.attention.numerics import at_least_float32, recomputed, uncompiled

_CHANNELS = 272  # products of features and values on the mesh at once; more are no faster
_MOST_ON_MESH = 2**26  # numbers
_SPARSE = 4  # times as long as in a dense product a multiplication takes in a sparse one


class MeshKernel(NamedTuple):
    """A kernel h(r_i - r_j) of the tokens of a batch, by a mesh for each graph."""

    rows: Tensor
    """(tokens,), place of each token among batch x tokens"""
    stencil: Stencil
    """tokens of all graphs on the points of all meshes"""
    weight: Tensor
    """(tokens, s), of the splines"""
    meshes: tuple[Mesh, ...]
    coefficients: tuple[Tensor, ...]
    """(heads or 1, r) of each graph"""

    @property
    def heads(self) -> int:
        """1 if all heads have the same kernel."""
        return len(self.coefficients[0])

    def matrix_is_cheaper(self, tokens: int, features: int, dim: int) -> bool:
        """Whether the N x N form takes less time, for N tokens, m features and values of dv."""
        on_mesh = 2 * _SPARSE * self.stencil.places.shape[1]
        return tokens * (features + dim + on_mesh) < features * dim * on_mesh

    def apply(self, x: Tensor, head: int) -> Tensor:
        """sum_j h(r_i - r_j) x_j over the tokens of the same graph, (tokens, channels)."""
        head = min(head, self.heads - 1)
        weight = self.weight.to(x.dtype)
        grids = spread(weight, x, self.stencil).split([mesh.points for mesh in self.meshes])
        parts = zip(self.meshes, grids, self.coefficients, strict=True)
        convolved = [mesh.convolve(grid, c[head].to(x.dtype)) for mesh, grid, c in parts]
        return gather(weight, torch.cat(convolved), self.stencil)

    @uncompiled
    def dense(self, tokens: int) -> Tensor:
        """The matrix of the kernel, (batch, heads or 1, tokens, tokens)."""
        graph, place = self.rows // tokens, self.rows % tokens
        with torch.autocast(place.device.type, enabled=False):
            one = torch.zeros(len(place), tokens, dtype=self.weight.dtype, device=place.device)
            one[torch.arange(len(place), device=place.device), place] = 1.0
            parts = one.split(_CHANNELS, dim=1)
            found = [
                torch.cat([recomputed(self.apply, part, head) for part in parts], dim=1)
                for head in range(self.heads)
            ]
            out = one.new_zeros(len(self.meshes), tokens, self.heads, tokens)
            return out.index_put((graph, place), torch.stack(found, dim=1)).transpose(1, 2)


@uncompiled
def linear_with_mesh(
    query: Features, key: Features, value: Tensor, kernel: MeshKernel, pairs: Pairs | None = None
) -> Sums:
    """A_ij = (h(r_i - r_j) + w_ij) phi(q_i) . phi(k_j) in time O(N m dv + pairs (m + dv)).

    sum_a phi_a(q_i) sum_j h(r_i - r_j) [phi_a(k_j) v_j], head by head and a few features a at a
    time, which are computed again in the backward pass: they are all that is on the mesh at once.

    Args:
        query: (batch, heads, tokens, m).
        key: (batch, heads, tokens, m).
        value: (batch, heads, tokens, dv).
        kernel: h.
        pairs: w.
    """
    with torch.autocast(value.device.type, enabled=False):
        phi_q, phi_k, shift = _stabilize(query.at_least_float32(), key.at_least_float32())
        value = at_least_float32(value)
        value = torch.cat((value, torch.ones_like(value[..., :1])), dim=-1)
        batch, heads, tokens, width = value.shape
        q, k, v = (x.transpose(1, 2).flatten(0, 1)[kernel.rows] for x in (phi_q, phi_k, value))
        most = min(_CHANNELS, max(1, _MOST_ON_MESH // max(1, kernel.stencil.points)))
        features = max(1, most // width)
        found = []
        for head in range(heads):
            parts = zip(q[:, head].split(features, 1), k[:, head].split(features, 1), strict=True)
            sums = v.new_zeros(())
            for a, b in parts:
                several = heads > 1 or features < q.shape[-1]
                sums = sums + recomputed(_part, a, b, v[:, head], kernel, head, several=several)
            found.append(sums)
        out = value.new_zeros(batch * tokens, heads, width)
        if len(kernel.rows):
            out = out.index_copy(0, kernel.rows, torch.stack(found, dim=1))
        out = out.unflatten(0, (batch, tokens)).transpose(1, 2)
        if pairs is not None:
            out = out + _pair_sums(phi_q, phi_k, value, pairs)
        return Sums(out[..., :-1], out[..., -1:], shift)


def _part(query: Tensor, key: Tensor, value: Tensor, kernel: MeshKernel, head: int) -> Tensor:
    """Of some features of one head: (tokens, m'), (tokens, m') and (tokens, dv) -> (tokens, dv)."""
    products = (key[:, :, None] * value[:, None, :]).flatten(1)
    mixed = kernel.apply(products, head).unflatten(1, (key.shape[1], -1))
    return torch.einsum("na,nav->nv", query, mixed)
