"""What is known of a trained model, whether a run holds it or an exported file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import nn

from molflt.evaluation.ensemble import ENSEMBLE, EnsembleRegressor, load_ensemble
from molflt.evaluation.results import RESULTS, why_of_others
from molflt.evaluation.uncertainty import CALIBRATION
from molflt.training.checkpoint import device_named, load_run, weights_of
from molflt.training.config import Config, read_config
from molflt.training.exported import build, is_exported, read_exported
from molflt.training.run_folder import KEPT
from molflt.training.sources import EXPECTED, find

__all__ = ["Trained", "read_trained"]


class Trained(NamedTuple):
    """A trained model and what it was trained on."""

    path: Path
    """folder of the run, or exported file"""
    recipe: str
    model: nn.Module
    """in evaluation mode; several trainings are a `molflt.evaluation.ensemble.EnsembleRegressor`"""
    options: Sequence[Mapping[str, object]]
    """arguments of each training's model"""
    task: Mapping[str, object]
    """options of training; of sentences also the name of what is learned, as `name`, and of
    structures what `tags` of files that ASE reads meant"""
    results: Mapping[str, object]
    """split -> metrics; empty if it was not evaluated"""
    files: Mapping[str, object]
    """what each small JSON file of the run holds, by name"""
    about: str | None = None
    license: str | None = None
    datasets: Sequence[str] = ()
    unmeasured: str = ""
    """why there are no results, where those that there are belong to others"""

    def label(self, name: str) -> str:
        """What messages call one of its files."""
        return str(self.path / name) if self.path.is_dir() else f"{self.path}: {name}"

    @property
    def name(self) -> str:
        """Of the run or of the folder of the export."""
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
        source: as for `molflt.training.sources.find`.
        checkpoint: of a run: best (the default), last, or the path of a safetensors file.
        device: cpu, cuda, cuda:N, or auto.
        also: further runs that make an ensemble with `source`, a run.
        hub: options of `huggingface_hub.snapshot_download`.

    Raises:
        FileNotFoundError: if there is nothing of that name, or a part is missing.
        ValueError: naming what is damaged, or does not go together; for a `checkpoint` of what is
            no run.
    """
    path = find(source, hub)
    if path.is_file() and checkpoint is not None:
        raise ValueError(
            f"{source or path}: weights, not a run; --checkpoint {checkpoint} has no effect; leave "
            "it out"
        )
    checkpoint = checkpoint or "best"
    if path.is_file() and path.suffix == ".safetensors" and is_exported(path):
        if also:
            raise ValueError(
                f"{path}: an exported model; expected a run in an ensemble, with --also"
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
    """The run that a file of weights belongs to: the folder with config.yaml beside or above it."""
    for folder in (weights.parent, weights.parent.parent):
        if (folder / "config.yaml").is_file():
            return folder
    if weights.suffix.lower() not in (".safetensors", ".ckpt"):
        raise ValueError(
            f"{weights}: {EXPECTED}; got a file that is not one of weights; a run goes before the "
            "structures: RUN FILE"
        )
    raise ValueError(
        f"{weights}: weights without a config.yaml beside or above them; expected a run, or what "
        "molflt export has written; name its folder"
    )


def _of_run(
    run: Path,
    model: nn.Module,
    config: Config,
    options: list[dict[str, object]],
    evaluated: Path,
    weights: list[Path],
) -> Trained:
    files = {name: read for name in KEPT if (read := _json(run / name)) is not None}
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
    """Content of a JSON file of a run, or None without the file."""
    if not path.is_file():
        return None
    try:
        found: object = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise ValueError(
            f"{path}: expected JSON, as it was written; put the file back, or write it again"
        ) from None
    return found


def _exported(path: Path, device: str) -> Trained:
    exported = read_exported(path)
    models = build(path, exported)
    content = exported.content
    model = models[0] if len(models) == 1 else EnsembleRegressor(models).eval()
    return Trained(
        path=path,
        recipe=str(content["recipe"]),
        model=model.to(device),
        options=[_mapping(one) for one in _list(content["models"])],
        task=_mapping(content["task"]),
        results=_mapping(content["results"]),
        files=_mapping(content["files"]),
        about=_text(content.get("about")),
        license=_text(content.get("license")),
        datasets=[str(one) for one in _list(content["datasets"])],
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}
