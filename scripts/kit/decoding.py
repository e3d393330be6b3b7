"""Models that decode from a state, and the memory of the state."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import yaml
from torch import Tensor

from kit.rows import choose
from molflt.plots.figure import SERIES
from molflt.sequence import EncoderDecoder, LanguageModel, PixelModel

SOFTMAX = "softmax"
CONFIGS = Path(__file__).resolve().parents[2] / "configs"

Model = TypeVar("Model", LanguageModel, PixelModel, EncoderDecoder)


def decoders(folder: str, given: Sequence[str], build: Callable[..., Model]) -> dict[str, Model]:
    """Models of the configurations in a folder by name; by default all that decode from a state.

    Files that name data are sizes, not mechanisms. `build` makes a model from options.
    """
    paths = sorted((CONFIGS / folder).glob("*.yaml"))
    configs = {path.stem: yaml.safe_load(path.read_text()) for path in paths}
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


def held(state: object) -> int:
    """Bytes of the storages of all tensors in a state, each storage counted once."""
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


def styles_of(mechanisms: Sequence[str]) -> dict[str, tuple[int, str]]:
    """Color and line of each mechanism; the last color is softmax's, which comes last."""
    colors = len(SERIES) - 1
    order = sorted(mechanisms, key=SOFTMAX.__eq__)
    styles = {name: (i % colors, "-" if i < colors else "--") for i, name in enumerate(order)}
    return {**styles, SOFTMAX: (colors, "-")} if SOFTMAX in styles else styles
