"""Two molecules drawn apart: local message passing against the same with GraphAttention.

    python scripts/long_range.py --data FOLDER --out runs/long_range

FOLDER has train-id*.xyz and test-id*.xyz, pairs of charged (C), polar (P) and apolar (A) molecules
in a periodic cell, at growing separations (LODE dimers, Huguenin-Dumittan et al., J. Phys. Chem.
Lett. 14, 9612, 2023, in the files of the cace-lr-fit repository; CC BY-NC 4.0). Models learn
binding energies E(AB) - E(A) - E(B) at 12.2 Å and less, each the difference of three energies of
their own, and are tested farther out. Writes long_range.csv and curves.png and prints a table.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn.models.schnet import InteractionBlock
from torch_geometric.utils import scatter

from molflt.data.records import MAX_ATOMIC_NUMBER
from molflt.graph import GraphAttention, PBCRadiusGraph
from molflt.graph.heads import radial_basis
from molflt.plots.figure import SERIES, picture

WIDTH, HEADS, FEATURES, BASIS, LAYERS = 32, 4, 16, 12, 2
CUTOFF = 5.0  # Å, of message passing

# Gaussians of either sign that decay to 0. A law as slow as 1 / r needs some wider than the region
# trained on. In a cell of 30 Å all wider than 8 Å would be flat, alike for all pairs.
FREE: dict[str, Any] = {"width_range": (2.0, 20.0), "num_gaussians": 12, "background": 0.0}
PERIODIC: dict[str, Any] = {"width_range": (1.5, 8.0), "num_gaussians": 6, "positive": False}
VARIANTS: dict[str, dict[str, Any] | None] = {
    "local": None,
    "sum, free": {
        "placement": "multiplicative",
        "nodes": "shells",
        "normalize": "none",
        "position_options": {**FREE, "node_diameter": 22.0, "node_k_max": 0.15},
    },
    "sum, reciprocal": {
        "placement": "multiplicative",
        "periodic": "reciprocal",
        "max_frequency": 0.12,
        "normalize": "none",
        "position_options": PERIODIC,
    },
    "mean, additive": {"placement": "additive", "num_nodes": 16},
    "mean, softmax": {"placement": "additive", "backend": "softmax"},
}


class Dimers(NamedTuple):
    """Pairs of molecules: each is three graphs, both molecules, the first, the second."""

    graphs: list[Data]
    energy: Tensor  # (pairs,) eV, E(AB) - E(A) - E(B)
    distance: list[float]  # Å, between the centers as the files have it
    label: list[str]


class Model(nn.Module):
    """Energy of each graph: local message passing, and perhaps attention on what it found.

    E = sum_i MLP(x_i) + sum_i a(x_i) . y_i, x from SchNet's interactions, y = GraphAttention(x).

    Args:
        attention: options of GraphAttention; None leaves it out.
    """

    def __init__(self, attention: dict[str, Any] | None) -> None:
        super().__init__()
        self.element = nn.Embedding(MAX_ATOMIC_NUMBER + 1, WIDTH)
        self.interactions = nn.ModuleList(
            InteractionBlock(WIDTH, BASIS, WIDTH, CUTOFF) for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.readout = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))
        self.attention = self.answer = None
        if attention is not None:
            self.attention = GraphAttention(
                WIDTH, HEADS, num_features=FEATURES, normalize_qk=True, **attention
            )
            self.answer = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Batch) -> Tensor:
        """(graphs,) energies, eV."""
        x = self.element(batch.z)
        basis = radial_basis(batch.edge_weight, BASIS, CUTOFF)
        for interaction in self.interactions:
            x = x + interaction(x, batch.edge_index, batch.edge_weight, basis)
        x = self.norm(x)
        atomic = self.readout(x).squeeze(-1)
        if self.attention is not None and self.answer is not None:
            seen = self.attention(x, batch.pos, batch.batch, batch.cell, batch.pbc)
            atomic = atomic + (self.answer(x) * seen).sum(dim=-1)
        return scatter(atomic, batch.batch, dim=0, dim_size=batch.num_graphs, reduce="sum")


def binding(model: Model, graphs: list[Data]) -> Tensor:
    """E(AB) - E(A) - E(B) of every three graphs, eV."""
    both, first, second = model(Batch.from_data_list(graphs)).view(-1, 3).unbind(dim=1)
    return both - first - second


def read(folder: Path, split: str, limit: int | None = None) -> Dimers:
    """All pairs of a split.

    Raises:
        FileNotFoundError: if the folder has none.
    """
    from ase.io import iread

    files = sorted(folder.glob(f"{split}-id*.xyz"))[:limit]
    if not files:
        raise FileNotFoundError(
            f"{folder}: no {split}-id*.xyz; give --data the folder of the dimers, see --help"
        )
    edges = PBCRadiusGraph(CUTOFF)
    found = Dimers([], torch.zeros(0), [], [])
    energies = []
    for atoms in (frame for file in files for frame in iread(file)):
        second = int(atoms.info["indexB"])
        for part in (atoms, atoms[:second], atoms[second:]):
            data = Data(
                z=torch.tensor(part.numbers, dtype=torch.long),
                pos=torch.tensor(part.positions).float(),
                cell=torch.tensor(part.cell.array).float()[None],
                pbc=torch.tensor(part.pbc)[None],
            )
            found.graphs.append(edges(data))
        energies.append(float(atoms.info["inter_energy"]))
        found.distance.append(float(atoms.info["distance"]))
        found.label.append(str(atoms.info["label"]))
    return found._replace(energy=torch.tensor(energies))


def train(variant: str, data: Dimers, steps: int, seed: int, pairs: int = 20) -> Model:
    """A model of that variant after so many steps on the mean squared error."""
    torch.manual_seed(seed)
    model = Model(VARIANTS[variant])
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    order: list[int] = []
    for _ in range(steps):
        if len(order) < min(pairs, len(data.energy)):
            order = torch.randperm(len(data.energy)).tolist()
        picked, order = order[:pairs], order[pairs:]
        predicted = binding(model, [data.graphs[3 * i + k] for i in picked for k in range(3)])
        loss = (predicted - data.energy[picked]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def measure(variants: list[str], splits: dict[str, Dimers], steps: int, seeds: int) -> list[dict]:
    """One row per variant, seed and pair of molecules: energies in eV."""
    rows = []
    for variant in variants:
        for seed in range(seeds):
            start = time.perf_counter()
            model = train(variant, splits["train"], steps, seed)
            seconds = time.perf_counter() - start
            for split, data in splits.items():
                with torch.no_grad():
                    energy = binding(model, data.graphs)
                rows += [
                    {
                        "variant": variant,
                        "seed": seed,
                        "split": split,
                        "class": label,
                        "distance_A": round(distance, 3),
                        "energy_eV": round(true, 6),
                        "predicted_eV": round(guess, 6),
                    }
                    for label, distance, true, guess in zip(
                        data.label,
                        data.distance,
                        data.energy.tolist(),
                        energy.tolist(),
                        strict=True,
                    )
                ]
            print(f"{variant}, seed {seed}: {seconds:.0f} s", file=sys.stderr)
    return rows


def references(splits: dict[str, Dimers]) -> dict[str, dict[str, float]]:
    """Errors of knowing nothing, by class, meV: energy 0, and that of the last one trained on."""
    train, test = splits["train"], splits["test"]
    last = {
        label: energy
        for _, label, energy in sorted(
            zip(train.distance, train.label, train.energy.tolist(), strict=True)
        )
    }
    pairs = list(zip(test.label, test.energy.tolist(), strict=True))
    guesses = {"energy 0": dict.fromkeys(last, 0.0), "last in training": last}
    return {
        name: {
            own: 1000 * statistics.fmean(abs(e - guess[own]) for label, e in pairs if label == own)
            for own in sorted(last)
        }
        for name, guess in guesses.items()
    }


def errors(rows: list[dict], split: str) -> dict[str, dict[str, list[float]]]:
    """MAE by variant and class, one of each seed, meV."""
    found: dict[str, dict[str, dict[int, list[float]]]] = {}
    for row in rows:
        if row["split"] == split:
            seeds = found.setdefault(row["variant"], {}).setdefault(row["class"], {})
            error = 1000 * abs(row["predicted_eV"] - row["energy_eV"])
            seeds.setdefault(row["seed"], []).append(error)
    return {
        variant: {
            label: [statistics.fmean(values) for values in seeds.values()]
            for label, seeds in sorted(classes.items())
        }
        for variant, classes in found.items()
    }


def table(rows: list[dict], splits: dict[str, Dimers]) -> str:
    """Markdown: MAE in meV, training and beyond it, by class, mean and spread over seeds."""
    trained, tested = errors(rows, "train"), errors(rows, "test")
    labels = sorted({row["class"] for row in rows})
    lines = [["model", "train", "test", *(f"test {label}" for label in labels)]]
    lines.append(["---"] * len(lines[0]))
    for name, classes in references(splits).items():
        cells = [statistics.fmean(classes.values()), *classes.values()]
        lines.append([name, "", *(f"{cell:.1f}" for cell in cells)])
    for variant, classes in tested.items():
        cells = [trained[variant], classes, *({label: classes[label]} for label in labels)]
        means = [[statistics.fmean(s) for s in zip(*c.values(), strict=True)] for c in cells]
        lines.append([variant, *map(spread, means)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def spread(values: list[float]) -> str:
    """Mean and standard deviation over seeds."""
    mean = f"{statistics.fmean(values):.1f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.1f}"


def draw(png: Path, rows: list[dict]) -> None:
    """Binding curves: true, and of every variant with its first seed; test region shaded."""
    labels = sorted({row["class"] for row in rows})
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    with picture(png, figsize=(11, 6)) as figure:
        grid = figure.subplots(-(-len(labels) // 3), min(3, len(labels)), squeeze=False)
        for axes, label in zip(grid.flat, labels, strict=False):
            own = [row for row in rows if row["class"] == label and row["seed"] == 0]
            beyond = min(row["distance_A"] for row in own if row["split"] == "test")
            axes.axvspan(beyond - 0.4, 15.2, color="#EEEEEE")
            for color, variant in zip(SERIES, variants, strict=False):
                part = sorted(
                    (row for row in own if row["variant"] == variant), key=lambda r: r["distance_A"]
                )
                x = [row["distance_A"] for row in part]
                axes.plot(x, [row["predicted_eV"] for row in part], color=color, label=variant)
                truth = [row["energy_eV"] for row in part]
            axes.plot(x, truth, "k.", label="reference", zorder=3)
            far = [row["energy_eV"] for row in own if row["distance_A"] > 7.0]
            low, high = min(far), max(far)
            margin = 0.5 * (high - low)
            axes.set(title=label, ylim=(low - margin, high + margin), xlim=(6.5, 15.2))
            axes.set_xlabel("separation, Å")
        for axes in grid[:, 0]:
            axes.set_ylabel("binding energy, eV")
        grid[0, -1].legend(loc="lower right", fontsize="x-small", frameon=False)


def main(words: list[str] | None = None) -> int:
    """Trains, measures, writes, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of the dimers")
    parser.add_argument("--out", type=Path, default=Path("runs/long_range"))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="3 steps, one seed, two files")
    options = parser.parse_args(words)
    steps, seeds, limit = (3, 1, 2) if options.quick else (options.steps, options.seeds, None)
    try:
        splits = {split: read(options.data, split, limit) for split in ("train", "test")}
    except FileNotFoundError as error:
        print(f"long_range.py: error: {error}", file=sys.stderr)
        return 2
    rows = measure(options.variants, splits, steps, seeds)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "long_range.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    draw(options.out / "curves.png", rows)
    print(table(rows, splits))
    return 0


if __name__ == "__main__":
    sys.exit(main())
