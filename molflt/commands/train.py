"""``molflt train``: one run of the parts that a recipe names."""

from __future__ import annotations

import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from molflt.training.config import Config, build_parser
from molflt.training.fit import check_steps, fit
from molflt.training.recipes import Recipe
from molflt.training.run_folder import RunFolder

__all__ = ["build_parser", "train"]

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
        ValueError: for bad options or data, a loss that is not finite, or a run folder that another
            training holds, that is damaged, or that was begun with other options or data.
        FileExistsError: if the run folder holds checkpoints of an earlier run.
        FileNotFoundError: if there is nothing to resume.
    """
    check: Callable[..., None] = check_steps  # the types of options have been checked
    check(task["warmup_steps"], **trainer)
    _expect_folder(run)
    folder = RunFolder(run)
    with folder.held(resume is not None), _one_line_warnings(folder):
        config = {"run": run, "seed": seed, "recipe": recipe, "model": model}
        config |= {"data": data, "task": task, "trainer": trainer}
        return _train(folder, cast(Config, config))


def _expect_folder(run: Path) -> None:
    """Raises ValueError where a file stands in the way of the run folder."""
    for path in (run, *run.parents):
        if path.exists() and not path.is_dir():
            raise ValueError(f"--run {run}: {path} is a file; expected a folder; choose another")


def _train(folder: RunFolder, config: Config) -> int:
    from lightning.pytorch import seed_everything

    folder.check_config(config)
    seed_everything(config["seed"], verbose=False)
    parts = Recipe.of(config)
    batches = parts.load("data")(**config["data"])
    batches.seed = config["seed"]
    batches.setup()
    if folder.writes:  # once for all processes: it reads all data
        folder.check_data(batches.fingerprints(), batches.files())
    model, trainer = config["model"], config["trainer"]
    _fit_sizes(model, batches.sizes())
    folder.check_config(config)  # with the sizes
    learned = parts.load("task")(
        parts.load("model")(**model), seed=config["seed"], **config["task"]
    )
    if folder.checkpoint is None:  # it holds it otherwise
        learned.prepare(batches)
    folder.check_weights(learned.model)
    folder.write({**batches.files(), **learned.files()})
    steps = trainer["max_steps"]
    items = batches.batch_size * cast(int, trainer["devices"])
    parameters = sum(p.numel() for p in learned.model.parameters() if p.requires_grad)
    folder.say(
        f"{folder.path}: {parameters:,} parameters; {'; '.join(batches.describe())}; "
        f"{steps:,} steps of {items} {batches.items}"
    )
    try:
        steps_of: Callable[..., tuple[int, int] | None] = fit  # its options have been checked
        stopped = steps_of(learned, batches, folder, **trainer)
    finally:
        folder.draw_curve(learned.metrics, learned.best)
    if stopped is None:
        return 0
    signum, step = stopped
    folder.say(
        f"\nstopped by {signal.Signals(signum).name} at step {step}; state saved; to go on: "
        f"molflt train --resume {folder.path}",
        sys.stderr,
    )
    return 128 + signum


@contextmanager
def _one_line_warnings(folder: RunFolder) -> Iterator[None]:
    """Warnings as lines of our own, each once, whatever its numbers are.

    Python would show a line of torch instead, which calls every module.
    """
    told: set[str] = set()

    def show(message: Warning | str, *_: object, **__: object) -> None:
        text = " ".join(str(message).split())
        kind = re.sub(r"\d+", "N", text)
        if kind not in told:
            told.add(kind)
            folder.say(f"molflt: warning: {text}", sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


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
