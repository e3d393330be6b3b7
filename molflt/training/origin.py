"""What a run was begun with, and whether one that goes on is still the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypedDict, cast

from molflt.data.batches import Fingerprint
from molflt.files import shown
from molflt.training.checkpoint import read_checkpoint
from molflt.training.config import Config, defaults, plain

__all__ = ["Origin", "Stopped", "check_config", "check_data", "check_machine", "check_stopped"]
__all__ += ["read_origin"]


class Stopped(TypedDict):
    """Why a training ended before its last step: no better validation came."""

    step: int
    """at which it ended"""
    since: int
    """validations since the best one"""
    metric: str
    best: float
    """the best value of `metric`"""
    best_step: int


class Origin(TypedDict, total=False):
    """What a checkpoint says about its run, under "molflt"."""

    config: Config
    data: Mapping[str, Fingerprint]
    machine: Mapping[str, object]
    stopped: Stopped
    seconds: float
    initial: object
    """domain.json of the weights that it started from, if they had one"""


def read_origin(run: Path) -> Origin:
    """Origin in the last checkpoint of a run; empty without one or in earlier versions."""
    last = Path(run) / "checkpoints" / "last.ckpt"
    return cast(Origin, read_checkpoint(last).get("molflt", {}) if last.is_file() else {})


# Where things are, how fast they come and how often they are written down: the steps are the same
_FREE = {
    "run",
    *(f"data.{name}" for name in ("root", "train", "val", "test", "vocabulary")),
    *(f"data.{name}" for name in ("train_labels", "val_labels", "workers", "split_seed")),
    *(f"trainer.{name}" for name in ("accelerator", "checkpoint_every", "log_every", "logger")),
    *("trainer.patience", "trainer.max_epochs"),  # epochs are compared as steps
}
_STEPS, _EPOCHS = "trainer.max_steps", "trainer.max_epochs"


def check_config(path: Path, was: Config, now: Config, done: int) -> None:
    """Refuses to go on with another configuration than the steps so far were made with.

    These may change, take effect and are written to config.yaml:

    - ``trainer.max_steps`` or ``trainer.max_epochs``, upwards; the schedule is then that of the
      new number;
    - ``run`` and the places of the data (``data.root``, ``train``, ``val``, ``test``,
      ``vocabulary``, labels), because the data themselves are compared;
    - ``data.split_seed``, for the same reason;
    - ``data.workers``, ``trainer.log_every``, ``trainer.checkpoint_every``;
    - ``trainer.patience`` and ``trainer.logger``;
    - ``trainer.accelerator``, which is said because it changes the rounding.

    All else is refused, `trainer.devices` too: it multiplies the items of a step.

    Args:
        path: of config.yaml, for messages.
        was: the configuration in the checkpoint.
        now: that of config.yaml with the words of the command line.
        done: steps that have been taken.
    """
    old, new = {**_defaults(now["recipe"]), **dict(_flat(was))}, dict(_flat(now))
    wrong = [
        f"{key} is {shown(old[key])}; got {shown(new[key])}"
        for key in old.keys() & new.keys()
        if key not in _FREE and key != _STEPS and old[key] != new[key]
    ]
    steps = new[_STEPS]  # None where the data decide; compared again then
    if steps is not None and int(str(steps)) < max(done, int(str(old[_STEPS]))):
        epochs = new[_EPOCHS]
        by = "" if epochs is None else f" from {_EPOCHS}={epochs}"
        raise ValueError(
            f"{path}: {_STEPS} is {old[_STEPS]}; got {steps}{by} for --resume; it may only be "
            f"raised; {done} steps are done"
        )
    if wrong:
        raise ValueError(
            f"{path}: {', '.join(sorted(wrong))} for --resume; start a new run instead, or set it "
            "back"
        )


def check_stopped(path: Path, stop: Stopped | None, now: Config) -> None:
    """Refuses to go on with a training that ended for want of patience, unless it has more now.

    Args:
        path: of the run, for messages.
        stop: what the checkpoint says about that; None if it did not end so.
        now: the configuration.
    """
    patience = now["trainer"].get("patience")
    if stop is not None and patience is not None and int(str(patience)) <= stop["since"]:
        raise ValueError(
            f"{path}: stopped early at step {stop['step']}, {stop['since']} validations after its "
            f"best {stop['metric']}; expected --trainer.patience above {stop['since']}, or null, "
            f"to go on; got {patience}"
        )


def _defaults(recipe: str) -> dict[str, object]:
    """Of all options, for those that an earlier version did not have."""
    return dict(_flat(cast(Mapping[str, object], plain(defaults(recipe)))))


def _flat(config: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Keys of options, as on the command line, and their values."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{key}", part) for key, part in value.items())
        else:
            yield name, value


def check_data(run: Path, was: Mapping[str, Fingerprint], now: Mapping[str, Fingerprint]) -> None:
    """Refuses to go on with other data.

    Args:
        run: folder of the run, for messages.
        was: fingerprints in the checkpoint.
        now: those of the data.
    """
    for use, old in was.items():
        new = now.get(use, {})
        for key in old:
            if old[key] != new.get(key):
                what = f"{use}: {key} was {shown(old[key], 16)}; got {shown(new.get(key), 16)}"
                raise ValueError(
                    f"{run}: the data of this run have changed; {what}; restore the data, or "
                    "start a new run"
                )


def check_machine(was: Mapping[str, object], now: Mapping[str, object]) -> str | None:
    """A line about what else may round in another way, if anything does."""
    differs = [
        f"{key} was {was[key]}, is {now[key]}" for key in was if key in now and was[key] != now[key]
    ]
    return f"resumed with {'; '.join(differs)}: sums may round differently" if differs else None
