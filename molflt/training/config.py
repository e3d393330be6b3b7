"""Run options, and functions that read config.yaml."""

import json
import os
from argparse import ArgumentError
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypedDict, get_args

import yaml
from jsonargparse import ArgumentParser, Namespace
from torch.utils._pytree import tree_map_only

from molflt.files import shown
from molflt.training.limits import readable
from molflt.training.recipes import DEFAULT, RECIPES, Recipe
from molflt.training.trainer import STEPS, TrainerOptions


class Config(TypedDict):
    """Content of config.yaml: the options of a run."""

    run: str
    seed: int
    recipe: str
    init: str | None
    model: dict[str, Any]
    data: dict[str, Any]
    task: dict[str, Any]
    trainer: dict[str, Any]


HUB = "hf:"
"""Prefix of repository names on the Hugging Face Hub."""


def add_options(parser: ArgumentParser, recipe: str) -> None:
    """Adds the options of ``molflt train``, which are the keys of config.yaml.

    The groups model, data, task and trainer contain the arguments of the classes in the recipe.
    """
    parts = Recipe.of({"recipe": recipe})
    parser.add_argument(
        "--config",
        action="config",
        help="YAML file with any of the options below, or the name of a shipped file, such as "
        "demo; paths in the file are relative to it",
    )
    parser.add_argument("--resume", type=Path | None, help="run folder to resume")
    parser.add_argument(
        "--init",
        type=Path | None,
        help="run, exported or packaged model, weights or hf:OWNER/NAME with the initial weights",
    )
    parser.add_argument(
        "--run", type=Path | None, help="folder to write to; by default runs/DATE-CONFIG"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, batches and dropout")
    parser.add_argument(
        "--recipe",
        type=Literal[*RECIPES],
        default=recipe,
        help="recipe to train; --recipe NAME --help lists the options of a recipe",
    )
    parser.add_class_arguments(parts.load("model"), "model")
    parser.add_class_arguments(parts.load("data"), "data")
    parser.add_class_arguments(parts.load("task"), "task", skip={"model", "seed"})
    parser.add_class_arguments(TrainerOptions, "trainer")


@cache  # takes 0.1 s
def _parser(recipe: str) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    add_options(parser, recipe)
    return parser


def defaults(recipe: str) -> dict[str, Any]:
    """Returns the defaults of all options of a recipe, nested as in config.yaml."""
    return _parser(recipe).get_defaults().as_dict()


def check_values(parser: ArgumentParser, config: Namespace) -> None:
    """Raises ValueError if a required option is null, which jsonargparse would accept."""
    for action in parser._actions:
        hint = getattr(action, "_typehint", None)
        accepts_null = not {None, NoneType, Any, object}.isdisjoint({hint, *get_args(hint)})
        if not accepts_null and config.get(action.dest) is None:
            raise ValueError(f"{action.dest}: expected a value; got none")


def read_config(run: Path) -> Config:
    """Reads config.yaml in the folder of a run and adds defaults for missing options."""
    path = Path(run) / "config.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected the folder of a training run")
    content = read_yaml(path)
    try:
        parser = _parser(str(content.get("recipe", DEFAULT)))
        config = parser.parse_object(content)
        check_values(parser, config)
    except (ArgumentError, ValueError, TypeError, AttributeError, KeyError) as error:
        reason = readable(error)[:200]
        raise ValueError(f"{path}: {reason}; restore the file that training wrote") from None
    for key in ("config", "resume"):
        config.pop(key, None)
    if config.trainer.max_steps is None:  # this configuration was not written by training
        config.trainer.max_steps = STEPS
    return plain(config.as_dict())


class _Loader(yaml.SafeLoader):
    """Safe YAML loader that rejects repeated keys, of which PyYAML would use the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        mapping = super().compose_mapping_node(anchor)
        marks: dict[str, yaml.Mark] = {}
        for key, _ in mapping.value:
            first = marks.setdefault(str(key.value), key.start_mark)
            if first is not key.start_mark:
                lines = f"lines {first.line + 1} and {key.start_mark.line + 1}"
                raise yaml.YAMLError(f"key {key.value!r} in {lines}; expected it once")
        return mapping


def read_yaml(path: Path) -> dict[str, object]:
    """Reads a YAML configuration; raises ValueError unless every group is a mapping."""
    try:
        content = yaml.load(path.read_bytes().decode(), _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path}: expected YAML in UTF-8; got {reason}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected `key: value`; got {shown(content)}")
    for part in ("model", "data", "task", "trainer"):
        if not isinstance(group := content.get(part, {}), dict):
            raise ValueError(f"{path}: key {part}: expected keys and values; got {shown(group)}")
    return content


def absolute(value: object, folder: Path | None = None) -> Any:
    """Makes paths relative to `folder` or the current folder absolute, except hf:OWNER/NAME."""

    def resolved(path: Path) -> Path:
        is_local = not str(path).startswith(HUB)
        return Path(os.path.normpath((folder or Path.cwd()) / path)) if is_local else path

    return tree_map_only(Path, resolved, value)


def plain(value: object) -> Any:
    """Converts paths to strings, and tuples to lists, as YAML files and checkpoints require."""
    return json.loads(json.dumps(value, default=os.fspath))
