"""Models that decode from a state, and what it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import yaml
from torch import Tensor

from kit.rows import choose
from molflt.sequence import EncoderDecoder, LanguageModel, PixelModel

SOFTMAX = "softmax"

Model = TypeVar("Model", LanguageModel, PixelModel, EncoderDecoder)


def decoders(folder: Path, given: Sequence[str], build: Callable[..., Model]) -> dict[str, Model]:
    """Models of the configurations of a folder by name; of all, those that have a state.

    Args:
        folder: of YAML files; those that name data are sizes, not mechanisms.
        given: names of files; all if there are none.
        build: makes a model of the options `model` of a file.
    """
    configs = {
        path.stem: yaml.safe_load(path.read_text()) for path in sorted(folder.glob("*.yaml"))
    }
    known = {name: one.get("model", {}) for name, one in configs.items() if "data" not in one}
    models = {}
    for name in choose(given, known):
        torch.manual_seed(0)
        model = build(**known[name]).eval()
        if model.decodes:
            models[name] = model
        elif given:
            raise ValueError(f"mechanism {name!r} leaves no state to decode from; leave it out")
    return models


def keeps_sums(name: str) -> bool:
    """Returns True if the state of a mechanism has constant size, as all but that of softmax."""
    return not name.startswith(SOFTMAX)


def held(state: object) -> int:
    """Bytes of the storages behind all tensors of a state, each counted once."""
    storages: dict[int, int] = {}

    def visit(part: object) -> None:
        if isinstance(part, Tensor):
            storage = part.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(part, (tuple, list)):
            for child in part:
                visit(child)

    visit(state)
    return sum(storages.values())
