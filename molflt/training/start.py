"""Command line of ``molflt train``; defaults come from the run or the weights that it names."""

import argparse
import contextlib
import glob
import os
import re
import time
from argparse import ArgumentError
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from molflt.data.text.tokenizer import TOKENIZER
from molflt.files import shown
from molflt.shipped import find_config
from molflt.training.checkpoint import Saved, packaged
from molflt.training.config import absolute, add_options, read_config, read_yaml
from molflt.training.initial import read_initial_weights
from molflt.training.recipes import DEFAULT, Recipe

_SHARED = "MOLFLT_RUN"  # passes the name of the run to the other processes
_LONGEST = 60  # characters
_STEPS, _EPOCHS = "trainer.max_steps", "trainer.max_epochs"
_READ = ("config", "init", "recipe", "resume", "run", _STEPS, _EPOCHS)


def build_parser(words: Sequence[str] = ()) -> ArgumentParser:
    """Returns the parser for ``molflt train``.

    The options --recipe, --config, --init and --resume in `words` determine the recipe, in this
    order of precedence; --init also determines defaults.
    """
    parser, (given, _) = _TrainParser(), _read(words)
    names = [*_values_in("init", given["config"]), *given["init"]]
    recipes, source = [DEFAULT, *_values_in("recipe", given["resume"])], None
    if names and names[-1] != "null" and not given["resume"]:
        try:
            source = read_initial_weights(names[-1])
            recipes += filter(None, [source.recipe])
        except (OSError, ValueError) as error:
            parser.failure = error
    recipes += [*_values_in("recipe", given["config"]), *given["recipe"]]
    add_options(parser, recipes[-1])
    if source is not None:
        parser.take_model_of(source, f"--init {names[-1]}", recipes[-1])
    return parser


def _read(
    words: Sequence[str], names: Sequence[str] = _READ
) -> tuple[dict[str, list[str]], list[str]]:
    """Returns the values of some options, in order, and the other words; omits empty values."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        parser.add_argument(f"--{name}", action="append", nargs="?", default=[])
    values, others = parser.parse_known_args(words)
    return {name: [*filter(None, several)] for name, several in vars(values).items()}, others


def _values_in(key: str, files: Sequence[str]) -> list[str]:
    """Returns the values of `key` in YAML files or run folders; "init" paths are made absolute."""
    values = []
    for name in files:
        with contextlib.suppress(OSError, ValueError):  # reported by the parser
            path = Path(name, "config.yaml") if Path(name).is_dir() else find_config(name)
            content = read_yaml(path)
            if key in content:
                value = content[key]
                if key == "init" and value is not None:
                    value = _resolved_init(str(value), path)
                values.append("null" if value is None else str(value))
    return values


def _resolved_init(name: str, config: Path) -> Path:
    """Resolves `init` of a configuration: a packaged model, hf:OWNER/NAME or a relative path."""
    return packaged(name) or absolute(Path(name), config.absolute().parent)


class _TrainParser(ArgumentParser):
    """Parser with defaults from the run given by ``--resume`` or the model given by ``--init``."""

    failure: Exception | None = None  # of reading the initial weights; raised by `parse_args`
    without_tokenizer = ""  # ``--init NAME`` if the tokenizer of these weights is missing

    def parse_args(self, args: Sequence[str]) -> Namespace:  # type: ignore[override]
        given, _ = _read(args)
        if self.failure is not None:
            raise self.failure
        if given["resume"]:
            self._resume(given["resume"][-1], given["run"])
        # configurations come first, to be overridden
        words = [f"--config={find_config(name)}" for name in given["config"]]
        words += [f"--init={packaged(x) or x}" for x in given["init"]]
        config = super().parse_args(words + _read(args, ("config", "init"))[1])
        if self.without_tokenizer and config.data.tokenizer is None and config.data.kind is None:
            raise ValueError(
                f"{self.without_tokenizer}: expected {TOKENIZER} next to the weights; got none; "
                "name one with --data.tokenizer, because words are vectors of these weights"
            )
        for key in ("config", "__default_config__"):
            config.pop(key, None)
        # max_steps on the command line replaces max_epochs in a file, and vice versa
        sets_steps, sets_epochs = (bool({*given[name]} - {"null"}) for name in (_STEPS, _EPOCHS))
        if sets_steps != sets_epochs:
            config.trainer["max_epochs" if sets_steps else "max_steps"] = None
        if given["resume"]:
            config.run = Path(given["resume"][-1])
        elif config.run is None:
            stems = [Path(name).stem for name in given["config"]]
            config.run = dated_run("-".join(stems) or config.recipe)
        return config

    def _resume(self, run: str, folders: Sequence[str]) -> None:
        """Uses the options of a run as defaults; rejects a different --run."""
        read_config(Path(run))  # raises if it is damaged
        # escapes glob patterns and ~, which jsonargparse would expand
        self.default_config_files = [glob.escape(str(Path(run, "config.yaml").absolute()))]
        if folders and Path(folders[-1]).resolve() != Path(run).resolve():
            raise ValueError(
                f"--run {folders[-1]} with --resume {run}: a run is resumed in its own folder; "
                "remove --run, or start a new run from its weights with --init"
            )

    def take_model_of(self, source: Saved, name: str, recipe: str) -> None:
        """Uses the options and the tokenizer of the initial weights `name` as defaults."""
        related = source.recipe in Recipe.of({"recipe": recipe}).relatives
        if source.recipe not in (None, recipe) and not related:
            raise ValueError(
                f"{name}: expected weights of recipe {recipe}, which this run trains; got recipe "
                f"{source.recipe}; use other weights"
            )
        known = {action.dest for action in self._actions}
        options = {}
        for option, value in source.options[0].items():
            if f"model.{option}" in known:
                options[f"model.{option}"] = value
            elif not related:
                raise ValueError(
                    f"{source.path}: its model has the option {shown(option)}, which models of "
                    f"recipe {recipe} do not have; use weights of the same recipe"
                )
        if "data.tokenizer" in known:
            if TOKENIZER in (source.files or ()):
                options["data.tokenizer"] = (source.run or source.path.parent).absolute()
            elif source.recipe is not None and source.files is None:
                self.without_tokenizer = name
        self.set_defaults(options)

    def parse_path(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Namespace:
        read_yaml(Path(path))  # raises for repeated keys, and for values in place of groups
        try:
            config = super().parse_path(path, *args, **kwargs)
        except ArgumentError as error:
            raise ArgumentError(None, f"{path}: {error}") from None
        known = {action.dest for action in self._actions}
        for name, value in vars(config.as_flat()).items():
            if name not in known or (name == "resume" and value is not None):
                raise ArgumentError(None, f"{path}: unknown key {name!r}")
            config[name] = absolute(value, Path(path).absolute().parent)
            if name == "init" and value is not None:
                config[name] = _resolved_init(str(value), Path(path))
        return config


def dated_run(name: str) -> Path:
    """Returns a new folder, such as ``runs/2026-11-22-NAME``; all processes of a run use it."""
    if "LOCAL_RANK" in os.environ:
        if _SHARED not in os.environ:
            raise ValueError("--run: expected the same folder for all processes; got none")
        return Path(os.environ[_SHARED])
    stem = f"{time.strftime('%Y-%m-%d')}-{re.sub(r'[^A-Za-z0-9._+-]+', '-', name)[:_LONGEST]}"
    run, count = Path("runs", stem), 1
    while os.path.lexists(run):
        count += 1
        run = Path("runs", f"{stem}-{count}")
    os.environ[_SHARED] = str(run)
    return run
