"""Search for trained models: runs, exported files, packaged models, the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from molflt.files import shown

__all__ = ["EXPECTED", "HUB", "RECOMMENDED", "find", "is_packaged", "is_trained"]

HUB = "hf:"
"""Prefix of the names of repositories on the Hugging Face Hub."""
RECOMMENDED = "game-net"
"""The packaged model used by default."""

_WEIGHTS = Path(__file__).parents[1] / "weights"  # packaged models
_MODEL = "model.safetensors"
_FILES = (_MODEL, "config.json", "tokenizer.json")  # tokenizer.json: published encoders

EXPECTED = (
    "expected the folder of a training run, an exported model, a .safetensors file, or "
    f"{HUB}OWNER/NAME"
)
"""Description of a trained model, for messages."""


def find(source: str | Path | None, hub: Mapping[str, object] | None = None) -> Path:
    """Resolves the name of a trained model.

    Args:
        source: the folder of a run, an exported model (its folder or file), weights within a run,
            ``hf:OWNER/NAME`` or ``hf:OWNER/NAME@REVISION``, or a packaged model; None selects
            the recommended packaged model.
        hub: arguments of `huggingface_hub.snapshot_download`.

    Returns:
        The folder of a run, or a weights file.
    """
    if source is None:
        return _packaged(RECOMMENDED)
    name, path = str(source), Path(source)
    if name.startswith(HUB):
        return _fetched(name, hub or {})
    if is_packaged(name):
        return _packaged(name)
    if path.is_dir() and not (path / "config.yaml").exists() and (path / _MODEL).is_file():
        return path / _MODEL
    return path.parent if path.name == "config.yaml" else path


def is_packaged(name: str) -> bool:
    """Returns True for the name of a packaged model unless a file has the same name."""
    packaged = {file.parent.name for file in _WEIGHTS.glob(f"*/{_MODEL}")}
    return name in packaged and not Path(name).exists()


def is_trained(folder: Path) -> bool:
    """Returns True if a folder looks like a run or an exported model."""
    return (folder / "config.yaml").is_file() or (folder / _MODEL).is_file()


def _packaged(name: str) -> Path:
    path = _WEIGHTS / name / _MODEL
    if not path.is_file():
        raise FileNotFoundError(
            f"this installation does not include weights ({_WEIGHTS / name}); expected a trained "
            "model: give a run, an exported model or hf:OWNER/NAME, as in `molflt predict RUN "
            "STRUCTURES`; `molflt train` creates a run"
        )
    return path


def _fetched(name: str, options: Mapping[str, object]) -> Path:
    """Downloads the weights of a repository into the cache of huggingface_hub."""
    try:
        import huggingface_hub
    except ImportError:
        raise ModuleNotFoundError(
            f"{name}: needs the package huggingface_hub; got none; run: pip install molflt[hub], "
            "or give a folder"
        ) from None
    repository, _, revision = name.removeprefix(HUB).partition("@")
    chosen = {"revision": revision or None, "allow_patterns": [*_FILES], **options}
    fetch: Callable[..., str] = huggingface_hub.snapshot_download
    try:
        folder = fetch(repository, **chosen)
    except Exception as error:  # the network can fail in many ways
        reason = shown((str(error).strip().splitlines() or [type(error).__name__])[0], 200)
        raise ValueError(
            f"{name}: not fetched from the Hugging Face Hub; expected a network connection, or a "
            f"model in the cache; got {type(error).__name__}: {reason}; check the name, or give a "
            "folder"
        ) from None
    path = Path(folder) / _MODEL
    if not path.is_file():
        raise FileNotFoundError(
            f"{name}: expected {_MODEL} in this repository, as molflt export writes it; got none"
        )
    return path
