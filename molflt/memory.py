"""Available memory, and out-of-memory errors."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# error messages from torch (CPU and CUDA), C++ and vesin
_MESSAGES = re.compile(r"out of memory|not enough memory|allocate memory|bad_alloc", re.IGNORECASE)
_SMALL = 2**26  # bytes; for smaller sizes, free memory is not measured, because this is slow
_CGROUP, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True for out-of-memory errors on the CPU or a GPU."""
    if isinstance(error, RuntimeError):
        return bool(_MESSAGES.search(str(error)))
    return isinstance(error, MemoryError)


@contextmanager
def within_memory(describe: Callable[[], str], advice: str) -> Iterator[None]:
    """Raises ValueError with a description and `advice` if the block runs out of memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200] or "no details"
        raise ValueError(f"{describe()} does not fit into memory ({reason}); {advice}") from None


def expect_memory(size: float, contents: str, advice: str) -> None:
    """Raises MemoryError if `size` bytes, which the plural noun `contents` takes, are not free."""
    if size > _SMALL and size > (free := available_memory()):
        needed = f"{contents} take {size / 1e9:.1f} GB"
        raise MemoryError(f"{needed}; {free / 1e9:.1f} GB are free; {advice}")


def available_memory() -> int:
    """Returns the memory, in bytes, available to this process on the host and in its cgroups.

    Only cgroups of version 2 are considered.
    """
    import psutil

    return min([psutil.virtual_memory().available, *_of_groups()])


def _number(path: Path, name: str = "") -> int | None:
    """Returns the number that follows `name` in a file of a cgroup; None if not found."""
    try:
        found = re.search(rf"^{name}\s*(\d+)\b", path.read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return None
    return int(found[1]) if found else None


def _of_groups() -> Iterator[int]:
    """Yields the bytes available in each control group of this process, up to the root."""
    found = re.search(r"^0::/(.*)$", _CGROUP.read_text(), re.M) if _CGROUP.is_file() else None
    group = _GROUPS / (found[1] if found else "")
    for folder in (group, *group.parents):
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None and used is not None:
            yield max(0, limit - used + (_number(folder / "memory.stat", "inactive_file") or 0))
