"""The folder of a run: what is written into it beside metrics and checkpoints."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from molflt import __version__
from molflt.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["check_run_folder", "draw_curve", "is_first_rank", "write_run_files"]


def check_run_folder(run: Path, resume: bool) -> None:
    """Refuses to resume what is not there, and to write over another run."""
    last = run / "checkpoints" / "last.ckpt"
    if resume and not last.is_file():
        raise FileNotFoundError(f"{last}: no such checkpoint; nothing to resume; start a new run")
    if not resume and is_first_rank() and any(run.glob("checkpoints/*")):
        raise FileExistsError(
            f"{run}: holds checkpoints of an earlier run; expected an empty or new folder; "
            f"resume it with --resume {run}, or choose another --run"
        )


def is_first_rank() -> bool:
    """Whether this process is no helper that Lightning's DDP launcher has started."""
    from lightning.pytorch.utilities import rank_zero_only

    return (getattr(rank_zero_only, "rank", None) or 0) == 0


def write_run_files(run: Path, config: str, data_files: Mapping[str, bytes], resume: bool) -> None:
    """Writes config.yaml, versions.json and what belongs to the data.

    Raises:
        ValueError: if what belongs to the data is no longer what a resumed run was started with.
    """
    for name, content in data_files.items():
        _keep(run / name, content, resume)
    write_atomically(run / "config.yaml", config.encode())
    if not resume:
        versions = json.dumps(_versions(), indent=2) + "\n"
        write_atomically(run / "versions.json", versions.encode())


def _keep(path: Path, content: bytes, resume: bool) -> None:
    """Writes what belongs to the data, or checks that a resumed run still has the same."""
    if resume and path.is_file() and path.read_bytes() != content:
        raise ValueError(
            f"{path}: the data of this run have changed; expected what the run was started with; "
            "restore the data, or start a new run"
        )
    write_atomically(path, content)


def _versions() -> dict[str, str | None]:
    packages = ("torch", "torch-geometric", "lightning", "numpy", "safetensors")
    return {
        "molflt": __version__,
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _git_commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None  # installed without git, or from a package
    return done.stdout.strip()


def draw_curve(run: Path) -> None:
    """Draws curve.png if anything has been logged; a picture never hides why training stopped."""
    from molflt.plots import training_curve

    metrics = run / "metrics.csv"
    try:
        if metrics.is_file() and len(metrics.read_text().splitlines()) > 1:
            training_curve(metrics, run / "curve.png")
    except (OSError, ValueError) as error:
        print(f"{run / 'curve.png'}: not drawn: {error}", file=sys.stderr)
