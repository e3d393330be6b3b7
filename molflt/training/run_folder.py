"""Run folder: configuration, checkpoints, provenance and results, and checks of resumed runs."""

import contextlib
import hashlib
import importlib.metadata
import io
import json
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
import yaml
from torch import Tensor, nn

from molflt.data.batches import Fingerprint
from molflt.data.structures.domain import DOMAIN, Domain
from molflt.files import (
    append,
    clear_parts,
    read_header,
    read_json,
    save_tensors,
    shown,
    verify_tensors,
    write_atomically,
)
from molflt.lock import FolderLock
from molflt.metrics import Metric
from molflt.training.checkpoint import check_weights, model_weights, read_checkpoint
from molflt.training.config import Config, defaults, plain, read_config
from molflt.version import __version__

KEPT = (DOMAIN, "references.json", "vocabulary.json", "classes.json", "tokenizer.json")
"""Files that some recipes need to interpret the weights."""
INIT_RECORD = "init.json"
"""File that describes the initial weights of a run."""

_VERSIONS = "versions.json"
_BUSY = "is training in this run folder; wait for it, or start a new run in another folder"
# Options that may change on resume. Data are compared by content, and epochs in terms of steps.
_MAY_CHANGE = {
    "run", "data.root", "data.split_seed", "data.test", "data.train", "data.train_labels",
    "data.val", "data.val_labels", "data.vocabulary", "data.workers", "trainer.accelerator",
    "trainer.checkpoint_every", "trainer.log_every", "trainer.logger", "trainer.max_epochs",
    "trainer.patience",
}  # fmt: skip
_STEPS, _EPOCHS = "trainer.max_steps", "trainer.max_epochs"

Provenance = dict[str, Any]
"""Information about a run, stored in its checkpoints under the key "molflt".

Keys: config; data (fingerprints by use); machine (settings that affect rounding); seconds; initial
(content of domain.json of the initial weights); wandb (id of the run there); and, only after early
stopping, stopped (step; since, the validations since the best; metric; best, its value; best_step).
"""


def read_provenance(run: Path) -> Provenance:
    """Reads the provenance in last.ckpt; {} if the file is missing or from an earlier version."""
    last = Path(run) / "checkpoints" / "last.ckpt"
    return read_checkpoint(last).get("molflt", {}) if last.is_file() else {}


def _flat(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the options of a configuration with names such as "trainer.max_steps"."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{key}", part) for key, part in value.items())
        else:
            yield name, value


class RunFolder:
    """Reads and writes the folder of a run; only the first process of a training run writes.

    Attributes:
        path: the folder.
        last: path of the checkpoint from which to resume.
        writes: True in the first process.
        provenance: information about the run, stored in its checkpoints.
        checkpoint: the checkpoint to resume from; None in a new run.
        stored: `provenance` in `checkpoint`; {} in a new run.
    """

    def __init__(self, path: Path) -> None:
        from lightning.pytorch.utilities import rank_zero_only

        # False in the other DDP processes launched by Lightning or torchrun
        self.writes = (getattr(rank_zero_only, "rank", None) or 0) == 0
        self.path, self.last = path, path / "checkpoints" / "last.ckpt"
        self.provenance: Provenance = {}
        self.checkpoint: dict[str, Any] | None = None
        self.stored: Provenance = {}
        self._lock = FolderLock(path, _BUSY)
        self._files: dict[str, str] = {}
        self._begun = time.perf_counter()

    @contextlib.contextmanager
    def held(self, resume: bool) -> Iterator[None]:
        """Locks the folder; reads its checkpoint if `resume` is True, else expects a new folder."""
        with self._lock.held() if self.writes else contextlib.nullcontext():
            if resume:
                self.checkpoint = read_checkpoint(self.last)
                self.stored = self.checkpoint.get("molflt", {})
            elif self.writes:
                self._expect_new()
            if self.writes:
                clear_parts(self.path)
                clear_parts(self.last.parent)
            yield

    def _expect_new(self) -> None:
        if self.last.exists():
            raise FileExistsError(
                f"{self.path}: contains checkpoints of an earlier run; expected an empty or new "
                f"folder; resume it with --resume {shlex.quote(str(self.path))}, or choose "
                "another --run"
            )
        weights = self.path.glob("checkpoints/*.safetensors")
        # weights from step 0 are saved before the first checkpoint
        unexpected = [path for path in weights if read_header(path).get("step") != "0"]
        interrupted = (self.path / _VERSIONS).exists()  # an earlier start of a run
        if not interrupted:
            unexpected += self.path.glob("config.yaml")
        if unexpected:
            raise FileExistsError(
                f"{unexpected[0]}: exists without last.ckpt, from which a run is resumed; expected "
                "an empty or new folder; choose another --run, or move the file"
            )
        if interrupted:  # perhaps with other data or weights
            for name in (*KEPT, INIT_RECORD, "config.yaml"):
                (self.path / name).unlink(missing_ok=True)

    def await_files(self) -> None:
        """Waits until the first process has called `write`, for at most half an hour.

        The first process, and processes of a resumed run, do not wait.
        """
        deadline = time.monotonic() + 1800  # as for groups of processes in torch.distributed
        while not (self.writes or self.checkpoint or (self.path / "config.yaml").is_file()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.path}: the first process has not written config.yaml")
            time.sleep(0.1)

    def check_config(self, config: Config) -> None:
        """Stores the configuration; raises ValueError if it would change steps of a resumed run.

        Options in `_MAY_CHANGE` may change. ``trainer.max_steps`` and ``trainer.max_epochs`` may be
        increased; the schedule then uses the new number of steps. Other changes, for example of
        `trainer.devices`, which multiplies the batch size, are rejected. A run ended by early
        stopping can be resumed only with more patience.
        """
        self.provenance["config"] = plain(config)
        if self.checkpoint is None:
            return
        path = self.path / "config.yaml"
        stored = self.stored.get("config") or read_config(self.path)
        # older configurations do not contain options that were added later
        old = dict(_flat(plain(defaults(config["recipe"])))) | dict(_flat(stored))
        new = dict(_flat(self.provenance["config"]))
        steps, done = new[_STEPS], self.checkpoint["global_step"]
        # None if max_epochs is set; compared again when the data are known
        if steps is not None and int(steps) < max(done, int(old[_STEPS])):
            epochs = "" if new[_EPOCHS] is None else f" from {_EPOCHS}={new[_EPOCHS]}"
            raise ValueError(
                f"{path}: --resume can only increase {_STEPS}; it is {old[_STEPS]}, and {done} "
                f"steps are done; got {steps}{epochs}"
            )
        changed = [
            f"{key} is {shown(old[key])}; got {shown(new[key])}"
            for key in old.keys() & new.keys()
            if key not in _MAY_CHANGE and key != _STEPS and old[key] != new[key]
        ]
        if changed:
            raise ValueError(
                f"{path}: {', '.join(sorted(changed))} with --resume; use the old value, or start "
                "a new run"
            )
        stop, patience = self.stored.get("stopped"), new["trainer.patience"]
        if stop and patience is not None and int(patience) <= stop["since"]:
            raise ValueError(
                f"{path}: stopped early at step {stop['step']}, {stop['since']} validations after "
                f"its best {stop['metric']}; expected --trainer.patience above {stop['since']}, or "
                f"null, to resume; got {patience}"
            )

    def check_data(
        self, fingerprints: Mapping[str, Fingerprint], files: Mapping[str, bytes]
    ) -> None:
        """Raises ValueError if the data have changed; stores digests of the contents in `files`."""
        for use, old in self.stored.get("data", {}).items():
            new = fingerprints.get(use, {})
            for key in old:
                if old[key] != new.get(key):
                    raise self._changed(
                        f"{use}: {key} was {shown(old[key], 16)}; got {shown(new.get(key), 16)}"
                    )
        self.provenance["data"] = fingerprints
        self._files = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}

    def _changed(self, how: str) -> ValueError:
        return ValueError(
            f"{self.path}: the data of this run have changed; {how}; restore the data, or start a "
            "new run"
        )

    def initial_domain(self, init: object, domain: object) -> Domain | None:
        """Returns the domain of the initial weights `init`, and stores it in checkpoints.

        A resumed run ignores `domain`, the content of domain.json, and uses its checkpoint.
        """
        name = f"--init {init}: {DOMAIN}"
        if self.checkpoint is not None:
            domain, name = self.stored.get("initial"), f"{self.last}: initial"
        if domain is None:
            return None
        self.provenance["initial"] = domain
        return Domain.from_json(domain, name)

    def check_weights(self, model: nn.Module) -> None:
        """Checks that the checkpoint matches the model, and rewrites last.safetensors from it.

        Rewriting is needed if the run was killed between writing the two files.
        """
        if self.checkpoint is not None:
            check_weights(self.last, model, model_weights(self.checkpoint))
            for file in sorted(self.last.parent.glob("*.safetensors")):
                verify_tensors(file)
            self._save_last(self.checkpoint)

    def start_steps(self, device: str) -> None:
        """Starts the timer, stores the settings that affect rounding, and reports changes."""
        self._begun = time.perf_counter()
        self.provenance["machine"] = machine = {
            "threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
            "device": device,
        }
        old = self.stored.get("machine", {})
        changes = ", ".join(
            f"{key} changed from {old[key]} to {value}"
            for key, value in machine.items()
            if old.get(key, value) != value
        )
        if changes:
            self.say(
                f"{self.path}: {changes} since the last start; rounding may differ", sys.stderr
            )

    def say(self, text: str, file: TextIO | None = None) -> None:
        """Prints a text if this is the first process."""
        if self.writes:
            print(text, file=file)

    def write(self, data_files: Mapping[str, bytes]) -> None:
        """Writes config.yaml, versions.json and data files, which a resumed run must not change."""
        if not self.writes:
            return
        if self.checkpoint is None:
            path = self.path / _VERSIONS  # written first: marks config.yaml as written by a run
            write_atomically(path, (json.dumps(_versions(), indent=2) + "\n").encode())
        for name, content in data_files.items():
            path = self.path / name
            if self.checkpoint is not None and path.is_file() and path.read_bytes() != content:
                raise self._changed(f"{name}: expected the file written at its start")
            write_atomically(path, content)
        text = yaml.safe_dump(self.provenance["config"], sort_keys=False, allow_unicode=True)
        write_atomically(self.path / "config.yaml", text.encode())

    def _expect_held(self) -> None:
        if self._lock.is_gone():
            raise FileNotFoundError(
                f"{self.path}: the run folder was removed or replaced during training; no further "
                "files are written; start a new run"
            )

    def save_weights(
        self, name: str, weights: Mapping[str, Tensor], metadata: Mapping[str, object]
    ) -> None:
        """Writes the model weights to checkpoints/NAME.safetensors."""
        if self.writes:
            self._expect_held()
            header = {name: str(value) for name, value in metadata.items()}
            # compared with these files by `read_saved`
            header["model"] = json.dumps(self.provenance["config"]["model"])
            header["files"] = json.dumps(self._files)
            save_tensors(self.last.with_name(f"{name}.safetensors"), weights, header)

    def save_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Writes last.ckpt and then last.safetensors."""
        self._expect_held()
        elapsed = time.perf_counter() - self._begun
        self.provenance["seconds"] = float(self.stored.get("seconds", 0.0)) + elapsed
        buffer = io.BytesIO()  # torch.save to a file would report a full disk as RuntimeError
        torch.save({**checkpoint, "molflt": self.provenance}, buffer)
        write_atomically(self.last, buffer.getvalue())
        self._save_last(checkpoint)

    def _save_last(self, checkpoint: Mapping[str, Any]) -> None:
        header = {"step": checkpoint["global_step"]}
        if stop := self.provenance.get("stopped"):
            header["stopped"] = json.dumps(stop)
        self.save_weights("last", model_weights(checkpoint), header)

    def append_metrics(self, row: str) -> None:
        """Appends a row to metrics.csv."""
        if self.writes:
            self._expect_held()
            append(self.path / "metrics.csv", row)  # reaches the disk before later checkpoints

    def draw_curve(self, metrics: Mapping[str, Metric]) -> None:
        """Draws curve.png if metrics.csv has rows.

        Errors are printed instead of raised, and ignored if the run itself ends with an error.
        """
        table, png = self.path / "metrics.csv", self.path / "curve.png"
        pending = sys.exception()  # raised by the run
        try:
            if self.writes and table.is_file() and len(table.read_text().splitlines()) > 1:
                draw_curve(self.path, png, metrics)
        except (OSError, ValueError) as error:
            if pending is None:
                print(f"{png}: not drawn: {error}", file=sys.stderr)


def _versions() -> dict[str, str | None]:
    command = ["git", f"--git-dir={Path(__file__).parents[2] / '.git'}", "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None  # the package is not in a repository
    packages = ("torch-geometric", "lightning", "numpy", "safetensors")
    return {
        "molflt": __version__,
        "git_commit": commit,
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # with the build, such as +cu130
        **{name: importlib.metadata.version(name) for name in packages},
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def read_versions(run: Path) -> dict[str, object]:
    """Reads versions.json of a run; returns {} if the file is missing."""
    return dict(read_json(Path(run) / _VERSIONS, "JSON", "restore it", missing_ok=True) or {})


class Best(NamedTuple):
    """The best validation of a run; best.safetensors contains its weights."""

    metric: str  # name in metrics.csv without ``val_``
    value: float
    step: int


def best_of(run: Path) -> Best | None:
    """Reads the best validation result from best.safetensors; None if it is unknown."""
    header = _header_of(run, "best")
    name = next((name for name in header if name.startswith("val_")), None)
    if name is None:
        return None
    return Best(name.removeprefix("val_"), float(header[name]), int(header["step"]))


def steps_of(run: Path) -> int:
    """Reads the step of the last weights from their header; 0 if it is unknown."""
    return int(_header_of(run, "last").get("step", 0))


def _header_of(run: Path, weights: str) -> Mapping[str, str]:
    path = Path(run) / "checkpoints" / f"{weights}.safetensors"
    return read_header(path) if path.is_file() else {}


def draw_curve(run: Path, file: Path, metrics: Mapping[str, Metric]) -> None:
    """Plots metrics.csv of a run to `file` and marks the validation of its best weights."""
    from molflt.plots import training_curve

    best = best_of(run)
    marked = best and (best.metric, best.step)
    training_curve(Path(run) / "metrics.csv", file, metrics, marked)


def duration(seconds: float) -> str:
    """Formats a time as "7 s", "4 min 12 s" or "2 h 05 min"."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
