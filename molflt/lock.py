"""One process per folder: a lock that ends with its process, however that ends."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

__all__ = ["FolderLock"]

_held: set[TextIO] = set()  # of this process, which its forks must not keep
if hasattr(os, "register_at_fork"):
    # Closing a copy unlocks nothing; but a data worker that outlives a killed training would hold
    # on to the lock.
    os.register_at_fork(after_in_child=lambda: [file.close() for file in _held])


class FolderLock:
    """Lets one process at a time work in a folder.

    The system releases the lock (``flock``) when the process ends, also after ``kill -9`` or a
    power failure. The file ``.lock`` names the holder and is removed at the end; a file left behind
    has no effect.

    Args:
        folder: created if it is missing, and removed again if it stays empty.
        doing: text that messages add to the name of the holder: what it does, and what to do.
        name: name of the file; locks of different names are independent.
        shared: may be held together with other shared locks, but not with an exclusive one.
    """

    def __init__(self, folder: Path, doing: str, name: str = ".lock", shared: bool = False) -> None:
        self.path = folder / name
        self.doing = doing
        self.shared = shared
        self._file: TextIO | None = None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Holds the lock inside the block; ValueError names another holder."""
        folder = self.path.parent
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        self._file = self._acquire()
        _held.add(self._file)
        try:
            yield
        finally:
            _held.discard(self._file)
            if not self.is_gone() and self._is_last():
                self.path.unlink(missing_ok=True)  # while the lock is still held
            self._file.close()
            with contextlib.suppress(OSError):  # folders that are not empty stay
                for path in made:
                    path.rmdir()

    def _acquire(self) -> TextIO:
        while True:
            file = open(self.path, "a+", encoding="utf-8")  # noqa: SIM115 (held beyond this block)
            try:
                _flock(file, self.shared)
            except BlockingIOError:
                holder = _holder(file)
                file.close()
                raise ValueError(f"{self.path.parent}: {holder} {self.doing}") from None
            except BaseException:
                file.close()
                raise
            self._file = file
            if self.is_gone():
                file.close()  # removed by its holder after it was opened here
                continue
            file.truncate(0)
            if self.shared:  # one name would be wrong for several holders
                return file
            since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
            file.write(f"process {os.getpid()} on {socket.gethostname()} (since {since})\n")
            file.flush()
            return file

    def _is_last(self) -> bool:
        """True if no other process holds the lock."""
        assert self._file is not None
        try:
            _flock(self._file, shared=False)
        except BlockingIOError:
            return False
        return True

    def is_gone(self) -> bool:
        """True if the lock is held and its file was removed or replaced."""
        if self._file is None:
            return False
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return True


def _holder(file: TextIO) -> str:
    """Name of the process that holds the lock, which writes it right after locking."""
    for _ in range(100):
        file.seek(0)
        name = file.read(300)
        if name.endswith("\n"):
            return name.strip()
        time.sleep(0.01)
    return "another process"


def _flock(file: TextIO, shared: bool) -> None:
    """Locks a file; prints a warning on systems without file locks."""
    try:
        import fcntl

        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except (ImportError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EAGAIN):
            raise BlockingIOError(error.errno, error.strerror) from error
        print(
            f"{file.name}: this system has no file locks; do not start a second process here",
            file=sys.stderr,
        )
