"""Weights and checkpoints of a run, read without executing code from them."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import safetensors
import torch
from torch import Tensor, nn

from molflt.files import read_header, save_tensors, shown, verify_tensors, write_atomically
from molflt.training.config import Config, read_config
from molflt.training.recipes import Recipe
from molflt.training.sources import EXPECTED, find

__all__ = ["Checkpoint", "check_unchanged", "check_weights", "count_parameters", "device_named"]
__all__ += ["expect_finite", "find_weights", "load_run", "model_weights", "read_checkpoint"]
__all__ += ["read_plain", "read_weights", "save_weights", "weights_digest", "weights_of"]
__all__ += ["write_checkpoint"]

Checkpoint = dict[str, Any]
"""Lightning's checkpoint; its key "molflt" holds a `molflt.training.resume.Provenance`."""

_RESTORE = "restore the file, or start a new run"


def save_weights(
    path: Path,
    weights: Mapping[str, Tensor],
    options: object,
    files: Mapping[str, str],
    metadata: Mapping[str, object],
) -> None:
    """Writes the weights of a model to a safetensors file with a digest.

    Args:
        path: file to write.
        weights: weights by name.
        options: arguments of the model; :func:`load_run` compares them with the configuration.
        files: sha256, by name, of other files in the run folder, which are compared as well.
        metadata: further header entries; values are converted to strings.
    """
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    header = {name: str(value) for name, value in metadata.items()}
    save_tensors(path, own, {**header, "model": json.dumps(options), "files": json.dumps(files)})


def load_run(
    run: Path, checkpoint: str = "best", device: str = "cpu", recipe: str | None = None
) -> tuple[nn.Module, Config]:
    """Loads a trained model.

    Args:
        run: folder written by ``molflt train``.
        checkpoint: "best" (by validation), "last", or the path of a safetensors file.
        device: device of the model: cpu, cuda, cuda:N, or auto.
        recipe: the expected recipe; None accepts any.

    Returns:
        The model in evaluation mode, and the configuration of the run.
    """
    run, config, device = Path(run), read_config(run), device_named(device)
    if recipe not in (None, config["recipe"]):
        raise ValueError(
            f"{run}: a run of recipe {config['recipe']}; expected one of recipe {recipe}; train it "
            f"with molflt train --recipe {recipe}"
        )
    path = weights_of(run, checkpoint)
    weights, options, files = read_weights(path)
    for name in files:
        check_unchanged(run / name, path, files)
    for name, was in options.items():
        if name in config["model"] and config["model"][name] != was:
            raise ValueError(
                f"{run / 'config.yaml'}: model.{name} is {shown(config['model'][name])}, but "
                f"{path.name} was trained with {shown(was)}; set it back"
            )
    model = _build(run, config)
    check_weights(path, model, weights)
    model.load_state_dict(weights)
    return model.to(device).eval(), config


def _build(run: Path, config: Config) -> nn.Module:
    try:
        return cast(nn.Module, Recipe.of(config).load("model")(**config["model"]))
    except (TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{run / 'config.yaml'}: key model: {reason}") from error


def weights_of(run: Path, checkpoint: str) -> Path:
    """Returns the weights file of a run for "best", "last" or a path."""
    named = checkpoint in ("best", "last")
    return run / "checkpoints" / f"{checkpoint}.safetensors" if named else Path(checkpoint)


def find_weights(
    source: str | Path | None,
    checkpoint: str | None = None,
    hub: Mapping[str, object] | None = None,
) -> tuple[Path, Path | None]:
    """Resolves the name of a trained model to a weights file and the folder of its run.

    Args:
        source: see `molflt.training.sources.find`.
        checkpoint: best (the default), last, or the path of a safetensors file; only for a run.
        hub: options of `huggingface_hub.snapshot_download`.

    Returns:
        The file, and the folder with config.yaml if there is one.
    """
    path = find(source, hub)
    if (path / "config.yaml").is_file():
        return weights_of(path, checkpoint or "best"), path
    if not path.is_file() or path.suffix != ".safetensors":
        got = "another file" if path.is_file() else "no such file"
        got = "a folder without its files" if path.is_dir() else got
        raise FileNotFoundError(f"{source}: {EXPECTED}; got {got}")
    if checkpoint is not None:
        raise ValueError(
            f"{source or path}: expected a run with checkpoint={checkpoint}; got weights"
        )
    run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    return path, run if (run / "config.yaml").is_file() else None


def weights_digest(path: Path) -> str:
    """Returns the sha256 stored in a weights file, or that of the file; "" if it is missing."""
    if not path.is_file():
        return ""
    digest = None
    with contextlib.suppress(ValueError):  # reported when the weights are loaded
        digest = read_header(path).get("sha256")
    return digest or hashlib.sha256(path.read_bytes()).hexdigest()


def check_unchanged(kept: Path, weights: Path, files: Mapping[str, object]) -> None:
    """Raises ValueError if a file of a run differs from its sha256 in `files`.

    Files without a digest and missing files are accepted.
    """
    digest = files.get(kept.name)
    if digest is None or not kept.is_file():
        return
    if hashlib.sha256(kept.read_bytes()).hexdigest() != digest:
        raise ValueError(
            f"{kept}: changed since {weights.name} was trained with it; expected sha256 "
            f"{shown(str(digest)[:12])}...; restore the file"
        )


def count_parameters(run: Path, config: Config) -> int:
    """Returns the number of parameters of a run's model without allocating them."""
    with torch.device("meta"):
        model = _build(run, config)
    return sum(parameter.numel() for parameter in model.parameters())


def device_named(name: str) -> str:
    """Resolves "auto", and raises ValueError for a device that is not available."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(
            f"device {name!r}: expected auto, cpu, cuda or cuda:N; {str(error).splitlines()[0]}"
        ) from None
    return name


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, object], dict[str, object]]:
    """Reads a weights file.

    Returns:
        The weights by name, and the `options` and `files` given to :func:`save_weights`. The latter
        two are empty for files written by other programs or earlier versions.
    """
    if not path.is_file():
        names = sorted(file.name for file in path.parent.glob("*.safetensors"))
        expected = f"best, last, or a path of weights; found {', '.join(names) or 'none'}"
        raise FileNotFoundError(f"{path}: no such checkpoint; expected {expected}")
    verify_tensors(path)
    with safetensors.safe_open(path, framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        header = file.metadata() or {}
    try:
        options, files = (dict(json.loads(header.get(key, "{}"))) for key in ("model", "files"))
    except (TypeError, ValueError):
        raise ValueError(
            f"{path}: 'model' and 'files' of its header must be objects in JSON; got "
            f"{shown(header.get('model'))} and {shown(header.get('files'))}; {_RESTORE}"
        ) from None
    return weights, options, files


def check_weights(path: Path, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raises ValueError for weights of another model or weights that are not finite.

    Tensors that the model names in `added_later` may be missing.
    """
    expected = model.state_dict()
    for name in {*getattr(model, "added_later", ())} - weights.keys():
        del expected[name]
    for name in [*expected, *weights]:
        want = tuple(expected[name].shape) if name in expected else "no such key"
        got = tuple(weights[name].shape) if name in weights else "no such key"
        if want != got:
            raise ValueError(
                f"{path}: key {shown(name)}: the model of config.yaml expects {want}; got {got}; "
                "the checkpoint belongs to another configuration"
            )
        expect_finite(path, name, weights[name])


def expect_finite(path: Path, name: str, tensor: Tensor) -> None:
    """Raises ValueError for a tensor of a weights file that is not finite."""
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(
            f"{path}: key {name!r}: expected finite numbers; got NaN or infinity; the weights are "
            "damaged, or the run diverged; use another checkpoint"
        )


def write_checkpoint(path: Path, checkpoint: Mapping[str, object]) -> None:
    """Writes a checkpoint atomically."""
    buffer = io.BytesIO()  # torch.save to a file hides a full disk behind a RuntimeError
    torch.save(checkpoint, buffer)
    write_atomically(path, buffer.getvalue())


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint written by :func:`write_checkpoint`."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such checkpoint; nothing to resume; start a new run")
    checkpoint: Checkpoint = read_plain(path)
    for part in ("global_step", "loops", "state_dict"):
        if not isinstance(checkpoint, dict) or part not in checkpoint:
            got = shown(list(checkpoint) if isinstance(checkpoint, dict) else checkpoint)
            raise ValueError(f"{path}: expected a checkpoint with {part!r}; got {got}; {_RESTORE}")
    return checkpoint


def read_plain(path: Path) -> Any:
    """Reads a file of tensors and plain values written by torch, without executing its content."""
    content = io.BytesIO(path.read_bytes())
    try:
        if zipfile.is_zipfile(content):
            with zipfile.ZipFile(content) as archive:  # torch does not compare checksums
                if damaged := archive.testzip():
                    raise ValueError(f"checksum of {damaged} differs")
        content.seek(0)
        return torch.load(content, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        refused = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it asks for {refused[1]}" if refused else "it is not a checkpoint"
        raise ValueError(
            f"{path}: refused; expected tensors and plain values; {what}, which could run code"
        ) from error
    except Exception as error:  # a damaged pickle can raise anything
        reason = (str(error) or type(error).__name__).splitlines()[0][:100]
        raise ValueError(f"{path}: not a complete checkpoint; {reason}; {_RESTORE}") from error


def model_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Returns the model weights in a checkpoint, or their averages if the run uses averaging."""
    return {
        name.removeprefix("model."): tensor
        for name, tensor in checkpoint["state_dict"].items()
        if name.startswith("model.") and isinstance(tensor, Tensor)
    }
