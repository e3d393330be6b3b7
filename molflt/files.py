"""Writing files so that they appear complete or not at all."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_atomically"]


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file that appears complete or not at all; an older one stays until then.

    Raises:
        OSError: naming the file, for instance on a full disk; the older file is kept.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # or a crash could leave the new name on old blocks
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        kept = "the one written before is kept" if path.exists() else "there is none before it"
        raise OSError(
            f"{path}: could not be written ({error.strerror}; {len(content) / 1e6:.1f} MB); "
            f"{kept}; free some space, then resume"
        ) from error
