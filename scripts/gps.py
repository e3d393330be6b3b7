"""GPS layers with GraphAttention as their global part, for relaxed energies of the EMT sample.

    python scripts/gps.py --data datasets/emt-sample --seeds 2

Message passing within 4 Å, alone and with attention beside it in every layer: PyG's own Performer,
which sees no positions, and GraphAttention. Prints a table of validation errors.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GINEConv, GPSConv

from molflt.data import open_dataset
from molflt.data.splits import split_path
from molflt.graph import GraphAttention, PBCRadiusGraph
from molflt.graph.heads import AtomEmbedding, EnergyReadout, radial_basis

WIDTH, HEADS, BASIS, CUTOFF = 64, 4, 12, 4.0  # cutoff in Å


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


flt = partial(GraphAttention, WIDTH, HEADS, num_features=32)
VARIANTS: dict[str, Any] = {
    "local": Nothing,
    "local + PyG's Performer": None,
    "local + GraphAttention, no positions": partial(flt, position="none"),
    "local + GraphAttention, additive": flt,
    "local + GraphAttention, multiplicative, reciprocal": partial(
        flt, placement="multiplicative", periodic="reciprocal", max_frequency=0.15
    ),
    "local + GraphAttention, multiplicative, near field": partial(
        flt,
        placement="multiplicative",
        nodes="shells",
        near_field=4.0,
        position_options={"node_diameter": 14.0, "node_k_max": 0.1},
    ),
}


class Model(nn.Module):
    """Relaxed energy from GPS layers: GINEConv on a radial basis, and the attention of a variant.

    Args:
        variant: key of VARIANTS.
        layers: number of GPS layers.
    """

    def __init__(self, variant: str, layers: int = 2) -> None:
        super().__init__()
        self.embedding = AtomEmbedding(WIDTH)
        attention = VARIANTS[variant]
        self.spatial = attention is not None
        self.layers = nn.ModuleList()
        for _ in range(layers):
            mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
            conv = GINEConv(mlp, edge_dim=BASIS)
            if attention is None:
                inner = {"head_channels": WIDTH // HEADS}
                layer = GPSConv(
                    WIDTH, conv, HEADS, act="silu", attn_type="performer", attn_kwargs=inner
                )
            else:
                layer = SpatialGPSConv(WIDTH, conv, HEADS, act="silu")
                layer.attn = attention()
            self.layers.append(layer)
        self.readout = EnergyReadout(WIDTH)

    def forward(self, batch: Batch) -> Tensor:
        """(graphs,) energies, in the unit that the model was trained in."""
        x = self.embedding(batch.atomic_numbers, batch.tags, None)
        edges = radial_basis(batch.edge_weight, BASIS, CUTOFF)
        places = (batch.pos, batch.cell, batch.pbc) if self.spatial else ()
        for layer in self.layers:
            x = layer(x, batch.edge_index, batch.batch, *places, edge_attr=edges)
        return self.readout(x, batch.tags, batch.batch, batch.num_graphs)


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
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        picked = torch.randint(len(data), (size,))
        predicted = model(Batch.from_data_list([data[i] for i in picked]))
        loss = (predicted - (energies[picked] - mean) / scale).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def mae(model: Model, data: list[Data], training: list[Data], size: int = 64) -> float:
    """Mean absolute error, eV; the training set has the mean and scale of energies."""
    energies = target(training)
    chunks = [data[i : i + size] for i in range(0, len(data), size)]
    predicted = torch.cat([model(Batch.from_data_list(chunk)) for chunk in chunks])
    return (predicted * energies.std() + energies.mean() - target(data)).abs().mean().item()


def main(words: list[str] | None = None) -> int:
    """Trains every variant and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("datasets/emt-sample"))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="2 steps on 40 structures")
    options = parser.parse_args(words)
    steps, limit = (2, 40) if options.quick else (options.steps, None)
    try:
        training, validation = (read(options.data, name, limit) for name in ("train", "val_id"))
    except (FileNotFoundError, ValueError) as error:
        print(f"gps.py: error: {error}", file=sys.stderr)
        return 2
    median = (target(validation) - target(training).median()).abs().mean().item()
    print("| model | parameters | val_id MAE, eV | seconds |\n| --- | --- | --- | --- |")
    print(f"| training median | | {median:.3f} | |")
    for variant in options.variants:
        errors, start = [], time.perf_counter()
        for seed in range(options.seeds):
            model = train(variant, training, steps, seed)
            errors.append(mae(model, validation, training))
        seconds = (time.perf_counter() - start) / options.seeds
        count = sum(p.numel() for p in model.parameters())
        spread = f" ± {statistics.stdev(errors):.3f}" if len(errors) > 1 else ""
        mean = statistics.fmean(errors)
        print(f"| {variant} | {count:,} | {mean:.3f}{spread} | {seconds:.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
