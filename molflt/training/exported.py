"""Exported models: one safetensors file with the weights and everything needed to use them.

The header describes the model and its training as JSON; config.json next to the file is a copy for
human readers and for the Hugging Face Hub. Neither refers to code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import safetensors
from torch import Tensor, nn

from molflt.files import read_header, save_tensors, shown, verify_tensors, write_atomically
from molflt.training.checkpoint import check_weights
from molflt.training.recipes import Recipe

__all__ = ["Exported", "build", "check_replaceable", "exported_recipe", "is_exported"]
__all__ += ["read_exported", "write_exported"]

_KEY, _FORMAT = "molflt", 1
_ADVICE = "export it again, or get the file again"
_PARTS: dict[str, type | tuple[type, ...]] = {
    "recipe": str,
    "models": list,
    "about": (str, type(None)),
    "license": (str, type(None)),
    "datasets": list,
    "task": dict,
    "results": dict,
    "files": dict,
}


class Exported(NamedTuple):
    """Content of an exported file."""

    content: Mapping[str, object]
    """content of the header, with checked types"""
    weights: dict[str, Tensor]


def write_exported(
    folder: Path, weights: Mapping[str, Tensor], content: Mapping[str, object]
) -> None:
    """Writes model.safetensors and config.json.

    Args:
        folder: folder to write into; created if missing.
        weights: weights by name; with several models, names start with "members.0.", "members.1.".
        content: recipe, models (the options of each), about, license, datasets, task (options),
            results, and files (the content of each small file of a run).
    """
    text = json.dumps({"format": _FORMAT, **content}, indent=1, ensure_ascii=False)
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    copy = folder / "config.json"
    copy.unlink(missing_ok=True)  # it must never describe other weights
    save_tensors(folder / "model.safetensors", own, {"format": "pt", _KEY: text})
    write_atomically(copy, text.encode())


def check_replaceable(folder: Path) -> None:
    """Raises ValueError if an export would overwrite anything other than an earlier export."""
    weights = folder / "model.safetensors"
    if weights.is_file() and is_exported(weights):
        return
    for name in ("config.yaml", "model.safetensors", "config.json", "README.md"):
        if (folder / name).exists():
            raise ValueError(
                f"{folder / name}: exists and does not belong to an exported model; expected a new "
                "folder, or an earlier export; choose another one"
            )


def is_exported(path: Path) -> bool:
    """Returns True if a weights file is an exported model."""
    return _KEY in read_header(path)


def exported_recipe(path: Path) -> object:
    """Returns the recipe of an exported model without reading its weights."""
    return _parsed(read_header(path)[_KEY]).get("recipe")


def read_exported(path: Path) -> Exported:
    """Reads a file written by :func:`write_exported`."""
    verify_tensors(path)
    content = _parsed(read_header(path)[_KEY])
    if content.get("format") != _FORMAT:
        raise ValueError(
            f"{path}: expected an exported model of format {_FORMAT}; got "
            f"{shown(content.get('format'))}; {_ADVICE}, with this version of molflt"
        )
    for key, kind in _PARTS.items():
        if not isinstance(content.get(key), kind):
            raise ValueError(f"{path}: key {key}: got {shown(content.get(key))}; {_ADVICE}")
    models = cast(list[object], content["models"])
    if not models or not all(isinstance(options, dict) for options in models):
        raise ValueError(f"{path}: key models: expected options; got {shown(models)}; {_ADVICE}")
    copy = path.with_name("config.json")
    copied = path.name == "model.safetensors" and copy.is_file()
    if copied and _parsed(copy.read_text(encoding="utf-8", errors="replace")) != content:
        raise ValueError(f"{copy}: expected a copy of the header of {path.name}; {_ADVICE}")
    with safetensors.safe_open(path, framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    return Exported(content, weights)


def _parsed(text: str) -> dict[str, object]:
    """Returns the object in a JSON text; empty if the text is not an object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def build(path: Path, exported: Exported) -> list[nn.Module]:
    """Builds the models of an exported file, in evaluation mode; `path` is for messages."""
    content, weights = exported
    members = cast(list[dict[str, Any]], content["models"])
    make = Recipe.of({"recipe": content["recipe"]}).load("model")
    models = []
    for i, options in enumerate(members):
        prefix = f"members.{i}." if len(members) > 1 else ""
        own = {
            name.removeprefix(prefix): tensor
            for name, tensor in weights.items()
            if name.startswith(prefix)
        }
        try:
            model: nn.Module = make(**options)
        except Exception as error:  # options of other versions can fail anywhere
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"{path}: key models: {reason}; {_ADVICE}") from None
        check_weights(path, model, own)
        model.load_state_dict(own)
        models.append(model.eval())
    return models
