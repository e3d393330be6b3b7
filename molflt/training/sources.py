"""Where a trained model is: the folder of a run, an exported file, the Hugging Face Hub, here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from molflt.files import shown

__all__ = ["EXPECTED", "HUB", "RECOMMENDED", "Source"]
__all__ += ["find", "find_weights", "is_packaged", "is_trained"]

HUB = "hf:"
"""What the name of a repository on the Hugging Face Hub begins with."""
RECOMMENDED = "game-net"
"""The packaged model that is taken where none is named."""

_WEIGHTS = Path(__file__).parents[1] / "weights"  # of the models that come with the package
_MODEL = "model.safetensors"
_FILES = (_MODEL, "config.json", "tokenizer.json")  # the last one of published encoders

EXPECTED = (
    "expected the folder of a training run, an exported model, a .safetensors file, or "
    f"{HUB}OWNER/NAME"
)
"""What messages say that a trained model has to be."""


class Source(NamedTuple):
    """Where the weights lie that a run starts from."""

    weights: Path
    """.safetensors"""
    run: Path | None
    """folder that holds their config.yaml, if there is one"""


def find(source: str | Path | None, hub: Mapping[str, object] | None = None) -> Path:
    """What a name stands for.

    Args:
        source: the folder of a run, an exported model (its folder or file), weights within a run,
            ``hf:OWNER/NAME`` or ``hf:OWNER/NAME@REVISION``, or a model that comes with the package;
            None is the recommended one of these.
        hub: options of `huggingface_hub.snapshot_download`.

    Returns:
        The folder of a run, or a file of weights.
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


def find_weights(name: str) -> Source:
    """What `--init` names, which also takes weights without a configuration; reads nothing.

    Args:
        name: as for `find`, or a file of weights; of a run, the best ones are meant.
    """
    path = find(name)
    if (path / "config.yaml").is_file():
        return Source(path / "checkpoints" / "best.safetensors", path)
    if path.is_dir():
        raise ValueError(f"--init {name}: holds no config.yaml; {EXPECTED}")
    if not path.is_file() or path.suffix != ".safetensors":
        got = "another file" if path.is_file() else "no such file or folder"
        raise ValueError(f"--init {name}: {EXPECTED}; got {got}")
    above = [path.parent, path.parent.parent][path.parent.name == "checkpoints" :]
    run = above[0] if (above[0] / "config.yaml").is_file() else None
    return Source(path, run)


def is_packaged(name: str) -> bool:
    """Whether it is the name of a model that comes with the package, and of no file."""
    return not Path(name).exists() and name in _names()


def is_trained(folder: Path) -> bool:
    """Whether it looks like the folder of a run or of an exported model."""
    return (folder / "config.yaml").is_file() or (folder / _MODEL).is_file()


def _names() -> list[str]:
    return sorted(file.parent.name for file in _WEIGHTS.glob(f"*/{_MODEL}"))


def _packaged(name: str) -> Path:
    """Raises FileNotFoundError if this installation does not have it."""
    path = _WEIGHTS / name / _MODEL
    if not path.is_file():
        raise FileNotFoundError(
            f"no weights come with this installation ({_WEIGHTS / name}); expected a trained "
            "model: name a run, an exported model or hf:OWNER/NAME, as in `molflt predict RUN "
            "STRUCTURES`; `molflt train` makes a run"
        )
    return path


def _fetched(name: str, options: Mapping[str, object]) -> Path:
    """The weights of a repository, in the cache of huggingface_hub."""
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
    except Exception as error:  # of the network, in as many ways as it has
        reason = shown((str(error).strip().splitlines() or [type(error).__name__])[0], 200)
        raise ValueError(
            f"{name}: not fetched from the Hugging Face Hub; expected a network, or a model that "
            f"was fetched before; got {type(error).__name__}: {reason}; check the name, or give a "
            "folder"
        ) from None
    path = Path(folder) / _MODEL
    if not path.is_file():
        raise FileNotFoundError(
            f"{name}: expected {_MODEL} in this repository, as molflt export writes it; got none"
        )
    return path
