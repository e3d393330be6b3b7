"""``molflt train``: options from the signatures of the parts, and one run of them."""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import yaml
from jsonargparse import ArgumentParser, Namespace

from molflt.training.fit import fit
from molflt.training.recipes import RECIPES, Recipe
from molflt.training.run_folder import RunFolder

__all__ = ["build_parser", "train"]

# What a resumed run may change: more steps, and a longer schedule with them
_RAISABLE = "trainer.max_steps"

_Options = dict[str, object]


def train(
    run: Path,
    seed: int,
    recipe: str,
    model: _Options,
    data: _Options,
    task: _Options,
    trainer: _Options,
    resume: Path | None = None,
) -> int:
    """Trains a model, or resumes a run.

    The run folder holds config.yaml (everything, defaults too), versions.json, metrics.csv,
    curve.png, what belongs to the data (a vocabulary, names of classes), and checkpoints/ with
    last.ckpt (to resume), last.safetensors and best.safetensors (weights; best by validation).

    Args:
        run: folder to write, or to go on with.
        seed: of weights, batches and dropout.
        recipe: what to learn.
        model: arguments of its model; what the data decide may be None.
        data: arguments of its data.
        task: arguments of its task.
        trainer: arguments of :func:`molflt.training.fit.fit`.
        resume: None, or `run`.

    Returns:
        0, or 128 + the number of the signal that stopped it, when the state has been saved.

    Raises:
        ValueError: for bad options or data, or a loss that is not finite.
        FileExistsError: if the run folder holds checkpoints of an earlier run.
        FileNotFoundError: if there is nothing to resume.
    """
    from lightning.pytorch import seed_everything

    folder = RunFolder(run, resume is not None)
    seed_everything(seed, verbose=False)
    parts = Recipe.of({"recipe": recipe})
    batches = parts.load("data")(**data)
    batches.seed = seed
    batches.setup()
    _fit_sizes(model, batches.sizes())
    learned = parts.load("task")(parts.load("model")(**model), seed=seed, **task)
    if resume is None:  # the checkpoint holds it otherwise
        learned.prepare(batches)
    config = {"run": run, "seed": seed, "recipe": recipe, "model": model}
    config |= {"data": data, "task": task, "trainer": trainer}
    folder.write(config, batches.files())
    steps, items = trainer["max_steps"], batches.batch_size * trainer["devices"]
    parameters = sum(p.numel() for p in learned.model.parameters() if p.requires_grad)
    folder.say(
        f"{run}: {parameters:,} parameters; {'; '.join(batches.describe())}; "
        f"{steps:,} steps of {items} {batches.items}"
    )
    try:
        steps_of: Callable[..., tuple[int, int] | None] = fit  # its options have been checked
        stopped = steps_of(learned, batches, run, resume=folder.resume, **trainer)
    finally:
        folder.draw_curve(learned.metrics, learned.best)
    if stopped is None:
        return 0
    signum, step = stopped
    folder.say(
        f"\nstopped by {signal.Signals(signum).name} at step {step}; state saved; to go on: "
        f"molflt train --resume {run}",
        sys.stderr,
    )
    return 128 + signum


def _fit_sizes(options: _Options, sizes: Mapping[str, int]) -> None:
    """Fills in what the data decide about the model, such as the size of a vocabulary."""
    for name, size in sizes.items():
        given = options[name]
        if given is not None and given != size:
            raise ValueError(
                f"model.{name}={given!r}, but the data have {size!r}; leave model.{name} out, or "
                "use the data that it was made for"
            )
        options[name] = size


def build_parser(words: Sequence[str] = ()) -> ArgumentParser:
    """Parser of ``molflt train``: groups model, data, task and trainer, from the signatures.

    Args:
        words: the command line; the recipe that it or its configuration names decides the options.

    Raises:
        ValueError: if there is no such recipe.
    """
    name = _recipe_named(list(words))
    recipe = Recipe.of({"recipe": name})
    parser = _TrainParser()
    parser.add_argument("--config", action="config", help="YAML file with any of the options below")
    parser.add_argument("--resume", type=Path | None, help="run folder to go on with")
    parser.add_argument("--run", type=Path, default=Path("runs/train"), help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and dropout")
    parser.add_argument(
        "--recipe", type=Literal[*RECIPES], default=name, help="what to learn; see its --help"
    )
    parser.add_class_arguments(recipe.load("model"), "model")
    parser.add_class_arguments(recipe.load("data"), "data")
    parser.add_class_arguments(recipe.load("task"), "task", skip={"model", "seed"})
    parser.add_function_arguments(fit, "trainer", skip={"task", "data", "run", "resume"})
    return parser


def _recipe_named(words: list[str]) -> str:
    """The recipe of a command line: its own word, or the last that its configurations name."""
    name = next(iter(RECIPES))
    paths = [Path(run) / "config.yaml" for run in _values_of("--resume", words)]
    for path in [*paths, *map(Path, _values_of("--config", words))]:
        try:
            config = yaml.safe_load(path.read_text())
        except (OSError, ValueError, yaml.YAMLError):
            continue  # the parser says what is wrong with it
        if isinstance(config, dict):
            name = str(config.get("recipe", name))
    return [name, *_values_of("--recipe", words)][-1]


class _TrainParser(ArgumentParser):
    """With ``--resume RUN`` the defaults are RUN's configuration, and little may differ from it."""

    def parse_args(self, args: Sequence[str] | None = None) -> Namespace:  # type: ignore[override]
        words = list(sys.argv[1:] if args is None else args)
        runs = _values_of("--resume", words)
        if runs:
            path = Path(runs[-1]) / "config.yaml"
            if not path.is_file():
                raise FileNotFoundError(
                    f"{path}: no such file; expected the folder of a run to resume"
                )
            self.default_config_files = [str(path)]
        saved = self.get_defaults().clone() if runs else None
        config = super().parse_args(words)
        for key in ("config", "__default_config__"):
            config.pop(key, None)
        if saved is None:
            return config
        config.run = saved.run = Path(runs[-1])
        for key, given in vars(config.as_flat()).items():
            value = saved.get(key)
            raised = key == _RAISABLE and given >= value
            if given != value and not raised and key != "resume":
                hint = "it may only be raised" if key == _RAISABLE else "start a new run instead"
                raise ValueError(f"{path}: {key} is {value!r}; got {given!r} for --resume; {hint}")
        return config


def _values_of(option: str, words: list[str]) -> list[str]:
    """Every value that the words give to an option."""
    values = [value for word, value in itertools.pairwise(words) if word == option]
    return values + [w.partition("=")[2] for w in words if w.startswith(f"{option}=")]
