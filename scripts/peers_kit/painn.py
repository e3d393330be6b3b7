"""PaiNN (Schütt, Unke and Gastegger, arXiv:2102.03150) on periodic edges.

Written here because what has it, schnetpack, wants another release of torch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from peers_kit.nets import Peer, TaggedEmbedding

_EPS = 1e-8  # under the root of a norm, whose gradient is not finite at 0


class PeriodicPaiNN(Peer):
    """Scalars and vectors of atoms, refined by messages and updates (section 4).

    Args:
        features: of each atom, scalars and vectors.
        layers: pairs of a message and an update.
        num_basis: radial functions.
        cutoff: Å.
    """

    def __init__(
        self, features: int = 128, layers: int = 3, num_basis: int = 20, cutoff: float = 5.0
    ) -> None:
        super().__init__(cutoff)
        self.cutoff = cutoff
        self.num_basis = num_basis
        self.embedding = TaggedEmbedding(nn.Embedding(1, features))
        nn.init.normal_(self.embedding.element.weight)
        self.messages = nn.ModuleList(_Message(features, num_basis) for _ in range(layers))
        self.updates = nn.ModuleList(_Update(features) for _ in range(layers))
        self.readout = _mlp(features, features // 2, 1)
        nn.init.zeros_(self.readout[-1].weight)

    def atomic(self, codes: Tensor, edges: Data) -> Tensor:
        return self.readout(self.features(codes, edges)[0])[:, 0]

    def features(self, codes: Tensor, edges: Data) -> tuple[Tensor, Tensor]:
        """Scalars (atoms, features) and vectors (atoms, 3, features) after the last layer."""
        scalars = self.embedding(codes)
        vectors = scalars.new_zeros(len(codes), 3, scalars.shape[1])
        distance = edges.edge_weight[:, None]
        unit, basis = edges.edge_vec / distance, self._basis(distance)
        for message, update in zip(self.messages, self.updates, strict=True):
            scalars, vectors = message(scalars, vectors, edges.edge_index, unit, basis)
            scalars, vectors = update(scalars, vectors)
        return scalars, vectors

    def _basis(self, distance: Tensor) -> tuple[Tensor, Tensor]:
        """sin(n pi r / cutoff) / r, (edges, num_basis), and the cosine cutoff, (edges, 1)."""
        number = torch.arange(1, self.num_basis + 1, device=distance.device)
        angle = distance * (math.pi / self.cutoff)
        return (number * angle).sin() / distance, 0.5 * (angle.cos() + 1)


class _Message(nn.Module):
    """Equations 7 and 8: filters of the distance times a net of the neighbor's scalars."""

    def __init__(self, features: int, num_basis: int) -> None:
        super().__init__()
        self.net = _mlp(features, features, 3 * features)
        self.filter = _linear(num_basis, 3 * features)

    def forward(
        self,
        scalars: Tensor,
        vectors: Tensor,
        edge_index: Tensor,
        unit: Tensor,
        basis: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        source, target = edge_index
        radial, gate = basis
        weights = self.net(scalars)[source] * (self.filter(radial) * gate)
        to_scalars, of_vectors, along = weights.chunk(3, dim=1)
        moved = vectors[source] * of_vectors[:, None] + unit[:, :, None] * along[:, None]
        return scalars.index_add(0, target, to_scalars), vectors.index_add(0, target, moved)


class _Update(nn.Module):
    """Equations 9 and 10: each atom's scalars and vectors among themselves."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.mix = _linear(features, 2 * features, bias=False)
        self.net = _mlp(2 * features, features, 3 * features)

    def forward(self, scalars: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        u, v = self.mix(vectors).chunk(2, dim=2)
        norm = (v.square().sum(dim=1) + _EPS).sqrt()
        weights = self.net(torch.cat((scalars, norm), dim=1))
        of_vectors, of_products, own = weights.chunk(3, dim=1)
        scalars = scalars + own + of_products * (u * v).sum(dim=1)
        return scalars, vectors + of_vectors[:, None] * u


def _linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=bias)
    nn.init.xavier_uniform_(made.weight)
    if bias:
        nn.init.zeros_(made.bias)
    return made


def _mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(_linear(inputs, hidden), nn.SiLU(), _linear(hidden, outputs))
