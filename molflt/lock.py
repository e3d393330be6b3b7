"""Locks that allow one process per folder and are released when the process ends."""

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

# The package filelock is not sufficient: it does not record the name of the holder, and if a
# training process is killed, its data workers keep the lock.
_held: set[TextIO] = set()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [file.close() for file in _held])


class FolderLock:
    """Lock that lets only one process at a time work in a folder.

    The system releases the lock (``flock``) when the process ends, even after ``kill -9`` or a
    power failure. The file ``.lock`` names the holder and is removed before the holder releases the
    lock; a file left by a killed process has no effect.

    Args:
        folder: folder to lock; it is created if it is missing and removed if it stays empty.
        doing: activity of the holder and advice, which follow the name of the holder in messages.
        name: name of the lock file; locks with different names are independent.
    """

    def __init__(self, folder: Path, doing: str, name: str = ".lock") -> None:
        self.path = folder / name
        self.doing = doing
        self._file: TextIO | None = None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Holds a lock on the folder for the block; raises ValueError if it is already locked."""
        folder = self.path.parent
        created = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        file = self._acquire()
        _held.add(file)
        try:
            yield
        finally:
            _held.discard(file)
            if not self.is_gone():  # while this lock is still held
                self.path.unlink(missing_ok=True)
            file.close()
            self._file = None
            with contextlib.suppress(OSError):  # folders that are not empty remain
                for path in created:
                    path.rmdir()

    def _acquire(self) -> TextIO:
        """Opens and locks the file and writes the holder; raises ValueError if it is locked."""
        while True:
            self._file = file = open(self.path, "a+", encoding="utf-8")  # noqa: SIM115 (closed later)
            if not _flock(file):
                time.sleep(0.1)  # holders write their name after locking
                file.seek(0)
                holder = file.read(300).strip() or "another process"
                file.close()
                raise ValueError(f"{self.path.parent}: {holder} {self.doing}")
            if self.is_gone():
                file.close()  # the holder removed the file after it was opened here
                continue
            file.truncate(0)
            since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
            file.write(f"process {os.getpid()} on {socket.gethostname()} (since {since})\n")
            file.flush()
            return file

    def is_gone(self) -> bool:
        """Returns True if the folder is locked and the lock file was removed or replaced."""
        if self._file is None:
            return False
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return True


def _flock(file: TextIO) -> bool:
    """Locks a file; returns False if another process has locked it."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        print(
            f"{file.name}: the file system has no locks; start only one process in this folder",
            file=sys.stderr,
        )
    return True
