"""Work in processes of one thread each, which end with the one that started them."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def _in_processes(
    work: Callable[[Task], Result], tasks: Iterable[Task], workers: int
) -> Generator[Result, None, None]:
    """Results as they come, whoever finishes first.

    One worker is a process of its own as well: with more threads the last bits would differ.

    Raises:
        OSError: a process ended early.
    """
    rest = iter(tasks)
    with _one_thread_each():
        pool = ProcessPoolExecutor(
            workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker
        )
        try:
            pending = {pool.submit(work, task) for task in itertools.islice(rest, 2 * workers)}
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    pending |= {pool.submit(work, task) for task in itertools.islice(rest, 1)}
                    yield future.result()
        except BrokenProcessPool as error:
            raise OSError(
                "a worker process ended early: out of memory, killed, or `make` was called by a "
                "script without `if __name__ == '__main__':`; the same command continues"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Workers inherit these variables: their array libraries must not start threads as well."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _start_worker() -> None:
    """Leave Ctrl-C to the parent process, and end when the parent was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
