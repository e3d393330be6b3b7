"""Workers from the outside: the time that an input takes, death, and what came of it."""

from __future__ import annotations

import os
import shutil
import signal
import time
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from fuzzing.cases import Case
from fuzzing.worker import Reply, make_seeds, serve

SECONDS = 5.0  # of CPU for one input
WAITING = 60.0  # of real time
BYTES, TIMES = 200 << 20, 4  # of memory: so much, and so many times the input
LIFE = 200  # inputs of a worker: the package keeps what it has opened
LINES, LENGTH = 4, 1500  # of a refusal
FAILURES = ("code", "traceback", "crash", "hang", "memory", "wrong", "message")
_TICKS = os.sysconf("SC_CLK_TCK")
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
    "MOLFLT_TRACEBACK": "", "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip


class Outcome(NamedTuple):
    """What came of an input: accepted, refused, or one of `FAILURES`; and why."""

    name: str
    number: int
    kind: str
    detail: str
    seconds: float
    peak: int
    case: Case


class DriverError(RuntimeError):
    """The fuzzer itself has failed."""


class Worker:
    """One process that runs inputs, with one that takes its place when it dies.

    Args:
        formats: ``module:name`` of the formats.
        entrance: ``module:name`` of what takes the words of a command line.
        seeds: folder of seeds.
        folder: for the inputs, which are removed unless they fail.
        seed: of all draws.
    """

    def __init__(
        self, formats: str, entrance: str, seeds: Path, folder: Path, seed: int = 0
    ) -> None:
        self._job = (formats, entrance, seeds, seed)
        self.folder = folder
        self._done = 0
        self._start()

    def _start(self) -> None:
        self._connection, theirs = get_context("forkserver").Pipe()
        self._process = get_context("forkserver").Process(target=serve, args=(theirs, *self._job))
        self._process.start()
        theirs.close()

    def stop(self) -> None:
        """Ends the process."""
        self._stop()

    def _stop(self) -> int | None:
        """Ends the process; returns its exit status, negative for a signal."""
        self._process.join(1.0 if self._done == LIFE else 0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()
        return self._process.exitcode

    def run(self, name: str, index: int, keep: bool = False) -> Outcome:
        """Runs one input.

        Args:
            name: of the format.
            index: of the input.
            keep: leave its folder, also where it does not fail.

        Raises:
            DriverError: if the input cannot be made.
        """
        if self._done == LIFE:
            self._connection.send(None)
            self._stop()
            self._done = 0
            self._start()
        self._done += 1
        folder = self.folder / f"{name}-{index}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._connection.send((name, index, folder))
        case = self._receive(120.0, 120.0)
        if not isinstance(case, Case):
            raise DriverError(f"{name}:{index} cannot be made: {case}")
        outcome = self._judged(name, index, case)
        if outcome.kind not in FAILURES and not keep:
            shutil.rmtree(folder, ignore_errors=True)
        return outcome

    def _judged(self, name: str, index: int, case: Case) -> Outcome:
        reply = self._receive(SECONDS, WAITING)
        if isinstance(reply, str):
            self._done = 0
            self._start()
            kind = "hang" if reply.startswith("more than") else "crash"
            return Outcome(name, index, kind, reply, SECONDS, 0, case)
        assert isinstance(reply, Reply)
        complaint = self._receive(60.0, 120.0)
        if isinstance(complaint, str) and complaint.startswith(("more than", "died")):
            # Its death says nothing of the package, which has survived the input
            complaint = None if complaint.startswith("died") else f"the reference took {complaint}"
            self._done = 0
            self._start()
        kind, detail = verdict(case, reply, complaint if isinstance(complaint, str) else None)
        return Outcome(name, index, kind, detail, reply.seconds, reply.peak, case)

    def _receive(self, seconds: float, waiting: float) -> object:
        """What the process sends; in words, why nothing comes, and then it has ended."""
        begin, cpu = time.monotonic(), self._cpu()
        while not self._connection.poll(0.1):
            if self._cpu() - cpu > seconds or time.monotonic() - begin > waiting:
                self._stop()
                return f"more than {seconds:g} s of CPU, or {waiting:g} s in all"
        try:
            return self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join(5.0)
            status = self._stop()
            name = signal.Signals(-status).name if status and status < 0 else f"status {status}"
            return f"died with {name}"

    def _cpu(self) -> float:
        """Seconds of the process until now."""
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return 0.0
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / _TICKS


def verdict(case: Case, reply: Reply, complaint: str | None) -> tuple[str, str]:
    """Accepted, refused, or the gravest failure; and the words that say so."""
    text = reply.errors.strip()
    last = (text.splitlines() or [""])[-1]
    if reply.events:
        return "code", "; ".join(reply.events)[:500]
    if "Traceback (most recent call last)" in text or reply.status not in (0, 2):
        return "traceback", f"status {reply.status}: {last[:500]}"
    size = case.size
    if size is not None and reply.peak > BYTES + TIMES * size:
        return "memory", f"{reply.peak >> 20} MB for {size} bytes; {last[:200]}"
    if reply.status == 0:
        return ("wrong", complaint) if complaint else ("accepted", "")
    fault = message_fault(text, case.names)
    return ("message", f"{fault}: {text[:500]}") if fault else ("refused", last)


def message_fault(text: str, names: tuple[str, ...]) -> str | None:
    """What is wrong with a refusal: it has to be short, of plain signs, and to name the input."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not any(line.startswith("molflt: error: ") for line in lines):
        return "no molflt: error"
    if len(lines) > LINES or len(text) > LENGTH:
        return f"{len(lines)} lines, {len(text)} signs"
    if any(not sign.isprintable() for line in lines for sign in line):
        return "control characters"
    if not any(name in text for name in names):
        return f"none of {', '.join(names[:3])} is named"
    return None


def start_server() -> None:
    """Starts the process that workers are forked from, with all packages loaded."""
    get_context("forkserver").set_forkserver_preload(["fuzzing.preload"])
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    with mock.patch.dict(os.environ, {**_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}):
        forkserver.ensure_running()


def seeds_in(folder: Path) -> None:
    """Makes the seeds.

    Raises:
        DriverError: if a command of the package fails on what is whole.
    """
    folder.mkdir(parents=True)
    ours, theirs = get_context("forkserver").Pipe()
    process = get_context("forkserver").Process(target=make_seeds, args=(theirs, folder))
    process.start()
    theirs.close()
    try:
        problem = _first(ours)
    finally:
        process.join()
    if problem is not None:
        shutil.rmtree(folder, ignore_errors=True)
        raise DriverError(f"the seeds cannot be made: {problem}")


def _first(connection: Connection) -> object:
    try:
        return connection.recv()
    except EOFError:
        return "the process has died"
