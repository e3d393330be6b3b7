"""Start of a training run: the command line of ``molflt train``, and the weights of ``--init``."""

import argparse
import contextlib
import glob
import hashlib
import json
import os
import re
import time
import warnings
from argparse import ArgumentError
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from torch import nn

from molflt.data.structures.domain import DOMAIN
from molflt.data.text.tokenizer import TOKENIZER, Tokenizer, find_tokenizer
from molflt.files import shown
from molflt.shipped import find_config
from molflt.training.checkpoint import Saved, check_finite, find_weights, packaged, read_saved
from molflt.training.config import absolute, add_options, read_config, read_yaml
from molflt.training.recipes import DEFAULT, Recipe

_SHARED = "MOLFLT_RUN"  # passes the name of the run to the other processes
_LONGEST = 60  # characters
_STEPS, _EPOCHS = "trainer.max_steps", "trainer.max_epochs"
_MOST = 8  # names per printed line about initial weights; init.json contains all names
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
            run = Path(given["resume"][-1])
            read_config(run)  # raises if it is damaged
            # escapes glob patterns and ~, which jsonargparse would expand
            self.default_config_files = [glob.escape(str((run / "config.yaml").absolute()))]
            if given["run"] and Path(given["run"][-1]).resolve() != run.resolve():
                raise ValueError(
                    f"--run {given['run'][-1]} with --resume {run}: a run is resumed in its own "
                    "folder; remove --run, or start a new run from its weights with --init"
                )
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


def read_initial_weights(name: str) -> Saved:
    """Reads the weights given by `--init`; only the first model of an ensemble is used."""
    saved = read_saved(*find_weights(name))
    if saved.recipe is None:
        saved = _of_transformers(saved)
    for key, tensor in saved.weights[0].items():
        check_finite(saved.path, key, tensor)
    return saved


def _of_transformers(saved: Saved) -> Saved:
    """Converts weights, options and tokenizer of `transformers` (BERT, FNet); returns others."""
    from molflt.sequence.published import is_transformers, options_of, renamed

    if not is_transformers(saved.weights[0]):
        return saved
    path, weights = saved.path, renamed(saved.weights[0])
    files: dict[str, object] | None = None
    if path.with_name(TOKENIZER).is_file():
        tokenizer = Tokenizer.from_json(*find_tokenizer(path.with_name(TOKENIZER)))
        files = {TOKENIZER: json.loads(tokenizer.to_json())}
        for name in {"encoder.words.weight", "head.bias"} & weights.keys():
            weights[name] = weights[name][: len(tokenizer)]  # the rest only pads the matrix
    config_file = path.with_name("config.json")
    try:
        config = json.loads(config_file.read_bytes()) if config_file.is_file() else {}
        options = options_of(weights, config)
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path}: expected a complete BERT or FNet model from transformers; "
            f"{shown(str(error))}; download its files again, or use different weights"
        ) from None
    return saved._replace(
        recipe="masked_language", options=[options], weights=[weights], files=files
    )


def load_initial(
    name: str, source: Saved, model: nn.Module, files: Mapping[str, bytes]
) -> dict[str, Any]:
    """Loads matching tensors of `--init NAME` into a new model; returns the content of init.json.

    `files` describe the new data. Warns if the domain of the source is unknown.
    """
    record = {
        "source": name,
        "weights": str(source.path),
        "sha256": hashlib.sha256(source.path.read_bytes()).hexdigest(),
        "recipe": source.recipe,
        **_transfer(source, model, files),
    }
    scale = source.weights[0].get("energy_std")
    if "energy_std" in record["of_data"] and scale is not None:
        model.get_buffer("energy_std").copy_(scale)  # until the task overwrites it
    if DOMAIN in files and source.domain is None:
        warnings.warn(
            f"--init {name} has no {DOMAIN}, so the training data of these weights are unknown; "
            "predictions will be compared only with the new data",
            stacklevel=2,
        )
    return record


def _transfer(source: Saved, model: nn.Module, files: Mapping[str, bytes]) -> dict[str, Any]:
    """Loads tensors with the same name and shape and returns the entries of init.json.

    Buffers named in the model's `of_data`, such as the normalizer, are not loaded. Parameters named
    there, such as the class logits, are loaded only if the data files on which they depend
    (vocabulary, classes) are the same. All other buffers are loaded, such as random features and
    the elements of the training data, unless the weight in `seen_by` that they describe is new.
    """
    state, buffers = model.state_dict(), dict(model.named_buffers())
    prefixes = getattr(model, "of_data", ())
    if not isinstance(prefixes, Mapping):
        prefixes = dict.fromkeys(files or [""], prefixes)
    weights = source.weights[0]
    changed: list[str] = []
    if source.files is not None:
        changed = [x for x in files if not _is_same(source.files.get(x), files[x])]
    loaded, new, of_data = {}, {}, []
    for name, tensor in state.items():
        weight = weights.get(name)
        needed = [file for file, group in prefixes.items() if name.startswith(tuple(group))]
        if needed and name in buffers:  # such as the normalizer
            of_data.append(name)
        elif weight is None:
            new[name] = "not in the source"
        elif weight.shape != tensor.shape:
            new[name] = f"{tuple(weight.shape)} in the source"
        elif needed_but_changed := [file for file in changed if file in needed]:
            new[name] = f"trained with a different {needed_but_changed[0]}"
        else:
            loaded[name] = weight
    for buffer, weight in getattr(model, "seen_by", {}).items():  # records of the training data
        if buffer in loaded and weight not in loaded:
            del loaded[buffer]
            new[buffer] = f"{weight} is new"
    if not any(name not in buffers for name in loaded):
        raise ValueError(
            f"{source.path}: expected at least one tensor with the name and shape of a tensor in "
            f"this model; got {_listed(list(weights))}; omit the model options to use those of the "
            "source"
        )
    unchanged = {name: state[name] for name in of_data}  # load_state_dict would reset buffers
    model.load_state_dict(unchanged | loaded, strict=False)
    return {
        "loaded": {name: list(x.shape) for name, x in loaded.items()},
        "new": {name: {"shape": list(state[name].shape), "why": why} for name, why in new.items()},
        "of_data": of_data,
        "left_over": {name: list(x.shape) for name, x in weights.items() if name not in state},
    }


def describe_initial(
    record: Mapping[str, Any], source: Saved, model: nn.Module, options: Mapping[str, object]
) -> str:
    """Describes which tensors were loaded, newly initialized, or left unused.

    `record` is the result of `load_initial`, and `options` are the arguments of the model.
    """
    new, weights = record["new"], source.weights[0]
    of_data = {name: name for name in record["of_data"]}
    for name in ("energy_mean", "energy_std"):
        if name in of_data and name in weights:
            of_data[name] += f", {float(weights[name]):.6g} eV in the source"
    frozen = [n for n, p in model.named_parameters() if n in new and not p.requires_grad]
    rows = {
        "loaded": [f"{len(record['loaded'])} of {len(model.state_dict())} tensors"],
        "new": [f"{name} {tuple(x['shape'])}, {x['why']}" for name, x in new.items()],
        "random and frozen": frozen,
        "of data": list(of_data.values()),
        "left over": [f"{name} {tuple(shape)}" for name, shape in record["left_over"].items()],
        "differs": [
            f"{name} {shown(options[name])}, {shown(value)} in the source"
            for name, value in source.options[0].items()
            if name in options and options[name] != value
        ],
    }
    lines = [f"{name}: {_listed(items)}" for name, items in rows.items() if items]
    members = len(source.options)
    first = f"the first of {members} models in " if members > 1 else ""
    path = f"{first}{source.path} (sha256 {record['sha256'][:12]})"
    return "\n  ".join([f"starts from {path}", *lines])


def _is_same(earlier: object, content: bytes) -> bool:
    """Returns True if `earlier` is the SHA-256 digest of `content`, or `content` parsed as JSON."""
    if isinstance(earlier, str):
        return earlier == hashlib.sha256(content).hexdigest()
    return earlier is not None and earlier == json.loads(content)


def _listed(names: list[str]) -> str:
    more = [f"and {len(names) - _MOST} more"] if len(names) > _MOST else []
    return "; ".join([*names[:_MOST], *more])
