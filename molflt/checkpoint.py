"""Files of a run: written atomically, read without running code from them."""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import yaml
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor

from molflt.files import write_atomically
from molflt.recipes import recipe_of

__all__ = ["AtomicCheckpointIO", "load_run", "load_weights", "read_config", "save_weights"]


def save_weights(path: Path, weights: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    """Weights of the model alone, as safetensors; metadata values become strings."""
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    header = {name: str(value) for name, value in metadata.items()}
    write_atomically(path, safetensors.torch.save(own, metadata=header))


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoints, written atomically and read without unpickling code."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        buffer = io.BytesIO()  # torch.save to a file hides a full disk behind a RuntimeError
        torch.save(checkpoint, buffer)
        write_atomically(Path(path), buffer.getvalue())

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = True
    ) -> dict[str, Any]:
        try:
            return torch.load(path, map_location=map_location or "cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            refused = re.search(r"GLOBAL (\S+)", str(error))
            what = f"it asks for {refused[1]}" if refused else "it is no checkpoint"
            raise ValueError(
                f"{path}: refused; expected tensors and plain values; {what}, which could run code"
            ) from error
        except (RuntimeError, EOFError, KeyError, ValueError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"{path}: not a complete checkpoint; {reason}") from error


def load_run(
    run: Path, checkpoint: str = "best", device: str = "cpu"
) -> tuple[Any, dict[str, Any]]:
    """Reads a trained model.

    Args:
        run: folder that :func:`molflt.train.train` wrote.
        checkpoint: "best" (by validation), "last", or the path of a safetensors file.
        device: where the model goes.

    Returns:
        The model in evaluation mode, and the run's configuration.

    Raises:
        FileNotFoundError: if the configuration or the checkpoint is missing.
        ValueError: naming the key, if the weights are those of a model of another shape.
    """
    run, config = Path(run), read_config(run)
    model = recipe_of(config).load("model")(**config["model"])
    named = checkpoint in ("best", "last")
    weights = run / "checkpoints" / f"{checkpoint}.safetensors" if named else Path(checkpoint)
    load_weights(model, weights)
    return model.to(device).eval(), config


def read_config(run: Path) -> dict[str, Any]:
    """The configuration of a run.

    Raises:
        FileNotFoundError: if there is none.
    """
    path = Path(run) / "config.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected the folder of a training run")
    config: dict[str, Any] = yaml.safe_load(path.read_text())
    return config


def load_weights(model: torch.nn.Module, path: Path) -> None:
    """Loads weights that :func:`save_weights` wrote into a model of the same shape.

    Raises:
        FileNotFoundError: if there is no such file; names those beside it.
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
