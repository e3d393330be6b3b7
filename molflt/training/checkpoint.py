"""Files of a run: written atomically, read without running code from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

import safetensors
import safetensors.torch
import torch
import yaml
from torch import Tensor, nn

from molflt.files import write_atomically
from molflt.training.recipes import Recipe

__all__ = ["Config", "load_run", "read_config"]


class Config(TypedDict):
    """config.yaml of a run: arguments of the parts of its recipe."""

    run: str
    seed: int
    recipe: str
    model: dict[str, object]
    data: dict[str, object]
    task: dict[str, object]
    trainer: dict[str, object]


def _save_weights(path: Path, weights: dict[str, Tensor], metadata: Mapping[str, object]) -> None:
    """Weights of the model alone, as safetensors; metadata values become strings."""
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    header = {name: str(value) for name, value in metadata.items()}
    write_atomically(path, safetensors.torch.save(own, metadata=header))


def load_run(run: Path, checkpoint: str = "best", device: str = "cpu") -> tuple[nn.Module, Config]:
    """Reads a trained model.

    Args:
        run: folder that :func:`molflt.commands.train.train` wrote.
        checkpoint: "best" (by validation), "last", or the path of a safetensors file.
        device: where the model goes: cpu, cuda, cuda:N, or auto.

    Returns:
        The model in evaluation mode, and the run's configuration.

    Raises:
        FileNotFoundError: if the configuration or the checkpoint is missing.
        ValueError: naming the key, if the weights are those of a model of another shape; or if
            there is no such device.
    """
    run, config, device = Path(run), read_config(run), _device(device)
    model: nn.Module = Recipe.of(config).load("model")(**config["model"])
    named = checkpoint in ("best", "last")
    weights = run / "checkpoints" / f"{checkpoint}.safetensors" if named else Path(checkpoint)
    _load_weights(model, weights)
    return model.to(device).eval(), config


def read_config(run: Path) -> Config:
    """The configuration of a run.

    Raises:
        FileNotFoundError: if there is none.
    """
    path = Path(run) / "config.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected the folder of a training run")
    config: Config = yaml.safe_load(path.read_text())
    return config


def _device(name: str) -> str:
    """The device that "auto" stands for, or the named one if it is there."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(
            f"device {name!r}: expected auto, cpu, cuda or cuda:N; {str(error).splitlines()[0]}"
        ) from None
    return name


def _load_weights(model: nn.Module, path: Path) -> None:
    """Loads weights that :func:`save_weights` wrote into a model of the same shape.

    Raises:
        FileNotFoundError: if there is no such file; names those next to it.
        ValueError: naming the first key that differs, or if the file is not complete.
    """
    if not path.is_file():
        there = sorted(file.name for file in path.parent.glob("*.safetensors"))
        raise FileNotFoundError(f"{path}: no such checkpoint; there: {', '.join(there) or 'none'}")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: not a complete safetensors file; {error}") from None
    expected = model.state_dict()
    for name in [*expected, *weights]:
        want = tuple(expected[name].shape) if name in expected else "no such key"
        got = tuple(weights[name].shape) if name in weights else "no such key"
        if want != got:
            raise ValueError(
                f"{path}: key {name!r}: the model of config.yaml expects {want}; got {got}; "
                "the checkpoint belongs to another configuration"
            )
    model.load_state_dict(weights)
