"""Provenance of a run, stored in its checkpoints, and checks of resumed runs against it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypedDict, cast

from molflt.data.batches import Fingerprint
from molflt.files import shown
from molflt.training.checkpoint import read_checkpoint
from molflt.training.config import Config, defaults, plain

__all__ = ["Provenance", "Stopped", "check_config", "check_stopped", "read_provenance"]


class Stopped(TypedDict):
    """State of a run that was ended by early stopping."""

    step: int
    since: int
    """validations since the best one"""
    metric: str
    best: float
    """best value of `metric`"""
    best_step: int


class Provenance(TypedDict, total=False):
    """Information about a run, stored in its checkpoints under the key "molflt"."""

    config: Config
    data: Mapping[str, Fingerprint]
    machine: Mapping[str, object]
    stopped: Stopped
    seconds: float
    initial: object
    """content of domain.json of the initial weights"""


def read_provenance(run: Path) -> Provenance:
    """Reads the provenance in last.ckpt; empty if missing or written by an earlier version."""
    last = Path(run) / "checkpoints" / "last.ckpt"
    return cast(Provenance, read_checkpoint(last).get("molflt", {}) if last.is_file() else {})


# Options that do not affect the steps. Data are compared by content, and epochs as steps.
_FREE = {
    "run",
    "data.root",
    "data.split_seed",
    "data.test",
    "data.train",
    "data.train_labels",
    "data.val",
    "data.val_labels",
    "data.vocabulary",
    "data.workers",
    "trainer.accelerator",
    "trainer.checkpoint_every",
    "trainer.log_every",
    "trainer.logger",
    "trainer.max_epochs",
    "trainer.patience",
}
_STEPS, _EPOCHS = "trainer.max_steps", "trainer.max_epochs"


def check_config(path: Path, was: Config, now: Config, done: int) -> None:
    """Raises ValueError if a resumed run has options that would change its steps.

    Options in `_FREE` may change. ``trainer.max_steps`` and ``trainer.max_epochs`` may be raised;
    the schedule then follows the new number. Other changes are refused, including those of
    `trainer.devices`, which multiplies the batch size.

    Args:
        path: config.yaml, for messages.
        was: the configuration in the checkpoint.
        now: the new configuration, config.yaml combined with the command line.
        done: number of completed steps.
    """
    # options that were added later had their defaults
    old = dict(_flat(cast(Mapping[str, object], plain(defaults(now["recipe"])))))
    old, new = {**old, **dict(_flat(was))}, dict(_flat(now))
    steps = new[_STEPS]  # None if the number of epochs is given; compared again later
    if steps is not None and int(str(steps)) < max(done, int(str(old[_STEPS]))):
        by = "" if new[_EPOCHS] is None else f" from {_EPOCHS}={new[_EPOCHS]}"
        raise ValueError(
            f"{path}: {_STEPS} is {old[_STEPS]}; got {steps}{by} for --resume; it may only be "
            f"raised; {done} steps are done"
        )
    wrong = [
        f"{key} is {shown(old[key])}; got {shown(new[key])}"
        for key in old.keys() & new.keys()
        if key not in _FREE and key != _STEPS and old[key] != new[key]
    ]
    if wrong:
        raise ValueError(
            f"{path}: {', '.join(sorted(wrong))} for --resume; start a new run instead, or set it "
            "back"
        )


def check_stopped(path: Path, stop: Stopped | None, now: Config) -> None:
    """Raises ValueError for a run ended by early stopping, unless patience was raised."""
    patience = now["trainer"].get("patience")
    if stop is not None and patience is not None and int(str(patience)) <= stop["since"]:
        raise ValueError(
            f"{path}: stopped early at step {stop['step']}, {stop['since']} validations after its "
            f"best {stop['metric']}; expected --trainer.patience above {stop['since']}, or null, "
            f"to resume; got {patience}"
        )


def _flat(config: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yields options, named as on the command line, with their values."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{key}", part) for key, part in value.items())
        else:
            yield name, value
