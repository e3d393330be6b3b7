"""Exported models: one safetensors file that holds weights and all that is needed to use them.

The header says, as JSON, what the model is and what it was trained on; config.json beside the file
is a copy of that for people and for the Hugging Face Hub. Nothing in it names code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import safetensors
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from molflt.files import expect_readable, save_tensors, shown, verify_tensors, write_atomically
from molflt.training.checkpoint import check_weights
from molflt.training.recipes import Recipe

__all__ = ["Exported", "build", "check_replaceable", "exported_recipe", "is_exported"]
__all__ += ["read_exported", "write_exported"]

_KEY, _FORMAT = "molflt", 1
_GONE = "export it again, or get the file again"
_MOST = 4096  # of a count in options that is no dimension of a weight
_LENGTHS = {  # Å, and cycles/Å: of what has to be searched or summed, which grows with them
    "near_field": (0.1, 100),
    "neighbor_cutoff": (0.1, 100),
    "image_cutoff": (0.1, 100),
    "max_frequency": (1e-3, 10),
    "mesh_order": (4, 8),
}
_LONGEST = 10_000_000  # tokens: a table of them would be a weight

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
    """An exported model, as its file holds it."""

    content: Mapping[str, object]
    """what the header says, checked for its types"""
    weights: dict[str, Tensor]


def write_exported(
    folder: Path, weights: Mapping[str, Tensor], content: Mapping[str, object]
) -> list[Path]:
    """Writes model.safetensors and config.json.

    Args:
        folder: to write into; made if need be.
        weights: by name; of several models "members.0.NAME", ....
        content: recipe, models (the options of each), about, license, datasets, task (options),
            results and files (what each small file of a run holds).

    Returns:
        What was written.
    """
    text = json.dumps({"format": _FORMAT, **content}, indent=1, ensure_ascii=False)
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    files = [folder / "model.safetensors", folder / "config.json"]
    files[1].unlink(missing_ok=True)  # never that of other weights
    save_tensors(files[0], own, {"format": "pt", _KEY: text})
    write_atomically(files[1], text.encode())
    return files


def check_replaceable(folder: Path) -> None:
    """Refuse a folder that holds anything but an earlier export."""
    try:
        if is_exported(folder / "model.safetensors"):
            return
    except (ValueError, FileNotFoundError):
        pass
    for name in ("model.safetensors", "config.json", "README.md"):
        if (folder / name).exists():
            raise ValueError(
                f"{folder / name}: is there already, and of no model that molflt exported; "
                "expected a new folder, or an earlier export; choose another one"
            )


def is_exported(path: Path) -> bool:
    """True if a file of weights is an exported model."""
    return _KEY in _header(path)


def exported_recipe(path: Path) -> str | None:
    """The recipe that an exported model names; nothing else of it is read or checked."""
    found = _parsed(_header(path)[_KEY]).get("recipe")
    return found if isinstance(found, str) else None


def _header(path: Path) -> dict[str, str]:
    expect_readable(path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(
            f"{path}: not a complete safetensors file; {str(error)[:100]}; expected weights of "
            "molflt"
        ) from None


def read_exported(path: Path) -> Exported:
    """Reads what :func:`write_exported` wrote."""
    if not verify_tensors(path):
        raise ValueError(f"{path}: damaged since it was written; its sha256 is missing; {_GONE}")
    text = _header(path)[_KEY]
    content = _parsed(text)
    if content.get("format") != _FORMAT:
        raise ValueError(
            f"{path}: expected an exported model of format {_FORMAT}; got "
            f"{shown(content.get('format'))}; {_GONE}, with this version of molflt"
        )
    for key, kind in _PARTS.items():
        if not isinstance(content.get(key), kind):
            raise ValueError(f"{path}: key {key}: got {shown(content.get(key))}; {_GONE}")
    models = content["models"]
    if not isinstance(models, list) or not models or not all(map(_is_object, models)):
        raise ValueError(f"{path}: key models: expected options; got {shown(models)}; {_GONE}")
    copy = path.with_name("config.json")
    if path.name == "model.safetensors" and copy.is_file() and _read(copy) != content:
        raise ValueError(
            f"{copy}: is not what {path.name} says of itself; expected a copy of its header; "
            "remove it, or get both again"
        )
    with safetensors.safe_open(path, framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    return Exported(content, weights)


def _read(path: Path) -> dict[str, object]:
    try:
        return _parsed(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        return {}


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _parsed(text: str) -> dict[str, object]:
    """The object that JSON holds; empty if it holds none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def build(path: Path, exported: Exported) -> list[nn.Module]:
    """The models of an exported file, in evaluation mode.

    They are first built without memory: what takes more of it than the weights of the file is
    refused.
    """
    content, weights = exported
    parts: Sequence[dict[str, object]] = [
        {str(name): value for name, value in one.items()} for one in _models(content)
    ]
    make = Recipe.of({"recipe": content["recipe"]}).load("model")
    models = []
    for i, options in enumerate(parts):
        prefix = f"members.{i}." if len(parts) > 1 else ""
        own = {
            name.removeprefix(prefix): tensor
            for name, tensor in weights.items()
            if name.startswith(prefix)
        }
        if not own:
            raise ValueError(
                f"{path}: key models: got {len(parts)}, but no weights {prefix}*; {_GONE}"
            )
        _bound(path, options, own)
        try:
            with torch.device("meta"):
                _check_shapes(path, make(**options), own)
            model: nn.Module = make(**options)
        except Exception as error:  # of options from anywhere, in any way
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"{path}: key models: {reason}; {_GONE}") from None
        check_weights(path, model, own)
        model.load_state_dict(own)
        models.append(model.eval())
    return models


def _models(content: Mapping[str, object]) -> list[dict[object, object]]:
    found = content["models"]
    return found if isinstance(found, list) else []


def _bound(path: Path, options: Mapping[str, object], weights: Mapping[str, Tensor]) -> None:
    """Refuses counts that these weights cannot have, before anything is drawn or counted up to.

    Random projections are drawn in full before their shape is known, at most dim x dim numbers.
    """
    longest = max([_MOST, *(size for tensor in weights.values() for size in tensor.shape)])
    total = sum(tensor.numel() for tensor in weights.values())
    rows = sum(len(tensor) for tensor in weights.values() if tensor.ndim)
    limits = {"layers": len(weights), "dim": int(total**0.5), "max_length": _LONGEST}
    # adaptive softmax has the rows of a vocabulary in several weights
    limits |= dict.fromkeys(("vocabulary", "adaptive_cutoffs"), max(longest, rows))
    for name, (low, high) in _LENGTHS.items():
        value = options.get(name)
        if value and not (isinstance(value, int | float) and low <= value <= high):
            raise ValueError(
                f"{path}: key models: {name}: expected a number from {low:g} to {high:g}; got "
                f"{shown(value)}; {_GONE}"
            )
    for name, value in options.items():
        most = limits.get(name, longest)
        for count in _leaves(value):
            if isinstance(count, int) and abs(count) > most:
                raise ValueError(
                    f"{path}: key models: {shown(name)}: expected at most {most:,} with the "
                    f"weights of this file; got {shown(count)}; {_GONE}"
                )


def _leaves(value: object) -> list[object]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value]


def _check_shapes(path: Path, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Refuses a model of other shapes than the weights; it may have no memory."""
    optional = getattr(model, "added_later", ())
    for name, tensor in model.state_dict().items():
        if name in weights and weights[name].shape != tensor.shape:
            got = tuple(weights[name].shape)
            raise ValueError(f"{shown(name)}: expected {tuple(tensor.shape)}; got {got}")
        if name not in weights and name not in optional:
            raise ValueError(f"{shown(name)}: expected {tuple(tensor.shape)}; got no such key")
