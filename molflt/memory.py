"""Available memory, and errors that tell of its lack."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["available_memory", "is_out_of_memory", "within_memory"]

# Of torch's allocators, of C++ and of vesin; CUDA's own is a RuntimeError, too.
_WORDS = re.compile(r"out of memory|not enough memory|allocate memory|bad_alloc", re.IGNORECASE)
_CGROUP, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_FILES = {  # versions 2 and 1 by folder: limit and use in bytes, and the part of it that may go
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def is_out_of_memory(error: BaseException) -> bool:
    """Tells whether an error is a lack of memory, of the CPU or a GPU."""
    if isinstance(error, RuntimeError):
        return bool(_WORDS.search(str(error)))
    return isinstance(error, MemoryError)


@contextmanager
def within_memory(what: Callable[[], str], advice: str) -> Iterator[None]:
    """Turns a lack of memory in the block into a ValueError that names `what` and the advice."""
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
    """Bytes that this process can still take without swapping; None if unknown.

    The least of what the machine, each control group of the process and its own limit leave.
    """
    known = [_of_machine(), *_of_groups(), _of_process()]
    return min((size for size in known if size is not None), default=None)


def _lines(path: Path) -> list[str]:
    """Lines of a file in /proc or /sys; empty without the file."""
    try:
        return path.read_text().splitlines()
    except (OSError, ValueError):
        return []


def _fields(path: Path) -> dict[str, int]:
    """Numbers of a file in /proc or /sys by name, that of a single number by \"\"."""
    lines = [line.split() for line in _lines(path)]
    words = [["", *line] if len(line) == 1 else line for line in lines]
    return {line[0].rstrip(":"): int(line[1]) for line in words if line[1:2] and line[1].isdigit()}


def _of_machine() -> int | None:
    kilobytes = _fields(Path("/proc/meminfo")).get("MemAvailable")
    return None if kilobytes is None else kilobytes * 1024


def _of_groups() -> Iterator[int]:
    """Bytes that each control group of this process leaves, up to the root."""
    own = {"": "", "memory": ""}
    for line in _lines(_CGROUP):  # number:controllers:path
        _, controllers, path = line.split(":", 2)
        own["memory" if "memory" in controllers.split(",") else controllers] = path
    for version, (limit, used, cached) in _FILES.items():
        root = _GROUPS / version
        group = root / own[version].lstrip("/")
        for place in (group, *group.parents):
            most, now = (_fields(place / name).get("") for name in (limit, used))
            if most is not None and now is not None and place.is_relative_to(root):
                yield max(0, most - now + _fields(place / "memory.stat").get(cached, 0))


def _of_process() -> int | None:
    """What `ulimit -v` leaves."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    kilobytes = _fields(Path("/proc/self/status")).get("VmSize")
    if limit == resource.RLIM_INFINITY or kilobytes is None:
        return None
    return max(0, limit - kilobytes * 1024)
