"""Available memory, and errors about a lack of memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["available_memory", "is_out_of_memory", "within_memory"]

# messages of torch (CPU and CUDA), C++ and vesin
_WORDS = re.compile(r"out of memory|not enough memory|allocate memory|bad_alloc", re.IGNORECASE)
_CGROUP, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_FILES = {  # cgroup versions 2 and 1 by folder: limit, use, and reclaimable part of the use
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True for out-of-memory errors on the CPU or a GPU."""
    if isinstance(error, RuntimeError):
        return bool(_WORDS.search(str(error)))
    return isinstance(error, MemoryError)


@contextmanager
def within_memory(what: Callable[[], str], advice: str) -> Iterator[None]:
    """Raises ValueError with `what` and `advice` if the block runs out of memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        asked = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        reason = f"{asked[1]} at once" if asked else " ".join(str(error).split())[:200]
        raise ValueError(
            f"{what()} does not fit into memory ({reason or 'no details'}); {advice}"
        ) from None


def available_memory() -> int | None:
    """Returns the bytes available to this process in the machine and its control groups.

    The result is None if unknown, for instance on systems other than Linux.
    """
    known = [_of_machine(), *_of_groups()]
    return min((size for size in known if size is not None), default=None)


def _numbers(path: Path) -> dict[str, int]:
    """Returns the numbers in a file of /proc or /sys by name; a single number has name ""."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except (OSError, ValueError):
        return {}
    rows = [["", *words] if len(words) == 1 else words for words in lines]
    return {row[0].rstrip(":"): int(row[1]) for row in rows if row[1:2] and row[1].isdigit()}


def _of_machine() -> int | None:
    kilobytes = _numbers(Path("/proc/meminfo")).get("MemAvailable")
    return None if kilobytes is None else kilobytes * 1024


def _of_groups() -> Iterator[int]:
    """Yields the bytes left by each control group of this process, up to the root."""
    if not _CGROUP.is_file():
        return
    own = {"": "", "memory": ""}
    for line in _CGROUP.read_text().splitlines():  # number:controllers:path
        _, controllers, path = line.split(":", 2)
        own["memory" if "memory" in controllers.split(",") else controllers] = path
    for version, (limit, used, cached) in _FILES.items():
        root = _GROUPS / version
        group = root / own[version].lstrip("/")
        for place in (group, *group.parents):
            most, now = (_numbers(place / name).get("") for name in (limit, used))
            if most is not None and now is not None and place.is_relative_to(root):
                yield max(0, most - now + _numbers(place / "memory.stat").get(cached, 0))
