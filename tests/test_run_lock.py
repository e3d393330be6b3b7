"""One training, or making of data, per folder; a lock that ends with its process anyhow."""

import os
import signal
import socket
import subprocess
import sys
import threading

import make_data
import pytest
from making.settings import _alone
from tiny_run import arguments, error_of, start, write_data

from molflt.data.shards import Shard
from molflt.training.lock import RunLock

fcntl = pytest.importorskip("fcntl", reason="flock is of POSIX")

HOLDER = """
import os, sys, time
from pathlib import Path
from molflt.training.lock import RunLock
with RunLock(Path(sys.argv[1])).held():
    if os.fork() == 0:  # such as a worker that reads data
        print("held", flush=True)  # after the fork has closed its copy
        time.sleep(60)
        os._exit(0)
    time.sleep(60)
"""


def test_one_of_two_threads_has_the_folder(tmp_path):
    """Exactly one; the other is told who has it."""
    gate, told, held = threading.Barrier(2), [], []

    def train():
        gate.wait()
        try:
            with RunLock(tmp_path / "run").held():
                held.append(threading.get_ident())
                gate.wait()
        except ValueError as error:
            told.append(str(error))
            gate.wait()

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert len(held) == 1 and len(told) == 1
    assert f"process {os.getpid()} on {socket.gethostname()} (since 20" in told[0]
    assert not list(tmp_path.rglob("*.lock"))


def test_a_folder_into_which_nothing_came_is_removed(tmp_path):
    with RunLock(tmp_path / "runs" / "a").held():
        assert (tmp_path / "runs" / "a").exists()
    assert not (tmp_path / "runs").exists()


def test_the_name_of_the_holder_is_waited_for(tmp_path):
    """A holder locks first and writes its name then: who comes between the two still names it."""
    (tmp_path / "run").mkdir()
    with open(tmp_path / "run" / ".lock", "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        writer = threading.Timer(0.2, lambda: print("process 7 on here", file=file, flush=True))
        writer.start()
        with (
            pytest.raises(ValueError, match="run: process 7 on here is training"),
            RunLock(tmp_path / "run").held(),
        ):
            pass
        writer.join()


def test_a_lock_ends_with_its_process_and_not_with_its_workers(tmp_path):
    words = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as one:
        assert one.stdout.readline() == "held\n"
        lock = RunLock(tmp_path / "run")
        with pytest.raises(ValueError, match=f"process {one.pid} on "), lock.held():
            pass
        one.send_signal(signal.SIGKILL)
        one.wait(timeout=10)
        assert (tmp_path / "run" / ".lock").exists()
        with lock.held():  # the fork is still there
            os.killpg(one.pid, signal.SIGKILL)
    assert not (tmp_path / "run" / ".lock").exists()


def test_the_lock_of_another_folder_in_its_place_is_noticed_and_left_alone(tmp_path):
    run, other = tmp_path / "run", RunLock(tmp_path / "run")
    lock = RunLock(run)
    with lock.held():
        lock.check()
        run.rename(tmp_path / "moved")
        with pytest.raises(FileNotFoundError, match=f"{run}: the run folder was removed or repl"):
            lock.check()
        run.mkdir()
        with other.held():
            with pytest.raises(FileNotFoundError):
                lock.check()
            other.check()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    data = write_data(folder / "data", 9, 5)
    start(data, folder / "run", "--trainer.max_steps=3", "--task.warmup_steps=1")
    return data, folder / "run"


def test_a_second_training_is_refused_in_one_line(run, capsys):
    data, folder = run
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with RunLock(folder).held():
        for words in (["--resume", str(folder)], arguments(data, folder)):
            line = error_of(capsys, "train", *words)
            assert f"{folder}: process {os.getpid()} on " in line and "choose another --run" in line
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_refused_trainings_leave_no_folder_and_no_lock(run, tmp_path, capsys):
    data, folder = run
    assert "earlier run" in error_of(capsys, "train", *arguments(data, folder))
    assert not (folder / ".lock").exists()
    new = tmp_path / "a" / "b"
    words = arguments(data, new, "--data.train_split=absent")
    assert "no split 'absent'" in error_of(capsys, "train", *words)
    assert not (tmp_path / "a").exists()
    assert "nothing to resume" in error_of(capsys, "train", "--resume", str(make_half(new, folder)))
    assert sorted(path.name for path in new.iterdir()) == ["config.yaml"]


def make_half(new, folder):
    new.mkdir(parents=True)
    (new / "config.yaml").write_bytes((folder / "config.yaml").read_bytes())
    return new


def test_shards_of_a_data_set_are_made_side_by_side_and_nothing_twice(tmp_path, capsys):
    folder, one, two = tmp_path / "made", Shard(1, 2), Shard(2, 2)
    here = f"{folder}: process {os.getpid()} on "
    with _alone(folder, one), _alone(folder, two):
        with pytest.raises(ValueError, match=f"^{here}.* is making shard 1/2 in this folder; wait"):
            _alone(folder, one).__enter__()
        with pytest.raises(ValueError, match=f"^{folder}: another process is making data in this"):
            _alone(folder, None).__enter__()
    with _alone(folder, None):
        with pytest.raises(ValueError, match=f"^{here}.* is making data in this folder; wait"):
            _alone(folder, one).__enter__()
        assert make_data.main([str(folder), "--train=1", "--val=1"]) == 2
        assert here in capsys.readouterr().err
        assert [path.name for path in folder.iterdir()] == [".lock"]
    assert not folder.exists()
