"""The IS2RE model: atoms in, relaxed energy (and displacements) out."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch

from molflt.attention import Attention, Block, Encoding, Stack
from molflt.graph.dense import DenseAtoms, to_dense
from molflt.graph.encoding import Geometry, GraphEncoding, shells_within
from molflt.graph.heads import NUM_ELEMENTS, AtomEmbedding, EnergyReadout, PositionHead
from molflt.graph.neighbors import Neighbors, neighbor_list

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

MAX_MOVE = 1.0  # Å; moves without a bound feed on their own gradients, and training diverges


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
        mixing: "linear" (O(atoms)), "quadratic" (the same through the matrix, cheaper for few
            atoms), "auto" (the cheaper of these) or "softmax" (exact mask, O(atoms^2)).
        feature_map: phi of kernelized attention.
        num_features: features m per head.
        projection: how random features are drawn; "orthogonal" if none is given and the map is
            random.
        normalize_qk: divide queries and keys by their norms.
        normalize: what kernelized attention divides by: the sum of its weights ("masked"), that
            without the mask ("unmasked"), or nothing ("none"), so that outputs grow with the number
            of neighbors; see `molflt.attention.Attention`.
        position: "spectral" (FLT's mask) or "none" (Performer; plain softmax).
        placement: "additive" (FLT: the mask is added to the logit) or "multiplicative" (a kernel
            multiplies phi(q).phi(k)).
        nodes: where the mask's spectrum is sampled.
        num_nodes: Fourier nodes r of the mask; shells count theirs themselves.
        num_gaussians: Gaussians T of the mask.
        max_frequency: end of the spectrum of shells and reciprocal nodes, cycles/Å.
        diameter: largest distance at which the mask of shells shall be right, Å.
        near_field: distance within which a multiplicative kernel is exact, through a neighbor list,
            Å; null leaves it to its Fourier nodes.
        periodic: "none"; "images": in-plane periodic images near the adsorbate as extra keys;
            "reciprocal": nodes on the reciprocal lattice of each cell, exactly periodic.
        image_cutoff: distance from the adsorbate within which images are kept, Å.
        neighbor_cutoff: radius of the neighborhoods of embedding and position head, Å.
        radial_basis: size of the embedding's radial summary; 0 leaves it out, so that attention is
            the only place where energies see positions.
        position_head: predict displacements to the relaxed positions as an auxiliary task.
        move_atoms: after each pass but the last, move the free atoms by what the position head
            predicts, by less than 1 Å each, and compute the mask again from where they are.
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
        mixing: Literal["linear", "quadratic", "auto", "softmax"] = "linear",
        feature_map: FeatureMapName = "positive",
        num_features: int = 64,
        projection: ProjectionName | None = None,
        normalize_qk: bool = False,
        normalize: Literal["masked", "unmasked", "none"] = "masked",
        position: Literal["spectral", "none"] = "spectral",
        placement: Literal["additive", "multiplicative"] = "additive",
        nodes: Literal["gaussian", "orthogonal", "sobol", "shells"] = "gaussian",
        num_nodes: int = 16,
        num_gaussians: int = 32,
        max_frequency: float = 0.25,
        diameter: float = 20.0,
        near_field: float | None = None,
        periodic: Literal["none", "images", "reciprocal"] = "none",
        image_cutoff: float = 8.0,
        neighbor_cutoff: float = 5.0,
        radial_basis: int = 0,
        position_head: bool = True,
        move_atoms: bool = False,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        spectral = position == "spectral"
        _refuse_misfits(move_atoms, position_head, refinements, near_field, spectral)
        self.encoding: GraphEncoding | None = None
        if spectral:
            self.encoding = GraphEncoding(
                heads,
                mixing=mixing,
                placement=placement,
                nodes=nodes,
                num_nodes=num_nodes,
                periodic=periodic,
                image_cutoff=image_cutoff,
                max_frequency=max_frequency,
                near_field=near_field,
                num_features=num_features,
                num_gaussians=num_gaussians,
                **(shells_within(diameter, max_frequency) if nodes == "shells" else {}),
            )
        kind = {"mixing": mixing, "feature_map": feature_map, "projection": projection}
        options: dict[str, Any] = {
            **kind,
            "num_features": num_features,
            "dropout": attention_dropout,
        }
        options |= {"normalize_qk": normalize_qk, "normalize": normalize}
        options["position"] = None if self.encoding is None else self.encoding.position
        blocks = [Block(Attention(dim, heads, **options), ffn_dim, dropout) for _ in range(layers)]
        self.neighbor_cutoff = neighbor_cutoff
        self.embedding = AtomEmbedding(dim, radial_basis, neighbor_cutoff)
        self.stack = Stack(blocks, refinements=refinements)
        self.move_atoms = move_atoms
        self.readout = EnergyReadout(dim)
        self.position_head = PositionHead(dim, cutoff=neighbor_cutoff) if position_head else None
        for name, start in (("energy_mean", torch.zeros), ("energy_std", torch.ones)):
            self.register_buffer(name, start((), dtype=torch.float64))
        self.register_buffer("trained_elements", torch.zeros(NUM_ELEMENTS, dtype=torch.bool))

    def forward(self, batch: Batch) -> Mapping[str, Tensor]:
        """Predicts a batch.

        Args:
            batch: PyG batch of structures: pos (atoms, 3) Å, cell (graphs, 3, 3) Å,
                pbc (graphs, 3), atomic_numbers, tags (atoms,); with `move_atoms` also fixed.

        Returns:
            "energy": (graphs,) float64, eV; with a position head, "displacement": (atoms, 3), Å,
            from the given to the relaxed position; with `move_atoms`, "displacement_by_pass":
            (passes, atoms, 3), Å, the same after each pass.
        """
        neighbors = None
        if self.position_head is not None or self.embedding.num_basis:
            neighbors = neighbor_list(batch, self.neighbor_cutoff)
        if self.training:
            self.trained_elements[batch.atomic_numbers] = True
        tokens = self.embedding(batch.atomic_numbers, batch.tags, neighbors)
        h, displacement = self._refine(batch, tokens, neighbors)
        energy = self.readout(h, batch.tags, batch.batch, batch.num_graphs)
        out = {"energy": energy.double() * self.energy_std + self.energy_mean}
        if displacement:
            out["displacement"] = displacement[-1]
            if len(displacement) > 1:
                out["displacement_by_pass"] = torch.stack(displacement)
        return out

    def _refine(
        self, batch: Batch, tokens: Tensor, neighbors: Neighbors | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Atoms (atoms, dim) after the last pass, displacements (atoms, 3) Å so far after each."""
        start = batch.pos
        geometry = Geometry(start, batch.batch, batch.ptr, batch.cell, batch.pbc, batch.tags)
        dense, encodings = self._encode(geometry)
        x = tokens.new_zeros(*dense.mask.shape, tokens.shape[-1])
        x[dense.mask] = tokens
        h, moved = tokens, []
        for left in reversed(range(self.stack.refinements)):
            x = self.stack.one_pass(x, encodings, dense.key_mask, dense.key_index)
            if left and not self.move_atoms:
                continue
            h = self.stack.norm(x)[dense.mask]
            if self.position_head is None or neighbors is None:
                continue
            step = self.position_head(h, neighbors)
            moved.append(geometry.pos - start + step)
            if left:
                free = ~batch.fixed[:, None]
                geometry = geometry._replace(pos=geometry.pos + _bounded(step) * free)
                neighbors = neighbor_list(geometry, self.neighbor_cutoff)
                dense, encodings = self._encode(geometry)
        return h, moved

    def _encode(self, geometry: Geometry) -> tuple[DenseAtoms, dict[str, Encoding]]:
        if self.encoding is None:
            return to_dense(geometry), {}
        dense, encoding = self.encoding(geometry)
        return dense, dict.fromkeys(self.stack.mixings, encoding)

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws new random features in place; give a generator seeded alike on every rank."""
        self.stack.redraw_(generator)
        if self.encoding is not None:
            self.encoding.redraw_(generator)


def _bounded(step: Tensor) -> Tensor:
    """Displacements (atoms, 3), Å, shortened smoothly to less than `MAX_MOVE`."""
    return step * (1 + (step / MAX_MOVE).square().sum(dim=-1, keepdim=True)).rsqrt()


def _refuse_misfits(
    move_atoms: bool, position_head: bool, passes: int, near_field: float | None, spectral: bool
) -> None:
    if move_atoms and not (position_head and passes > 1 and spectral):
        raise ValueError(
            "move_atoms moves atoms between passes, for the mask; got "
            f"position_head={position_head}, refinements={passes} and a mask: {spectral}; "
            "use a position head, 2 passes or more and position 'spectral'"
        )
    if near_field is not None and not spectral:
        raise ValueError(f"near_field={near_field} needs position 'spectral'; got 'none'")
