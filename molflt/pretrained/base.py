"""Trained models, read from runs and exports, and exported to a folder or the Hugging Face Hub."""

import json
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
import yaml
from torch import nn

from molflt.data.structures.domain import DOMAIN, domain_of
from molflt.evaluation.calibration import CALIBRATION
from molflt.evaluation.ensemble import ENSEMBLE, EnsembleRegressor, load_ensemble
from molflt.evaluation.results import own_results
from molflt.files import read_json, shown, write_atomically
from molflt.optional import require
from molflt.training.checkpoint import (
    device_named,
    find_weights,
    load_run,
    packaged,
    read_saved,
    weights_of,
    write_exported,
)
from molflt.training.config import HUB, read_config
from molflt.training.run_folder import KEPT
from molflt.version import __version__


class Trained(NamedTuple):
    """Trained model and its metadata."""

    path: Path  # folder of the run, or exported file
    recipe: str
    model: nn.Module  # in evaluation mode; an `EnsembleRegressor` for several runs
    options: Sequence[Mapping[str, object]]  # arguments of the model of each run
    task: Mapping[str, object]
    """options of the task; for sentences also its `name`, for structures the convention of `tags`,
    and for images `data.resize`"""
    results: Mapping[str, object]  # metrics by split; empty before an evaluation
    files: Mapping[str, object]  # contents of the small JSON files of the run, by name
    about: str | None = None
    license: str | None = None
    datasets: Sequence[str] = ()
    unmeasured: str = ""
    """reason why `results` is empty, if results belong to other weights or data"""

    def label(self, name: str) -> str:
        """Returns the name by which messages refer to a file of the model."""
        return str(self.path / name) if self.path.is_dir() else f"{self.path}: {name}"

    def content(self, name: str) -> tuple[bytes, str]:
        """Returns the content of a file of the model and the name to use for it in messages."""
        return json.dumps(self.files.get(name), ensure_ascii=False).encode(), self.label(name)

    @property
    def name(self) -> str:
        """Name of the run, of the exported folder or of the repository on the Hub."""
        path = (self.path.parent if self.path.name == "model.safetensors" else self.path).resolve()
        if path.parent.name == "snapshots" and path.parents[1].name.startswith("models--"):
            return path.parents[1].name.rpartition("--")[2]  # models--OWNER--NAME/snapshots/COMMIT
        return path.name.removesuffix(".safetensors")


def read_trained(
    source: str | Path | None,
    checkpoint: str | None = None,
    device: str = "cpu",
    also: Sequence[str | Path] = (),
    hub: Mapping[str, object] | None = None,
) -> Trained:
    """Reads a trained model; see `molflt.load` for the arguments and `find_weights` for `hub`."""
    path, run = find_weights(source, checkpoint, hub)
    if run is None:
        saved = read_saved(path)
        if also or saved.recipe is None:
            expected = "a run in an ensemble" if also else "weights in a run or an exported folder"
            raise ValueError(f"{path}: expected {expected}; got weights without config.yaml")
        models = saved.models()
        model: nn.Module = models[0]
        if len(models) > 1:
            model = EnsembleRegressor(models).eval()
        names = ("task", "results", "files", "about", "license", "datasets")
        known = {name: saved.content[name] for name in names if name in saved.content}
        return Trained(path, saved.recipe, model.to(device_named(device)), saved.options, **known)
    members, checkpoint = [run, *map(Path, also)], checkpoint or path.stem
    read = partial(
        read_json, expected="JSON", hint="restore it, or write it again", missing_ok=True
    )
    files = {name: content for name in KEPT if (content := read(run / name)) is not None}
    if also:
        model, config = load_ensemble(members, checkpoint, device)
        evaluated, weights = run / ENSEMBLE, [weights_of(member, checkpoint) for member in members]
        if (domain := domain_of(members)) is not None:
            files[DOMAIN] = domain.to_json()
        calibration = read(evaluated / CALIBRATION)
        if isinstance(calibration, dict) and calibration.get("members") == sorted(model.weights):
            files[CALIBRATION] = calibration
    else:
        model, config = load_run(run, str(path), device)
        evaluated, weights = run, [path]
    results, unmeasured = own_results(evaluated, weights)
    data = config["data"]
    task: dict[str, object] = dict(config["task"])
    task |= {name: data[name] for name in ("tags", "baseline_key", "resize") if name in data}
    if "task" in data:
        task["name"] = data["task"]
    return Trained(
        path=run,
        recipe=config["recipe"],
        model=model,
        options=[read_config(one)["model"] for one in members],
        task=task,
        results=results,
        files=files,
        unmeasured=unmeasured,
    )


class Card(NamedTuple):
    """Content of the model card that depends on the kind of model."""

    tags: Sequence[str]
    metric: str
    python: str  # line of code that uses `model`
    command: str = ""  # arguments of ``molflt``, with {} for the name of the model


class Pretrained:
    """Trained model with its training options and results, as returned by `molflt.load`.

    `save_pretrained(folder)` writes model.safetensors (weights and options), config.json (a copy of
    the options) and README.md (a model card). `from_pretrained(folder or OWNER/NAME)` reads these
    files, and `push_to_hub("OWNER/NAME")` uploads them.

    Args:
        trained: the model and its metadata.

    Attributes:
        models: classes of the modules that this class supports.
        card: tags, metric and examples of the model card.
        model: the module in evaluation mode.
        name: name of the run or of the exported folder.
        about: one line about the predicted quantity; for energies also the structures, the
            references and the level of theory; None if unknown.
        license: short name of the license, as on the Hub; None if unknown.
        datasets: training data sets on the Hub.
    """

    models: ClassVar[tuple[type[nn.Module], ...]] = ()
    card: Card

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        self.model: nn.Module = trained.model
        self.name = trained.name
        self.about, self.license = trained.about, trained.license
        self.datasets = list(trained.datasets)

    @property
    def summary(self) -> str:
        """One line about the model and its training data."""
        return f"{self.name}: {self.about or self.trained.recipe}"

    def __repr__(self) -> str:
        why = self.trained.unmeasured
        return f"{type(self).__name__}({self.summary}{why and f'; not measured: {why}'})"

    def save_pretrained(self, folder: str | Path, half: bool = False) -> None:
        """Writes the model to a folder; raises an error instead of replacing other files.

        `half` stores float32 parameters as float16, except parameters beyond its range. Loading
        converts them back to float32.
        """
        folder, weights = Path(folder), self.model.state_dict()
        trained = self.trained
        content = {
            "molflt": __version__,
            "recipe": trained.recipe,
            "about": self.about,
            "license": self.license,
            "datasets": self.datasets,
            "models": list(trained.options),
            "task": trained.task,
            "results": trained.results,
            "files": trained.files,
        }
        if half:
            parameters = self.model.named_parameters()
            halves = {name: x.half() for name, x in parameters if x.dtype == torch.float32}
            weights |= {name: x for name, x in halves.items() if x.isfinite().all()}
        write_exported(folder, weights, content)
        write_atomically(folder / "README.md", self._readme(folder.resolve().name).encode())

    def _readme(self, name: str) -> str:
        card, recipe = self.card, self.trained.recipe
        header: dict[str, Any] = {"library_name": "molflt", "tags": ["molflt", recipe, *card.tags]}
        header |= {"license": self.license, "datasets": self.datasets, "metrics": [card.metric]}
        known = {key: value for key, value in header.items() if value}
        count = sum(weight.numel() for weight in self.model.parameters())
        command = f"```\nmolflt {card.command.format(shlex.quote(name))}\n```"
        paragraphs = [
            f"---\n{yaml.safe_dump(known, sort_keys=False)}---",
            f"# {name.rpartition('/')[2]}",
            self.summary.removeprefix(f"{self.name}: "),
            f"{count:,} parameters.",
            "## Use",
            f'```python\nimport molflt\n\nmodel = molflt.load("{name}")\n{card.python}\n```',
            *([command] if card.command else []),
            "`pip install molflt`; the weights contain a checksum and no code.",
            "## Measured",
            "\n".join(_table(self.trained.results)),
        ]
        return "\n\n".join(paragraphs) + "\n"

    def push_to_hub(
        self,
        repo_id: str,
        private: bool | None = None,
        token: str | None = None,
        half: bool = False,
        **options: Any,
    ) -> str:
        """Uploads the model to the Hugging Face Hub and returns the address of the commit.

        Args:
            repo_id: OWNER/NAME; created if it is missing.
            private: make a new repository private.
            token: Hub token; by default the saved login token.
            half: see :meth:`save_pretrained`.
            options: options of `huggingface_hub.HfApi.upload_folder`, such as commit_message.
        """
        hub = require("huggingface_hub", repo_id, "hub").HfApi(token=token)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, half)
            try:
                repo_id = str(hub.create_repo(repo_id, private=private, exist_ok=True).repo_id)
                Path(folder, "README.md").write_text(self._readme(f"{HUB}{repo_id}"), "utf-8")
                return str(hub.upload_folder(repo_id=repo_id, folder_path=folder, **options))
            except Exception as error:  # the network can fail in many ways
                reason = " ".join(str(error).split())[:200]
                raise ValueError(
                    f"{HUB}{repo_id}: Hugging Face Hub error, {type(error).__name__}: {reason}; "
                    "check the name, the network and the login (hf auth login)"
                ) from None

    @classmethod
    def from_pretrained(cls, source: str | Path, device: str = "cpu", **options: Any) -> Self:
        """Loads a model.

        Args:
            source: folder of a run or of an exported model, the name of a packaged model, or
                [hf:]OWNER/NAME on the Hub.
            device: cpu, cuda, cuda:N, or auto.
            options: options of `huggingface_hub.snapshot_download`, such as revision and token.
        """
        local = Path(source).exists() or packaged(str(source))
        name = source if local else f"{HUB}{str(source).removeprefix(HUB)}"
        trained = read_trained(name, device=device, hub=options)
        if not isinstance(trained.model, cls.models):
            raise ValueError(
                f"{source}: expected a model for {cls.__name__}; got a model with the recipe "
                f"{shown(trained.recipe)}; molflt.load reads any model"
            )
        return cls(trained)


def _table(results: Mapping[str, object]) -> list[str]:
    rows = {split: row for split, row in results.items() if isinstance(row, dict) and row}
    if not rows:
        return ["No results; run `molflt evaluate RUN` before `molflt export`."]
    keys = list(dict.fromkeys(key for row in rows.values() for key in row))
    lines = [f"| {' | '.join(['split', *keys])} |", f"|{'---|' * (len(keys) + 1)}"]
    for split, row in rows.items():
        values = [row.get(key) for key in keys]
        forms = ["," if isinstance(value, int) else ",.4g" for value in values]
        cells = ["-" if x is None else f"{x:{form}}" for x, form in zip(values, forms, strict=True)]
        lines.append(f"| {' | '.join([split, *cells])} |")
    return lines
