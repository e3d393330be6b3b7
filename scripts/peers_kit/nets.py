"""SchNet, DimeNet++ and ViSNet from PyG, and PaiNN, with edges to periodic images.

PyG's own radius graphs need torch_cluster and ignore cells. Here, `molflt.graph.PBCRadiusGraph`
creates an edge for every image within the cutoff. Each network adds a learned vector per tag, which
is initially 0, to the embedding of the element. The initial output of each network is the mean
energy, as in DimeNet++. Otherwise, the other networks would spend much of a small budget on
learning the mean.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn.models import DimeNetPlusPlus, SchNet, ViSNet
from torch_geometric.nn.models.visnet import NeighborEmbedding

from molflt.atoms import MAX_ATOMIC_NUMBER, Tag
from molflt.graph import PBCRadiusGraph
from molflt.graph.geometry import Geometry

_ELEMENTS = MAX_ATOMIC_NUMBER + 1
_EPS = 1e-8  # added to a squared norm, because the gradient of a norm is not finite at 0


class TaggedEmbedding(nn.Module):
    """Embeds an atom as a vector for its element plus a vector for its tag (initially 0)."""

    def __init__(self, element: nn.Embedding) -> None:
        super().__init__()
        self.element = nn.Embedding(_ELEMENTS, element.embedding_dim)
        # The weights of reference energies are 0.
        nn.init.normal_(self.element.weight, std=float(element.weight.detach().std()))
        self.tag = nn.Embedding(len(Tag), element.embedding_dim)
        nn.init.zeros_(self.tag.weight)

    def forward(self, codes: Tensor) -> Tensor:
        """Maps codes (atoms,) to embeddings (atoms, dim)."""
        return self.element(codes % _ELEMENTS) + self.tag(codes // _ELEMENTS)


class Peer(nn.Module, ABC):
    """Base class with the interface required by `molflt.tasks.is2re.IS2RETask`.

    Args:
        cutoff: maximum edge length in Å.

    Attributes:
        energy_mean, energy_std: buffers that convert the normalized output to eV.
        element_energies: buffer (119,) of energies in eV, which are added for each atom.
        subsurface: True if atoms with tag 0 are used.
    """

    energy_mean: Tensor
    energy_std: Tensor
    element_energies: Tensor

    def __init__(self, cutoff: float) -> None:
        super().__init__()
        self.subsurface = True
        self.graph = PBCRadiusGraph(cutoff)
        self.register_buffer("energy_mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("energy_std", torch.ones((), dtype=torch.float64))
        self.register_buffer("element_energies", torch.zeros(_ELEMENTS, dtype=torch.float64))

    def forward(self, batch: Batch) -> Mapping[str, Tensor]:
        """Returns a mapping whose entry "energy" is a float64 tensor (graphs,) in eV."""
        dtype = next(self.parameters()).dtype
        kept = slice(None) if self.subsurface else Geometry.of_data(batch).above_subsurface()
        pos, graph = batch.pos[kept].to(dtype), batch.batch[kept]
        place = {"pos": pos, "cell": batch.cell.to(dtype), "pbc": batch.pbc}
        edges = self.graph(Data(**place, batch=graph, num_nodes=len(pos)))
        codes = batch.atomic_numbers.long() + _ELEMENTS * batch.tags.long()  # elements and tags
        atomic = self.atomic(codes[kept], edges)
        energy = atomic.new_zeros(batch.num_graphs).index_add(0, graph, atomic)
        own = self.element_energies[batch.atomic_numbers.long()]
        references = own.new_zeros(batch.num_graphs).index_add(0, batch.batch, own)
        return {"energy": energy.double() * self.energy_std + self.energy_mean + references}

    @abstractmethod
    def atomic(self, codes: Tensor, edges: Data) -> Tensor:
        """Returns atomic energies (atoms,) for codes (atoms,) and edges from `PBCRadiusGraph`."""


def _one_each(codes: Tensor) -> Tensor:
    """Assigns each atom to its own graph, which turns sums over graphs into atomic values."""
    return torch.arange(len(codes), device=codes.device)


class _Given(nn.Module):
    """Replaces PyG's neighbor search: returns the given edges instead of computing them."""

    def forward(self, edges: tuple[Tensor, ...], *_: object) -> tuple[Tensor, ...]:
        return edges


class PeriodicSchNet(Peer):
    """SchNet (arXiv:1706.08566) with the size of OC20's IS2RE baseline (arXiv:2010.09990)."""

    def __init__(self, cutoff: float = 6.0, **sizes: int) -> None:
        super().__init__(cutoff)
        sizes = {"hidden_channels": 384, "num_interactions": 4, "num_gaussians": 100, **sizes}
        self.net = SchNet(cutoff=cutoff, interaction_graph=_Given(), **sizes)
        self.net.embedding = TaggedEmbedding(self.net.embedding)
        nn.init.zeros_(self.net.lin2.weight)

    def atomic(self, codes: Tensor, edges: Data) -> Tensor:
        return self.net(codes, (edges.edge_index, edges.edge_weight), _one_each(codes))[:, 0]


class PeriodicDimeNet(Peer):
    """DimeNet++ (arXiv:2011.14115) with the size used in its paper."""

    def __init__(self, cutoff: float = 5.0, **sizes: int) -> None:
        super().__init__(cutoff)
        usual = {"hidden_channels": 128, "num_blocks": 4, "int_emb_size": 64, "basis_emb_size": 8}
        usual |= {"out_emb_channels": 256, "num_spherical": 7, "num_radial": 6}
        self.net = DimeNetPlusPlus(out_channels=1, cutoff=cutoff, **{**usual, **sizes})
        self.net.emb.emb = TaggedEmbedding(self.net.emb.emb)

    def atomic(self, codes: Tensor, edges: Data) -> Tensor:
        net, (source, target) = self.net, edges.edge_index
        kj, ji = triplets(edges.edge_index, edges.edge_shift, len(codes))
        outward, onward = -edges.edge_vec[ji], -edges.edge_vec[kj]  # j -> i and k -> j
        across = torch.linalg.cross(outward, onward).norm(dim=-1)
        angle = torch.atan2(across, (outward * onward).sum(dim=-1))
        rbf, sbf = net.rbf(edges.edge_weight), net.sbf(edges.edge_weight, angle, kj)
        x = net.emb(codes, rbf, target, source)
        out = net.output_blocks[0](x, rbf, target, num_nodes=len(codes))
        for interaction, output in zip(net.interaction_blocks, net.output_blocks[1:], strict=True):
            x = interaction(x, rbf, sbf, kj, ji)
            out = out + output(x, rbf, target, num_nodes=len(codes))
        return out[:, 0]


def triplets(edge_index: Tensor, shift: Tensor, atoms: int) -> tuple[Tensor, Tensor]:
    """Returns indices of edges k -> j and j -> i for all triplets with k different from i.

    Here, k may be a periodic image of i, which PyG's function excludes. `edge_index` (2, edges)
    contains sources and targets, sorted by target. `shift` (edges, 3) is the cell of each source.
    """
    source, target = edge_index
    degree = torch.bincount(target, minlength=atoms)
    first, count = degree.cumsum(0) - degree, degree[source]
    ji = torch.arange(len(source), device=source.device).repeat_interleave(count)
    place = torch.arange(len(ji), device=source.device)
    kj = first[source[ji]] + place - (count.cumsum(0) - count)[ji]
    back = (source[kj] == target[ji]) & (shift[kj] + shift[ji] == 0).all(dim=1)
    return kj[~back], ji[~back]


class PeriodicViSNet(Peer):
    """ViSNet (arXiv:2210.16518) with PyG's defaults."""

    def __init__(
        self, hidden_channels: int = 128, num_layers: int = 6, cutoff: float = 5.0
    ) -> None:
        super().__init__(cutoff)
        self.net = ViSNet(hidden_channels=hidden_channels, num_layers=num_layers, cutoff=cutoff)
        block = self.net.representation_model
        block.distance = _Given()
        block.embedding = TaggedEmbedding(block.embedding)
        near = _NearEmbedding(hidden_channels, block.num_rbf, cutoff, _ELEMENTS)
        near.embedding = TaggedEmbedding(near.embedding)
        block.neighbor_embedding = near
        self.net.prior_model.atomref = TaggedEmbedding(self.net.prior_model.atomref)
        nn.init.zeros_(self.net.output_model.output_network[-1].update_net[-1].weight)

    def atomic(self, codes: Tensor, edges: Data) -> Tensor:
        # ViSNet has a zero-length edge from each atom to itself. It normalizes only vectors
        # between different atoms, not vectors to images of the same atom. Here, all vectors are
        # normalized.
        own, zero = _one_each(codes), edges.edge_weight.new_zeros(len(codes))
        index = torch.cat((edges.edge_index, own.expand(2, -1)), dim=1)
        distance = torch.cat((edges.edge_weight, zero))
        unit = edges.edge_vec / edges.edge_weight[:, None]
        unit = torch.cat((unit, zero[:, None].expand(-1, 3)))
        energy, _ = self.net(codes, (index, distance, unit), own)
        return energy[:, 0]


class _NearEmbedding(NeighborEmbedding):
    """Neighbor embedding that includes periodic images of the atom itself.

    PyG excludes these images together with the zero-length edge.
    """

    def forward(
        self, z: Tensor, x: Tensor, edge_index: Tensor, edge_weight: Tensor, edge_attr: Tensor
    ) -> Tensor:
        real = edge_weight > 0
        gate = self.cutoff(edge_weight[real])[:, None]
        weights = self.distance_proj(edge_attr[real]) * gate
        found = self.propagate(edge_index[:, real], x=self.embedding(z), W=weights)
        return self.combine(torch.cat((x, found), dim=1))


class PeriodicPaiNN(Peer):
    """PaiNN (arXiv:2102.03150), which PyG does not include."""

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
        scalars = self.embedding(codes)
        vectors = scalars.new_zeros(len(codes), 3, scalars.shape[1])
        distance = edges.edge_weight[:, None]
        unit, basis = edges.edge_vec / distance, self._basis(distance)
        for message, update in zip(self.messages, self.updates, strict=True):
            scalars, vectors = message(scalars, vectors, edges.edge_index, unit, basis)
            scalars, vectors = update(scalars, vectors)
        return self.readout(scalars)[:, 0]

    def _basis(self, distance: Tensor) -> tuple[Tensor, Tensor]:
        """Returns basis functions sin(n pi r / cutoff) / r and a cosine cutoff for each edge."""
        number = torch.arange(1, self.num_basis + 1, device=distance.device)
        angle = distance * (math.pi / self.cutoff)
        return (number * angle).sin() / distance, 0.5 * (angle.cos() + 1)


class _Message(nn.Module):
    """Messages from neighbors (equations 7 and 8).

    A filter that depends on the distance is multiplied by the output of a network that is applied
    to the scalars of the neighbor.
    """

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
    """Updates (equations 9 and 10), which mix the scalars and vectors of each atom."""

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
