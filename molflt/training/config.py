"""The configuration of a run: its parser, and reading it back through the parser that wrote it."""

from __future__ import annotations

import contextlib
import itertools
import sys
from argparse import ArgumentError
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Literal, TypedDict, cast, get_args

import yaml
from jsonargparse import ArgumentParser, Namespace

from molflt.files import shown
from molflt.training.fit import fit
from molflt.training.recipes import RECIPES, Recipe

__all__ = ["Config", "build_parser", "plain", "read_config"]


class Config(TypedDict):
    """config.yaml of a run: arguments of the parts of its recipe."""

    run: str
    seed: int
    recipe: str
    model: dict[str, object]
    data: dict[str, object]
    task: dict[str, object]
    trainer: dict[str, object]


_PARTS = ("model", "data", "task", "trainer")
_MOST_BYTES = 1_000_000
_ADVICE = "restore the file that training wrote"


def build_parser(words: Sequence[str] = ()) -> ArgumentParser:
    """Parser of ``molflt train``: groups model, data, task and trainer, from the signatures.

    Args:
        words: the command line; the recipe that it or its configuration names decides the options.

    Raises:
        ValueError: if there is no such recipe.
    """
    name = _recipe_named(list(words))
    recipe = Recipe.of({"recipe": name})
    parser = _TrainParser()
    parser.add_argument("--config", action="config", help="YAML file with any of the options below")
    parser.add_argument("--resume", type=Path | None, help="run folder to go on with")
    parser.add_argument("--run", type=Path, default=Path("runs/train"), help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and dropout")
    parser.add_argument(
        "--recipe", type=Literal[*RECIPES], default=name, help="what to learn; see its --help"
    )
    parser.add_class_arguments(recipe.load("model"), "model")
    parser.add_class_arguments(recipe.load("data"), "data")
    parser.add_class_arguments(recipe.load("task"), "task", skip={"model", "seed"})
    parser.add_function_arguments(fit, "trainer", skip={"task", "data", "folder"})
    return parser


def _recipe_named(words: list[str]) -> str:
    """The recipe of a command line: its own word, or the last that its configurations name."""
    name = next(iter(RECIPES))
    runs = [Path(run) / "config.yaml" for run in _values_of("--resume", words)]
    for path in [*runs, *map(Path, _values_of("--config", words))]:
        # The parser says what is wrong with it; aliases are not, in a file that a person wrote.
        with contextlib.suppress(OSError, ValueError, RecursionError, yaml.YAMLError):
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
            name = str(content.get("recipe", name)) if isinstance(content, dict) else name
    return [name, *_values_of("--recipe", words)][-1]


class _TrainParser(ArgumentParser):
    """With ``--resume RUN`` the defaults are RUN's configuration."""

    def parse_args(self, args: Sequence[str] | None = None) -> Namespace:  # type: ignore[override]
        words = list(sys.argv[1:] if args is None else args)
        runs = _values_of("--resume", words)
        if runs:
            read_config(Path(runs[-1]))  # says what is wrong with it
            self.default_config_files = [str(Path(runs[-1]) / "config.yaml")]
        config = super().parse_args(words)
        for key in ("config", "__default_config__"):
            config.pop(key, None)
        if runs:
            config.run = Path(runs[-1])
        return config


def _values_of(option: str, words: list[str]) -> list[str]:
    """Every value that the words give to an option."""
    values = [value for word, value in itertools.pairwise(words) if word == option]
    return values + [w.partition("=")[2] for w in words if w.startswith(f"{option}=")]


def plain(value: object) -> object:
    """With names in place of paths and lists in place of tuples, for YAML and checkpoints."""
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value


def read_config(run: Path) -> Config:
    """The configuration of a run, with the defaults of options that it does not name.

    Args:
        run: folder of the run.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: naming the file, and the key if it is one that is wrong.
    """
    path = Path(run) / "config.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected the folder of a training run")
    content = _read_yaml(path)
    for part in _PARTS:
        if not isinstance(content.get(part), dict):
            got = shown(content[part]) if part in content else "no such key"
            raise ValueError(f"{path}: key {part}: expected its options; got {got}; {_ADVICE}")
    try:
        parser = build_parser([f"--recipe={_recipe_of(content)}"])
        parser.exit_on_error = False
        found = parser.parse_object(content)
    except (ArgumentError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())[:200]}; {_ADVICE}") from None
    for action in parser._actions:
        hint = getattr(action, "_typehint", None)
        optional = hint is None or NoneType in get_args(hint)
        if not optional and found.get(action.dest) is None:
            raise ValueError(f"{path}: key {action.dest}: expected a value; got none; {_ADVICE}")
    for key in ("config", "resume"):
        found.pop(key, None)
    return cast(Config, plain(found.as_dict()))


def _recipe_of(content: Mapping[str, object]) -> str:
    """The name of a recipe that exists."""
    Recipe.of(content)
    return str(content.get("recipe", next(iter(RECIPES))))


class _Loader(yaml.SafeLoader):
    """Without references, of which a few lines could make more than fits into memory."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("references (*name) are not read")
        return super().compose_node(parent, index)


def _read_yaml(path: Path) -> dict[str, object]:
    """Keys and values of a YAML file.

    Raises:
        ValueError: naming the file and the line that is wrong.
    """
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(
            f"{path}: expected a configuration of at most {_MOST_BYTES:,} bytes; got "
            f"{path.stat().st_size:,}"
        )
    try:
        content = yaml.load(path.read_bytes().decode(), _Loader)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8; {_ADVICE}") from None
    except RecursionError:
        raise ValueError(
            f"{path}: expected `key: value`; got too many brackets; {_ADVICE}"
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or error
        raise ValueError(f"{path}: {place}not YAML: {shown(str(problem))}; {_ADVICE}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected `key: value`; got {shown(content)}; {_ADVICE}")
    return content
