"""Two molecules at growing distances: local message passing with and without GraphAttention.

See kit/dimers.py for the data.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from e3nn.math import soft_one_hot_linspace
from kit.dimers import errors, errors_table, frames_of
from kit.rows import Rows, choose, mean_sd, names, pick
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn.models.schnet import InteractionBlock
from torch_geometric.utils import scatter

from molflt.atoms import MAX_ATOMIC_NUMBER
from molflt.graph import GraphAttention, PBCRadiusGraph
from molflt.plots.figure import SERIES, picture

WIDTH, HEADS, FEATURES, BASIS, LAYERS = 32, 4, 16, 12, 2
CUTOFF = 5.0  # Å, of message passing

# Gaussians of either sign that decay to 0. A law as slow as 1 / r needs some that are wider than
# the training distances. In a cell of 30 Å, Gaussians wider than 8 Å would be the same for all
# pairs.
FREE: dict[str, Any] = {"width_range": (2.0, 20.0), "num_gaussians": 12, "background": 0.0}
SHELLS = {"nodes": "shells", "node_diameter": 22.0, "node_max_frequency": 0.15}
PERIODIC: dict[str, Any] = {"width_range": (1.5, 8.0), "num_gaussians": 6, "positive": False}
SUM: dict[str, Any] = {"position": "multiplicative", "normalize": "none"}
VARIANTS: dict[str, dict[str, Any] | None] = {
    "local": None,
    "sum, free": {**SUM, "num_features": FEATURES, "position_options": {**FREE, **SHELLS}},
    "sum, reciprocal": {
        **{**SUM, "num_features": FEATURES, "position_options": PERIODIC},
        **{"periodic": "reciprocal", "max_frequency": 0.12},
    },
    "mean, additive": {
        **{"position": "spectral", "num_features": FEATURES},
        "position_options": {"num_nodes": 16},
    },
    "mean, softmax": {"position": "spectral", "mixing": "softmax"},
}
QUICK = {"steps": 3, "seeds": 1, "files": 2}


class Dimers(NamedTuple):
    """Pairs of molecules. Each pair has three graphs: both molecules, the first, the second."""

    graphs: list[Data]
    energy: Tensor  # (pairs,) eV, E(AB) - E(A) - E(B)
    distance: list[float]  # Å, as given in the files
    label: list[str]


class Model(nn.Module):
    """Energy of each graph: local message passing, optionally followed by attention.

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
            options = {"periodic": "none", **attention}
            self.attention = GraphAttention(WIDTH, HEADS, normalize_qk=True, **options)
            self.answer = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Batch) -> Tensor:
        """(graphs,) energies, eV."""
        x = self.element(batch.z)
        smooth = {"basis": "smooth_finite", "cutoff": True}
        basis = soft_one_hot_linspace(batch.edge_weight, 0.0, CUTOFF, BASIS, **smooth)
        basis = basis * BASIS**0.5
        for interaction in self.interactions:
            x = x + interaction(x, batch.edge_index, batch.edge_weight, basis)
        x = self.norm(x)
        atomic = self.readout(x).squeeze(-1)
        if self.attention is not None and self.answer is not None:
            seen = self.attention(x, batch.pos, batch.batch, batch.cell, batch.pbc)
            atomic = atomic + (self.answer(x) * seen).sum(dim=-1)
        return scatter(atomic, batch.batch, dim=0, dim_size=batch.num_graphs, reduce="sum")


def binding(model: Model, graphs: list[Data]) -> Tensor:
    """E(AB) - E(A) - E(B) of each three graphs, eV."""
    both, first, second = model(Batch.from_data_list(graphs)).view(-1, 3).unbind(dim=1)
    return both - first - second


def read(folder: Path, split: str, limit: int | None = None) -> Dimers:
    """All pairs of a split."""
    edges = PBCRadiusGraph(CUTOFF)
    found = Dimers([], torch.zeros(0), [], [])
    energies = []
    for atoms in (frame for frames in frames_of(folder, split, limit) for frame in frames):
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
    """A model of a variant, trained on the mean squared error with one cycle of learning rates."""
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
        optimizer.zero_grad()
        (predicted - data.energy[picked]).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def measure(
    data: Path, variants: tuple[str, ...] = (), steps: int = 400, seeds: int = 2, files: int = 10**9
) -> Rows:
    """One row per variant, seed and pair of molecules: energies in eV."""
    splits = {split: read(data, split, files) for split in ("train", "test")}
    rows = []
    for variant in choose(variants, VARIANTS, "variant"):
        for seed in range(seeds):
            model = train(variant, splits["train"], steps, seed)
            for split, pairs in splits.items():
                with torch.no_grad():
                    predicted = binding(model, pairs.graphs).tolist()
                columns = (pairs.label, pairs.distance, pairs.energy.tolist(), predicted)
                rows += [
                    {
                        **{"variant": variant, "seed": seed, "split": split, "class": label},
                        "distance_A": round(distance, 3),
                        **{"energy_eV": round(true, 6), "predicted_eV": round(guess, 6)},
                    }
                    for label, distance, true, guess in zip(*columns, strict=True)
                ]
    return rows


def references(rows: Rows) -> Rows:
    """Rows of constant predictions: energy 0, and the energy at the largest training distance."""
    one = pick(rows, variant=rows[0]["variant"], seed=0)
    train = sorted(pick(one, split="train"), key=lambda row: row["distance_A"])
    last = {row["class"]: row["energy_eV"] for row in train}
    guesses = {"energy 0": dict.fromkeys(last, 0.0), "last in training": last}
    return [
        {**row, "variant": name, "predicted_eV": guess[row["class"]]}
        for name, guess in guesses.items()
        for row in pick(one, split="test")
    ]


def by_seed(rows: Rows, variant: str, split: str) -> dict[str, list[float]]:
    """Mean absolute errors by class, meV, a value per seed."""
    own = pick(rows, variant=variant, split=split)
    found = [errors(pick(own, seed=seed)) for seed in names(own, "seed")]
    return {label: [one[label] for one in found] for label in (found[0] if found else ())}


def table(rows: Rows) -> str:
    """Markdown: MAE in meV in and beyond the training distances, by class, over seeds."""
    rows, lines = references(rows) + rows, []
    for variant in names(rows, "variant"):
        trained, tested = (by_seed(rows, variant, split) for split in ("train", "test"))
        cells = [trained.get("all"), *tested.values()]
        lines.append([variant, *(mean_sd(cell, 1) if cell else None for cell in cells)])
    return errors_table(lines, rows)


def draw(png: Path, rows: Rows) -> None:
    """Binding curves of the reference and of each variant's first seed; test region shaded."""
    labels = sorted(names(rows, "class"))
    with picture(png, figsize=(11, 6)) as figure:
        grid = figure.subplots(-(-len(labels) // 3), min(3, len(labels)), squeeze=False)
        for axes, label in zip(grid.flat, labels, strict=False):
            own = sorted(pick(rows, seed=0, **{"class": label}), key=lambda row: row["distance_A"])
            beyond = min(row["distance_A"] for row in pick(own, split="test"))
            axes.axvspan(beyond - 0.4, 15.2, color="#EEEEEE")
            for color, variant in zip(SERIES, names(rows, "variant"), strict=False):
                part = pick(own, variant=variant)
                x = [row["distance_A"] for row in part]
                axes.plot(x, [row["predicted_eV"] for row in part], color=color, label=variant)
            axes.plot(x, [row["energy_eV"] for row in part], "k.", label="reference", zorder=3)
            far = [row["energy_eV"] for row in own if row["distance_A"] > 7.0]
            margin = 0.5 * (max(far) - min(far))
            limits = {"ylim": (min(far) - margin, max(far) + margin), "xlim": (6.5, 15.2)}
            axes.set(title=label, xlabel="separation, Å", **limits)
        for axes in grid[:, 0]:
            axes.set_ylabel("binding energy, eV")
        grid[0, -1].legend(loc="lower right", fontsize="x-small", frameon=False)
