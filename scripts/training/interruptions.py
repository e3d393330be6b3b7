"""Training runs that are killed and continued, compared bitwise with uninterrupted runs.

A small training run with dropout, averaged weights and redrawn features is repeated many times.
Each time, it is killed with SIGKILL at a random time, or ended before one of its file operations.
It is then resumed if a checkpoint exists, and started again otherwise. Weights, optimizer state and
validation results must be equal to those of an uninterrupted run.
"""

import contextlib
import io
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
from kit.rows import Row, Rows, markdown, pick
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from molflt.commands.cli import main

SAMPLE = Path(__file__).resolve().parents[2] / "datasets" / "chgnet-sample" / "val_id.safetensors"
QUICK = {"kills": 1, "every": 60}
KILLED, CUT = "SIGKILL", "cut"


def words(run: Path) -> list[str]:
    """Returns the arguments for a run of 13 steps, which ends in the middle of an epoch."""
    small = {"dim": 16, "heads": 2, "layers": 1, "ffn_dim": 16, "num_features": 8, "dropout": 0.2}
    steps = {"max_steps": 13, "val_every": 5, "checkpoint_every": 3, "log_every": 2}
    return [
        "train",
        *(f"--model.{name}={value}" for name, value in small.items()),
        *(f"--trainer.{name}={value}" for name, value in steps.items()),
        *("--model.mixing=linear", "--model.position=none", "--trainer.ema_decay=0.9"),
        *("--trainer.accelerator=cpu", "--task.warmup_steps=2", "--task.redraw_every=4"),
        *(f"--data.root={SAMPLE}", "--data.val_fraction=0.1", "--data.batch_size=4"),
        f"--run={run}",
    ]


def start(command: list[str], before: Callable[[], None] = lambda: None) -> int:
    """Starts a molflt command in a silent fork of this process and returns the process id."""
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
    """Waits for a process; returns its exit status, or the negative number of a fatal signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def count_operations(run: Path, act: Callable[[int], None]) -> Callable[[], None]:
    """Returns a function that installs a hook, which calls `act(n)` before the n-th file operation.

    The count includes all operations on files of the run that Python's audit hooks report: opening
    for writing, renaming, removing, creating folders, truncating, and changing permissions.
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


def leaves(value: object) -> list[object]:
    """Returns the leaves of nested dictionaries and lists; tensors are converted to bytes."""
    found = tree_leaves(value)
    return [one.numpy().tobytes() if isinstance(one, torch.Tensor) else one for one in found]


def ends(run: Path) -> list[object]:
    """Returns the weights, optimizer state and validation results of a run."""
    folder = run / "checkpoints"
    files = (folder / f"{name}.safetensors" for name in ("best", "last"))
    found: list[object] = [file.read_bytes() for file in files]
    state = torch.load(folder / "last.ckpt", weights_only=True)
    parts = ("state_dict", "current_model_state", "optimizer_states", "lr_schedulers", "callbacks")
    found += [leaves(state[part]) for part in (*parts, "global_step")]
    rows = (run / "metrics.csv").read_text().splitlines()
    return [*found, [row for row in rows if not row.endswith(",")]]


def row(how: str, at: float, run: Path, expected: list[object]) -> Row:
    """Continues an interrupted run and compares its results; deletes the run if they are equal."""
    resumed = (run / "checkpoints" / "last.ckpt").exists()
    after = "resumed" if resumed else "started again"
    status = end(start(["train", "--resume", str(run)] if resumed else words(run)))
    same = status == 0 and ends(run) == expected
    if same:
        shutil.rmtree(run)
    else:
        print(f"{run}: {how} at {at:g}, {after}: status {status}", file=sys.stderr)
    return {"how": how, "at": at, "after": after, "same": same}


def measure(kills: int = 20, every: int = 1, seed: int = 0) -> Rows:
    """Returns one row per interruption, which is at a random time or before a file operation."""
    folder = Path(tempfile.mkdtemp(prefix="molflt-interruptions-"))
    whole, operations = folder / "whole", folder / "operations"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main(words(folder / "warm"))  # forks inherit the imported modules
    begun = time.perf_counter()
    note = count_operations(whole, lambda n: operations.write_text(str(n)))
    if status := end(start(words(whole), note)):
        raise ValueError(f"{whole}: the uninterrupted training run ended with status {status}")
    seconds, expected = time.perf_counter() - begun, ends(whole)
    rows = []
    moments = np.random.default_rng(seed).uniform(0.05, 0.95, kills) * seconds
    for i, moment in enumerate(tqdm(moments, desc=KILLED, leave=False)):
        run = folder / f"killed{i}"
        pid = start(words(run))
        time.sleep(moment)
        os.kill(pid, signal.SIGKILL)
        end(pid)
        rows.append(row(KILLED, float(moment), run, expected))
    for n in tqdm(range(1, int(operations.read_text()) + 1, every), desc=CUT, leave=False):
        run = folder / f"cut{n}"
        cut = count_operations(run, lambda now, n=n: os._exit(9) if now == n else None)
        end(start(words(run), cut))
        rows.append(row(CUT, n, run, expected))
    if all(each["same"] for each in rows):
        shutil.rmtree(folder)
    return rows


def table(rows: Rows) -> str:
    """Formats the numbers of runs that resumed, that started again, and whose results are equal."""
    lines = []
    titles = {KILLED: "SIGKILL at a random time", CUT: "before a file operation"}
    for how, name in titles.items():
        own = pick(rows, how=how)
        resumed = len(pick(own, after="resumed"))
        same = len(pick(own, same=True))
        lines.append((name, len(own), resumed, len(own) - resumed, f"{same} of {len(own)}"))
    return markdown(("killed", "times", "resumed", "started again", "same results"), lines)
