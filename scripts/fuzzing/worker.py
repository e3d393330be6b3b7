"""A process that runs inputs, one after the other, and watches what each does."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import pkgutil
import resource
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from fuzzing.cases import Case, Format, draws_of
from fuzzing.payloads import canary_of

__all__ = ["Reply", "serve"]

ADDRESS_SPACE = 3 << 30  # bytes beyond what the process has: more is refused at once
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
RUNS_CODE = (
    *("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn"),
    *("socket.connect", "socket.getaddrinfo", "socket.bind", "ctypes.dlopen"),
)
CHANGES = (
    *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.chmod"),
    *("os.truncate", "shutil.rmtree", "shutil.move", "shutil.copyfile"),
)


class Reply(NamedTuple):
    """What an input did.

    Attributes:
        status: of the command; None if an exception came out of it.
        printed: its standard output and error, the latter last.
        errors: its standard error alone.
        seconds: of CPU.
        peak: bytes of memory above those before, at most.
        events: what it did besides reading and writing in its folder.
    """

    status: int | None
    printed: str
    errors: str
    seconds: float
    peak: int
    events: list[str]


def serve(connection: Connection, formats: str, entrance: str, seeds: Path, seed: int) -> None:
    """Takes (name, index, folder); sends the case, a `Reply`, and what the check complains of.

    Args:
        connection: to the pool; None ends the process.
        formats: ``module:name`` of a dictionary of `Format`.
        entrance: ``module:name`` of a function of command-line words that returns a status.
        seeds: folder of seeds.
        seed: of all draws.
    """
    known: dict[str, Format] = pkgutil.resolve_name(formats)
    run: Callable[[list[str]], int] = pkgutil.resolve_name(entrance)
    gc.freeze()  # or each collection would copy what was loaded before the fork
    watch = _Watch()
    _limit_memory()
    for name, index, folder in iter(partial(_next, connection), None):
        os.chdir(folder)
        try:
            case = known[name].make(draws_of(seed, name, index), folder, seeds)
        except Exception:
            connection.send(traceback.format_exc())
            return
        (folder / "out").mkdir(exist_ok=True)
        connection.send(dataclasses.replace(case, check=None))
        with _pictures(index % 10 == 0):
            reply = _run(run, case, folder, watch)
        connection.send(reply)
        connection.send(_complaint(case) if reply.status == 0 else None)


def _next(connection: Connection) -> tuple[str, int, Path] | None:
    """The next input; None when the pool has ended, too."""
    try:
        job: tuple[str, int, Path] | None = connection.recv()
    except EOFError:
        return None
    return job


def _complaint(case: Case) -> str | None:
    if case.check is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return case.check()
    except Exception as error:  # what was accepted is not there, or cannot be decoded
        where = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"check: {type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        )


def _run(run: Callable[[list[str]], int], case: Case, folder: Path, watch: _Watch) -> Reply:
    gc.collect()
    before, names = _memory("VmRSS", reset=True), _names(folder)
    status: int | None = None
    begin = time.process_time()
    with _captured(folder) as (out, err), watch.armed(folder):
        try:
            status = run(case.words)
        except BaseException:  # nothing may come out of it
            traceback.print_exc()
    seconds = time.process_time() - begin
    peak = _memory("VmHWM") - before
    printed, errors = out.read_text(errors="replace"), err.read_text(errors="replace")
    events = list(watch.events)
    if canary_of(folder).exists():
        events.append("the canary has appeared")
    changed = _names(folder) ^ names
    events += [f"changed {name}" for name, *_ in changed if not _may_change(name, case)]
    return Reply(status, printed + errors, errors, seconds, peak, events)


def _names(folder: Path) -> set[tuple[str, int, int]]:
    """Name, size and time of all files beside the standard output and error."""
    found = set()
    for where, _, files in os.walk(folder):
        for name in files:
            path = os.path.join(where, name)
            entry = os.lstat(path)
            found.add((os.path.relpath(path, folder), entry.st_size, entry.st_mtime_ns))
    return found


def _may_change(name: str, case: Case) -> bool:
    first = Path(name).parts[0]
    own = case.words[0] == "train" and case.words[1:2] == ["--resume"] and first == case.words[2]
    return own or first in ("out", "molflt-error.log", "stdout", "stderr", ".cache")


@contextlib.contextmanager
def _captured(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Standard output and error of Python and of C, into files."""
    paths = folder / "stdout", folder / "stderr"
    streams = sys.stdout, sys.stderr
    saved = os.dup(1), os.dup(2)
    files = [path.open("w", errors="backslashreplace") for path in paths]
    for file, number in zip(files, (1, 2), strict=True):
        os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = files
    try:
        yield paths
    finally:
        for file in files:
            file.flush()
        sys.stdout, sys.stderr = streams
        for old, number in zip(saved, (1, 2), strict=True):
            os.dup2(old, number)
            os.close(old)
        for file in files:
            file.close()


@contextlib.contextmanager
def _pictures(drawn: bool) -> Iterator[None]:
    """Pictures are drawn for some inputs alone: each takes longer than all the rest."""
    from matplotlib import pyplot
    from matplotlib.figure import Figure

    real = Figure.savefig
    if not drawn:
        setattr(Figure, "savefig", lambda self, path, **_: Path(path).touch())  # noqa: B010
    try:
        yield
    finally:
        setattr(Figure, "savefig", real)  # noqa: B010
        pyplot.close("all")


class _Watch:
    """Notes processes, connections, and writing outside of a folder, while it is armed."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._folder = ""
        sys.dont_write_bytecode = True
        sys.addaudithook(self._hear)

    @contextlib.contextmanager
    def armed(self, folder: Path) -> Iterator[None]:
        self.events.clear()
        self._folder = os.path.realpath(folder)
        try:
            yield
        finally:
            self._folder = ""

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self._folder:
            return
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES:
            self._expect_inside(event, arguments[0])
        elif event in CHANGES:
            for path in arguments[:2] if event in ("os.rename", "os.link") else arguments[:1]:
                self._expect_inside(event, path)
        elif event in RUNS_CODE and not _is_question(arguments) and not _is_own(event, arguments):
            self.events.append(f"{event} {arguments!r:.200}")

    def _expect_inside(self, event: str, path: object) -> None:
        if isinstance(path, str | bytes | os.PathLike):
            real = os.path.realpath(os.fsdecode(path))
            if not real.startswith((self._folder, "/dev/null")) and "/pymp-" not in real:
                self.events.append(f"{event} {real}")


def _is_question(arguments: tuple[object, ...]) -> bool:
    """Whether it asks for the commit or the platform, which versions.json records."""
    words = arguments[1] if len(arguments) > 1 else None
    return isinstance(words, list | tuple) and words[:1] in (["git"], ["uname"], ("uname",))


def _is_own(event: str, arguments: tuple[object, ...]) -> bool:
    """Whether a package loads its own library or C's, or processes of one program talk locally."""
    words = str(arguments)
    if event.startswith("socket."):
        return "family=1," in words and "/pymp-" in words
    return event == "ctypes.dlopen" and ("site-packages" in words or words == "(None,)")


def _memory(field: str, reset: bool = False) -> int:
    """VmRSS or VmHWM, the peak since the last reset, in bytes."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; the fuzzer needs Linux")


def _limit_memory() -> None:
    """Refuses address space beyond a few GB, so that no input can take the computer's memory."""
    most = _memory("VmSize") + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))


def make_seeds(connection: Connection, folder: Path) -> None:
    """Makes the seeds in a process of their own; sends None, or what went wrong."""
    from fuzzing import seeds

    os.chdir(folder)
    try:
        with _captured(folder) as (_, err), _pictures(False):
            seeds.make(folder)
        connection.send(None)
    except Exception:
        connection.send(traceback.format_exc() + err.read_text())
    shutil.rmtree(folder / "lightning_logs", ignore_errors=True)
