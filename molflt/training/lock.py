"""One training per run folder."""

from __future__ import annotations

from pathlib import Path

from molflt.lock import FolderLock

__all__ = ["RunLock"]

_DOING = (
    "is training in this run folder; expected one training at a time; wait for it, or choose "
    "another --run"
)


class RunLock(FolderLock):
    """Makes sure that nobody else trains in a folder.

    Args:
        folder: of the run; made if it is not there, and removed again if nothing came into it.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, _DOING)

    def check(self) -> None:
        """Says if the folder is no longer the one that was locked."""
        if self.is_gone():
            raise FileNotFoundError(
                f"{self.path.parent}: the run folder was removed or replaced while training in it; "
                "nothing more is written; start a new run"
            )
