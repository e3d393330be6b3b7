"""Training: ``molflt train``, the run folder it writes, and reading that folder back."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.warnings import PossibleUserWarning

from molflt import __version__
from molflt.callbacks import Interrupted, LastCheckpoint, MetricsFile, StepBar
from molflt.checkpoint import AtomicCheckpointIO, load_run
from molflt.data.datamodule import IS2REData
from molflt.files import write_atomically
from molflt.graph.regressor import EnergyRegressor
from molflt.task import IS2RETask

__all__ = ["build_parser", "fit", "load_run", "train"]

# What a resumed run may change: more steps, and a longer schedule with them
RAISABLE = "trainer.max_steps"


def fit(
    task: IS2RETask,
    data: IS2REData,
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
    metrics = MetricsFile(run, log_every)
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
    """Trains an energy regressor, or resumes a run.

    The run folder holds config.yaml (everything, defaults too), versions.json, metrics.csv,
    curve.png, and checkpoints/ with last.ckpt (to resume), last.safetensors and best.safetensors
    (weights; best by validation MAE).

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
    _check_run_folder(run, resume)
    pl.seed_everything(config.seed, verbose=False)
    model = EnergyRegressor(**config.model.as_dict())
    task = IS2RETask(model, seed=config.seed, **config.task.as_dict())
    data = IS2REData(**config.data.as_dict())
    data.seed = config.seed
    data.setup()
    if not resume:  # the checkpoint holds it otherwise
        mean, std = task.energy_mean, task.energy_std
        if mean is None or std is None:
            found = data.normalizer()
            mean, std = found[0] if mean is None else mean, found[1] if std is None else std
        task.set_normalizer(mean, std)
    if _is_first_rank():
        _write_run_files(run, config, resume)
        print(_header(run, model, data, config))
    try:
        fit(task, data, run, resume=resume, **config.trainer.as_dict())
        return 0
    except Interrupted as stop:
        if _is_first_rank():
            print(f"\n{stop}; state saved; to go on: molflt train --resume {run}", file=sys.stderr)
        return 128 + stop.signum
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):  # a second Ctrl-C, in Lightning's words
            raise KeyboardInterrupt from stop
        raise
    finally:
        if _is_first_rank():
            _draw_curve(run)


def build_parser() -> ArgumentParser:
    """Parser of ``molflt train``: groups model, data, task and trainer, from the signatures."""
    parser = _TrainParser(prog="molflt train", description="Train an energy regressor, or resume.")
    parser.add_argument("--config", action="config", help="YAML file with any of the options below")
    parser.add_argument("--resume", type=Path | None, help="run folder to go on with")
    parser.add_argument("--run", type=Path, default=Path("runs/train"), help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and dropout")
    parser.add_class_arguments(EnergyRegressor, "model")
    parser.add_class_arguments(IS2REData, "data")
    parser.add_class_arguments(IS2RETask, "task", skip={"model", "seed"})
    parser.add_function_arguments(fit, "trainer", skip={"task", "data", "run", "resume"})
    return parser


class _TrainParser(ArgumentParser):
    """With ``--resume RUN`` the defaults are RUN's configuration, and little may differ from it."""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *more: Any, **options: Any
    ) -> Namespace:
        words = list(sys.argv[1:] if args is None else args)
        run = _value_of("--resume", words)
        if run is None:
            return super().parse_args(words, *more, **options)
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


def _value_of(option: str, words: list[str]) -> Path | None:
    for i, word in enumerate(words):
        if word == option and i + 1 < len(words):
            return Path(words[i + 1])
        if word.startswith(f"{option}="):
            return Path(word.partition("=")[2])
    return None


def _check_run_folder(run: Path, resume: bool) -> None:
    last = run / "checkpoints" / "last.ckpt"
    if resume and not last.is_file():
        raise FileNotFoundError(f"{last}: no such checkpoint; nothing to resume; start a new run")
    if not resume and _is_first_rank() and any(run.glob("checkpoints/*")):
        raise FileExistsError(
            f"{run}: holds checkpoints of an earlier run; expected an empty or new folder; "
            f"resume it with --resume {run}, or choose another --run"
        )


def _is_first_rank() -> bool:
    """Whether this process is no helper that Lightning's DDP launcher has started."""
    from lightning.pytorch.utilities import rank_zero_only

    return (getattr(rank_zero_only, "rank", None) or 0) == 0


def _write_run_files(run: Path, config: Namespace, resume: bool) -> None:
    kept = config.clone()
    kept.run = run
    for key in ("config", "resume"):
        kept.pop(key, None)
    text = build_parser().dump(kept, skip_validation=True, skip_unset=False)
    write_atomically(run / "config.yaml", text.encode())
    if not resume:
        versions = json.dumps(_versions(), indent=2) + "\n"
        write_atomically(run / "versions.json", versions.encode())


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


def _header(run: Path, model: EnergyRegressor, data: IS2REData, config: Namespace) -> str:
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    sizes = [
        f"{data.splits[use]} {len(dataset):,} systems ({int(dataset.natoms.sum()):,} atoms"
        + (f", {len(dataset.bad)} bad left out)" if dataset.bad else ")")
        for use, dataset in data.datasets.items()
    ]
    trainer = config.trainer
    return (
        f"{run}: {parameters:,} parameters; {'; '.join(sizes)}; "
        f"{trainer.max_steps:,} steps of {data.batch_size * trainer.devices} systems"
    )


def _draw_curve(run: Path) -> None:
    """Draws curve.png if anything has been logged; a picture never hides why training stopped."""
    from molflt.plots import training_curve

    metrics = run / "metrics.csv"
    try:
        if metrics.is_file() and len(metrics.read_text().splitlines()) > 1:
            training_curve(metrics, run / "curve.png")
    except (OSError, ValueError) as error:
        print(f"{run / 'curve.png'}: not drawn: {error}", file=sys.stderr)


def _silence_lightning() -> None:
    """Keeps errors; drops tips, banners of hardware, and advice on numbers of workers."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=PossibleUserWarning)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # of Lightning's own making
    # its replacement also broadcasts buffers once more and is not in every release we support
    warnings.filterwarnings("ignore", message=".*`broadcast_buffers` is deprecated.*")
