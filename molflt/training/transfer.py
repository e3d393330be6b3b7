"""Starting a run from the weights of another: what is taken over, what is not, and its record."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import safetensors
import torch
from torch import Tensor, nn

from molflt.data.text.tokenizer import TOKENIZER, Tokenizer, find_tokenizer
from molflt.files import shown
from molflt.sequence.published import is_transformers, options_of, renamed
from molflt.training.checkpoint import _read_weights
from molflt.training.config import read_config
from molflt.training.exported import exported_recipe, is_exported, read_exported
from molflt.training.sources import find_weights

if TYPE_CHECKING:
    from molflt.training.run_folder import RunFolder

__all__ = ["Start", "read_origins", "recipe_of"]

_RECORD = "init.json"
_MASKED = "masked_language"  # the recipe whose model published encoders are
_MOST = 8  # names in a line; init.json has them all


class _Origins(NamedTuple):
    """Weights, and what they were made with."""

    path: Path
    sha256: str
    """of the file"""
    recipe: str | None
    """None where only the weights are there"""
    options: dict[str, object]
    """of the model"""
    files: dict[str, object] | None
    """what belonged to the data, by name: its sha256, or in an export what its JSON says; None
    where nobody knows, and shapes have to do"""
    weights: dict[str, Tensor]


class _Transfer(NamedTuple):
    """What became of each tensor."""

    loaded: dict[str, Tensor]
    new: dict[str, str]
    """left at its initialization: why"""
    of_data: tuple[str, ...]
    """buffers that the new data decide"""
    left_over: dict[str, Tensor]
    """of the source, with no place here"""


class Start:
    """What a new run starts from: other weights if `init` names some, else nothing.

    Args:
        folder: of the run; one that goes on has weights of its own.
        init: as for `molflt.training.sources.find_weights`.

    Attributes:
        options: of the source's model.

    Raises:
        FileNotFoundError: if a run has no best weights.
        ValueError: if it names nothing, or the file is damaged.
    """

    def __init__(self, folder: RunFolder, init: object) -> None:
        self.folder = folder
        self.name = str(init)
        goes_on = init is None or folder.checkpoint is not None
        self._origins = None if goes_on else read_origins(self.name)
        self.options = {} if self._origins is None else self._origins.options
        self._done: _Transfer | None = None

    def load(self, model: nn.Module, files: Mapping[str, bytes]) -> None:
        """Loads what fits into a new model.

        Args:
            model: to load into.
            files: of the data, by name.

        Raises:
            ValueError: if nothing fits.
        """
        if self._origins is not None:
            self._done = _transfer(self._origins, model, files)
        elif self.folder.writes:  # of a start that was killed before its first checkpoint
            (self.folder.path / _RECORD).unlink(missing_ok=True)

    def files(self, model: nn.Module) -> dict[str, bytes]:
        """The record that the run keeps, by name."""
        if self._origins is None or self._done is None:
            return {}
        return {_RECORD: _record(self.name, self._origins, self._done, model)}

    def say(self, model: nn.Module, options: Mapping[str, object]) -> None:
        """Prints what became of the weights, when the data have decided about their part.

        Args:
            model: of the run.
            options: its options.
        """
        if self._origins is not None and self._done is not None:
            lines = _report(self._origins, self._done, model, options)
            self.folder.say(f"{self.folder.path}: {lines}")


def recipe_of(weights: Path) -> str | None:
    """The recipe of a file of weights without a run, from its header alone; None if unknown."""
    if is_exported(weights):
        return exported_recipe(weights)
    with safetensors.safe_open(weights, framework="pt") as file:
        return _MASKED if is_transformers(dict.fromkeys(file.keys())) else None


def read_origins(name: str) -> _Origins:
    """Reads what `--init` names.

    Raises:
        FileNotFoundError: if a run has no best weights.
        ValueError: if it names nothing, or the file is damaged.
    """
    source = find_weights(name)
    recipe: str | None = None
    files: dict[str, object] | None
    if source.weights.is_file() and is_exported(source.weights):
        recipe, weights, options, files = _of_export(source.weights)
    else:
        weights, options, known = _read_weights(source.weights)
        files = known
        if source.run is None and is_transformers(weights):
            recipe, (weights, options, files) = _MASKED, _of_transformers(source.weights, weights)
    if source.run is not None:
        config = read_config(source.run)
        recipe, options = config["recipe"], {**config["model"], **options}
    for key, tensor in weights.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(
                f"{source.weights}: key {shown(key)}: expected finite numbers; got NaN or "
                "infinity; start from other weights"
            )
    with open(source.weights, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return _Origins(source.weights, digest, recipe, options, files, weights)


def _of_export(
    path: Path,
) -> tuple[str, dict[str, Tensor], dict[str, object], dict[str, object]]:
    """Recipe, weights, options of the model and the data's files of an exported model.

    Raises:
        ValueError: if it is damaged, or an ensemble.
    """
    content, weights = read_exported(path)
    models, files = content["models"], content["files"]
    assert isinstance(models, list) and isinstance(files, dict)  # read_exported has seen to it
    if len(models) > 1:
        raise ValueError(
            f"--init {path}: an ensemble of {len(models)} models; expected one; start from a "
            "member's own run or export"
        )
    return str(content["recipe"]), weights, models[0], files


def _of_transformers(
    path: Path, published: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, object], dict[str, object] | None]:
    """Weights of transformers' BERT or FNet, the options of their model, and their tokenizer.

    Raises:
        ValueError: if it is one that cannot be built here, or a file beside it is damaged.
    """
    weights, beside = renamed(published), path.with_name("config.json")
    try:
        config = json.loads(beside.read_bytes()) if beside.is_file() else {}
        options = options_of(weights, config)
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path}: expected a whole BERT or FNet of transformers; {shown(str(error))}; get its "
            "files again"
        ) from None
    if not path.with_name(TOKENIZER).is_file():
        return weights, options, None
    tokenizer = Tokenizer.from_json(*find_tokenizer(path.with_name(TOKENIZER)))
    return weights, options, {TOKENIZER: json.loads(tokenizer.to_json())}


def _transfer(origins: _Origins, model: nn.Module, files: Mapping[str, bytes]) -> _Transfer:
    """Loads the tensors that have a name and a shape of the model's, but for what is the data's.

    The model's `of_data` names beginnings of these: a buffer of them, such as the normalizer, is
    never taken over, since it is made of the new data, and parameters of them, such as the logits
    of classes, are taken over if the data come with the same files (vocabulary, classes), or with
    the same one of them if `of_data` has beginnings for each file. All
    other buffers are: the weights were trained with those random features, and what was seen in
    training, such as elements, is joined by what will be.

    Args:
        origins: what to load.
        model: to load into.
        files: of the data, by name.

    Raises:
        ValueError: if nothing fits.
    """
    own, buffers = model.state_dict(), dict(model.named_buffers())
    files_of = _files_of(model)
    decided = tuple(files_of)
    was = origins.files
    others = [n for n in files if was is not None and not _is_same(was.get(n), files[n])]
    loaded, new, of_data = {}, {}, []
    for name, tensor in own.items():
        there = origins.weights.get(name)
        if name.startswith(decided) and name in buffers:
            of_data.append(name)
        elif there is None:
            new[name] = "not in the source"
        elif there.shape != tensor.shape:
            new[name] = f"{tuple(there.shape)} in the source"
        elif other := [
            file
            for start, own in files_of.items()
            if name.startswith(start)
            for file in others
            if own in (None, file)
        ]:
            new[name] = f"of another {other[0]} in the source"
        else:
            loaded[name] = there
    if not any(name not in buffers for name in loaded):
        raise ValueError(
            f"{origins.path}: none of its {len(origins.weights)} tensors has the name and the "
            f"shape of one of this model; got {_listed(list(origins.weights))}; leave the options "
            "of the model out, which are then the source's"
        )
    model.load_state_dict(loaded, strict=False)
    left = {name: tensor for name, tensor in origins.weights.items() if name not in own}
    return _Transfer(loaded, new, tuple(of_data), left)


def _files_of(model: nn.Module) -> dict[str, str | None]:
    """Beginnings of names of what belongs to the data, and the file that decides; None for any."""
    named = getattr(model, "of_data", ())
    if isinstance(named, Mapping):
        return {start: file for file, starts in named.items() for start in starts}
    return dict.fromkeys(named)


def _is_same(kept: object, content: bytes) -> bool:
    """Whether a file of the data is what the source was trained with."""
    if isinstance(kept, str):
        return kept == hashlib.sha256(content).hexdigest()
    return kept is not None and kept == json.loads(content)


def _record(name: str, origins: _Origins, done: _Transfer, model: nn.Module) -> bytes:
    """What init.json says: where the weights come from, and what became of each tensor."""
    shapes = {key: list(tensor.shape) for key, tensor in model.state_dict().items()}
    content = {
        "source": name,
        "weights": str(origins.path),
        "sha256": origins.sha256,
        "recipe": origins.recipe,
        "loaded": {key: shapes[key] for key in done.loaded},
        "new": {key: {"shape": shapes[key], "why": why} for key, why in done.new.items()},
        "of_data": list(done.of_data),
        "left_over": {key: list(tensor.shape) for key, tensor in done.left_over.items()},
    }
    return (json.dumps(content, indent=1) + "\n").encode()


def _report(
    origins: _Origins, done: _Transfer, model: nn.Module, options: Mapping[str, object]
) -> str:
    """Lines about what was loaded, is new, is the data's, and was left over, by name and size.

    Args:
        origins: what was loaded from.
        done: what became of it.
        model: with what the data decide.
        options: of the model.
    """
    own = model.state_dict()
    parts = {name: tensor for name, tensor in own.items() if name in done.loaded}
    lines = [f"starts from {origins.path} (sha256 {origins.sha256[:12]})"]
    lines.append(
        f"loaded     {len(parts)} of {len(own)} tensors, {_numbers(parts.values()):,}"
        f" of {_numbers(own.values()):,} numbers"
    )
    new = [f"{name} {tuple(own[name].shape)}, {why}" for name, why in done.new.items()]
    lines += [f"new        {_listed(new, '; ')}"] if new else []
    frozen = [n for n, p in model.named_parameters() if n in done.new and not p.requires_grad]
    lines += [f"and frozen {_listed(frozen)}: stays random"] if frozen else []
    data = [_of_data(name, own[name], origins.weights.get(name)) for name in done.of_data]
    lines += [f"of data    {'; '.join(data)}"] if data else []
    left = [f"{name} {tuple(tensor.shape)}" for name, tensor in done.left_over.items()]
    lines += [f"left over  {_listed(left)}"] if left else []
    unlike = [
        f"{name} {shown(options[name])}, {shown(was)} in the source"
        for name, was in origins.options.items()
        if name in options and options[name] != was
    ]
    lines += [f"unlike     {_listed(unlike, '; ')}"] if unlike else []
    return "\n  ".join(lines)


def _of_data(name: str, now: Tensor, was: Tensor | None) -> str:
    if was is None or now.numel() != 1 or was.numel() != 1:
        return name
    return f"{name} {float(now):.6g}, {float(was):.6g} in the source"


def _numbers(tensors: Iterable[Tensor]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors)


def _listed(names: list[str], separator: str = ", ") -> str:
    more = f"{separator}and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return separator.join(names[:_MOST]) + more
