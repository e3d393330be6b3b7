"""Initial weights of a new run, taken from another model (``--init``)."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, cast

import safetensors
from torch import Tensor, nn

from molflt.data.structures.domain import DOMAIN, read_domain
from molflt.data.text.tokenizer import TOKENIZER, Tokenizer, find_tokenizer
from molflt.files import shown
from molflt.sequence.published import is_transformers, options_of, renamed
from molflt.training.checkpoint import check_unchanged, expect_finite, find_weights, read_weights
from molflt.training.config import read_config
from molflt.training.exported import exported_recipe, is_exported, read_exported
from molflt.training.run_folder import INIT_RECORD, RunFolder

__all__ = ["InitialWeights", "Initializer", "read_initial_weights", "recipe_of"]

_MASKED = "masked_language"  # recipe of published encoders
_MOST = 8  # names per printed line; init.json has them all


class InitialWeights(NamedTuple):
    """Weights named by ``--init``, and information about their model and data."""

    path: Path
    sha256: str
    """digest of the file"""
    recipe: str | None
    """None for a file that only holds weights"""
    options: dict[str, object]
    """arguments of the model"""
    files: dict[str, object] | None
    """sha256 of the files of the training data by name, or their JSON content in an export; None if
    unknown"""
    weights: dict[str, Tensor]
    domain: object
    """content of domain.json; None if there is no such file"""


def recipe_of(weights: Path) -> str | None:
    """Returns the recipe of a weights file outside a run from its header; None if unknown."""
    if is_exported(weights):
        recipe = exported_recipe(weights)
        return recipe if isinstance(recipe, str) else None
    with safetensors.safe_open(weights, framework="pt") as file:
        return _MASKED if is_transformers(dict.fromkeys(file.keys())) else None


def read_initial_weights(name: str) -> InitialWeights:
    """Reads the weights that `--init` names."""
    path, run = find_weights(name)
    recipe: str | None = None
    domain: object = None
    files: dict[str, object] | None
    if path.is_file() and is_exported(path):
        content, weights = read_exported(path)
        models = cast(list[dict[str, object]], content["models"])
        files = cast(dict[str, object], content["files"])
        if len(models) > 1:
            raise ValueError(
                f"--init {path}: an ensemble of {len(models)} models; expected one; use the run or "
                "export of one member"
            )
        recipe, options, domain = str(content["recipe"]), models[0], files.get(DOMAIN)
    else:
        weights, options, files = read_weights(path)
        if run is None and is_transformers(weights):
            recipe, (weights, options, files) = _MASKED, _of_transformers(path, weights)
    if run is not None:
        config = read_config(run)
        recipe, options = config["recipe"], {**config["model"], **options}
        check_unchanged(run / DOMAIN, path, files or {})
        domain = read_domain(run / DOMAIN)
    for key, tensor in weights.items():
        expect_finite(path, key, tensor)
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return InitialWeights(path, digest, recipe, options, files, weights, domain)


def _of_transformers(
    path: Path, published: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, object], dict[str, object] | None]:
    """Converts the weights, options and tokenizer of a BERT or FNet model from transformers."""
    weights, config_file = renamed(published), path.with_name("config.json")
    try:
        config = json.loads(config_file.read_bytes()) if config_file.is_file() else {}
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


class _Transfer(NamedTuple):
    """Tensors, grouped by how they are initialized."""

    loaded: dict[str, Tensor]
    new: dict[str, str]
    """reason for each tensor that keeps its random values, by name"""
    of_data: tuple[str, ...]
    """buffers computed from the new data"""
    left_over: dict[str, Tensor]
    """tensors of the source that the model does not have"""


class Initializer:
    """Loads initial weights into a new run; does nothing without `init` or in a resumed run.

    Args:
        folder: the run folder.
        init: name of the weights; see `molflt.training.checkpoint.find_weights`.

    Attributes:
        options: arguments of the source's model.
    """

    def __init__(self, folder: RunFolder, init: object) -> None:
        self.folder = folder
        self.name = str(init)
        unused = init is None or folder.checkpoint is not None
        self._source = None if unused else read_initial_weights(self.name)
        self.options = {} if self._source is None else self._source.options
        self._done: _Transfer | None = None

    def domain(self) -> tuple[str, object] | None:
        """Returns a name for messages and the content of the source's domain.json.

        A resumed run takes the content from its checkpoint. Returns None if there is no such file.
        """
        source = self._source
        found = self.folder.remember(None if source is None else source.domain)
        name = f"--init {self.name}: {DOMAIN}" if source else f"{self.folder.last}: initial"
        return None if found is None else (name, found)

    def load(self, model: nn.Module, files: Mapping[str, bytes]) -> None:
        """Loads all tensors that fit; warns if the domain of the source is unknown."""
        if self._source is None:
            return
        self._done = _transfer(self._source, model, files)
        if DOMAIN in files and self._source.domain is None:
            warnings.warn(
                f"--init {self.name}: no {DOMAIN} belongs to it, so the training data of these "
                "weights are unknown; predictions will be compared with the new data only",
                stacklevel=2,
            )

    def files(self, model: nn.Module) -> dict[str, bytes]:
        """Returns the content of init.json, by file name."""
        source, done = self._source, self._done
        if source is None or done is None:
            return {}
        shapes = {key: list(tensor.shape) for key, tensor in model.state_dict().items()}
        content = {
            "source": self.name,
            "weights": str(source.path),
            "sha256": source.sha256,
            "recipe": source.recipe,
            "loaded": {key: shapes[key] for key in done.loaded},
            "new": {key: {"shape": shapes[key], "why": why} for key, why in done.new.items()},
            "of_data": list(done.of_data),
            "left_over": {key: list(tensor.shape) for key, tensor in done.left_over.items()},
        }
        return {INIT_RECORD: (json.dumps(content, indent=1) + "\n").encode()}

    def say(self, model: nn.Module, options: Mapping[str, object]) -> None:
        """Prints which tensors were loaded, are new, or were not used."""
        source, done = self._source, self._done
        if source is None or done is None:
            return
        own = model.state_dict()
        frozen = [n for n, p in model.named_parameters() if n in done.new and not p.requires_grad]
        rows = {
            "loaded": [f"{len(done.loaded)} of {len(own)} tensors"],
            "new": [f"{name} {tuple(own[name].shape)}, {why}" for name, why in done.new.items()],
            "random and frozen": frozen,
            "of data": [
                _change(name, own[name], source.weights.get(name)) for name in done.of_data
            ],
            "left over": [f"{name} {tuple(x.shape)}" for name, x in done.left_over.items()],
            "differs": [
                f"{name} {shown(options[name])}, {shown(was)} in the source"
                for name, was in source.options.items()
                if name in options and options[name] != was
            ],
        }
        lines = [f"{name}: {_listed(items)}" for name, items in rows.items() if items]
        start = f"{self.folder.path}: starts from {source.path} (sha256 {source.sha256[:12]})"
        self.folder.say("\n  ".join([start, *lines]))


def _transfer(source: InitialWeights, model: nn.Module, files: Mapping[str, bytes]) -> _Transfer:
    """Loads the tensors whose name and shape match, except those that depend on the data.

    The model's `of_data` lists prefixes of names. Buffers with such a prefix, such as the
    normalizer, are never loaded. Parameters with such a prefix, such as the logits of classes, are
    loaded only if the files of the data (vocabulary, classes) are the same; if `of_data` lists
    prefixes for each file, only that file is compared. All other buffers are loaded. These are
    random features, with which the weights were trained, and records of the training data, such as
    its elements, which the new training extends. A record is not loaded if the weight that the
    model's `seen_by` names for it is new.
    """
    own, buffers = model.state_dict(), dict(model.named_buffers())
    named = getattr(model, "of_data", ())
    file_of: dict[str, str | None] = dict.fromkeys(named)  # None stands for any file
    if isinstance(named, Mapping):
        file_of = {prefix: file for file, prefixes in named.items() for prefix in prefixes}
    was = source.files
    changed = [n for n in files if was is not None and not _is_same(was.get(n), files[n])]
    loaded, new, of_data = {}, {}, []
    for name, tensor in own.items():
        found = source.weights.get(name)
        needed = [file for prefix, file in file_of.items() if name.startswith(prefix)]
        if needed and name in buffers:
            of_data.append(name)
        elif found is None:
            new[name] = "not in the source"
        elif found.shape != tensor.shape:
            new[name] = f"{tuple(found.shape)} in the source"
        elif other := [file for file in changed if needed and {None, file} & {*needed}]:
            new[name] = f"trained with another {other[0]}"
        else:
            loaded[name] = found
    for buffer, weight in getattr(model, "seen_by", {}).items():
        if buffer in loaded and weight not in loaded:
            del loaded[buffer]
            new[buffer] = f"{weight} is new"
    if not any(name not in buffers for name in loaded):
        raise ValueError(
            f"{source.path}: none of its {len(source.weights)} tensors has the name and shape of "
            f"one of this model; got {_listed(list(source.weights))}; omit the model's options to "
            "use those of the source"
        )
    kept = {name: own[name] for name in of_data}  # load_state_dict resets missing buffers
    model.load_state_dict(kept | loaded, strict=False)
    left = {name: tensor for name, tensor in source.weights.items() if name not in own}
    return _Transfer(loaded, new, tuple(of_data), left)


def _is_same(kept: object, content: bytes) -> bool:
    """Compares a data file with that of the source, given as a digest or parsed JSON."""
    if isinstance(kept, str):
        return kept == hashlib.sha256(content).hexdigest()
    return kept is not None and kept == json.loads(content)


def _change(name: str, now: Tensor, was: Tensor | None) -> str:
    """Describes a buffer of the new data, and its value in the source if it is a number."""
    if was is None or now.numel() != 1 or was.numel() != 1:
        return name
    return f"{name} {float(now):.6g}, {float(was):.6g} in the source"


def _listed(names: list[str]) -> str:
    more = [f"and {len(names) - _MOST} more"] if len(names) > _MOST else []
    return "; ".join([*names[:_MOST], *more])
