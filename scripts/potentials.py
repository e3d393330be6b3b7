"""Compare a molflt potential with SchNet (PyG) and PaiNN at equal CPU time.

    python scripts/potentials.py FOLDER --out runs/potentials --seconds 3600
    python scripts/potentials.py FOLDER --out runs/potentials --test val_id val_hot --seeds 0 1 2

FOLDER contains training and test splits (--train, --test) that `molflt data inspect` can read. The
molflt potential is configs/potential.yaml. All models use the same frames, loss and batches, and
the same schedule of learning rates, which depends on the time used so far. Writes potentials.md and
potentials.csv. After an interruption, the same command continues.
"""

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import yaml
from kit.budget import CpuBudget
from kit.rows import Row, Rows, markdown, mean_sd, pick, write_csv
from kit.runs import prepare
from kit.words import described, guarded
from numpy.typing import NDArray
from peers_kit.nets import Peer, PeriodicPaiNN, PeriodicSchNet
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from molflt.data.structures.potential_data import PotentialData, SinglePoints
from molflt.files import write_atomically
from molflt.graph.geometry import Geometry
from molflt.graph.potential import Potential
from molflt.tasks.potential import PotentialTask
from molflt.training.checkpoint import read_plain, write_checkpoint

CONFIG = Path(__file__).parents[1] / "configs/potential.yaml"
CUTOFF = 5.0  # Å
MODELS = ("molflt", "schnet", "painn")
MEASURES = {
    "energy_mae_meV_per_atom": "energy MAE, meV/atom",
    "energy_rmse_meV_per_atom": "energy RMSE, meV/atom",
    "force_mae_meV_per_A": "force MAE, meV/Å",
    "force_rmse_meV_per_A": "force RMSE, meV/Å",
}


class LocalNet(nn.Module):
    """A message-passing net with a cutoff, with the interface that `PotentialTask` needs."""

    element_energies: Tensor
    energy_std: Tensor

    def __init__(self, net: Peer) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("element_energies", torch.zeros(119, dtype=torch.float64))
        self.register_buffer("energy_std", torch.ones((), dtype=torch.float64))

    def forward(self, batch: Batch) -> Mapping[str, Tensor]:
        with torch.enable_grad():
            pos = batch.pos.detach().clone().requires_grad_()
            geometry = Geometry.of(pos, batch.batch, batch.cell, batch.pbc)
            place = {"pos": pos, "cell": batch.cell, "pbc": batch.pbc}
            edges = self.net.graph(Data(**place, batch=batch.batch, num_nodes=len(pos)))
            atomic = self.net.atomic(batch.atomic_numbers, edges)
            known = geometry.sum(self.element_energies[batch.atomic_numbers])
            energy = geometry.sum(atomic).double() * self.energy_std + known
            force = -torch.autograd.grad(energy.sum(), pos, create_graph=self.training)[0]
        return {"energy": energy, "forces": force, "stress": torch.full_like(batch.stress, np.nan)}


def build(name: str, options: argparse.Namespace) -> nn.Module:
    """Returns an untrained model."""
    dim, layers = options.dim, options.layers
    if name == "schnet":
        sizes = {"hidden_channels": dim, "num_filters": dim, "num_interactions": layers}
        return LocalNet(PeriodicSchNet(CUTOFF, num_gaussians=50, **sizes))
    if name == "painn":
        return LocalNet(PeriodicPaiNN(dim, layers, cutoff=CUTOFF))
    return Potential(**yaml.safe_load(CONFIG.read_text())["model"])


def judge(task: PotentialTask, points: SinglePoints, batch_size: int) -> dict[str, float]:
    """Returns the metrics of a whole split."""
    task.model.eval()
    totals = torch.zeros(len(task.sums._fields), dtype=torch.float64)
    for start in range(0, len(points), batch_size):
        part = [points[i] for i in range(start, min(start + batch_size, len(points)))]
        totals += torch.stack(list(task.judge(Batch.from_data_list(part))))
    return task.summarize(totals)


def learn(
    task: PotentialTask, points: SinglePoints, state: Path, seed: int, options: argparse.Namespace
) -> CpuBudget:
    """Trains until the time limit; the time of earlier calls counts.

    Learning rates increase linearly for 2 % of the time and then follow a cosine to 0. The state is
    saved every minute and at the end.
    """
    budget, optimizer, model = CpuBudget(options.seconds), task.optimizer(), task.model
    rates = [group["lr"] for group in optimizer.param_groups]
    if state.exists():
        kept = read_plain(state)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        budget.steps, budget.used = kept["step"], kept["spent"]
    saved = budget.used
    model.train()
    while budget.used < budget.seconds:
        with budget.running():
            factor = min(budget.share / 0.02, 0.5 * (1 + math.cos(math.pi * budget.share)))
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            draw = np.random.default_rng((seed, budget.steps))
            chosen = draw.choice(len(points), min(options.batch_size, len(points)), replace=False)
            batch = Batch.from_data_list([points[int(i)] for i in chosen])
            optimizer.zero_grad()
            loss = task.loss(batch, budget.share)[0]
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
        budget.steps += 1
        if budget.used - saved > 60 or budget.used >= budget.seconds:
            print(f"{state.stem}: step {budget.steps}, {budget.used:.0f} s, loss {loss.item():.4f}")
            kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            write_checkpoint(state, {**kept, "step": budget.steps, "spent": budget.used})
            saved = budget.used
    return budget


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
    task = PotentialTask(build(name, options), lr=options.lr)
    task.prepare(data)
    train, state = data.datasets["train"], options.out / f"{name}-{seed}.ckpt"
    budget = learn(task, train, state, seed, options)
    count = sum(p.numel() for p in task.model.parameters())
    about: Row = {"model": name, "seed": seed, "parameters": count, "steps": budget.steps}
    about["seconds"] = round(budget.used)
    rows = [
        {**about, "split": split, **judge(task, points, options.batch_size)}
        for split, points in tests.items()
    ]
    write_atomically(done, json.dumps(rows).encode())
    return rows


def trivial(data: PotentialData, tests: Mapping[str, SinglePoints]) -> Rows:
    """Returns the errors of a trivial model.

    It predicts zero forces, and element energies plus a constant per atom.
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
    """Returns mean and standard deviation over seeds of each model on each split."""
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
    """Returns a row for each model, seed and split; writes the files after each model."""
    own = ("out", "models", "seeds")  # these do not change other rows
    job = {key: value for key, value in vars(options).items() if key not in own}
    job |= {"data": str(options.data), "config": CONFIG.name, "content": CONFIG.read_text()}
    every = {
        split: PotentialData(options.data, train_split=options.train, val_split=split)
        for split in options.test
    }
    for data in every.values():
        data.setup()
    job["digests"] = {split: data.fingerprints() for split, data in every.items()}
    prepare(options.out, job)
    data, tests = every[options.test[0]], {name: own.datasets["val"] for name, own in every.items()}
    rows = trivial(data, tests)
    for seed in options.seeds:
        for name in options.models:
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
    print(table(measured(options)))


if __name__ == "__main__":
    raise SystemExit(main())
