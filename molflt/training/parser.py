"""The command line of ``molflt train``: recipe, shipped names, ``--resume`` and ``--init``."""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from jsonargparse import ArgumentParser, Namespace

from molflt.data.text.tokenizer import TOKENIZER
from molflt.files import shown
from molflt.shipped import find_config
from molflt.training.config import add_options, below, read_config
from molflt.training.initial_weights import read_origins, recipe_of
from molflt.training.recipes import DEFAULT, Recipe
from molflt.training.run_name import dated_run
from molflt.training.sources import Source, find, find_weights, is_packaged
from molflt.training.yaml_file import Loader

__all__ = ["build_parser"]


def build_parser(words: Sequence[str] = ()) -> ArgumentParser:
    """Parser of ``molflt train``: groups model, data, task and trainer, from the signatures.

    Args:
        words: the command line; the recipe that it or its configuration names decides the options.

    Raises:
        ValueError: if there is no such recipe.
    """
    name = _recipe_named(list(words))
    parser = _TrainParser()
    try:
        add_options(parser, name)
    except ValueError as error:
        given = ["--"] if _values_of("--recipe", list(words)) else []
        files = _values_of("--config", list(words))
        where = [*(f"{file}: key " for file in files if _values_in("recipe", [file])), *given]
        raise ValueError("".join(where[-1:]) + str(error)) from None
    return parser


def _recipe_named(words: list[str]) -> str:
    """The recipe of a command line: its own word, or the last that its configurations name."""
    found = [DEFAULT, *_values_in("recipe", _values_of("--resume", words))]
    for name in _inits(words):
        with contextlib.suppress(ValueError, OSError):  # told when it is read
            found += _recipes_of(find_weights(name))
    found += _values_in("recipe", _values_of("--config", words))
    return [*found, *_values_of("--recipe", words)][-1]


def _recipes_of(source: Source) -> list[str]:
    """The recipe of weights, if it is known."""
    if source.run is not None:
        return _values_in("recipe", [str(source.run)])
    found = recipe_of(source.weights)
    return [] if found is None else [found]


def _inits(words: list[str]) -> list[str]:
    """What a new run starts from: every value that configurations and words give."""
    found = [*_values_in("init", _values_of("--config", words)), *_values_of("--init", words)]
    return [] if found[-1:] == ["null"] else found


def _values_in(key: str, files: Sequence[str]) -> list[str]:
    """A key's value in each YAML file, or run folder, that has it; of init and run, a path."""
    found = []
    for name in files:
        # The parser says what is wrong with it.
        with contextlib.suppress(OSError, ValueError, RecursionError, yaml.YAMLError):
            path = Path(name, "config.yaml") if Path(name).is_dir() else find_config(name)
            content = yaml.load(path.read_text(encoding="utf-8"), Loader)
            value = content.get(key) if isinstance(content, dict) else None
            if value is not None:
                folder = path.absolute().parent
                found.append(str(below(folder, value) if key in ("init", "run") else value))
    return found


class _TrainParser(ArgumentParser):
    """With ``--resume RUN`` the defaults are RUN's, with ``--init`` those of the model.

    Shipped configurations go by their names. Paths in a configuration are relative to its file,
    those of the command line to where one is.
    """

    def parse_args(self, args: Sequence[str] | None = None) -> Namespace:  # type: ignore[override]
        words = list(sys.argv[1:] if args is None else args)
        runs = _values_of("--resume", words)
        words = _with_files(words)
        if runs:
            read_config(Path(runs[-1]))  # says what is wrong with it
            # They are patterns, and expanded where they begin with ~: neither is meant
            own = Path(runs[-1], "config.yaml").absolute()
            self.default_config_files = [glob.escape(str(own))]
            if starts := _values_of("--init", words):
                raise ValueError(
                    f"--init {starts[-1]} with --resume {runs[-1]}: a run that goes on has weights "
                    "of its own; leave one of them out"
                )
            same = (own.resolve(), own.parent.resolve())  # says where the run was, if it has moved
            files = [x for x in _values_of("--config", words) if Path(x).resolve() not in same]
            given = [(f"{file}: run", _values_in("run", [file])) for file in files]
            given.append(("--run", _values_of("--run", words)))
            where, folders = next((one for one in reversed(given) if one[1]), ("", runs))
            if Path(folders[-1]).resolve() != Path(runs[-1]).resolve():
                raise ValueError(
                    f"{where} {folders[-1]} with --resume {runs[-1]}: a run goes on in its own "
                    "folder; leave run out, or begin a new run from its weights with --init"
                )
        elif starts := _inits(words):
            self._take_model_of(starts[-1], _recipe_named(words))
        config = super().parse_args(words)
        for key in ("config", "__default_config__"):
            config.pop(key, None)
        _let_words_decide(config, words)
        configs = [Path(name) for name in _values_of("--config", words)]
        if runs:
            config.run = Path(runs[-1])
        elif config.run is None:
            config.run = dated_run("-".join(file.stem for file in configs) or config.recipe)
        elif (config.run / "config.yaml").resolve() in [file.resolve() for file in configs]:
            raise ValueError(
                f"--run {config.run}: its config.yaml is what --config reads, and would be "
                "overwritten; expected another folder; choose another --run"
            )
        return config

    def _take_model_of(self, init: str, recipe: str) -> None:
        """Makes the model of a source the default; what the data decide is compared later."""
        source = read_origins(init)
        related = source.recipe in Recipe.of({"recipe": recipe}).relatives
        if source.recipe not in (None, recipe) and not related:
            raise ValueError(
                f"--init {init}: a run of recipe {source.recipe}; this one is of recipe {recipe}; "
                "expected the same; start from another"
            )
        known = {action.dest for action in self._actions}
        taken = {}
        for name, value in source.options.items():
            if f"model.{name}" in known:
                taken[f"model.{name}"] = value
            elif not related:
                raise ValueError(
                    f"{source.path}: its model has {shown(name)}, which one of recipe {recipe} has "
                    "not; start from weights of the same recipe"
                )
        if "data.tokenizer" in known and source.files is not None and TOKENIZER in source.files:
            taken["data.tokenizer"] = _tokenizer_of(source.path)
        self.set_defaults(taken)

    def parse_path(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Namespace:
        found = super().parse_path(path, *args, **kwargs)
        folder = Path(path).absolute().parent
        for action in self._actions:
            hint = getattr(action, "_typehint", None)
            if _holds_paths(hint) and found.get(action.dest) not in (None, *_words_in(hint)):
                found[action.dest] = below(folder, found[action.dest])
        return found


def _let_words_decide(config: Namespace, words: list[str]) -> None:
    """Drops the steps of a configuration if the words give epochs, and the reverse."""
    both = ("max_steps", "max_epochs")
    given = [key for key in both if {*_values_of(f"--trainer.{key}", words)} - {"null"}]
    if len(given) == 1:
        config.trainer[both[1 - both.index(given[0])]] = None


def _tokenizer_of(weights: Path) -> Path | None:
    """The folder whose tokenizer belongs to weights: theirs, or that of the run around them."""
    folder = weights.absolute().parent
    above = folder.parent if folder.name == "checkpoints" else folder
    return above if (above / TOKENIZER).is_file() or (above / "config.json").is_file() else None


def _holds_paths(hint: object) -> bool:
    """Whether a type is that of a path, or has it inside, as ``list[Path] | None``."""
    return hint is Path or any(map(_holds_paths, get_args(hint)))


def _words_in(hint: object) -> list[object]:
    """Words that a type allows besides paths, as ``Literal["fit"] | Path``."""
    if get_origin(hint) is Literal:
        return [*get_args(hint)]
    return [word for part in get_args(hint) for word in _words_in(part)]


def _with_files(words: Sequence[str]) -> list[str]:
    """The words with files in place of the names of shipped configurations and models."""
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
    """Every value that the words give to an option."""
    values = [value for word, value in itertools.pairwise(words) if word == option]
    return values + [w.partition("=")[2] for w in words if w.startswith(f"{option}=")]
