"""Training loop based on Lightning's Trainer, its callbacks, and optional loggers."""

import hashlib
import logging
import math
import os
import re
import shlex
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.callbacks import Callback, Checkpoint, WeightAveraging
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.strategies import DDPStrategy
from torch.optim.swa_utils import get_ema_multi_avg_fn
from tqdm import tqdm

from molflt.data.batches import BatchedData
from molflt.memory import within_memory
from molflt.tasks.base import Task
from molflt.training.loop import _CheckpointIO, _LightningTask, _MetricsFile
from molflt.training.run_folder import RunFolder, _flat, duration
from molflt.training.trainer import TrainerOptions, computes_on

_HANGUP = getattr(signal, "SIGHUP", None)  # not on Windows
_WARNING = getattr(signal, "SIGUSR1", None)  # from a scheduler; Lightning would requeue the job
_LOST = re.compile("gloo|NCCL|closed by peer|reset by peer", re.IGNORECASE)


def fit(
    task: Task[Any, Any], data: BatchedData[Any], folder: RunFolder, options: TrainerOptions
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
        # Lightning would convert the weights after restoring and averaging them, which would first
        # round float64 weights to float32
        trainer.precision_plugin.convert_module(module)
        try:
            last = None if folder.checkpoint is None else folder.last
            trainer.fit(module, ckpt_path=last, weights_only=True)
        except _Interrupted as stop:
            signum, step = stop.args
            return signum, step
        except SystemExit as stop:
            if isinstance(stop.__context__, KeyboardInterrupt):  # a second Ctrl-C
                raise KeyboardInterrupt from stop
            raise
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if ddp and _LOST.search(str(error)) and not isinstance(error, ValueError):
                resume = f"to resume: molflt train --resume {shlex.quote(str(folder.path))}"
                raise ChildProcessError(
                    f"{folder.path}: another process of this training run has ended; see its error "
                    f"message; {resume if folder.last.is_file() else 'start the run again'}"
                ) from error
            raise
        finally:
            _stop_others(trainer)
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
def _loggers(name: str, folder: RunFolder) -> Iterator[list[Logger]]:
    """Yields a list of loggers, which is empty for "csv", because metrics.csv is always written."""
    if name == "csv" or not folder.writes:
        yield []
    elif name == "tensorboard":
        # The step of the checkpoint is also purged, because its validation may be repeated. If it
        # is not repeated, its rows are logged again from metrics.csv. A new run purges all steps of
        # an interrupted start.
        step = 0 if folder.checkpoint is None else folder.checkpoint["global_step"]
        logger = TensorBoardLogger(folder.path, name="", version="tensorboard", purge_step=step)
        logger.log_hyperparams(dict(folder.provenance["config"]))
        yield [logger]
    else:
        versions = (folder.path / "versions.json").read_bytes()
        key = hashlib.sha256(str(folder.path.resolve()).encode() + versions).hexdigest()[:16]
        key = folder.provenance["wandb"] = folder.stored.get("wandb", key)  # it may have moved
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


def _callbacks_of(
    task: Task[Any, Any], folder: RunFolder, options: TrainerOptions
) -> list[Callback]:
    """Returns the callbacks in the order in which they are called.

    Callbacks that use the validated (averaged) weights come before the averaging callback, which
    restores the current weights at the end of a validation epoch.
    """
    metrics = _MetricsFile(task, folder, options.log_every)
    best = _BestWeights(task, folder, options.patience)
    callbacks = [metrics, best, _Progress(task, metrics)]
    if options.ema_decay is not None:
        callbacks.append(_Averages(options.ema_decay))
    return [*callbacks, _LastCheckpoint(folder, options.checkpoint_every, options.val_every)]


class _Progress(Callback):
    """Shows a progress bar on a terminal; in a log, prints one line per validation run instead."""

    def __init__(self, task: Task[Any, Any], table: _MetricsFile) -> None:
        self.metrics = {name: task.metrics[name] for name in table.val}
        self.table = table
        self._since = time.perf_counter()
        self._bar = tqdm(disable=True)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._since = time.perf_counter()
        self._bar = tqdm(
            desc="training",
            total=trainer.max_steps,
            initial=trainer.global_step,
            file=sys.stdout,
            dynamic_ncols=True,
            smoothing=0,
            disable=not (trainer.is_global_zero and sys.stdout.isatty()),
        )

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        step = trainer.global_step
        if step % min(self.table.log_every, 10) == 0 or step >= trainer.max_steps:
            self._bar.update(step - self._bar.n)
            self._bar.set_postfix(self.table.latest)

    def on_validation_start(self, *_: object) -> None:
        self._bar.set_description("validating")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.sanity_checking and not pl_module.task.validates_start:
            return
        self._bar.set_description("training", refresh=False)
        self._bar.set_postfix(self.table.latest)
        if sys.stdout.isatty():
            return
        values = pl_module.validation_metrics()
        measured = [name for name in self.metrics if math.isfinite(values.get(name, math.nan))]
        # without duplicates: the ranking metric may equal another metric, such as the accuracy
        texts = list(dict.fromkeys(self.metrics[name].shown(values[name]) for name in measured))
        latest = self.table.latest.items()
        training = [f"{name} {text}" for name, text in latest if name == "loss" or "/s" in name]
        training.append(duration(time.perf_counter() - self._since))
        self.table.folder.say(
            f"step {trainer.global_step:,} of {trainer.max_steps:,}: validation "
            f"{', '.join(texts[:2]) or 'not finite'}; {', '.join(training)}"
        )

    def on_train_end(self, *_: object) -> None:
        self._bar.close()

    def on_exception(self, *_: object) -> None:
        self._bar.close()


class _Averages(WeightAveraging):
    """Moving average of weights; unlike Lightning's version, it does not round frozen weights."""

    def __init__(self, decay: float) -> None:
        # Buffers are copied: the average of two random projections is not a random projection
        super().__init__(use_buffers=False, multi_avg_fn=get_ema_multi_avg_fn(decay))

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Lightning moves the weights to the device later, but the averages would stay on the CPU
        self._device = trainer.strategy.root_device
        super().setup(trainer, pl_module, stage)

    @property
    def state_key(self) -> str:
        """Returns the key of this callback in checkpoints; earlier versions used the same key."""
        return "EMAWeightAveraging"


class _Interrupted(Exception):
    """Raised with the number of a signal and the step, after the state has been saved."""


class _BestWeights(Callback):
    """Saves the best weights by validation; stops training if validations do not improve.

    `Task.ranking` compares validations. If two validations are equal, the later one counts as
    better. A validation is never the best if one of its sums, such as the loss, is not finite.
    """

    def __init__(self, task: Task[Any, Any], folder: RunFolder, patience: int | None) -> None:
        self.folder = folder
        self.patience = patience
        self.task = task
        # best values of metrics, their step, and the number of validations without improvement
        self.best: dict[str, float] = {"step": 0, "since": 0}

    def _scores(self, values: Mapping[str, float], names: Sequence[str]) -> list[float]:
        """Returns scores to compare in this order, -inf for missing or non-finite metrics."""
        scores = []
        for name in names:
            value = values.get(name, math.nan)
            sign = 1 if self.task.metrics[name].largest_is_best else -1
            scores.append(sign * value if math.isfinite(value) else -math.inf)
        return scores

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.sanity_checking and not self.task.validates_start:
            return
        values, step = pl_module.validation_metrics(), trainer.global_step
        names = self.task.ranking(values)
        new, best = self._scores(values, names), self._scores(self.best, names)
        # the accuracy is always finite, but the sums include the loss
        is_valid = pl_module.validation_is_finite and max(new) > -math.inf
        since = 0 if is_valid and new > best else int(self.best["since"]) + 1
        if is_valid and new >= best:
            known = {name: values[name] for name in names if math.isfinite(values[name])}
            self.best = {**known, "step": step}
            metric = next(iter(known))
            header = {"step": step, f"val_{metric}": values[metric]}
            self.folder.save_weights("best", pl_module.model.state_dict(), header)
        self.best["since"] = since
        if self.patience is not None and since >= self.patience and step < trainer.max_steps:
            trainer.should_stop = True
            metric = next((name for name in names if name in self.best), names[0])
            self.folder.provenance["stopped"] = {
                "step": step,
                "since": since,
                "metric": metric,
                "best": self.best.get(metric, math.inf),
                "best_step": int(self.best["step"]),
            }

    def state_dict(self) -> dict[str, float]:
        return dict(self.best)

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Restores the record of the best validation, unless its weights file has been removed."""
        if self.folder.last.with_name("best.safetensors").is_file():
            self.best |= state_dict


class _LastCheckpoint(Checkpoint):
    """Saves checkpoints with :meth:`RunFolder.save_checkpoint` and stops on signals.

    A checkpoint is saved after the optimizer, the schedule and the averages have completed a step,
    but before the validation that follows. A run killed during a validation therefore repeats it
    when resumed. Only the checkpoint of the last step is saved after its validation. The first
    checkpoint precedes the last step and all weights except those of step 0. An interrupted run
    with such weights therefore has a checkpoint.

    Closing a terminal sends SIGHUP. If nohup has disabled this signal, it stays disabled.

    Lightning places `Checkpoint` callbacks last, after weight averaging, as required here.
    """

    def __init__(self, folder: RunFolder, every: int, val_every: int) -> None:
        self.folder = folder
        self.every = every
        self.val_every = val_every
        self.signum = 0  # first signal received; 0 before
        self._exists = folder.checkpoint is not None
        self._validation_due = False
        self._terminals: list[int] = []  # file descriptors

    def on_sanity_check_start(self, *_: object) -> None:
        """Replaces the signal handlers; Lightning restores the previous handlers at the end.

        Lightning's SIGTERM handler communicates between ranks, and its SIGINT handler stops
        training in the middle of a step.
        """
        if threading.current_thread() is threading.main_thread():
            for signum in filter(None, (signal.SIGINT, signal.SIGTERM, _HANGUP, _WARNING)):
                if signal.getsignal(signum) != signal.SIG_IGN:
                    signal.signal(signum, self._note)
        self._terminals = [number for number in (1, 2) if os.isatty(number)]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.on_sanity_check_start()  # Lightning skips it without a sanity check
        self.folder.start_steps(trainer.strategy.root_device.type)
        self._save_early(trainer)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        for number in self._terminals:
            if not os.isatty(number):  # printing to a closed terminal would raise an error
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        if self.signum and signum != _HANGUP:  # a closed terminal may send several hangups
            raise KeyboardInterrupt  # on the second signal, do not wait for the step
        self.signum = self.signum or signum

    def _agreed_signal(self, trainer: pl.Trainer) -> int:
        """Returns a signal received by any rank, or 0; must be called by all ranks."""
        if trainer.world_size == 1:
            return self.signum
        # `signum` is not overwritten, because a signal may arrive during the communication
        flag = torch.tensor(float(self.signum), device=trainer.strategy.root_device)
        return int(trainer.strategy.reduce(flag, reduce_op="max"))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: object) -> None:
        step = trainer.global_step
        if not pl_module.step_completed():
            return  # checkpoints cannot store accumulated gradients
        if step >= trainer.max_steps:
            trainer.should_stop = True  # Lightning then validates regardless of the interval
        elif step % self.val_every:  # otherwise a validation follows
            signum = self._agreed_signal(trainer)
            if signum or step % self.every == 0:
                self._save(trainer)
            if signum:
                raise _Interrupted(signum, step)
            self._save_early(trainer)

    def _save_early(self, trainer: pl.Trainer) -> None:
        """Saves a checkpoint before the last step unless a checkpoint exists."""
        # ranks must not look for the file, because the first rank may already have written it
        if trainer.global_step == trainer.max_steps - 1 and not self._exists:
            self._save(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking and trainer.global_step < trainer.max_steps:
            self._save(trainer, validation_due=True)
            if signum := self._agreed_signal(trainer):
                raise _Interrupted(signum, trainer.global_step)

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        # Ranks may have different numbers of batches; they agree only after the validation.
        if self.signum and trainer.world_size == 1 and trainer.global_step < trainer.max_steps:
            raise _Interrupted(self.signum, trainer.global_step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        if trainer.should_stop:  # after the last step or early stopping
            self._save(trainer)
        elif signum := self._agreed_signal(trainer):
            raise _Interrupted(signum, trainer.global_step)

    def _save(self, trainer: pl.Trainer, validation_due: bool = False) -> None:
        self._exists, self._validation_due = True, validation_due
        trainer.save_checkpoint(self.folder.last)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # Lightning marks an unfinished validation in this way
        if self._validation_due:
            progress = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
            progress["total"] = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
            progress["current"] = {"ready": 0, "started": 0, "processed": 0, "completed": 0}
