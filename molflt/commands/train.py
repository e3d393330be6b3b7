"""``molflt train``: trains the model of a recipe on its data."""

import json
import re
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from molflt.data.batches import BatchedData
from molflt.metrics import Metric
from molflt.training.config import Config, absolute
from molflt.training.recipes import Recipe
from molflt.training.run_folder import INIT_RECORD, RunFolder, best_of, duration
from molflt.training.start import build_parser as build_parser  # of this command
from molflt.training.start import describe_initial, load_initial, read_initial_weights
from molflt.training.trainer import TrainerOptions

_Options = dict[str, Any]


def train(resume: Path | None = None, **config: Any) -> int:
    """Trains a model, from random or existing weights (--init), or resumes a run.

    The run folder contains config.yaml (all options, including defaults), versions.json,
    metrics.csv, curve.png, files that describe the data, such as a vocabulary, and checkpoints/
    with last.ckpt (to resume), last.safetensors and best.safetensors (weights; best by validation).

    Args:
        resume: the run folder if a run is resumed.
        config: options of the run; sizes of the model that depend on the data are None, and `init`
            has no effect on a resumed run.

    Returns:
        0, or 128 plus the number of the signal that stopped training after the state was saved.
    """
    TrainerOptions(**config["trainer"]).check()
    folder = RunFolder(config["run"])
    with folder.held(resume is not None), _one_line_warnings(folder):
        return _train(folder, absolute({key: config[key] for key in Config.__annotations__}))


def _train(folder: RunFolder, config: Config) -> int:
    from lightning.pytorch import seed_everything

    from molflt.training.fit import fit  # loads Lightning

    folder.check_config(config)
    seed_everything(config["seed"], verbose=False)
    parts = Recipe.of(config)
    batches = parts.load("data")(**config["data"])
    batches.seed = config["seed"]
    folder.await_files()
    if folder.checkpoint is not None or not folder.writes:
        batches.kept = folder.path
    init = None if folder.checkpoint is not None else config["init"]
    source = None if init is None else read_initial_weights(str(init))
    batches.initial = folder.initial_domain(init, source.domain if source else None)
    batches.setup()
    model, task, trainer = config["model"], config["task"], config["trainer"]
    steps = TrainerOptions(**trainer).steps(batches)
    trainer["max_steps"] = steps
    if (warmup := task["warmup_steps"]) >= steps:
        task["warmup_steps"] = steps // 10
        folder.say(f"task.warmup_steps={warmup}: reduced to {steps // 10}, a tenth of all steps")
    first = {"task.redraw_every": task["redraw_every"]}  # steps after which options take effect
    first["trainer.patience"] = trainer["patience"] and trainer["patience"] * trainer["val_every"]
    for name in [name for name, step in first.items() if (step or 0) >= steps]:
        folder.say(f"{name}: has no effect in {steps} steps; reduce it, or train for longer")
    if folder.writes:  # only in one process, because this reads all data
        folder.check_data(batches.fingerprints(), batches.files())
    _set_sizes(model, batches.sizes(), {} if source is None else source.options[0])
    folder.check_config(config)  # sizes and numbers of steps are known now
    trained = parts.load("task")(parts.load("model")(**model), seed=config["seed"], **task)
    init_files = {}
    if folder.checkpoint is None:  # a checkpoint contains this state
        trained.check_new()
        if source is not None:
            record = load_initial(str(init), source, trained.model, batches.files())
            init_files[INIT_RECORD] = (json.dumps(record, indent=1) + "\n").encode()
            folder.say(f"{folder.path}: {describe_initial(record, source, trained.model, model)}")
        trained.prepare(batches)
    folder.check_weights(trained.model)
    if folder.writes:  # making the files may read all data
        folder.write({**batches.files(), **trained.files(), **init_files})
    _say_begin(folder, trained.model, batches, trainer)
    begin = time.perf_counter()
    try:
        stopped = fit(trained, batches, folder, TrainerOptions(**trainer))
    finally:
        folder.draw_curve(trained.metrics)
    if stopped is None:
        _say_end(folder, trained.metrics, steps, time.perf_counter() - begin)
        return 0
    signum, step = stopped
    hint = f"to continue: molflt train --resume {shlex.quote(str(folder.path))}"
    folder.say(
        f"\nstopped by {signal.Signals(signum).name} at step {step}; "
        + (hint if step else "nothing to resume; start the run again"),
        sys.stderr,
    )
    return 128 + signum


def _say_begin(
    folder: RunFolder, model: nn.Module, batches: BatchedData[Any], trainer: _Options
) -> None:
    """Prints the sizes of the model, the data and the run."""
    steps, epochs = trainer["max_steps"], trainer["max_epochs"]
    items = batches.batch_size * trainer["devices"] * trainer["accumulate"]
    trainable = sum(x.numel() for x in model.parameters() if x.requires_grad)
    frozen = sum(x.numel() for x in model.parameters() if not x.requires_grad)
    size = f"{trainable:,} parameters" + (f" and {frozen:,} frozen ones" if frozen else "")
    folder.say(
        f"{folder.path}: {size}; {'; '.join(batches.describe())}; {steps:,} steps of {items} "
        f"{batches.items}" + ("" if epochs is None else f" ({epochs:,} epochs)")
    )
    if (folder.checkpoint or {}).get("global_step", 0) >= steps:
        folder.say(
            f"{folder.path}: finished, all {steps:,} steps are done; increase --trainer.max_steps "
            "or --trainer.max_epochs to continue"
        )


def _say_end(folder: RunFolder, metrics: Mapping[str, Metric], steps: int, seconds: float) -> None:
    if stop := folder.provenance.get("stopped"):
        steps = stop["step"]
        folder.say(
            f"stopped early at step {steps:,}: {stop['since']} validations without a better "
            f"{stop['metric']} than {stop['best']:.4g} at step {stop['best_step']:,}"
        )
    validation, advice = "no validation with finite values", "lower task.lr, or check the data"
    if (best := best_of(folder.path)) is not None:
        value = metrics[best.metric].shown(best.value)
        validation = f"best validation {value} at step {best.step:,}"
        advice = f"molflt evaluate {shlex.quote(str(folder.path))}"
    folder.say(f"{folder.path}: {validation}; {steps:,} steps, {duration(seconds)}; next: {advice}")


@contextmanager
def _one_line_warnings(folder: RunFolder) -> Iterator[None]:
    """Prints each warning on one line; skips repetitions that differ only in numbers."""
    shown: set[str] = set()

    def show(message: Warning | str, *_: object, **__: object) -> None:
        text = " ".join(str(message).split())
        kind = re.sub(r"\d+", "N", text)
        if kind not in shown:
            shown.add(kind)
            folder.say(f"molflt: warning: {text}", sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _set_sizes(options: _Options, sizes: Mapping[str, int], source: Mapping[str, object]) -> None:
    """Sets options that depend on the data; rejects other values, unless they are in `source`."""
    for name, size in sizes.items():
        value = options[name]
        if value not in (None, size, source.get(name)):
            raise ValueError(
                f"model.{name}={value!r} does not fit the data; expected {size!r}; omit "
                f"model.{name} or use different data"
            )
        options[name] = size
