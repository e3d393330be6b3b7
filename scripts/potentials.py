"""Compare a molflt potential with SchNet (PyG) and PaiNN at equal CPU time.

    python scripts/potentials.py FOLDER --out runs/potentials --seconds 3600
    python scripts/potentials.py FOLDER --out runs/potentials --test val_id val_hot --seeds 0 1 2

FOLDER contains training and test splits (--train, --test) that `molflt data inspect` can read. The
molflt potential has the model options of configs/potential.yaml. All models use the same frames,
loss and batches, the last weights, and a cosine schedule over the CPU time. Writes potentials.md
and potentials.csv. After an interruption, the same command starts the unfinished model again.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import yaml
from kit.budget import CpuBudget
from kit.rows import Row, Rows, markdown, mean_sd, pick, write_csv
from kit.runs import prepare
from kit.words import described, guarded, refuse_idle
from numpy.typing import NDArray
from peers_kit.jobs import train
from peers_kit.nets import Peer, PeriodicPaiNN, PeriodicSchNet
from torch import Tensor, nn
from torch_geometric.data import Batch

from molflt.data.structures.potential_data import PotentialData, SinglePoints
from molflt.evaluation.potentials import infer_points
from molflt.files import write_atomically
from molflt.graph.potential import Potential
from molflt.tasks.potential import PotentialTask

CONFIG = Path(__file__).parents[1] / "configs/potential.yaml"
CUTOFF = 5.0  # Å
MODELS = ("molflt", "schnet", "painn")
TRAINER = {"ema_decay": None, "gradient_clip": 5.0, "max_steps": 10_000}  # steps of the schedule
SCHEDULE = {"schedule": "cosine", "warmup_steps": 200}
MEASURES = {
    "energy_mae_meV_per_atom": "energy MAE, meV/atom",
    "energy_rmse_meV_per_atom": "energy RMSE, meV/atom",
    "force_mae_meV_per_A": "force MAE, meV/Å",
    "force_rmse_meV_per_A": "force RMSE, meV/Å",
}


class WithForces(nn.Module):
    """Adds forces to a network as `PotentialTask` requires; tags of atoms are ignored."""

    element_energies: Tensor
    energy_std: Tensor

    def __init__(self, net: Peer) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("element_energies", net.element_energies)  # shared with the network
        self.register_buffer("energy_std", net.energy_std)

    def forward(self, batch: Batch) -> Mapping[str, Tensor]:
        with torch.inference_mode(False), torch.enable_grad():
            batch = batch.clone()
            batch.pos.requires_grad_()
            batch.tags.zero_()
            energy = self.net(batch)["energy"]
            slope = torch.autograd.grad(energy.sum(), batch.pos, create_graph=self.training)[0]
        stress = torch.full_like(batch.stress, np.nan)
        return {"energy": energy, "forces": -slope, "stress": stress}


def build(name: str, options: argparse.Namespace) -> nn.Module:
    """Returns an untrained model."""
    dim, layers = options.dim, options.layers
    if name == "schnet":
        sizes = {"hidden_channels": dim, "num_filters": dim, "num_interactions": layers}
        return WithForces(PeriodicSchNet(CUTOFF, num_gaussians=50, **sizes))
    if name == "painn":
        return WithForces(PeriodicPaiNN(dim, layers, cutoff=CUTOFF))
    return Potential(**yaml.safe_load(CONFIG.read_text())["model"])


def run(
    name: str,
    seed: int,
    data: PotentialData,
    tests: Mapping[str, SinglePoints],
    options: argparse.Namespace,
) -> Rows:
    """Trains and evaluates a model, or reads the result of an earlier call."""
    done = options.out / f"{name}-{seed}.json"
    if done.exists():
        return json.loads(done.read_text())
    torch.manual_seed(seed)
    task = PotentialTask(build(name, options), lr=options.lr, **SCHEDULE)
    task.prepare(data)
    data.seed, budget = seed, CpuBudget(options.seconds)
    model, _ = train(task, data, budget, TRAINER)
    count = sum(p.numel() for p in model.parameters())
    about: Row = {"model": name, "seed": seed, "parameters": count, "steps": budget.steps}
    about["seconds"] = round(budget.used)
    rows = []
    for split, points in tests.items():
        found = infer_points(model, points, options.batch_size, split, domain=None)
        rows.append({**about, "split": split, **found.metrics})
    write_atomically(done, json.dumps(rows).encode())
    return rows


def trivial(data: PotentialData, tests: Mapping[str, SinglePoints]) -> Rows:
    """Returns the errors of a trivial model.

    The model predicts zero forces. Its energies are sums of element energies and one constant per
    atom.
    """
    own, train = data.element_energies().energies, data.datasets["train"]

    def rest(points: SinglePoints) -> NDArray[np.float64]:
        known = points.compositions(np.arange(len(points))) @ own
        return np.asarray((points.y_relaxed - known) / points.natoms)

    constant = np.median(rest(train))
    return [
        {
            "model": "mean",
            "split": split,
            "energy_mae_meV_per_atom": 1e3 * float(np.abs(rest(points) - constant).mean()),
            "force_mae_meV_per_A": 1e3 * points.force_size,
        }
        for split, points in tests.items()
    ]


def table(rows: Rows) -> str:
    """Formats the mean and standard deviation over seeds for each model and split."""
    lines = []
    for split, model in dict.fromkeys((row["split"], row["model"]) for row in rows):
        mine = pick(rows, split=split, model=model)
        found = ([row[key] for row in mine if key in row] for key in MEASURES)
        told = [mean_sd(values, 2) if values else None for values in found]
        steps = [row["steps"] for row in mine if "steps" in row]
        taken = round(sum(steps) / len(steps)) if steps else None
        lines.append([split, model, mine[0].get("parameters"), taken, *told])
    return markdown(["split", "model", "parameters", "steps", *MEASURES.values()], lines)


def measured(options: argparse.Namespace) -> Rows:
    """Returns one row per model, seed and split; updates the output files after each model."""
    own = ("out", "models", "seeds")  # do not affect other rows
    job = {key: value for key, value in vars(options).items() if key not in own}
    job |= {"data": str(options.data), "config": CONFIG.name, "content": CONFIG.read_text()}
    same = {"train_split": options.train, "batch_size": options.batch_size}
    every = {name: PotentialData(options.data, val_split=name, **same) for name in options.test}
    for data in every.values():
        data.setup()
    job["digests"] = {split: data.fingerprints() for split, data in every.items()}
    prepare(options.out, job)
    data, tests = every[options.test[0]], {name: own.datasets["val"] for name, own in every.items()}
    rows = trivial(data, tests)
    for seed in dict.fromkeys(options.seeds):  # repeated seeds would reduce the spread
        for name in dict.fromkeys(options.models):
            rows += run(name, seed, data, tests, options)
            columns = list(dict.fromkeys(key for row in reversed(rows) for key in row))
            write_csv(options.out / "potentials.csv", [dict.fromkeys(columns) | r for r in rows])
            write_atomically(options.out / "potentials.md", table(rows).encode())
    return rows


@guarded
def main(words: list[str] | None = None) -> None:
    parser = described(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train", default="train")
    parser.add_argument("--test", nargs="+", default=["val_id"])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    for name, default in (("seconds", 600.0), ("lr", 2e-3)):
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--batch_size", type=int, default=8)
    for name, value in (("dim", 64), ("layers", 3)):
        parser.add_argument(f"--{name}", type=int, default=value, help="size of SchNet and PaiNN")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args(words)
    if {"schnet", "painn"}.isdisjoint(options.models):
        refuse_idle(parser, options, "without schnet or painn", "dim", "layers")
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # otherwise, SchNet is slower on some processors
    print(table(measured(options)))


if __name__ == "__main__":
    raise SystemExit(main())
