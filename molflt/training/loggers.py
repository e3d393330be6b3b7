"""Where the rows of metrics.csv go besides: Lightning's loggers, of packages that are optional."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from molflt.training.run_folder import RunFolder
from molflt.training.trainer import LoggerName

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

_PROJECT = "molflt"  # of Weights & Biases, unless WANDB_PROJECT names another


@contextmanager
def _logging(name: LoggerName, folder: RunFolder) -> Iterator[list[Logger]]:
    """Lightning's logger inside of the block; none for csv, which the run folder has in any case.

    A run that goes on writes where it wrote before: what TensorBoard has of the steps that come
    again is cleared away, and Weights & Biases knows the run by a digest of its folder and start.
    """
    if name == "csv" or not folder.writes:
        yield []
        return
    logger = _tensorboard(folder) if name == "tensorboard" else _wandb(folder)
    logger.log_hyperparams(dict(folder.origin["config"]))
    try:
        yield [logger]
    finally:
        if name == "wandb":
            logger.experiment.finish()  # or the next run of this process would write into it


def _tensorboard(folder: RunFolder) -> TensorBoardLogger:
    from lightning.pytorch.loggers import TensorBoardLogger

    # with the step of the checkpoint itself, whose validation may come again; its rows that do not
    # are in metrics.csv
    step = None if folder.checkpoint is None else folder.checkpoint["global_step"]
    return TensorBoardLogger(folder.path, name="", version="tensorboard", purge_step=step)


def _wandb(folder: RunFolder) -> WandbLogger:
    from lightning.pytorch.loggers import WandbLogger

    begun = (folder.path / "versions.json").read_bytes()
    own = hashlib.sha256(str(folder.path.resolve()).encode() + begun).hexdigest()[:16]
    project = os.environ.get("WANDB_PROJECT", _PROJECT)
    logger = WandbLogger(folder.path.name, save_dir=folder.path, project=project, id=own)
    try:
        _ = logger.experiment  # asks for the login now, not in the middle of training
    except Exception as error:  # wandb's errors share no class of their own
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"trainer.logger=wandb: could not begin; {reason}; log in with `wandb login`, or set "
            "WANDB_MODE=offline"
        ) from error
    return logger
