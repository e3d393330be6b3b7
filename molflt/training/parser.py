"""Command line of ``molflt train``: recipe, shipped names, ``--resume`` and ``--init``."""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import re
import sys
import time
from argparse import ArgumentError
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from molflt.data.text.tokenizer import TOKENIZER
from molflt.files import shown
from molflt.shipped import find_config
from molflt.training.checkpoint import find_weights
from molflt.training.config import absolute, add_options, check_groups, read_config, read_yaml
from molflt.training.initial_weights import read_initial_weights, recipe_of
from molflt.training.recipes import DEFAULT, Recipe
from molflt.training.sources import find, is_packaged

__all__ = ["build_parser", "dated_run"]

_SHARED = "MOLFLT_RUN"  # passes the name of the run to the other processes of a training
_LONGEST = 60  # characters


def build_parser(words: Sequence[str] = ()) -> ArgumentParser:
    """Returns the parser of ``molflt train`` with groups model, data, task and trainer.

    Args:
        words: the command line, whose recipe determines the options.
    """
    parser = _TrainParser()
    add_options(parser, _recipe_named(list(words)))
    return parser


def _recipe_named(words: list[str]) -> str:
    """Returns the recipe given on a command line or in the files that it names."""
    found = [DEFAULT, *_values_in("recipe", _values_of("--resume", words))]
    for name in _inits(words):
        with contextlib.suppress(ValueError, OSError):  # reported when the weights are read
            weights, run = find_weights(name)
            known = [recipe_of(weights)] if run is None else _values_in("recipe", [str(run)])
            found += filter(None, known)
    found += _values_in("recipe", _values_of("--config", words))
    return [*found, *_values_of("--recipe", words)][-1]


def _inits(words: list[str]) -> list[str]:
    """Returns all values of init in configurations and on the command line."""
    found = [*_values_in("init", _values_of("--config", words)), *_values_of("--init", words)]
    return [] if found[-1:] == ["null"] else found


def _values_in(key: str, files: Sequence[str]) -> list[str]:
    """Returns the values of a key in YAML files and run folders; init and run become absolute."""
    found = []
    for name in files:
        # errors are reported by the parser
        with contextlib.suppress(OSError, ValueError):
            path = Path(name, "config.yaml") if Path(name).is_dir() else find_config(name)
            value = read_yaml(path).get(key)
            if value is not None:
                folder = path.absolute().parent
                value = absolute(Path(str(value)), folder) if key in ("init", "run") else value
                found.append(str(value))
    return found


class _TrainParser(ArgumentParser):
    """Parser with defaults from the run of ``--resume``, or model defaults from ``--init``.

    Shipped configurations are found by name. Paths in a configuration are relative to its file;
    paths on the command line are relative to the current folder.
    """

    def parse_args(self, args: Sequence[str] | None = None) -> Namespace:  # type: ignore[override]
        words = list(sys.argv[1:] if args is None else args)
        runs, files = _values_of("--resume", words), _values_of("--config", words)
        words = _with_files(words)
        if runs:
            self._resume(runs[-1], words, files)
        elif starts := _inits(words):
            self._take_model_of(starts[-1], _recipe_named(words))
        config = super().parse_args(words)
        for key in ("config", "__default_config__"):
            config.pop(key, None)
        _let_words_decide(config, words)
        if runs:
            config.run = Path(runs[-1])
        elif config.run is None:
            config.run = dated_run("-".join(Path(file).stem for file in files) or config.recipe)
        elif (config.run / "config.yaml").resolve() in [Path(file).resolve() for file in files]:
            raise ValueError(
                f"--run {config.run}: its config.yaml is given as --config and would be "
                "overwritten; expected another folder; choose another --run"
            )
        return config

    def _resume(self, run: str, words: list[str], files: list[str]) -> None:
        """Takes the defaults from the configuration of a run."""
        read_config(Path(run))  # raises if it is damaged
        # these are glob patterns, and ~ is expanded: escape both
        self.default_config_files = [glob.escape(str(Path(run, "config.yaml").absolute()))]
        if starts := _values_of("--init", words):
            raise ValueError(
                f"--init {starts[-1]} with --resume {run}: a resumed run already has weights; "
                "remove one of the two"
            )
        own = Path(run).resolve()
        # in a moved run, its key run is outdated
        others = [file for file in files if Path(file).resolve() != own / "config.yaml"]
        given = [*_values_in("run", others), *_values_of("--run", words)]
        if given and Path(given[-1]).resolve() != own:
            raise ValueError(
                f"--run {given[-1]} with --resume {run}: a run is resumed in its own folder; "
                "remove run, or start a new run from its weights with --init"
            )

    def _take_model_of(self, init: str, recipe: str) -> None:
        """Sets the model defaults to the options of a source; the data are compared later."""
        source = read_initial_weights(init)
        related = source.recipe in Recipe.of({"recipe": recipe}).relatives
        if source.recipe not in (None, recipe) and not related:
            raise ValueError(
                f"--init {init}: a run of recipe {source.recipe}; expected recipe {recipe}, as of "
                "this run; use other weights"
            )
        known = {action.dest for action in self._actions}
        taken = {}
        for name, value in source.options.items():
            if f"model.{name}" in known:
                taken[f"model.{name}"] = value
            elif not related:
                raise ValueError(
                    f"{source.path}: its model has the option {shown(name)}, which models of "
                    f"recipe {recipe} do not have; use weights of the same recipe"
                )
        if "data.tokenizer" in known and source.files is not None and TOKENIZER in source.files:
            taken["data.tokenizer"] = _tokenizer_of(source.path)
        self.set_defaults(taken)

    def parse_path(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Namespace:
        check_groups(Path(path), read_yaml(Path(path)))
        try:
            found = super().parse_path(path, *args, **kwargs)
        except ArgumentError as error:
            raise ArgumentError(None, f"{path}: {error}") from None
        known = {action.dest for action in self._actions}
        for name, value in vars(found.as_flat()).items():
            if name not in known or (name == "resume" and value is not None):
                raise ArgumentError(None, f"{path}: unknown key {name!r}")
            found[name] = absolute(value, Path(path).absolute().parent)
        return found


def _let_words_decide(config: Namespace, words: list[str]) -> None:
    """Drops steps of a configuration if the command line gives epochs, and vice versa."""
    both = ("max_steps", "max_epochs")
    given = [key for key in both if {*_values_of(f"--trainer.{key}", words)} - {"null"}]
    if len(given) == 1:
        config.trainer[both[1 - both.index(given[0])]] = None


def _tokenizer_of(weights: Path) -> Path | None:
    """Returns the folder that holds the tokenizer of a weights file or of its run."""
    folder = weights.absolute().parent
    above = folder.parent if folder.name == "checkpoints" else folder
    return above if (above / TOKENIZER).is_file() or (above / "config.json").is_file() else None


def _with_files(words: Sequence[str]) -> list[str]:
    """Replaces names of shipped configurations and models with the paths of their files."""
    named: dict[str, Callable[[str], object]] = {
        "--config": find_config,
        "--init": lambda name: find(name) if is_packaged(name) else name,
    }
    out: list[str] = []
    for word in words:
        option, _, value = word.partition("=")
        if out and out[-1] in named:
            option, value = out.pop(), word
        out.append(f"{option}={named[option](value)}" if option in named and value else word)
    return out


def _values_of(option: str, words: list[str]) -> list[str]:
    """Returns all values of an option on the command line."""
    values = [value for word, value in itertools.pairwise(words) if word == option]
    return values + [w.partition("=")[2] for w in words if w.startswith(f"{option}=")]


def dated_run(name: str, folder: Path = Path("runs")) -> Path:
    """Returns a folder that does not exist yet, such as ``runs/2026-11-22-demo``.

    All processes of a training run get the same folder.

    Args:
        name: name of the training run, such as that of its configuration.
        folder: folder that holds all runs.
    """
    if "LOCAL_RANK" in os.environ:
        if _SHARED not in os.environ:
            raise ValueError(
                "option --run; expected a folder, the same for all processes; got none"
            )
        return Path(os.environ[_SHARED])
    stem = f"{time.strftime('%Y-%m-%d')}-{re.sub(r'[^A-Za-z0-9._+-]+', '-', name)[:_LONGEST]}"
    names = itertools.chain([stem], (f"{stem}-{count}" for count in itertools.count(2)))
    run = next(folder / each for each in names if not os.path.lexists(folder / each))
    os.environ[_SHARED] = str(run)
    return run
