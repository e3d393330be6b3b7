"""Initial weights of a run (``--init``): read, loaded into the model, recorded and printed."""

import hashlib
import json
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from molflt.data.structures.domain import DOMAIN
from molflt.data.text.tokenizer import TOKENIZER, Tokenizer, find_tokenizer
from molflt.files import shown
from molflt.training.checkpoint import (
    Saved,
    check_finite,
    find_weights,
    read_saved,
)

_MASKED = "masked_language"  # recipe of published encoders
_MOST = 8  # names per printed line; init.json contains all names


def read_initial_weights(name: str) -> Saved:
    """Reads the weights given by `--init`; only the first model of an ensemble is used."""
    from molflt.sequence.published import is_transformers

    saved = read_saved(*find_weights(name))
    if saved.recipe is None and is_transformers(saved.weights[0]):
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
            f"{shown(str(error))}; download its files again, or use different weights"
        ) from None
    return saved._replace(recipe=_MASKED, options=[options], weights=[weights], files=files)


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
