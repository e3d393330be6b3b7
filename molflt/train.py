"""Training: ``molflt train``, the run folder it writes, and reading that folder back."""

from __future__ import annotations

import itertools
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import yaml
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.warnings import PossibleUserWarning

from molflt.callbacks import Interrupted, LastCheckpoint, MetricsFile, StepBar
from molflt.checkpoint import AtomicCheckpointIO, load_run
from molflt.data.datamodule import BatchedData
from molflt.recipes import DEFAULT, RECIPES, recipe_of
from molflt.run_folder import check_run_folder, draw_curve, is_first_rank, write_run_files
from molflt.tasks.base import Task

__all__ = ["build_parser", "fit", "load_run", "train"]

# What a resumed run may change: more steps, and a longer schedule with them
RAISABLE = "trainer.max_steps"


def fit(
    task: Task,
    data: BatchedData,
    run: Path,
    resume: bool = False,
    max_steps: int = 10_000,
    precision: Literal["32-true", "64-true", "bf16-mixed", "16-mixed"] = "32-true",
    accelerator: Literal["auto", "cpu", "gpu"] = "auto",
    devices: int = 1,
    strategy: Literal["auto", "ddp"] = "auto",
    gradient_clip: float | None = 5.0,
    val_every: int = 500,
    checkpoint_every: int = 500,
    ema_decay: float | None = None,
    log_every: int = 50,
    num_sanity: int = 2,
) -> None:
    """Runs the steps, with Lightning's Trainer underneath.

    Args:
        task: what is learned.
        data: on what.
        run: folder for checkpoints and metrics.
        resume: go on from the folder's last checkpoint.
        max_steps: optimizer steps in all.
        precision: of the arithmetic.
        accelerator: where to compute; auto takes a GPU if there is one.
        devices: GPUs, or processes on the CPU.
        strategy: ddp for more than one device; auto chooses it then.
        gradient_clip: largest norm of the gradient; null for no limit.
        val_every: steps between validations; there is one after the last step in any case.
        checkpoint_every: steps between checkpoints; each validation is preceded by one.
        ema_decay: decay of the moving average of weights that is validated and kept; null for none.
        log_every: steps between rows of metrics.csv.
        num_sanity: validation batches tried before training.

    Raises:
        ValueError: for an option outside its range, a missing label, or a loss that is not finite.
        molflt.callbacks.Interrupted: after SIGINT or SIGTERM, when the state is saved.
    """
    _check_counts(
        max_steps=max_steps,
        devices=devices,
        val_every=val_every,
        checkpoint_every=checkpoint_every,
        log_every=log_every,
    )
    if task.warmup_steps >= max_steps:
        raise ValueError(
            f"task.warmup_steps must be less than trainer.max_steps={max_steps}; "
            f"got {task.warmup_steps}"
        )
    metrics = MetricsFile(task, run, log_every)
    callbacks: list[Callback] = [metrics, StepBar(lambda: metrics.shown, min(log_every, 10))]
    if ema_decay is not None:
        # Buffers are copied, not averaged: the mean of two random projections is none
        callbacks.append(EMAWeightAveraging(decay=ema_decay, use_buffers=False))
    callbacks.append(LastCheckpoint(run, checkpoint_every))
    # Buffers change in the same way on all ranks; broadcasting them would wait for ranks that have
    # one validation batch less
    several = devices > 1 or strategy == "ddp"
    with warnings.catch_warnings():
        _silence_lightning()
        trainer = pl.Trainer(
            max_steps=max_steps,
            max_epochs=-1,
            precision=precision,
            accelerator=accelerator,
            devices=devices,
            strategy=DDPStrategy(broadcast_buffers=False) if several else "auto",
            gradient_clip_val=gradient_clip,
            val_check_interval=val_every,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=num_sanity,
            use_distributed_sampler=False,
            plugins=[AtomicCheckpointIO()],
            callbacks=callbacks,
            logger=False,
            enable_model_summary=False,
            default_root_dir=run,
        )
        last = run / "checkpoints" / "last.ckpt"
        trainer.fit(task, datamodule=data, ckpt_path=last if resume else None, weights_only=True)


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"trainer.{name} must be at least 1; got {value}")


def train(config: Namespace) -> int:
    """Trains a model, or resumes a run.

    The run folder holds config.yaml (everything, defaults too), versions.json, metrics.csv,
    curve.png, what belongs to the data (a vocabulary, names of classes), and checkpoints/ with
    last.ckpt (to resume), last.safetensors and best.safetensors (weights; best by validation).

    Args:
        config: what :func:`build_parser`'s parser returns.

    Returns:
        0, or 128 + the number of the signal that stopped it, when the state has been saved.

    Raises:
        ValueError: for bad options or data, or a loss that is not finite.
        FileExistsError: if the run folder holds checkpoints of an earlier run.
        FileNotFoundError: if there is nothing to resume.
    """
    resume = config.resume is not None
    run = Path(config.resume if resume else config.run)
    check_run_folder(run, resume)
    pl.seed_everything(config.seed, verbose=False)
    recipe = recipe_of(config)
    data = recipe.load("data")(**config.data.as_dict())
    data.seed = config.seed
    data.setup()
    _fit_sizes(config.model, data)
    model = recipe.load("model")(**config.model.as_dict())
    task = recipe.load("task")(model, seed=config.seed, **config.task.as_dict())
    if not resume:  # the checkpoint holds it otherwise
        task.prepare(data)
    if is_first_rank():
        write_run_files(run, _dump(config, run), data.files(), resume)
        print(_header(run, task, data, config))
    try:
        fit(task, data, run, resume=resume, **config.trainer.as_dict())
        return 0
    except Interrupted as stop:
        if is_first_rank():
            print(f"\n{stop}; state saved; to go on: molflt train --resume {run}", file=sys.stderr)
        return 128 + stop.signum
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):  # a second Ctrl-C, in Lightning's words
            raise KeyboardInterrupt from stop
        raise
    finally:
        if is_first_rank():
            draw_curve(run)


def _fit_sizes(options: Namespace, data: BatchedData) -> None:
    """Fills in what the data decide about the model, such as the size of a vocabulary."""
    for name, size in data.sizes().items():
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
    """
    name = _recipe_named(list(words))
    recipe = recipe_of({"recipe": name})
    parser = _TrainParser(prog="molflt train", description="Train a model, or resume.")
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
    name = DEFAULT
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

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *more: Any, **options: Any
    ) -> Namespace:
        words = list(sys.argv[1:] if args is None else args)
        runs = _values_of("--resume", words)
        if not runs:
            return super().parse_args(words, *more, **options)
        run = Path(runs[-1])
        path = run / "config.yaml"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; expected the folder of a run to resume")
        self.default_config_files = [str(path)]
        saved = self.get_defaults().clone()
        config = super().parse_args(words, *more, **options)
        config.run = saved.run = run
        for key, value in vars(saved.as_flat()).items():
            given = config[key]
            raised = key == RAISABLE and given >= value
            if given != value and not raised and key not in ("config", "resume"):
                hint = "; it may only be raised" if key == RAISABLE else "; start a new run instead"
                raise ValueError(f"{path}: {key} is {value!r}; got {given!r} for --resume{hint}")
        return config


def _values_of(option: str, words: list[str]) -> list[str]:
    """Every value that the words give to an option."""
    values = [value for word, value in itertools.pairwise(words) if word == option]
    return values + [w.partition("=")[2] for w in words if w.startswith(f"{option}=")]


def _dump(config: Namespace, run: Path) -> str:
    """The configuration as YAML, with all defaults."""
    kept = config.clone()
    kept.run = run
    for key in ("config", "resume"):
        kept.pop(key, None)
    parser = build_parser(["--recipe", config.recipe])
    return parser.dump(kept, skip_validation=True, skip_unset=False)


def _header(run: Path, task: Task, data: BatchedData, config: Namespace) -> str:
    parameters = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    trainer = config.trainer
    return (
        f"{run}: {parameters:,} parameters; {'; '.join(data.describe())}; "
        f"{trainer.max_steps:,} steps of {data.batch_size * trainer.devices} {data.items}"
    )


def _silence_lightning() -> None:
    """Keeps errors; drops tips, banners of hardware, and advice on numbers of workers."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=PossibleUserWarning)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # of Lightning's own making
    # its replacement also broadcasts buffers once more and is not in every release we support
    warnings.filterwarnings("ignore", message=".*`broadcast_buffers` is deprecated.*")
