"""The folder of a run: what is written into it next to metrics and checkpoints."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TextIO, cast

import torch
import yaml
from torch import Tensor, nn

from molflt.data.batches import Fingerprint
from molflt.data.structures.domain import DOMAIN
from molflt.files import append, clear_parts, read_json, shown, verify_tensors, write_atomically
from molflt.metrics import Metric
from molflt.training.checkpoint import (
    Checkpoint,
    check_weights,
    model_weights,
    read_checkpoint,
    save_weights,
    write_checkpoint,
)
from molflt.training.config import Config, plain, read_config
from molflt.training.lock import RunLock
from molflt.training.origin import (
    Origin,
    check_config,
    check_data,
    check_machine,
    check_stopped,
)
from molflt.training.outcome import draw_curve
from molflt.version import __version__

__all__ = ["KEPT", "RunFolder", "read_versions"]

KEPT = (DOMAIN, "references.json", "vocabulary.json", "classes.json", "tokenizer.json")
"""Names of the files that say what weights mean, of which a run has those of its recipe."""

_RECORD = "init.json"  # of a start from other weights
_VERSIONS = "versions.json"
_MOST_BYTES = 100_000  # of that


class RunFolder:
    """What a run leaves behind next to metrics and checkpoints; only its first process writes.

    Args:
        path: the folder.

    Attributes:
        path: as given.
        writes: whether this is the first of the run's processes.
        origin: what checkpoints say about the run.
        checkpoint: what to go on from; None for a new run.
    """

    def __init__(self, path: Path) -> None:
        from lightning.pytorch.utilities import rank_zero_only

        # False in the processes that a DDP launcher starts, be it Lightning's or torchrun
        self.writes = (getattr(rank_zero_only, "rank", None) or 0) == 0
        self.path = path
        self.origin: Origin = {}
        self.checkpoint: Checkpoint | None = None
        self._lock = RunLock(path)
        self._files: dict[str, str] = {}
        self._begun = time.perf_counter()

    @property
    def last(self) -> Path:
        """The checkpoint to go on from."""
        return self.path / "checkpoints" / "last.ckpt"

    @contextmanager
    def held(self, resume: bool) -> Iterator[None]:
        """Keeps others from training in the folder, and looks at what is in there.

        Args:
            resume: whether an earlier run in it goes on.
        """
        if resume and not self.last.is_file():
            read_checkpoint(self.last)  # says so, and makes no folder
        with self._lock.held() if self.writes else nullcontext():
            if resume:
                self.checkpoint = read_checkpoint(self.last)
            elif self.writes:
                self._expect_new()
            yield

    def _expect_new(self) -> None:
        if self.last.exists():
            raise FileExistsError(
                f"{self.path}: holds checkpoints of an earlier run; expected an empty or new "
                f"folder; resume it with --resume {shlex.quote(str(self.path))}, or choose "
                "another --run"
            )
        for kept in self.path.glob("checkpoints/*.safetensors"):
            # never those of an interrupted start: last.ckpt is written before any weights
            raise FileExistsError(
                f"{kept}: belongs to an earlier run, whose last.ckpt is gone; expected an empty or "
                "new folder; choose another --run, or move the file away"
            )
        config = self.path / "config.yaml"
        if config.exists() and not (self.path / _VERSIONS).exists():
            raise FileExistsError(
                f"{config}: of no run, and would be overwritten; expected an empty or new folder; "
                "choose another --run, or move the file away"
            )

    def check_config(self, config: Config) -> None:
        """Compares the configuration with that of the checkpoint, and takes it over."""
        now = cast(Config, plain(config))
        if self.checkpoint is not None:
            was = self._was().get("config") or read_config(self.path)
            check_config(self.path / "config.yaml", was, now, self.checkpoint["global_step"])
            check_stopped(self.path, self._was().get("stopped"), now)
        self.origin["config"] = now

    def check_data(
        self, fingerprints: Mapping[str, Fingerprint], files: Mapping[str, bytes]
    ) -> None:
        """Compares the data with those of the checkpoint.

        Args:
            fingerprints: of each split.
            files: what belongs to the data, whose digests weights will carry.
        """
        check_data(self.path, self._was().get("data", {}), fingerprints)
        self.origin["data"] = fingerprints
        self._files = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}

    def _was(self) -> Origin:
        """What the checkpoint says about its run; nothing, in those of earlier versions."""
        return cast(Origin, (self.checkpoint or {}).get("molflt", {}))

    def remember(self, domain: object) -> object:
        """Keeps in checkpoints what the weights of a start had seen; a run that goes on has it.

        Args:
            domain: content of their domain.json, None without; that of a new run.
        """
        kept = domain if self.checkpoint is None else self._was().get("initial")
        if kept is not None:
            self.origin["initial"] = kept
        return kept

    def check_weights(self, model: nn.Module) -> None:
        """Refuses a checkpoint of another model, and writes last.safetensors if it lags behind.

        The latter happens if the run was killed between the two files.
        """
        if self.checkpoint is not None:
            weights = model_weights(self.checkpoint)
            check_weights(self.last, model, weights)
            for kept in sorted(self.last.parent.glob("*.safetensors")):
                verify_tensors(kept)
            self.save_weights("last", weights, {"step": self.checkpoint["global_step"]})

    def check_machine(self, machine: Mapping[str, object]) -> None:
        """Notes what else decides about rounding, and says if it was another in the checkpoint.

        Steps begin now: the time that checkpoints tell counts from here.
        """
        self._begun = time.perf_counter()
        line = check_machine(self._was().get("machine", {}), machine)
        if line is not None:
            self.say(f"{self.path}: {line}", sys.stderr)
        self.origin["machine"] = machine

    def say(self, text: str, file: TextIO | None = None) -> None:
        """Prints, once for all processes."""
        if self.writes:
            print(text, file=file)

    def write(self, data_files: Mapping[str, bytes]) -> None:
        """Writes config.yaml, versions.json and what belongs to the data."""
        if not self.writes:
            return
        for folder in (self.path, self.last.parent):
            clear_parts(folder)
        if self.checkpoint is None:
            path = self.path / _VERSIONS  # the first file: it tells a config.yaml of ours
            # an interrupted start may have been of other data, another recipe or other weights
            for name in {*KEPT, _RECORD} - data_files.keys() if path.exists() else ():
                (self.path / name).unlink(missing_ok=True)
            write_atomically(path, (json.dumps(_versions(), indent=2) + "\n").encode())
        for name, content in data_files.items():
            path = self.path / name
            if self.checkpoint is not None and path.is_file() and path.read_bytes() != content:
                raise ValueError(
                    f"{path}: the data of this run have changed; expected what the run was started "
                    "with; restore the data, or start a new run"
                )
            write_atomically(path, content)
        text = yaml.safe_dump(self.origin["config"], sort_keys=False, allow_unicode=True)
        write_atomically(self.path / "config.yaml", text.encode())

    def save_weights(
        self, name: str, weights: Mapping[str, Tensor], metadata: Mapping[str, object]
    ) -> None:
        """Writes weights of the model as checkpoints/NAME.safetensors."""
        if self.writes:
            self._lock.check()
            path = self.last.with_name(f"{name}.safetensors")
            options = self.origin["config"]["model"]
            save_weights(path, weights, options, self._files, metadata)

    def save_checkpoint(self, checkpoint: Mapping[str, object]) -> None:
        """Writes last.ckpt; raises as `save_weights` does."""
        self._lock.check()
        spent = time.perf_counter() - self._begun
        self.origin["seconds"] = float(self._was().get("seconds", 0.0)) + spent
        write_checkpoint(self.last, {**checkpoint, "molflt": self.origin})

    def append_metrics(self, row: str) -> None:
        """Appends a row to metrics.csv; raises as `save_weights` does."""
        if self.writes:
            self._lock.check()
            append(self.path / "metrics.csv", row)  # no later checkpoint may outlive it

    def draw_curve(self, metrics: Mapping[str, Metric], best: str) -> None:
        """Draws curve.png if anything is logged; a picture never hides why training stopped."""
        table, png = self.path / "metrics.csv", self.path / "curve.png"
        ending = sys.exception()  # of the training, not of the picture
        try:
            if self.writes and table.is_file() and len(table.read_text().splitlines()) > 1:
                draw_curve(self.path, png, metrics, best)
        except (OSError, ValueError) as error:
            if ending is None:
                print(f"{png}: not drawn: {error}", file=sys.stderr)


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


def read_versions(run: Path) -> dict[str, object]:
    """Versions of packages, by name, that a run was begun with; none if it does not say."""
    path = Path(run) / _VERSIONS
    if not path.is_file():
        return {}
    found = read_json(path, _MOST_BYTES, "JSON", "restore it")
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected versions by name; got {shown(found)}; restore it")
    return found


def _git_commit(root: Path = Path(__file__).parents[2]) -> str | None:
    """The commit of molflt's own repository; None for a package, also one in another repository.

    Args:
        root: folder that holds the package.
    """
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text())["project"]["name"]
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--show-toplevel", "HEAD"],
            env={name: value for name, value in os.environ.items() if name[:4] != "GIT_"},
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, ValueError, KeyError, TypeError, subprocess.CalledProcessError):
        return None
    top, commit = done.stdout.splitlines()
    return commit if project == "molflt" and Path(top).samefile(root) else None
