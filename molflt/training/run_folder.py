"""The folder of a run: what is written into it next to metrics and checkpoints."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

import torch
import yaml

from molflt import __version__
from molflt.files import write_atomically
from molflt.metrics import Metric

__all__ = ["RunFolder"]


class RunFolder:
    """What a run leaves behind next to metrics and checkpoints; only its first process writes.

    Args:
        path: the folder.
        resume: whether an earlier run in it goes on.

    Raises:
        FileNotFoundError: if there is nothing to resume.
        FileExistsError: if the folder holds checkpoints of an earlier run.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        from lightning.pytorch.utilities import rank_zero_only

        # False in the processes that Lightning's DDP launcher starts
        self.writes = (getattr(rank_zero_only, "rank", None) or 0) == 0
        self.path = path
        self.resume = resume
        last = path / "checkpoints" / "last.ckpt"
        if resume and not last.is_file():
            raise FileNotFoundError(
                f"{last}: no such checkpoint; nothing to resume; start a new run"
            )
        if not resume and self.writes and any(path.glob("checkpoints/*")):
            raise FileExistsError(
                f"{path}: holds checkpoints of an earlier run; expected an empty or new folder; "
                f"resume it with --resume {path}, or choose another --run"
            )

    def say(self, text: str, file: TextIO | None = None) -> None:
        """Prints, once for all processes."""
        if self.writes:
            print(text, file=file)

    def write(self, config: Mapping[str, object], data_files: Mapping[str, bytes]) -> None:
        """Writes config.yaml, versions.json and what belongs to the data.

        Raises:
            ValueError: if what belongs to the data is not what a resumed run was started with.
        """
        if not self.writes:
            return
        for name, content in data_files.items():
            path = self.path / name
            if self.resume and path.is_file() and path.read_bytes() != content:
                raise ValueError(
                    f"{path}: the data of this run have changed; expected what the run was started "
                    "with; restore the data, or start a new run"
                )
            write_atomically(path, content)
        text = yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True)
        write_atomically(self.path / "config.yaml", text.encode())
        if not self.resume:
            versions = json.dumps(_versions(), indent=2) + "\n"
            write_atomically(self.path / "versions.json", versions.encode())

    def draw_curve(self, metrics: Mapping[str, Metric], best: str) -> None:
        """Draws curve.png if anything is logged; a picture never hides why training stopped."""
        from molflt.plots import training_curve

        table, png = self.path / "metrics.csv", self.path / "curve.png"
        try:
            if self.writes and table.is_file() and len(table.read_text().splitlines()) > 1:
                training_curve(table, png, metrics, best)
        except (OSError, ValueError) as error:
            print(f"{png}: not drawn: {error}", file=sys.stderr)


def _plain(value: object) -> object:
    """With names in place of paths and lists in place of tuples, for YAML."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value


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
