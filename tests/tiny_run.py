"""A small data set and a small model, trained in seconds: what the training tests share."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from molflt.data.records import make_record
from molflt.data.store import write_store
from molflt.train import build_parser

SMALL = [
    "--model.dim=16",
    "--model.heads=2",
    "--model.layers=1",
    "--model.ffn_dim=16",
    "--model.num_features=8",
    "--model.num_nodes=4",
    "--model.num_gaussians=4",
    "--data.batch_size=4",
    "--task.warmup_steps=2",
    "--trainer.accelerator=cpu",
]


def structures(count: int, seed: int = 0, first_sid: int = 0, labels: bool = True):
    """Random slabs of 6 to 14 atoms with an energy that depends on elements and distances."""
    draw = np.random.default_rng(seed)
    for i in range(count):
        n = int(draw.integers(6, 15))
        pos = draw.uniform(0, 5, (n, 3))
        numbers = draw.choice([1, 8, 29, 78], n)
        tags = np.array([0, 0, 1, 1] + [2] * (n - 4))
        nearest = np.linalg.norm(pos[:, None] - pos[None], axis=-1)[~np.eye(n, dtype=bool)].min()
        yield make_record(
            pos=pos,
            atomic_numbers=numbers,
            cell=np.diag([8.0, 8.0, 20.0]),
            tags=tags,
            fixed=tags == 0,
            sid=first_sid + i,
            y_init=0.0 if labels else None,
            y_relaxed=float(nearest - 0.02 * numbers.mean() - 1) if labels else None,
            pos_relaxed=pos + 0.2 * (pos.mean(axis=0) - pos) if labels else None,
        )


def write_data(root: Path, train: int = 22, val: int = 13) -> Path:
    write_store(root / "train.safetensors", structures(train))
    write_store(root / "val_id.safetensors", structures(val, seed=1, first_sid=1000))
    return root


def arguments(data: Path, run: Path, *more: str) -> list[str]:
    return [*SMALL, f"--data.root={data}", f"--run={run}", *more]


def config(data: Path, run: Path, *more: str):
    return build_parser().parse_args(arguments(data, run, *more))


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "molflt", "train", *words]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}


def run_command(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(*words), env=environment(), capture_output=True, text=True, check=False, timeout=120
    )
    if check and done.returncode != 0:
        raise AssertionError(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def last_state(run: Path) -> dict:
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)


def flatten(value, name=""):
    """(name, leaf) of nested dictionaries and lists."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from flatten(part, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for key, part in enumerate(value):
            yield from flatten(part, f"{name}.{key}")
    else:
        yield name, value


def differences(one, other) -> list[str]:
    """Names of leaves that are not equal bit for bit."""
    left, right = dict(flatten(one)), dict(flatten(other))
    names = sorted(set(left) ^ set(right))
    for name in set(left) & set(right):
        a, b = left[name], right[name]
        same = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        if not same:
            names.append(name)
    return names
