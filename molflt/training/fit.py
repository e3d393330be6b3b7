"""Training loop based on Lightning's Trainer, with optional loggers."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shlex
import signal
import warnings
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.strategies import DDPStrategy

from molflt.data.batches import BatchedData
from molflt.memory import within_memory
from molflt.tasks.base import Task
from molflt.training.callbacks import _callbacks_of, _Interrupted
from molflt.training.loop import _CheckpointIO, _LightningTask
from molflt.training.run_folder import RunFolder, _flat
from molflt.training.trainer import LoggerName, TrainerOptions, computes_on

_LOST = re.compile("gloo|NCCL|closed by peer|reset by peer", re.IGNORECASE)
_Batch = TypeVar("_Batch")
_Data = TypeVar("_Data", bound=BatchedData[Sized])


def fit(
    task: Task[_Batch, _Data], data: _Data, folder: RunFolder, options: TrainerOptions
) -> tuple[int, int] | None:
    """Trains a task, or resumes from the checkpoint in the run folder.

    Args:
        task: model, loss and optimizer.
        data: training and validation data, already set up.
        folder: run folder for checkpoints and metrics.
        options: options of the loop.

    Returns:
        The number of the signal that stopped training and the step that was saved; None if
        training finished.
    """
    options.check()
    max_steps = options.steps(data)
    _warn_of_slow_average(options.ema_decay, max_steps)
    module = _LightningTask(task, data)
    ddp = options.devices > 1 or options.strategy == "ddp"
    sizes = ("data.batch_size", "data.max_atoms", "data.max_tokens", "data.length", "task.unroll")
    known = dict(_flat(folder.provenance.get("config", {})))
    advice = f"lower {' or '.join(name for name in sizes if known.get(name)) or 'the batch size'}"
    with (
        _loggers(options.logger, folder) as loggers,
        warnings.catch_warnings(),
        within_memory(module.step_description, advice),
    ):
        _adapt_lightning()
        trainer = pl.Trainer(
            max_steps=max_steps,
            max_epochs=-1,
            precision=options.precision,
            accelerator="cuda" if computes_on(options.accelerator)[0] == "GPU" else "cpu",
            devices=options.devices,
            # Buffers change identically on all ranks; broadcasting them would hang if one rank had
            # fewer validation batches than the others
            strategy=DDPStrategy(broadcast_buffers=False) if ddp else "auto",
            use_distributed_sampler=False,
            gradient_clip_val=options.gradient_clip,
            accumulate_grad_batches=options.accumulate,
            val_check_interval=options.val_every * options.accumulate,  # counted in batches
            check_val_every_n_epoch=None,
            num_sanity_val_steps=-1 if task.validates_start else options.num_sanity,
            enable_model_summary=False,
            enable_progress_bar=False,
            default_root_dir=folder.path,
            plugins=[_CheckpointIO(folder)],
            logger=loggers,
            callbacks=_callbacks_of(task, folder, options),
        )
        last = None if folder.checkpoint is None else folder.last
        # Lightning would convert the weights after restoring and averaging them, which would first
        # round float64 weights to float32
        trainer.precision_plugin.convert_module(module)
        try:
            trainer.fit(module, ckpt_path=last, weights_only=True)
        except _Interrupted as stop:
            signum, step = stop.args
            return signum, step
        except SystemExit as stop:
            if isinstance(stop.__context__, KeyboardInterrupt):  # a second Ctrl-C
                raise KeyboardInterrupt from stop
            raise
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            _stop_others(trainer)
            if ddp and _LOST.search(str(error)) and not isinstance(error, ValueError):
                resume = f"to resume: molflt train --resume {shlex.quote(str(folder.path))}"
                raise ChildProcessError(
                    f"{folder.path}: another process of this training run has ended; see its error "
                    f"message; {resume if folder.last.is_file() else 'start the run again'}"
                ) from error
            raise
    return None


def _stop_others(trainer: pl.Trainer) -> None:
    """Kills the processes started by Lightning, whose observer would also kill this process."""
    launcher: Any = trainer.strategy.launcher
    if launcher is not None:
        launcher.kill(signal.SIGKILL)
        launcher.procs.clear()  # leaves nothing for the observer to do


def _adapt_lightning() -> None:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        os.environ["SLURM_JOB_NAME"] = "bash"  # otherwise Lightning expects srun to start processes
    warnings.filterwarnings("ignore", category=PossibleUserWarning)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # caused by Lightning
    # the replacement adds another broadcast of buffers and is missing in some supported releases
    warnings.filterwarnings("ignore", message=".*`broadcast_buffers` is deprecated.*")


def _warn_of_slow_average(decay: float | None, max_steps: int) -> None:
    """Warns if the first step contributes more than 10 % to the averaged weights."""
    share = 0.0 if decay is None or max_steps == 1 else decay ** (max_steps - 1)
    if share > 0.1:
        distance = float(f"{3 / max_steps:.2g}")  # from 1, for a share of about exp(-3), 5 %
        warnings.warn(
            f"trainer.ema_decay={decay:g} with trainer.max_steps={max_steps}: {share:.0%} of the "
            "averaged weights, which are validated and saved, come from the first step; use "
            f"{max(0, 1 - distance):.9g} or less, or more steps",
            stacklevel=2,
        )


@contextmanager
def _loggers(name: LoggerName, folder: RunFolder) -> Iterator[list[Logger]]:
    """Yields a list of loggers, which is empty for "csv", because metrics.csv is always written."""
    if name == "csv" or not folder.writes:
        yield []
    elif name == "tensorboard":
        # The step of the checkpoint is also purged, because its validation may be repeated. If it
        # is not repeated, its rows are logged again from metrics.csv.
        step = None if folder.checkpoint is None else folder.checkpoint["global_step"]
        logger = TensorBoardLogger(folder.path, name="", version="tensorboard", purge_step=step)
        logger.log_hyperparams(dict(folder.provenance["config"]))
        yield [logger]
    else:
        versions = (folder.path / "versions.json").read_bytes()
        key = hashlib.sha256(str(folder.path.resolve()).encode() + versions).hexdigest()[:16]
        key = folder.provenance["wandb"] = folder._stored().get("wandb", key)  # it may have moved
        project = os.environ.get("WANDB_PROJECT", "molflt")
        wandb = WandbLogger(
            folder.path.resolve().name, save_dir=folder.path, project=project, id=key
        )
        try:
            wandb.log_hyperparams(dict(folder.provenance["config"]))  # prompts for the login
        except Exception as error:  # the errors of wandb only have Exception as a common base
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"trainer.logger=wandb: could not start; {reason}; log in with wandb login, or set "
                "WANDB_MODE=offline"
            ) from error
        try:
            yield [wandb]
        finally:
            wandb.experiment.finish()  # otherwise the next run in this process would write to it
