"""The configuration of a run: its options, and how config.yaml is read."""

from __future__ import annotations

import os
from argparse import ArgumentError
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypedDict, cast, get_args

from jsonargparse import ArgumentParser

from molflt.files import shown
from molflt.training.recipes import DEFAULT, RECIPES, Recipe
from molflt.training.sources import HUB
from molflt.training.trainer import STEPS, TrainerOptions
from molflt.training.yaml_file import read_yaml

__all__ = ["Config", "absolute", "add_options", "below", "defaults", "plain", "read_config"]


class Config(TypedDict):
    """config.yaml of a run: arguments of the parts of its recipe."""

    run: str
    seed: int
    recipe: str
    init: str | None
    model: dict[str, object]
    data: dict[str, object]
    task: dict[str, object]
    trainer: dict[str, object]


_PARTS = ("model", "data", "task", "trainer")
_ADVICE = "restore the file that training wrote"


def add_options(parser: ArgumentParser, recipe: str) -> None:
    """Adds the options of ``molflt train``, which are the keys of config.yaml.

    Groups model, data, task and trainer are the arguments of the classes that the recipe names.

    Raises:
        ValueError: if the recipe does not exist.
    """
    parts = Recipe.of({"recipe": recipe})
    parser.add_argument(
        "--config",
        action="config",
        help="YAML file with any of the options below, whose paths are relative to it, or the name "
        "of a shipped one, such as demo",
    )
    parser.add_argument("--resume", type=Path | None, help="run folder to go on with")
    parser.add_argument(
        "--init",
        type=Path | None,
        help="run, exported model, weights or hf:OWNER/NAME to start from",
    )
    parser.add_argument(
        "--run", type=Path | None, help="folder to write; by default runs/DATE-CONFIG"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and dropout")
    parser.add_argument(
        "--recipe", type=Literal[*RECIPES], default=recipe, help="what to learn; see its --help"
    )
    parser.add_class_arguments(parts.load("model"), "model")
    parser.add_class_arguments(parts.load("data"), "data")
    parser.add_class_arguments(parts.load("task"), "task", skip={"model", "seed"})
    parser.add_class_arguments(TrainerOptions, "trainer")


def defaults(recipe: str) -> dict[str, Any]:
    """Returns the defaults of all options of a recipe, nested as in config.yaml."""
    parser = ArgumentParser()
    add_options(parser, recipe)
    return parser.get_defaults().as_dict()


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
        above = (one for one in Path(run).parents if (one / "config.yaml").is_file())
        advice = f"; give {found}" if (found := next(above, None)) else ""
        got = f"{run}: not a folder" if Path(run).is_file() else f"{path}: no such file"
        raise FileNotFoundError(f"{got}; expected the folder of a training run{advice}")
    content = read_yaml(path, _ADVICE)
    for part in _PARTS:
        if not isinstance(content.get(part), dict):
            got = shown(content[part]) if part in content else "no such key"
            raise ValueError(f"{path}: key {part}: expected its options; got {got}; {_ADVICE}")
    try:
        parser = ArgumentParser(exit_on_error=False)
        add_options(parser, str(content.get("recipe", DEFAULT)))
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
    if found.trainer.max_steps is None:
        found.trainer.max_steps = STEPS  # of a file that training has not written
    return cast(Config, plain(found.as_dict()))


def below(folder: Path, value: object) -> object:
    """Make a path, or those in a list, absolute; ``hf:OWNER/NAME`` stays as it is."""
    if isinstance(value, list | tuple):
        return [below(folder, part) for part in value]
    if not isinstance(value, str | Path) or str(value).startswith(HUB):
        return value
    return Path(os.path.normpath(folder / value))


def absolute(value: object) -> object:
    """What a configuration holds, with the paths in it as seen from where one is now."""
    if isinstance(value, Mapping):
        return {key: absolute(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(absolute(part) for part in value)
    return below(Path.cwd(), value) if isinstance(value, Path) else value


def plain(value: object) -> object:
    """With names in place of paths and lists in place of tuples, for YAML and checkpoints."""
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value
