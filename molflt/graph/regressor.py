"""The IS2RE model: atoms in, relaxed energy (and displacements) out."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch

from molflt.attention import Attention, Block, Stack, make_position
from molflt.graph.dense import to_dense
from molflt.graph.heads import NUM_ELEMENTS, AtomEmbedding, EnergyReadout, PositionHead
from molflt.graph.neighbors import neighbor_list

# The attention core's names, spelled out so that the command line can list and check them; a test
# compares them with the core's dictionaries.
FeatureMapName = Literal[
    "positive",
    "trigonometric",
    "favor2020",
    "relu",
    "squared_relu",
    "sigmoid",
    "abs",
    "exp",
    "gelu",
    "cos",
    "tanh",
    "identity",
    "learnable_exp",
    "learnable_relu",
    "elu",
    "cosformer",
    "rfa_gaussian",
    "rfa_arccos",
]
ProjectionName = Literal["iid", "orthogonal", "hadamard", "givens", "sphere", "sobol"]


class EnergyRegressor(nn.Module):
    """Transformer that maps an initial structure to its relaxed energy.

    Element and tag embeddings, blocks of attention with a relative encoding learned per head and
    shared by all layers, several passes with shared weights, tag-weighted sum over atoms. FLT's
    OC20 model (arXiv:2302.01925) on 3D-Graphormer's recipe (arXiv:2203.04810).

    Args:
        dim: width of tokens.
        heads: attention heads; `dim` is a multiple of it.
        layers: distinct layers.
        refinements: passes through the layers with shared weights.
        ffn_dim: hidden width of the feed-forward networks.
        mixing: "linear" (O(atoms)), "quadratic" (its oracle) or "softmax" (exact mask, O(atoms^2)).
        feature_map: phi of kernelized attention.
        num_features: features m per head.
        projection: how random features are drawn; "orthogonal" if none is given and the map is
            random.
        normalize_qk: divide queries and keys by their norms.
        position: "spectral" (FLT's mask) or "none" (Performer; plain softmax).
        num_nodes: Fourier nodes r of the mask.
        num_gaussians: Gaussians T of the mask.
        periodic: "none", or "images": in-plane periodic images near the adsorbate as extra keys.
        image_cutoff: distance from the adsorbate within which images are kept, Å.
        neighbor_cutoff: radius of the neighborhoods of embedding and position head, Å.
        radial_basis: size of the embedding's radial summary; 0 leaves it out, so that attention is
            the only place where energies see positions.
        position_head: predict displacements to the relaxed positions as an auxiliary task.
        dropout: dropout of blocks.
        attention_dropout: see `molflt.attention.Attention`.

    Attributes:
        energy_mean, energy_std: eV, buffers that turn the normalized output into eV.
        trained_elements: (119,) bool, buffer: the atomic numbers seen in training. Embeddings of
            other elements are random, and so are energies of structures that contain them.
    """

    energy_mean: Tensor
    energy_std: Tensor
    trained_elements: Tensor

    def __init__(
        self,
        dim: int = 128,
        heads: int = 8,
        layers: int = 4,
        refinements: int = 1,
        ffn_dim: int = 256,
        mixing: Literal["linear", "quadratic", "softmax"] = "linear",
        feature_map: FeatureMapName = "positive",
        num_features: int = 64,
        projection: ProjectionName | None = None,
        normalize_qk: bool = False,
        position: Literal["spectral", "none"] = "spectral",
        num_nodes: int = 16,
        num_gaussians: int = 32,
        periodic: Literal["none", "images"] = "none",
        image_cutoff: float = 8.0,
        neighbor_cutoff: float = 5.0,
        radial_basis: int = 0,
        position_head: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        encoding = None
        if position == "spectral":
            encoding = make_position(
                position, heads, dim // heads, num_nodes=num_nodes, num_gaussians=num_gaussians
            )
        blocks = [
            Block(
                Attention(
                    dim,
                    heads,
                    mixing=mixing,
                    feature_map=feature_map,
                    num_features=num_features,
                    projection=projection,
                    position=encoding,
                    normalize_qk=normalize_qk,
                    dropout=attention_dropout,
                ),
                ffn_dim,
                dropout,
            )
            for _ in range(layers)
        ]
        self.periodic = periodic
        self.image_cutoff = image_cutoff
        self.neighbor_cutoff = neighbor_cutoff
        self.embedding = AtomEmbedding(dim, radial_basis, neighbor_cutoff)
        self.stack = Stack(blocks, encoding, refinements)
        self.readout = EnergyReadout(dim)
        self.position_head = PositionHead(dim, cutoff=neighbor_cutoff) if position_head else None
        self.register_buffer("energy_mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("energy_std", torch.ones((), dtype=torch.float64))
        self.register_buffer("trained_elements", torch.zeros(NUM_ELEMENTS, dtype=torch.bool))

    def forward(self, batch: Batch) -> Mapping[str, Tensor]:
        """Predicts a batch.

        Args:
            batch: PyG batch of structures: pos (atoms, 3) Å, cell (graphs, 3, 3) Å,
                pbc (graphs, 3), atomic_numbers, tags (atoms,).

        Returns:
            "energy": (graphs,) float64, eV; and, with a position head, "displacement": (atoms, 3),
            Å, from the given to the relaxed position.
        """
        neighbors = None
        if self.position_head is not None or self.embedding.num_basis:
            neighbors = neighbor_list(batch, self.neighbor_cutoff)
        if self.training:
            self.trained_elements[batch.atomic_numbers] = True
        dense = to_dense(batch, self.periodic, self.image_cutoff)
        tokens = self.embedding(batch.atomic_numbers, batch.tags, neighbors)
        x = tokens.new_zeros(*dense.mask.shape, tokens.shape[-1])
        x[dense.mask] = tokens
        x = self.stack(x, dense.positions, dense.key_positions, dense.key_mask, dense.key_index)
        h = x[dense.mask]
        energy = self.readout(h, batch.tags, batch.batch, batch.num_graphs)
        out = {"energy": energy.double() * self.energy_std + self.energy_mean}
        if self.position_head is not None and neighbors is not None:
            out["displacement"] = self.position_head(h, neighbors)
        return out

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws new random features in place; give a generator seeded alike on every rank."""
        self.stack.redraw_(generator)
