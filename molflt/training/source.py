"""Where the weights lie that a run starts from, by what people name: a run, or a file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

__all__ = ["Source", "find_source"]

_EXPECTED = "expected the folder of a training run, or a .safetensors file"


class Source(NamedTuple):
    """Files on this machine."""

    weights: Path
    """.safetensors"""
    run: Path | None
    """folder that holds their config.yaml, if there is one"""


def find_source(name: str) -> Source:
    """Finds what `--init` names; reads nothing.

    Args:
        name: folder of a run, whose best weights are meant, or a file of weights.

    Raises:
        ValueError: if it is neither.
    """
    path = Path(name)
    if (path / "config.yaml").is_file():
        return Source(path / "checkpoints" / "best.safetensors", path)
    if path.is_dir():
        raise ValueError(f"--init {name}: holds no config.yaml; {_EXPECTED}")
    if not path.is_file() or path.suffix != ".safetensors":
        got = "another file" if path.is_file() else "no such file or folder"
        raise ValueError(f"--init {name}: {_EXPECTED}; got {got}")
    above = [path.parent, path.parent.parent][path.parent.name == "checkpoints" :]
    run = above[0] if (above[0] / "config.yaml").is_file() else None
    return Source(path, run)
