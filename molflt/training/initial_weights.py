"""Weights that a new run starts from, and what is known of how they were made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import safetensors
import torch
from torch import Tensor

from molflt.data.structures.domain import DOMAIN, read_domain
from molflt.data.text.tokenizer import TOKENIZER, Tokenizer, find_tokenizer
from molflt.files import shown
from molflt.sequence.published import is_transformers, options_of, renamed
from molflt.training.checkpoint import _read_weights, check_unchanged
from molflt.training.config import read_config
from molflt.training.exported import exported_recipe, is_exported, read_exported
from molflt.training.sources import find_weights

__all__ = ["Origins", "read_origins", "recipe_of"]

_MASKED = "masked_language"  # the recipe whose model published encoders are


class Origins(NamedTuple):
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
    domain: object
    """content of domain.json; None where there is none"""


def recipe_of(weights: Path) -> str | None:
    """The recipe of a file of weights without a run, from its header alone; None if unknown."""
    if is_exported(weights):
        return exported_recipe(weights)
    with safetensors.safe_open(weights, framework="pt") as file:
        return _MASKED if is_transformers(dict.fromkeys(file.keys())) else None


def read_origins(name: str) -> Origins:
    """Reads what `--init` names."""
    source = find_weights(name)
    recipe: str | None = None
    domain: object = None
    files: dict[str, object] | None
    if source.weights.is_file() and is_exported(source.weights):
        recipe, weights, options, files = _of_export(source.weights)
        domain = files.get(DOMAIN)
    else:
        weights, options, known = _read_weights(source.weights)
        files = known
        if source.run is None and is_transformers(weights):
            recipe, (weights, options, files) = _MASKED, _of_transformers(source.weights, weights)
    if source.run is not None:
        config = read_config(source.run)
        recipe, options = config["recipe"], {**config["model"], **options}
        domain = _domain_of(source.run / DOMAIN, source.weights, files or {})
    for key, tensor in weights.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(
                f"{source.weights}: key {shown(key)}: expected finite numbers; got NaN or "
                "infinity; start from other weights"
            )
    with open(source.weights, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Origins(source.weights, digest, recipe, options, files, weights, domain)


def _domain_of(path: Path, weights: Path, files: Mapping[str, object]) -> object:
    """What domain.json of a run says; ValueError if it is damaged, None if it is not there."""
    if path.is_file():
        check_unchanged(path, weights, files)
    return read_domain(path)


def _of_export(
    path: Path,
) -> tuple[str, dict[str, Tensor], dict[str, object], dict[str, object]]:
    """Recipe, weights, options of the model and the data's files of an exported model."""
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
    """Weights of transformers' BERT or FNet, the options of their model, and their tokenizer."""
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
