"""Writing files so that they appear complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["atomically", "write_atomically"]


@contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """Lets a file appear complete or not at all; an older one stays until then.

    Args:
        path: file to write; folders above it are made.

    Yields:
        An empty file next to `path`, to be written or replaced; it takes the name of `path` when
        the block ends without an error, with the permissions of any file the user writes.

    Raises:
        OSError: naming the file, for instance on a full disk; the older file is kept.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.touch()
        mode = part.stat().st_mode
        yield part
        os.chmod(part, mode)  # some libraries write a private file in its place
        with open(part, "rb+") as file:
            os.fsync(file.fileno())  # or a crash could leave the new name on old blocks
        os.replace(part, path)
    except OSError as error:
        kept = "the one written before is kept" if path.exists() else "there is none before it"
        raise OSError(
            f"{path}: could not be written ({error.strerror or error}); {kept}; free some space, "
            "then resume"
        ) from error
    finally:
        part.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes bytes as :func:`atomically` does."""
    with atomically(path) as part:
        part.write_bytes(content)
