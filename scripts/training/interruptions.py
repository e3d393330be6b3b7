"""Trainings that are killed: whether they go on to the same end, bit for bit.

A small training, with dropout, averaged weights and redrawn features, is killed with SIGKILL at
random moments, and again, one by one, before each of its operations on files. What is left is
resumed if there is a checkpoint and begun again if there is none. Weights, the state of the
optimizer and the validations have to be those of the training that nothing happened to.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from kit.rows import Promise, Row, Rows, markdown, pick
from tqdm import tqdm

from molflt.commands.cli import main
from molflt.data.structures.records import make_record
from molflt.data.structures.store import write_store

QUICK = {"kills": 1, "every": 60}
KILLED, CUT = "SIGKILL", "cut"


def write_data(root: Path) -> Path:
    """22 and 13 small slabs with energies."""
    draw = np.random.default_rng(0)
    for split, count in (("train", 22), ("val_id", 13)):
        records = []
        for sid in range(count):
            atoms = int(draw.integers(6, 15))
            pos = draw.uniform(0, 5, (atoms, 3))
            tags = np.array([0, 0, 1, 1] + [2] * (atoms - 4))
            numbers = draw.choice([1, 8, 29, 78], atoms)
            box = {"cell": np.diag([8.0, 8.0, 20.0]), "tags": tags, "fixed": tags == 0, "sid": sid}
            energy = -0.02 * float(numbers.mean())
            records.append(
                make_record(
                    pos=pos, atomic_numbers=numbers, y_relaxed=energy, pos_relaxed=pos, **box
                )
            )
        write_store(root / f"{split}.safetensors", records)
    return root


def words(data: Path, run: Path) -> list[str]:
    """Command line of the training: 13 steps in batches of 4, so that it stops in mid-epoch."""
    small = {"dim": 16, "heads": 2, "layers": 1, "ffn_dim": 16, "num_features": 8, "dropout": 0.2}
    steps = {"max_steps": 13, "val_every": 5, "checkpoint_every": 3, "log_every": 2}
    return [
        "train",
        *(f"--model.{name}={value}" for name, value in small.items()),
        *(f"--trainer.{name}={value}" for name, value in steps.items()),
        *("--model.mixing=linear", "--model.position=none", "--trainer.ema_decay=0.9"),
        *("--trainer.accelerator=cpu", "--task.warmup_steps=2", "--task.redraw_every=4"),
        *("--data.batch_size=4", f"--data.root={data}", f"--run={run}"),
    ]


def start(command: list[str], before: Callable[[], None] = lambda: None) -> int:
    """Runs a command in a fork of this process, silently; its process id."""
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)
        status = 70
        try:
            before()
            status = main(command)
        finally:
            os._exit(status)
    return pid


def end(pid: int) -> int:
    """Exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def count_operations(run: Path, act: Callable[[int], None]) -> Callable[[], None]:
    """First action of a fork: call `act` before each operation on files of a run, counted.

    Operations are those that Python's audit hooks see: opening for writing, renaming, removing,
    making folders, truncating, changing permissions.
    """
    changing = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod"}
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
    done = [0]

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        changes = event in changing or (event == "open" and int(str(arguments[2])) & writing)
        if changes and str(arguments[0]).startswith(str(run)):
            done[0] += 1
            act(done[0])

    return lambda: sys.addaudithook(hook)


def goes_on(data: Path, run: Path) -> tuple[str, int]:
    """Resumes what is left of a training, or begins it again; which of the two, and its status."""
    if (run / "checkpoints" / "last.ckpt").exists():
        return "resumed", end(start(["train", "--resume", str(run)]))
    return "begun again", end(start(words(data, run)))


def leaves(value: object) -> list[object]:
    """Leaves of nested dictionaries and lists; bytes of tensors."""
    if isinstance(value, dict):
        value = [part for pair in sorted(value.items(), key=str) for part in pair]
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in leaves(part)]
    return [value.numpy().tobytes() if isinstance(value, torch.Tensor) else value]


def ends(run: Path) -> list[object]:
    """All that has to be the same: weights, state of the optimizer, validations."""
    folder = run / "checkpoints"
    found: list[object] = [
        (folder / f"{name}.safetensors").read_bytes() for name in ("best", "last")
    ]
    state = torch.load(folder / "last.ckpt", weights_only=True)
    parts = ("state_dict", "current_model_state", "optimizer_states", "lr_schedulers", "callbacks")
    found += [leaves(state[part]) for part in (*parts, "global_step")]
    rows = (run / "metrics.csv").read_text().splitlines()
    return [*found, [row for row in rows if not row.endswith(",")]]


def row(how: str, at: float, data: Path, run: Path, expected: list[object]) -> Row:
    """Result of one interrupted training; its folder is removed unless it failed."""
    after, status = goes_on(data, run)
    same = status == 0 and ends(run) == expected
    if same:
        shutil.rmtree(run)
    else:
        print(f"{run}: {how} at {at:g}, {after}: status {status}", file=sys.stderr)
    return {"how": how, "at": at, "after": after, "same": same}


def measure(kills: int = 20, every: int = 1, seed: int = 0) -> Rows:
    """Kills at random moments, and before every (or every so many) operation on files."""
    folder = Path(tempfile.mkdtemp(prefix="molflt-interruptions-"))
    data, whole, operations = write_data(folder / "data"), folder / "whole", folder / "operations"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main(words(data, folder / "warm"))  # what it has imported, its forks need not
    begun = time.perf_counter()
    note = count_operations(whole, lambda n: operations.write_text(str(n)))
    if status := end(start(words(data, whole), note)):
        raise ValueError(f"{whole}: the training that nothing happens to ended with {status}")
    seconds, expected = time.perf_counter() - begun, ends(whole)
    rows = []
    moments = np.random.default_rng(seed).uniform(0.05, 0.95, kills) * seconds
    for i, moment in enumerate(tqdm(moments, desc=KILLED, leave=False)):
        run = folder / f"killed{i}"
        pid = start(words(data, run))
        time.sleep(moment)
        os.kill(pid, signal.SIGKILL)
        end(pid)
        rows.append(row(KILLED, float(moment), data, run, expected))
    for n in tqdm(range(1, int(operations.read_text()) + 1, every), desc=CUT, leave=False):
        run = folder / f"cut{n}"
        cut = count_operations(run, lambda now, n=n: os._exit(9) if now == n else None)
        end(start(words(data, run), cut))
        rows.append(row(CUT, n, data, run, expected))
    if all(each["same"] for each in rows):
        shutil.rmtree(folder)
    return rows


def share(how: str) -> Callable[[Rows], float | None]:
    """Share of interrupted trainings with the same end."""

    def value(rows: Rows) -> float:
        own = pick(rows, how=how)
        return sum(each["same"] for each in own) / len(own) if own else math.nan

    return value


def table(rows: Rows) -> str:
    """Counts of resumed, restarted and equal trainings."""
    lines = []
    for how, name in (
        (KILLED, "SIGKILL at a random moment"),
        (CUT, "before an operation on files"),
    ):
        own = pick(rows, how=how)
        resumed = len(pick(own, after="resumed"))
        same = len(pick(own, same=True))
        lines.append((name, len(own), resumed, len(own) - resumed, f"{same} of {len(own)}"))
    return markdown(("stopped", "times", "resumed", "begun again", "the same end"), lines)


PROMISES = [
    Promise("share of the killed with the same end", share(KILLED), least=1.0),
    Promise("share of the cut with the same end", share(CUT), least=1.0),
]
