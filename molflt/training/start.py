"""Starting a run: command-line options of ``molflt train``, and initial weights (``--init``)."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
import sys
import time
import warnings
from argparse import ArgumentError
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from torch import nn

from molflt.data.structures.domain import DOMAIN, Domain
from molflt.data.text.tokenizer import TOKENIZER, Tokenizer, find_tokenizer
from molflt.files import shown
from molflt.shipped import find_config
from molflt.training.checkpoint import (
    MASKED,
    Saved,
    check_finite,
    find,
    find_weights,
    is_packaged,
    read_saved,
    recipe_of,
)
from molflt.training.config import absolute, add_options, read_config, read_yaml
from molflt.training.recipes import DEFAULT, Recipe
from molflt.training.run_folder import INIT_RECORD, RunFolder

_MOST = 8  # names per printed line; init.json contains all names
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
            weights, run = find_weights(init)
            known = [recipe_of(weights)] if run is None else _values_in("recipe", [str(run)])
            recipes += filter(None, known)
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
        needs_tokenizer = False
        if runs:
            self._resume(runs[-1], words)
        elif (init := _init_named(words)) is not None:
            needs_tokenizer = self._take_model_of(init, _recipe_named(words))
        config = super().parse_args(words)
        if needs_tokenizer and config.data.tokenizer is None and config.data.kind is None:
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

    def _take_model_of(self, init: str, recipe: str) -> bool:
        """Uses options and tokenizer of `init` as defaults; True if a tokenizer is missing."""
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
        reads_tokens = "data.tokenizer" in known
        if reads_tokens and source.files is not None and TOKENIZER in source.files:
            options["data.tokenizer"] = _tokenizer_of(source.path)
        self.set_defaults(options)
        return reads_tokens and source.files is None and source.recipe is not None

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
    path_of: dict[str, Callable[[str], object]] = {
        "--config": find_config,
        "--init": lambda name: find(name) if is_packaged(name) else name,
    }
    resolved = []
    for word in words:
        option, _, value = word.partition("=")
        if option in path_of and value:
            word = f"{option}={path_of[option](value)}"
        resolved.append(word)
    return sorted(resolved, key=lambda word: not word.startswith("--config="))


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


def read_initial_weights(name: str) -> Saved:
    """Reads the weights given by `--init`; only the first model of an ensemble is used."""
    saved = read_saved(*find_weights(name))
    if saved.recipe is None and recipe_of(saved.path) is not None:
        saved = _of_transformers(saved)
    for key, tensor in saved.weights[0].items():
        check_finite(saved.path, key, tensor)
    return saved


def _of_transformers(saved: Saved) -> Saved:
    """Converts the weights, options and tokenizer of a BERT or FNet model from `transformers`."""
    from molflt.sequence.published import options_of, renamed

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
            f"{shown(str(error))}; download its files again"
        ) from None
    return saved._replace(recipe=MASKED, options=[options], weights=[weights], files=files)


class Initializer:
    """Loads initial weights into the model of a new run; does nothing in a resumed run.

    Args:
        folder: the run folder.
        init: name of the weights (see `molflt.training.checkpoint.find_weights`), or None.

    Attributes:
        options: arguments of the source model; empty if nothing is loaded.
    """

    def __init__(self, folder: RunFolder, init: object) -> None:
        self.folder = folder
        self.name = str(init)
        unused = init is None or folder.checkpoint is not None
        self._source = None if unused else read_initial_weights(self.name)
        self.options = {} if self._source is None else {**self._source.options[0]}
        self._record: dict[str, Any] = {}  # content of init.json

    def domain(self) -> Domain | None:
        """Returns the domain of the source (resumed runs: from the checkpoint), or None."""
        source = self._source
        content = self.folder.remember(None if source is None else source.domain)
        name = f"--init {self.name}: {DOMAIN}" if source else f"{self.folder.last}: initial"
        return None if content is None else Domain.from_json(content, name)

    def load(self, model: nn.Module, files: Mapping[str, bytes]) -> None:
        """Loads matching tensors; warns if the domain of the source is unknown."""
        source = self._source
        if source is None:
            return
        self._record = {
            "source": self.name,
            "weights": str(source.path),
            "sha256": hashlib.sha256(source.path.read_bytes()).hexdigest(),
            "recipe": source.recipe,
            **_transfer(source, model, files),
        }
        scale = source.weights[0].get("energy_std")
        if "energy_std" in self._record["of_data"] and scale is not None:
            model.get_buffer("energy_std").copy_(scale)  # until the task overwrites it
        if DOMAIN in files and source.domain is None:
            warnings.warn(
                f"--init {self.name} has no {DOMAIN}, so the training data of these weights are "
                "unknown; predictions will be compared only with the new data",
                stacklevel=2,
            )

    def files(self) -> dict[str, bytes]:
        """Returns init.json as {name: content}, or an empty dictionary without `init`."""
        content = (json.dumps(self._record, indent=1) + "\n").encode()
        return {INIT_RECORD: content} if self._record else {}

    def say(self, model: nn.Module, options: Mapping[str, object]) -> None:
        """Prints which tensors were loaded, newly initialized, or left unused."""
        source, record = self._source, self._record
        if source is None or not record:
            return
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
                for name, value in self.options.items()
                if name in options and options[name] != value
            ],
        }
        lines = [f"{name}: {_listed(items)}" for name, items in rows.items() if items]
        members = len(source.options)
        first = f"the first of {members} models in " if members > 1 else ""
        path = f"{first}{source.path} (sha256 {record['sha256'][:12]})"
        self.folder.say("\n  ".join([f"{self.folder.path}: starts from {path}", *lines]))


def _transfer(source: Saved, model: nn.Module, files: Mapping[str, bytes]) -> dict[str, Any]:
    """Loads tensors with the same name and shape and returns the entries of init.json.

    The model's `of_data` lists name prefixes of tensors that depend on the data. Buffers with these
    prefixes, such as the normalizer, are never loaded. Parameters with these prefixes, such as the
    class logits, are loaded only if the data files (vocabulary, classes) are the same; if `of_data`
    lists prefixes for each file, only that file is compared. All other buffers are loaded: the
    random features with which the weights were trained, and records of the training data, such as
    its elements, which the new training extends. The model's `seen_by` maps each record to a
    weight; the record is not loaded if this weight is new.
    """
    state, buffers = model.state_dict(), dict(model.named_buffers())
    prefixes = getattr(model, "of_data", ())
    file_of: dict[str, str | None] = dict.fromkeys(prefixes)  # None means any file
    if isinstance(prefixes, Mapping):
        file_of = {prefix: file for file, group in prefixes.items() for prefix in group}
    weights = source.weights[0]
    changed: list[str] = []
    if source.files is not None:
        changed = [x for x in files if not _is_same(source.files.get(x), files[x])]
    loaded, new, of_data = {}, {}, []
    for name, tensor in state.items():
        weight = weights.get(name)
        needed = {file for prefix, file in file_of.items() if name.startswith(prefix)}
        needed_but_changed = [file for file in changed if not needed.isdisjoint({None, file})]
        if needed and name in buffers:  # such as the normalizer
            of_data.append(name)
        elif weight is None:
            new[name] = "not in the source"
        elif weight.shape != tensor.shape:
            new[name] = f"{tuple(weight.shape)} in the source"
        elif needed_but_changed:
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


def _is_same(earlier: object, content: bytes) -> bool:
    """Returns True if `earlier` is the SHA-256 digest of `content`, or `content` parsed as JSON."""
    if isinstance(earlier, str):
        return earlier == hashlib.sha256(content).hexdigest()
    return earlier is not None and earlier == json.loads(content)


def _listed(names: list[str]) -> str:
    more = [f"and {len(names) - _MOST} more"] if len(names) > _MOST else []
    return "; ".join([*names[:_MOST], *more])
