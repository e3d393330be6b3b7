"""What a run is called that nobody has named: the day, and what is trained."""

from __future__ import annotations

import itertools
import os
import re
import time
from pathlib import Path

__all__ = ["dated_run"]

_SHARED = "MOLFLT_RUN"  # tells the processes of one training the name that the first has chosen
_LONGEST = 60  # characters


def dated_run(name: str, folder: Path = Path("runs")) -> Path:
    """A folder that is not there yet, such as ``runs/2026-11-22-demo``.

    All processes of one training get the same.

    Args:
        name: of what is trained, such as the names of its configurations.
        folder: above it.
    """
    if "LOCAL_RANK" in os.environ:
        if _SHARED not in os.environ:
            raise ValueError(
                "option --run; expected a folder, the same for all processes; got none"
            )
        return Path(os.environ[_SHARED])
    stem = f"{time.strftime('%Y-%m-%d')}-{re.sub(r'[^A-Za-z0-9._+-]+', '-', name)[:_LONGEST]}"
    names = itertools.chain([stem], (f"{stem}-{count}" for count in itertools.count(2)))
    run = next(folder / each for each in names if not os.path.lexists(folder / each))
    os.environ[_SHARED] = str(run)
    return run
