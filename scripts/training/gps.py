"""GPS layers with GraphAttention as their global part, for relaxed energies of the CHGNet sample.

Message passing within 4 Å, alone and with attention beside it in every layer: PyG's own Performer,
which sees no positions, and GraphAttention. Validation errors after a short training.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kit.graphs import fit, radial_basis
from kit.rows import Promise, Rows, at_least, choose, markdown, mean_sd, names, pick
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GINEConv, GPSConv

from molflt.data.structures import open_dataset
from molflt.data.structures.sources import split_path
from molflt.graph import GraphAttention, PBCRadiusGraph
from molflt.graph.geometry import Geometry
from molflt.graph.heads import AtomEmbedding, EnergyReadout

WIDTH, HEADS, BASIS, CUTOFF = 64, 4, 12, 4.0  # cutoff in Å
SAMPLE = Path(__file__).resolve().parents[2] / "datasets" / "chgnet-sample"
QUICK = {"steps": 2, "limit": 40, "seeds": 1}


# GPSConv calls no attention but its own two, and gives these no positions. As short as it can be,
# because it is what users copy: GPSConv's forward for its default norm, without dropout.
class SpatialGPSConv(GPSConv):
    def forward(self, x, edge_index, batch, pos, cell=None, pbc=None, **edges):
        near = self.norm1(x + self.conv(x, edge_index, **edges))
        far = self.norm2(x + self.attn(x, pos, batch, cell, pbc))
        out = near + far
        return self.norm3(out + self.mlp(out))


class Nothing(nn.Module):
    """No global part."""

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        """Zeros like x."""
        return torch.zeros_like(x)


flt = partial(GraphAttention, WIDTH, HEADS, num_features=32, periodic="none")
product = partial(flt, position="multiplicative")
RECIPROCAL = {"periodic": "reciprocal", "max_frequency": 0.15}
SHELLS = {"nodes": "shells", "node_diameter": 14.0, "node_max_frequency": 0.1}
VARIANTS: dict[str, Any] = {
    "local": Nothing,
    "local + PyG's Performer": None,
    "local + GraphAttention, no positions": partial(flt, position="none"),
    "local + GraphAttention, additive": partial(flt, position="spectral"),
    "local + GraphAttention, multiplicative, reciprocal": partial(product, **RECIPROCAL),
    "local + GraphAttention, multiplicative, near field": partial(
        product, near_field=4.0, position_options=SHELLS
    ),
}


class Model(nn.Module):
    """Relaxed energy from two GPS layers: GINEConv on a radial basis, a variant's attention."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.embedding = AtomEmbedding(WIDTH)
        attention = VARIANTS[variant]
        self.spatial = attention is not None
        self.layers = nn.ModuleList()
        for _ in range(2):
            mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
            conv = GINEConv(mlp, edge_dim=BASIS)
            if attention is None:
                inner = {"attn_kwargs": {"head_channels": WIDTH // HEADS}}
                layer = GPSConv(WIDTH, conv, HEADS, act="silu", attn_type="performer", **inner)
            else:
                layer = SpatialGPSConv(WIDTH, conv, HEADS, act="silu")
                layer.attn = attention()
            self.layers.append(layer)
        self.readout = EnergyReadout(WIDTH)

    def forward(self, batch: Batch) -> Tensor:
        """(graphs,) energies, in the unit that the model was trained in."""
        x = self.embedding(batch.atomic_numbers, batch.tags, None, batch.ptr)
        edges = radial_basis(batch.edge_weight, BASIS, CUTOFF)
        places = (batch.pos, batch.cell, batch.pbc) if self.spatial else ()
        for layer in self.layers:
            x = layer(x, batch.edge_index, batch.batch, *places, edge_attr=edges)
        return self.readout(x, Geometry.of_data(batch))


def read(root: Path, split: str, limit: int | None) -> list[Data]:
    """Structures with their edges, once and for all."""
    edges = PBCRadiusGraph(CUTOFF)
    source = open_dataset(split_path(root, split))
    return [edges(source[i]) for i in range(len(source))[:limit]]


def target(structures: list[Data]) -> Tensor:
    """(structures,) relaxed energies, eV."""
    return torch.cat([data.y_relaxed for data in structures]).float()


def train(variant: str, data: list[Data], steps: int, seed: int, size: int = 32) -> Model:
    """A model of that variant, after so many steps on the mean absolute error."""
    torch.manual_seed(seed)
    model = Model(variant)
    energies = target(data)
    mean, scale = energies.mean(), energies.std()

    def loss() -> Tensor:
        picked = torch.randint(len(data), (size,))
        predicted = model(Batch.from_data_list([data[i] for i in picked]))
        return (predicted - (energies[picked] - mean) / scale).abs().mean()

    fit(model, torch.optim.AdamW(model.parameters()), 2e-3, steps, loss)
    return model


@torch.no_grad()
def mae(model: Model, data: list[Data], training: list[Data], size: int = 64) -> float:
    """Mean absolute error, eV; the training set has the mean and scale of energies."""
    energies = target(training)
    chunks = [data[i : i + size] for i in range(0, len(data), size)]
    predicted = torch.cat([model(Batch.from_data_list(chunk)) for chunk in chunks])
    return (predicted * energies.std() + energies.mean() - target(data)).abs().mean().item()


def measure(
    data: Path = SAMPLE,
    variants: tuple[str, ...] = (),
    steps: int = 300,
    seeds: int = 1,
    limit: int = 10**9,
) -> Rows:
    """Errors of every variant and seed, and that of the median of the training set."""
    at_least(1, steps=steps, seeds=seeds, limit=limit)
    training, validation = (read(data, name, limit) for name in ("train", "val_id"))
    error = (target(validation) - target(training).median()).abs().mean().item()
    labels = ("variant", "seed", "parameters", "mae_eV", "seconds_of_training")
    found: list[tuple[object, ...]] = [("training median", 0, None, error, None)]
    for variant in choose(variants, VARIANTS, "variant"):
        for seed in range(seeds):
            start = time.perf_counter()
            model = train(variant, training, steps, seed)
            error = mae(model, validation, training)
            count = sum(p.numel() for p in model.parameters())
            found.append((variant, seed, count, error, time.perf_counter() - start))
    return [dict(zip(labels, line, strict=True)) for line in found]


def table(rows: Rows) -> str:
    """A line per variant: mean and spread over seeds."""
    lines = []
    for variant in names(rows, "variant"):
        own = pick(rows, variant=variant)
        spent, count = own[0]["seconds_of_training"], own[0]["parameters"]
        cells = [None, None] if spent is None else [f"{count:,}", f"{spent:.0f}"]
        lines.append([variant, cells[0], mean_sd([row["mae_eV"] for row in own], 3), cells[1]])
    return markdown(["model", "parameters", "val_id MAE, eV", "seconds"], lines)


def gain(rows: Rows) -> float | None:
    """Error of the best attention of ours over that of message passing alone, after training."""
    error = {row["variant"]: row["mae_eV"] for row in rows}
    ours = [value for name, value in error.items() if "GraphAttention" in name]
    trained = [row["seconds_of_training"] or 0.0 for row in rows]
    return min(ours) / error["local"] if ours and max(trained) > 10 else None


PROMISES = [Promise("error with GraphAttention / local alone", gain, most=0.7)]
