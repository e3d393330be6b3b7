"""A potential of molflt beside SchNet (PyG), at equal processor time on the same frames.

    python scripts/potentials.py FOLDER --out runs/potentials --seconds 3600
    python scripts/potentials.py FOLDER --out runs/potentials --models molflt --dim 128 --layers 4

FOLDER holds train and test splits (--train, --test) that `molflt data inspect` reads. Both models
see the same loss, batches and schedule, which follows the clock. Writes potentials.md and .csv;
started again, it goes on where it was stopped and repeats nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kit.rows import Row, Rows, markdown, write_csv
from kit.words import parsed
from torch import Tensor, nn
from torch_geometric.data import Batch
from torch_geometric.nn.models import SchNet

from molflt.data.structures.potential_data import PotentialData, SinglePoints
from molflt.files import write_atomically
from molflt.graph.geometry import Geometry
from molflt.graph.neighbors import neighbor_list
from molflt.graph.potential import Potential
from molflt.tasks.potential import PotentialTask

SAVE_EVERY = 60  # seconds
WARM = 0.02  # share of the time in which the learning rate rises


class LocalNet(nn.Module):
    """PyG's SchNet with periodic neighbors, and what `PotentialTask` asks of a model."""

    def __init__(self, dim: int, layers: int, cutoff: float = 5.0) -> None:
        super().__init__()
        self.net = SchNet(dim, dim, layers, cutoff=cutoff, interaction_graph=self._edges)
        self.cutoff = cutoff
        self.found: tuple[Tensor, Tensor] | None = None
        self.register_buffer("element_energies", torch.zeros(119, dtype=torch.float64))
        self.register_buffer("energy_std", torch.ones((), dtype=torch.float64))

    def _edges(self, pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        assert self.found is not None
        return self.found

    def forward(self, batch: Batch) -> Mapping[str, Tensor]:
        with torch.enable_grad():
            pos = batch.pos.detach().clone().requires_grad_()
            geometry = Geometry.of(pos, batch.batch, batch.cell, batch.pbc)
            pairs = neighbor_list(geometry, self.cutoff)
            self.found = torch.stack((pairs.neighbor, pairs.center)), pairs.distance
            atomic = self.net(batch.atomic_numbers, pos, batch.batch)[:, 0]
            known = geometry.sum(self.element_energies[batch.atomic_numbers])
            energy = atomic.double() * self.energy_std + known
            force = -torch.autograd.grad(energy.sum(), pos, create_graph=self.training)[0]
        return {"energy": energy, "forces": force, "stress": torch.full_like(batch.stress, np.nan)}


def build(name: str, options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(options.seed)
    if name == "schnet":
        return LocalNet(options.dim, options.layers)
    sizes: dict[str, Any] = {"dim": options.dim, "layers": options.layers}
    return Potential(**sizes, ffn_dim=2 * options.dim)


def judge(task: PotentialTask, points: SinglePoints, batch_size: int) -> dict[str, float]:
    """Metrics of a whole split."""
    task.model.eval()
    totals = torch.zeros(len(task.sums._fields), dtype=torch.float64)
    for start in range(0, len(points), batch_size):
        part = [points[i] for i in range(start, min(start + batch_size, len(points)))]
        totals += torch.stack(list(task.judge(Batch.from_data_list(part))))
    return task.summarize(totals)


def learn(
    task: PotentialTask, points: SinglePoints, state: Path, options: argparse.Namespace
) -> tuple[int, float]:
    """Steps until the time is over; those of earlier starts count. Returns steps and seconds."""
    optimizer, step, spent = task.optimizer(), 0, 0.0
    if state.exists():
        kept = torch.load(state, weights_only=True)
        task.model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        step, spent = kept["step"], kept["spent"]
    began = saved = time.process_time()
    task.model.train()

    def keep(seconds: float) -> None:
        parts = {"model": task.model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**parts, "step": step, "spent": seconds}, state)

    while (elapsed := spent + time.process_time() - began) < options.seconds:
        draw = np.random.default_rng((options.seed, step))
        chosen = draw.choice(len(points), min(options.batch_size, len(points)), replace=False)
        progress = elapsed / options.seconds
        factor = min(progress / WARM, 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = options.lr * factor
        loss, _ = task.loss(Batch.from_data_list([points[int(i)] for i in chosen]), progress)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(task.model.parameters(), 5.0)
        optimizer.step()
        step += 1
        if time.process_time() - saved > SAVE_EVERY:
            keep(spent + time.process_time() - began)
            saved = time.process_time()
    keep(elapsed)
    return step, elapsed


def run(name: str, options: argparse.Namespace, data: PotentialData) -> Row:
    """Trains and judges one model, or reads what an earlier start has found."""
    done = options.out / f"{name}.json"
    if done.exists():
        return json.loads(done.read_text())  # type: ignore[no-any-return]
    train, test = data.datasets["train"], data.datasets["val"]
    assert isinstance(train, SinglePoints) and isinstance(test, SinglePoints)
    task = PotentialTask(build(name, options), lr=options.lr)
    task.prepare(data)
    step, seconds = learn(task, train, options.out / f"{name}.ckpt", options)
    found = judge(task, test, options.batch_size)
    count = sum(p.numel() for p in task.model.parameters())
    row: Row = {"model": name, "parameters": count, "steps": step, "seconds": round(seconds)}
    row |= {key: round(value, 3) for key, value in found.items()}
    write_atomically(done, json.dumps(row).encode())
    return row


def trivial(data: PotentialData) -> Row:
    """Energies of the elements plus a constant per atom, and no forces."""
    train, test = data.datasets["train"], data.datasets["val"]
    assert isinstance(train, SinglePoints) and isinstance(test, SinglePoints)
    own = data.element_energies().energies
    rest = [
        (points.y_relaxed - points.compositions(np.arange(len(points))) @ own) / points.natoms
        for points in (train, test)
    ]
    error = np.abs(rest[1] - np.median(rest[0])).mean()
    row: Row = {"model": "mean", "energy_mae_meV_per_atom": round(1e3 * float(error), 3)}
    return {**row, "force_mae_meV_per_A": round(1e3 * test.force_size, 3)}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train", default="train")
    parser.add_argument("--test", default="val_id")
    parser.add_argument("--models", nargs="+", default=["molflt", "schnet"])
    for name, default in (("seconds", 600.0), ("lr", 2e-3)):
        parser.add_argument(f"--{name}", type=float, default=default)
    for name, value in (("batch_size", 8), ("dim", 64), ("layers", 3), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parsed(parser, words)
    options.out.mkdir(parents=True, exist_ok=True)
    data = PotentialData(options.data, train_split=options.train, val_split=options.test)
    data.setup()
    rows: Rows = [trivial(data), *(run(name, options, data) for name in options.models)]
    columns = list(dict.fromkeys(key for row in reversed(rows) for key in row))
    rows = [{key: row.get(key) for key in columns} for row in rows]
    write_csv(options.out / "potentials.csv", rows)
    text = markdown(columns, (row.values() for row in rows))
    write_atomically(options.out / "potentials.md", text.encode())
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
