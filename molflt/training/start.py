"""Command line of ``molflt train``; defaults come from the run or the weights that it names."""

import contextlib
import glob
import os
import re
import sys
import time
from argparse import ArgumentError
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from molflt.data.text.tokenizer import TOKENIZER
from molflt.files import shown
from molflt.shipped import find_config
from molflt.training.checkpoint import Saved, find, find_weights, is_packaged, recipe_of
from molflt.training.config import absolute, add_options, read_config, read_yaml
from molflt.training.initial import read_initial_weights
from molflt.training.recipes import DEFAULT, Recipe

_SHARED = "MOLFLT_RUN"  # passes the name of the run to the other processes
_LONGEST = 60  # characters
_STEPS, _EPOCHS = "--trainer.max_steps", "--trainer.max_epochs"
_READ = ("--config", "--init", "--recipe", "--resume", "--run", _STEPS, _EPOCHS)


def build_parser(words: Sequence[str] = ()) -> ArgumentParser:
    """Returns the parser for ``molflt train`` with the recipe given in `words`."""
    parser = _TrainParser()
    add_options(parser, _recipe_named(_joined(words)))
    return parser


def _recipe_named(words: list[str]) -> str:
    """Returns the recipe from --resume, --init, --config or --recipe; the last of these decides."""
    recipes = [DEFAULT, *_values_in("recipe", _values_of("--resume", words))]
    if (init := _init_named(words)) is not None:
        with contextlib.suppress(ValueError, OSError):  # reported when the weights are read
            recipes += filter(None, [recipe_of(*find_weights(init))])
    recipes += _values_in("recipe", _values_of("--config", words))
    return [*recipes, *_values_of("--recipe", words)][-1]


def _init_named(words: list[str]) -> str | None:
    """Returns the initial weights given by --init or a configuration; None without any."""
    names = [*_values_in("init", _values_of("--config", words)), *_values_of("--init", words)]
    return None if not names or names[-1] == "null" else names[-1]


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
    return find(name) if is_packaged(name) else absolute(Path(name), config.absolute().parent)


class _TrainParser(ArgumentParser):
    """Parser with defaults from the run given by ``--resume`` or the model given by ``--init``."""

    def parse_args(self, args: Sequence[str] | None = None) -> Namespace:  # type: ignore[override]
        words = _joined(sys.argv[1:] if args is None else args)
        runs, files = _values_of("--resume", words), _values_of("--config", words)
        words = _with_files(words)
        source = None
        if runs:
            self._resume(runs[-1], words)
        elif (init := _init_named(words)) is not None:
            source = self._take_model_of(init, _recipe_named(words))
        config = super().parse_args(words)
        data = config.data
        without_files = source is not None and source.recipe is not None and source.files is None
        if without_files and "tokenizer" in data and data.tokenizer is None and data.kind is None:
            raise ValueError(
                f"--init {init}: expected {TOKENIZER} next to the weights; got none; name one with "
                "--data.tokenizer, because words are vectors of these weights"
            )
        for key in ("config", "__default_config__"):
            config.pop(key, None)
        _keep_one_length(config, words)
        if runs:
            config.run = Path(runs[-1])
        elif config.run is None:
            config.run = dated_run("-".join(Path(file).stem for file in files) or config.recipe)
        return config

    def _resume(self, run: str, words: list[str]) -> None:
        """Uses the options of a run as defaults; rejects a different --run."""
        read_config(Path(run))  # raises if it is damaged
        # escapes glob patterns and ~, which jsonargparse would expand
        self.default_config_files = [glob.escape(str(Path(run, "config.yaml").absolute()))]
        folders = _values_of("--run", words)
        if folders and Path(folders[-1]).resolve() != Path(run).resolve():
            raise ValueError(
                f"--run {folders[-1]} with --resume {run}: a run is resumed in its own folder; "
                "remove --run, or start a new run from its weights with --init"
            )

    def _take_model_of(self, init: str, recipe: str) -> Saved:
        """Uses options and tokenizer of `init` as defaults; returns its weights."""
        source = read_initial_weights(init)
        related = source.recipe in Recipe.of({"recipe": recipe}).relatives
        if source.recipe not in (None, recipe) and not related:
            raise ValueError(
                f"--init {init}: expected weights of recipe {recipe}, which this run trains; got "
                f"recipe {source.recipe}; use other weights"
            )
        known = {action.dest for action in self._actions}
        options = {}
        for name, value in source.options[0].items():
            if f"model.{name}" in known:
                options[f"model.{name}"] = value
            elif not related:
                raise ValueError(
                    f"{source.path}: its model has the option {shown(name)}, which models of "
                    f"recipe {recipe} do not have; use weights of the same recipe"
                )
        if "data.tokenizer" in known and TOKENIZER in (source.files or ()):
            options["data.tokenizer"] = _tokenizer_of(source.path)
        self.set_defaults(options)
        return source

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


def _keep_one_length(config: Namespace, words: list[str]) -> None:
    """Removes max_steps set in a file if the command line sets max_epochs, and vice versa."""
    sets_steps = bool({*_values_of(_STEPS, words)} - {"null"})
    sets_epochs = bool({*_values_of(_EPOCHS, words)} - {"null"})
    if sets_steps != sets_epochs:
        config.trainer["max_epochs" if sets_steps else "max_steps"] = None


def _tokenizer_of(weights: Path) -> Path | None:
    """Returns the folder with the tokenizer of these weights, or None."""
    folder = weights.absolute().parent
    if folder.name == "checkpoints":
        folder = folder.parent
    files = (folder / TOKENIZER, folder / "config.json")
    return folder if any(file.is_file() for file in files) else None


def _with_files(words: Sequence[str]) -> list[str]:
    """Replaces names of shipped files with their paths; puts --config first, to be overridden."""
    configs, others = [], []
    for word in words:
        option, _, value = word.partition("=")
        if word.startswith("--config="):
            configs.append(f"--config={value and find_config(value)}")
        elif option == "--init" and is_packaged(value):
            others.append(f"--init={find(value)}")
        else:
            others.append(word)
    return configs + others


def _joined(words: Sequence[str]) -> list[str]:
    """Joins the options that this module reads with their values, as in ``--run=NAME``."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in _READ:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _values_of(option: str, words: Sequence[str]) -> list[str]:
    """Returns the values of an option in words from `_joined`, in order."""
    return [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]


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
