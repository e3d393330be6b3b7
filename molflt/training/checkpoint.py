"""Weights and checkpoints of a run: sealed by a digest, and read without running code from them."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn

from molflt.files import save_tensors, shown, verify_tensors, write_atomically
from molflt.training.config import Config, read_config
from molflt.training.recipes import Recipe

__all__ = ["Checkpoint", "check_unchanged", "check_weights", "count_parameters", "device_named"]
__all__ += ["load_run", "model_weights", "read_checkpoint", "read_sealed", "save_weights"]
__all__ += ["weights_digest", "weights_of", "write_checkpoint"]

Checkpoint = dict[str, Any]  # Lightning's, and under "molflt" what the run was begun with

_SEAL = b"sha256:"  # stands before the digest in the comment of a checkpoint's zip archive
_DIGEST = len(_SEAL) + 64
_GONE = "restore the file, or start a new run"
_LARGEST = 1e30  # of what an optimizer keeps: float32 overflows soon after
_PARTS: dict[str, type] = {
    "callbacks": dict,
    "global_step": int,
    "loops": dict,
    "lr_schedulers": list,
    "optimizer_states": list,
    "pytorch-lightning_version": str,
    "state_dict": dict,
}


def save_weights(
    path: Path,
    weights: Mapping[str, Tensor],
    options: object,
    files: Mapping[str, str],
    metadata: Mapping[str, object],
) -> None:
    """Writes weights of a model alone, as safetensors with a digest.

    Args:
        path: file to write.
        weights: of the model.
        options: its arguments, which :func:`load_run` compares with the configuration.
        files: sha256 by name of what else the run folder holds, which it compares as well.
        metadata: what else the header says; values become strings.
    """
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    header = {name: str(value) for name, value in metadata.items()}
    save_tensors(path, own, {**header, "model": json.dumps(options), "files": json.dumps(files)})


def load_run(
    run: Path, checkpoint: str = "best", device: str = "cpu", recipe: str | None = None
) -> tuple[nn.Module, Config]:
    """Reads a trained model.

    Args:
        run: folder that ``molflt train`` wrote.
        checkpoint: "best" (by validation), "last", or the path of a safetensors file.
        device: where the model goes: cpu, cuda, cuda:N, or auto.
        recipe: the only one of which the run may be; None for any.

    Returns:
        The model in evaluation mode, and the run's configuration.
    """
    run, config, device = Path(run), read_config(run), device_named(device)
    if recipe not in (None, config["recipe"]):
        raise ValueError(
            f"{run}: a run of recipe {config['recipe']}; expected one of recipe {recipe}; train it "
            f"with molflt train --recipe {recipe}"
        )
    path = weights_of(run, checkpoint)
    weights, options, files = _read_weights(path)
    for name in files:
        check_unchanged(run / name, path, files)
    for name, was in options.items():
        if name in config["model"] and config["model"][name] != was:
            raise ValueError(
                f"{run / 'config.yaml'}: model.{name} is {shown(config['model'][name])}, but "
                f"{path.name} was trained with {shown(was)}; set it back"
            )
    try:
        model: nn.Module = Recipe.of(config).load("model")(**config["model"])
    except (TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{run / 'config.yaml'}: key model: {reason}") from error
    check_weights(path, model, weights)
    model.load_state_dict(weights)
    return model.to(device).eval(), config


def weights_of(run: Path, checkpoint: str) -> Path:
    """File of the weights of a run that are called best or last, or have a path of their own."""
    named = checkpoint in ("best", "last")
    return run / "checkpoints" / f"{checkpoint}.safetensors" if named else Path(checkpoint)


def weights_digest(path: Path) -> str:
    """sha256 of a file of weights, as its header says it, else of its bytes; "" without a file."""
    if not path.is_file():
        return ""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            said = (file.metadata() or {}).get("sha256")
    except safetensors.SafetensorError:  # whoever loads it says so
        said = None
    return said or hashlib.sha256(path.read_bytes()).hexdigest()


def check_unchanged(kept: Path, weights: Path, files: Mapping[str, object]) -> None:
    """Refuses a file of a run that is there, and is not what weights were trained with.

    Args:
        kept: the file.
        weights: file of these, for messages.
        files: sha256 by name, as weights hold them; another name is not compared.
    """
    if kept.name not in files or not kept.is_file():
        return
    digest = files[kept.name]
    if hashlib.sha256(kept.read_bytes()).hexdigest() != digest:
        raise ValueError(
            f"{kept}: changed since {weights.name} was trained with it; expected sha256 "
            f"{shown(str(digest)[:12])}...; put it back"
        )


def count_parameters(run: Path, config: Config) -> int:
    """How many numbers the model of a run learns; none of them is allocated.

    Args:
        run: its folder, for messages.
        config: its configuration.
    """
    try:
        with torch.device("meta"):
            model: nn.Module = Recipe.of(config).load("model")(**config["model"])
    except (TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{run / 'config.yaml'}: key model: {reason}") from error
    return sum(parameter.numel() for parameter in model.parameters())


def device_named(name: str) -> str:
    """The device that "auto" stands for, or the named one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(
            f"device {name!r}: expected auto, cpu, cuda or cuda:N; {str(error).splitlines()[0]}"
        ) from None
    return name


def _read_weights(
    path: Path,
) -> tuple[dict[str, Tensor], dict[str, object], dict[str, object]]:
    """Weights that :func:`save_weights` wrote, and its options and files if they are known."""
    if not path.is_file():
        there = ", ".join(sorted(file.name for file in path.parent.glob("*.safetensors"))) or "none"
        found = f"there: {there}" if path.suffix else "expected best, last, or a path of weights"
        raise FileNotFoundError(f"{path}: no such checkpoint; {found}")
    sealed = verify_tensors(path)
    with safetensors.safe_open(path, framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        header = file.metadata() or {}
    if not sealed and "model" in header:
        raise ValueError(f"{path}: damaged since it was written; its sha256 is missing; {_GONE}")
    return weights, _parsed(path, header, "model"), _parsed(path, header, "files")


def _parsed(path: Path, header: Mapping[str, str], key: str) -> dict[str, object]:
    """What the header of weights holds as JSON; nothing, in those of earlier versions."""
    try:
        found = json.loads(header.get(key, "{}"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(
            f"{path}: key {key!r} of its header must be an object in JSON; got "
            f"{shown(header[key])}; {_GONE}"
        )
    return found


def check_weights(path: Path, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Refuses weights that are not numbers, or those of another model.

    Args:
        path: where they come from.
        model: that they are for; what its `added_later` names may be missing.
        weights: by name.
    """
    expected = model.state_dict()
    for name in getattr(model, "added_later", ()):
        if name not in weights:
            del expected[name]
    for name in [*expected, *weights]:
        want = tuple(expected[name].shape) if name in expected else "no such key"
        got = tuple(weights[name].shape) if name in weights else "no such key"
        if want != got:
            raise ValueError(
                f"{path}: key {shown(name)}: the model of config.yaml expects {want}; got {got}; "
                "the checkpoint belongs to another configuration"
            )
        if not bool(torch.isfinite(weights[name]).all()):
            raise ValueError(
                f"{path}: key {name!r}: expected finite numbers; got NaN or infinity; the weights "
                "are damaged or those of a diverged run; use another checkpoint"
            )


def write_checkpoint(path: Path, checkpoint: Mapping[str, object]) -> None:
    """Writes a checkpoint and its digest as one file, atomically.

    The digest is the comment of the zip archive that torch writes, and that of all before it, so
    that torch and unzip read the file as ever.
    """
    buffer = io.BytesIO()  # torch.save to a file hides a full disk behind a RuntimeError
    torch.save(checkpoint, buffer)
    content = buffer.getvalue()[:-2] + _DIGEST.to_bytes(2, "little")  # the comment's length
    write_atomically(path, content + _SEAL + hashlib.sha256(content).hexdigest().encode())


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads what :func:`write_checkpoint` wrote, or Lightning alone did in earlier versions."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such checkpoint; nothing to resume; start a new run")
    checkpoint, sealed = read_sealed(path)
    for part, kind in _PARTS.items():
        if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(part), kind):
            there = isinstance(checkpoint, dict) and part in checkpoint
            got = type(checkpoint[part]).__name__ if there else "none"
            raise ValueError(
                f"{path}: not a checkpoint of molflt; expected {part!r}, a {kind.__name__}; "
                f"got {got}; {_GONE}"
            )
    _check_numbers(path, "optimizer_states", checkpoint["optimizer_states"])
    _check_numbers(path, "lr_schedulers", checkpoint["lr_schedulers"])
    if "molflt" in checkpoint and not sealed:
        raise ValueError(f"{path}: damaged since it was written; its sha256 is missing; {_GONE}")
    return checkpoint


def read_sealed(path: Path) -> tuple[Checkpoint, bool]:
    """Content of a file of tensors and plain values, and True if it has a digest."""
    content = path.read_bytes()
    body, seal = content[:-_DIGEST], content[-_DIGEST:]
    sealed = seal.startswith(_SEAL)
    if sealed and (found := hashlib.sha256(body).hexdigest().encode()) != seal[len(_SEAL) :]:
        raise ValueError(
            f"{path}: damaged since it was written; expected sha256 "
            f"{shown(seal[len(_SEAL) :][:12].decode(errors='replace'))}...; "
            f"got {found[:12].decode()!r}...; {_GONE}"
        )
    return _unpack(path, content), sealed


def _check_numbers(path: Path, key: str, value: object) -> None:
    """Raises ValueError for a number that no step can be taken with, somewhere in a value."""
    if isinstance(value, Mapping | list | tuple):
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, part in parts:
            _check_numbers(path, f"{key}.{name}", part)
    elif isinstance(value, Tensor | int | float):
        size: float = 0.0
        if not isinstance(value, Tensor):
            size = value
        elif value.numel():
            size = float(value.abs().max())
        if not abs(size) <= _LARGEST:  # NaN is not
            raise ValueError(
                f"{path}: key {shown(key)}: expected finite numbers of at most {_LARGEST:g}; got "
                f"{shown(size)}; {_GONE}"
            )


def _unpack(path: Path, content: bytes) -> Any:
    """What a checkpoint holds; nothing in it is run."""
    try:
        if zipfile.is_zipfile(io.BytesIO(content)):
            members = zipfile.ZipFile(io.BytesIO(content)).infolist()
            size = sum(member.file_size for member in members)
            if size > len(content) or any(member.compress_type for member in members):
                raise ValueError(f"it unpacks to {size:,} bytes, and torch does not compress")
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        refused = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it asks for {refused[1]}" if refused else "it is not a checkpoint"
        raise ValueError(
            f"{path}: refused; expected tensors and plain values; {what}, which could run code"
        ) from error
    except Exception as error:  # a damaged pickle makes the reader fail in any way
        reason = (str(error) or type(error).__name__).splitlines()[0][:100]
        raise ValueError(f"{path}: not a complete checkpoint; {reason}; {_GONE}") from error


def model_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Weights of the model in a checkpoint: the averaged ones, if the run averages."""
    found = checkpoint["state_dict"].items()
    return {
        name.removeprefix("model."): tensor
        for name, tensor in found
        if name.startswith("model.") and isinstance(tensor, Tensor)
    }
