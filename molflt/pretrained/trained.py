"""Reading of trained models from runs and exported files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from molflt.evaluation.calibration import CALIBRATION
from molflt.evaluation.ensemble import ENSEMBLE, EnsembleRegressor, load_ensemble
from molflt.evaluation.results import RESULTS, why_of_others
from molflt.files import read_json
from molflt.training.checkpoint import device_named, load_run, weights_of
from molflt.training.config import Config, read_config
from molflt.training.exported import build, is_exported, read_exported
from molflt.training.run_folder import KEPT
from molflt.training.sources import EXPECTED, find

__all__ = ["Trained", "read_trained"]


class Trained(NamedTuple):
    """A trained model and the information about it."""

    path: Path
    """folder of the run, or exported file"""
    recipe: str
    model: nn.Module
    """in evaluation mode; an `EnsembleRegressor` for several runs"""
    options: Sequence[Mapping[str, object]]
    """arguments of the model of each run"""
    task: Mapping[str, object]
    """options of training; for sentences also the `name` of the task, and for structures the
    meaning of `tags`"""
    results: Mapping[str, object]
    """split -> metrics; empty without an evaluation"""
    files: Mapping[str, object]
    """contents of the small JSON files of the run, by name"""
    about: str | None = None
    license: str | None = None
    datasets: Sequence[str] = ()
    unmeasured: str = ""
    """reason why results are missing, if they belong to other weights or data"""

    def label(self, name: str) -> str:
        """Returns how messages refer to one of its files."""
        return str(self.path / name) if self.path.is_dir() else f"{self.path}: {name}"

    @property
    def name(self) -> str:
        """Name of the run or of the exported folder."""
        named = self.path.name == "model.safetensors"
        return self.path.resolve().parent.name if named else self.path.stem


def read_trained(
    source: str | Path | None,
    checkpoint: str | None = None,
    device: str = "cpu",
    also: Sequence[str | Path] = (),
    hub: Mapping[str, object] | None = None,
) -> Trained:
    """Reads a trained model.

    Args:
        source: as for `molflt.load`.
        checkpoint: best (the default), last, or the path of a safetensors file; only for a run.
        device: cpu, cuda, cuda:N, or auto.
        also: further runs that form an ensemble with `source`, which must be a run.
        hub: options of `huggingface_hub.snapshot_download`.
    """
    path = find(source, hub)
    if path.is_file() and checkpoint is not None:
        raise ValueError(
            f"{source or path}: expected a run with --checkpoint {checkpoint}; got weights; leave "
            "--checkpoint out"
        )
    checkpoint = checkpoint or "best"
    if path.is_file() and path.suffix == ".safetensors" and is_exported(path):
        if also:
            raise ValueError(
                f"{path}: expected a run in an ensemble, with --also; got an exported model"
            )
        return _exported(path, device_named(device))
    run = path
    if not path.is_file() and not (path / "config.yaml").is_file():
        got = "a folder without its files" if path.is_dir() else "no such file or folder"
        raise FileNotFoundError(f"{path}: {EXPECTED}; got {got}")
    if path.is_file():
        run, checkpoint = _run_of(path), str(path)
    if also:
        model, config = load_ensemble([run, *map(Path, also)], checkpoint, device)
        options = [read_config(Path(one))["model"] for one in (run, *also)]
        weights = [weights_of(Path(one), checkpoint) for one in (run, *also)]
        return _of_run(run, model, config, options, run / ENSEMBLE, weights)
    alone, config = load_run(run, checkpoint, device)
    return _of_run(run, alone, config, [config["model"]], run, [weights_of(run, checkpoint)])


def _run_of(weights: Path) -> Path:
    """Returns the run of a weights file: its folder or the parent folder, with a config.yaml."""
    for folder in (weights.parent, weights.parent.parent):
        if (folder / "config.yaml").is_file():
            return folder
    if weights.suffix.lower() not in (".safetensors", ".ckpt"):
        raise ValueError(
            f"{weights}: {EXPECTED}; got another file; name the run before the structures: RUN FILE"
        )
    raise ValueError(
        f"{weights}: expected weights in a run or in an exported folder; got weights without a "
        "config.yaml next to or above them"
    )


def _of_run(
    run: Path,
    model: nn.Module,
    config: Config,
    options: list[dict[str, object]],
    evaluated: Path,
    weights: list[Path],
) -> Trained:
    files = {name: content for name in KEPT if (content := _json(run / name)) is not None}
    calibration = _json(evaluated / CALIBRATION)
    if isinstance(model, EnsembleRegressor) and calibration is not None:
        own = not isinstance(calibration, dict) or calibration.get("members") == sorted(
            model.weights
        )
        files |= {CALIBRATION: calibration} if own else {}
    unmeasured = why_of_others(evaluated, weights)
    results = None if unmeasured else _json(evaluated / RESULTS)
    found = results if isinstance(results, dict) else {}
    data = {"task": "name", "tags": "tags"}
    named = {kept: config["data"][name] for name, kept in data.items() if name in config["data"]}
    task = {**config["task"], **named}
    return Trained(run, config["recipe"], model, options, task, found, files, unmeasured=unmeasured)


def _json(path: Path) -> object:
    """Returns the content of a JSON file of a run, or None without the file."""
    return read_json(path, "JSON", "restore it, or write it again") if path.is_file() else None


def _exported(path: Path, device: str) -> Trained:
    exported = read_exported(path)
    models = build(path, exported)
    content: Any = exported.content
    model = models[0] if len(models) == 1 else EnsembleRegressor(models).eval()
    return Trained(
        path=path,
        recipe=str(content["recipe"]),
        model=model.to(device),
        options=content["models"],
        task=content["task"],
        results=content["results"],
        files=content["files"],
        about=content.get("about"),
        license=content.get("license"),
        datasets=content["datasets"],
    )
