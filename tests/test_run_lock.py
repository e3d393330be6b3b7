"""One process per folder: locks of run folders and of data being made."""

import os
import signal
import subprocess
import sys

import pytest
from tiny_run import arguments, error_of

from molflt.lock import FolderLock

fcntl = pytest.importorskip("fcntl", reason="flock is POSIX only")

HOLDER = """
import os, sys, time
from pathlib import Path
from molflt.lock import FolderLock
with FolderLock(Path(sys.argv[1]), "is busy").held():
    if os.fork() == 0:  # such as a worker that reads data
        print("held", flush=True)  # after the fork has closed its copy
        time.sleep(60)
        os._exit(0)
    time.sleep(60)
"""


def lock_of(folder):
    return FolderLock(folder, "is busy")


def test_a_lock_ends_with_its_process_and_not_with_its_workers(tmp_path):
    words = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as one:
        assert one.stdout.readline() == "held\n"
        lock = lock_of(tmp_path / "run")
        with pytest.raises(ValueError, match=f"process {one.pid} on "), lock.held():
            pass
        one.send_signal(signal.SIGKILL)
        one.wait(timeout=10)
        assert (tmp_path / "run" / ".lock").exists()
        with lock.held():  # the worker is still running
            os.killpg(one.pid, signal.SIGKILL)
    assert not (tmp_path / "run" / ".lock").exists()


def test_a_replaced_folder_is_noticed(tmp_path):
    run, other = tmp_path / "run", lock_of(tmp_path / "run")
    lock = lock_of(run)
    with lock.held():
        assert not lock.is_gone()
        run.rename(tmp_path / "moved")
        assert lock.is_gone()
        run.mkdir()
        with other.held():
            assert lock.is_gone() and not other.is_gone()


def test_a_second_training_is_refused(shared_data, copied_run, capsys):
    before = {path: path.read_bytes() for path in copied_run.rglob("*") if path.is_file()}
    with lock_of(copied_run).held():
        for words in (["--resume", str(copied_run)], arguments(shared_data, copied_run)):
            line = error_of(capsys, "train", *words)
            assert f"{copied_run}: process {os.getpid()} on " in line
    assert {path: path.read_bytes() for path in copied_run.rglob("*") if path.is_file()} == before
