"""What reaches the terminal and the log: no control characters, no pages, no planted link."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_run import error_of

from molflt.commands.cli import COMMANDS, _Command, main
from molflt.memory import available_memory, is_out_of_memory

ESCAPES = "\x1b]0;owned\x07\x1b[2Jgone\x9b31m\u202etxt.\x00\x7f"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Callable], None]:
    """Makes ``molflt act`` call a function."""
    monkeypatch.delenv("MOLFLT_TRACEBACK", raising=False)
    monkeypatch.chdir(tmp_path)

    def becomes(function: Callable[[], None]) -> None:
        monkeypatch.setitem(sys.modules, "acting", type(sys)("acting"))
        sys.modules["acting"].act = function
        monkeypatch.setitem(COMMANDS, ("act",), _Command("acting:act", "act"))

    return becomes


def raising(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError(f"{ESCAPES}: expected"), 2),
        (FileNotFoundError(2, "No such file", ESCAPES), 2),
        (ModuleNotFoundError("x", name=ESCAPES), 2),
        (KeyError(ESCAPES), 1),
        (RuntimeError(ESCAPES), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_control_characters_are_shown_and_not_obeyed(command, capsys, error, status) -> None:
    command(raising(error))
    line = error_of(capsys, "act", status=status)
    assert line.isprintable(), line
    assert "x1b[2Jgone" in line and "x9b31m" in line and "u202etxt." in line


def test_warnings_tracebacks_and_logs_are_escaped_too(command, capsys, monkeypatch) -> None:
    def act() -> None:
        print(f"molflt: warning: {ESCAPES}", file=sys.stderr)
        sys.stderr.writelines([ESCAPES, "\n"])
        raise RuntimeError(ESCAPES)

    command(act)
    monkeypatch.setenv("MOLFLT_TRACEBACK", "1")
    assert main(["act"]) == 1
    err = capsys.readouterr().err
    assert err.count(r"\x1b[2Jgone") == 4 and "\x1b" not in err and "\x9b" not in err
    assert r"\x1b[2Jgone" in (log := Path("molflt-error.log").read_text()) and "\x1b" not in log


@pytest.mark.parametrize("terminal", [True, False])
def test_output_is_escaped_on_a_terminal_and_as_it_is_in_a_file(
    command, capsys, monkeypatch, terminal
) -> None:
    command(lambda: print(f"{ESCAPES}\tä\r\n\udcff"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert main(["act"]) == 0
    out = capsys.readouterr().out
    assert ("\x1b" in out) is not terminal and out.endswith("\tä\r\n\\udcff\n")
    assert (out == f"{ESCAPES}\tä\r\n\\udcff\n") is not terminal


def test_long_messages_keep_their_beginning_and_their_end(command, capsys) -> None:
    command(raising(ValueError(f"f.xyz: bad line {'H 0 0 0 ' * 3000}; get it again")))
    assert main(["act"]) == 2
    line = capsys.readouterr().err
    assert len(line) == 1001
    assert line.startswith("molflt: error: f.xyz: bad line H") and line.endswith("get it again\n")
    assert "24,0" in line and "characters" in line


def test_a_planted_link_is_not_followed(command, capsys, tmp_path, monkeypatch) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    log = tmp_path / "molflt-error.log"
    command(raising(KeyError("bug")))
    for plant in (log.symlink_to, log.hardlink_to):
        log.unlink(missing_ok=True)
        plant(victim)
        assert str(log) in error_of(capsys, "act", status=1)
        assert victim.read_text() == "precious" and "KeyError" in log.read_text()
        assert not log.is_symlink() and log.stat().st_nlink == 1


def test_the_log_goes_to_a_new_temporary_file_where_the_folder_cannot_be_written(
    command, capsys, tmp_path, monkeypatch
) -> None:
    shared = tmp_path / "tmp"
    shared.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    (tmp_path / "molflt-error.log").mkdir()  # also for root, who may write everywhere
    command(raising(KeyError("bug")))
    names = set()
    for _ in range(2):
        line = error_of(capsys, "act", status=1)
        names.add(Path(line.split("traceback in ")[1]))
    assert set(shared.iterdir()) == names and len(names) == 2
    assert all(name.stat().st_mode & 0o777 == 0o600 for name in names)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    assert "MOLFLT_TRACEBACK=1 shows the traceback" in error_of(capsys, "act", status=1)


def test_running_out_of_memory_is_no_bug(command, capsys, tmp_path) -> None:
    def allocate() -> None:
        torch.empty(2**58)

    for act, what in ((allocate, "allocate memory"), (raising(MemoryError()), "MemoryError")):
        command(act)
        line = error_of(capsys, "act")
        assert "out of memory" in line and what in line and "lower the batch size" in line
    assert not (tmp_path / "molflt-error.log").exists()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("could not allocate memory for growing neighbor list"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_of_memory_are_recognized(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_available_memory_is_within_what_the_machine_and_the_process_have(monkeypatch) -> None:
    import resource

    found = available_memory()
    assert found is not None and 2**20 < found < 2**50
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**28, before[1]))
    try:
        limited = available_memory()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert limited is not None and 2**26 < limited <= 2**28
