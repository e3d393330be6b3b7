"""Whether something fits into memory: known before from its size, or after from the error."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["available_memory", "is_out_of_memory", "within_memory"]

# Of torch's allocators, of C++ and of vesin; CUDA's own is a RuntimeError, too.
_WORDS = re.compile(r"out of memory|not enough memory|allocate memory|bad_alloc", re.IGNORECASE)
_CGROUPS = (  # version 2, version 1: limit and use, bytes
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "inactive_file"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had, on the CPU or a GPU."""
    if isinstance(error, RuntimeError):
        return bool(_WORDS.search(str(error)))
    return isinstance(error, MemoryError)


@contextmanager
def within_memory(what: Callable[[], str], advice: str) -> Iterator[None]:
    """Says what the memory did not suffice for, if it does not.

    Args:
        what: names what is computed in the block; called only then.
        advice: what to lower.

    Raises:
        ValueError: the memory of the CPU or a GPU did not suffice.
    """
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
    """Bytes that this process can still take without swapping; None where that is not known."""
    known = [_of_machine(), *(_of_cgroup(*names) for names in _CGROUPS), _of_process()]
    return min((size for size in known if size is not None), default=None)


def _fields(path: str) -> dict[str, int]:
    """Numbers of a file in /proc or /sys by name; nothing where there is no such file."""
    try:
        lines = [line.split() for line in Path(path).read_text().splitlines()]
    except (OSError, ValueError):
        return {}
    words = [["", *line] if len(line) == 1 else line for line in lines]
    return {line[0].rstrip(":"): int(line[1]) for line in words if line[1:2] and line[1].isdigit()}


def _of_machine() -> int | None:
    kilobytes = _fields("/proc/meminfo").get("MemAvailable")
    return None if kilobytes is None else kilobytes * 1024


def _of_cgroup(limit: str, used: str, cached: str) -> int | None:
    most, now = _fields(limit).get(""), _fields(used).get("")
    if most is None or now is None:
        return None
    files = _fields(str(Path(used).with_name("memory.stat"))).get(cached, 0)
    return max(0, most - now + files)


def _of_process() -> int | None:
    """What `ulimit -v` leaves."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    kilobytes = _fields("/proc/self/status").get("VmSize")
    if limit == resource.RLIM_INFINITY or kilobytes is None:
        return None
    return max(0, limit - kilobytes * 1024)
