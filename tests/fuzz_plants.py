"""An entrance that fails in every way the fuzzer has to notice, on demand."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from fuzzing.cases import Case, Format

SIZE = 10_000_000  # bytes that an input says to be
HOG = 300 << 20


def refuse(text: str) -> int:
    print(text, file=sys.stderr)
    return 2


def _memory(size: int) -> int:
    return len(bytearray(b"x") * size) * 0


def _hang() -> int:
    while True:
        time.sleep(0)


def _raise() -> int:
    raise RuntimeError("planted")


def _canary() -> int:
    Path(f"{os.getcwd()}.canary").touch()
    return 0


def _write(path: Path) -> int:
    path.write_text("planted")
    return 0


def _native() -> int:
    os.write(2, b"molflt: error: input.bin: \x1b[31mred\n")
    return 2


# Name of the plant -> what comes of it, and what does it
PLANTS: dict[str, tuple[str, Callable[[], int]]] = {
    "accepted": ("accepted", lambda: 0),
    "refused": ("refused", lambda: refuse("molflt: error: input.bin: damaged")),
    "status": ("traceback", lambda: 1),
    "exception": ("traceback", _raise),
    "exit": ("traceback", lambda: sys.exit(0)),
    "please report": ("traceback", lambda: refuse("Traceback (most recent call last):")),
    "death": ("crash", lambda: os.kill(os.getpid(), signal.SIGSEGV) or 0),
    "end": ("crash", lambda: os._exit(0)),
    "loop": ("hang", _hang),
    "hog": ("memory", lambda: _memory(HOG)),
    "reader of all": ("accepted", lambda: _memory(4 * SIZE)),
    "shell": ("code", lambda: os.system("true")),
    "connection": ("code", lambda: socket.socket().bind(("127.0.0.1", 0)) or 0),
    "canary": ("code", _canary),
    "write outside": ("code", lambda: _write(Path("../outside"))),
    "write on the input": ("code", lambda: _write(Path("input.bin"))),
    "write to out": ("accepted", lambda: _write(Path("out/result"))),
    "number": ("wrong", lambda: 0),
    "unreadable": ("wrong", lambda: 0),
    "nameless": ("message", lambda: refuse("molflt: error: Invalid argument")),
    "long": ("message", lambda: refuse("molflt: error: input.bin" + "x" * 5000)),
    "many lines": ("message", lambda: refuse("molflt: error: input.bin\n" * 9)),
    "escape": ("message", _native),
    "silent": ("message", lambda: 2),
}
CHECKS: dict[str, Callable[[], str | None]] = {
    "number": lambda: "2 for 1",
    "unreadable": lambda: str(1 // 0),
}


def entrance(words: list[str]) -> int:
    return PLANTS[words[0]][1]()


def _planted(draw: Random, folder: Path, seeds: Path) -> Case:
    """Every plant in turn, by the name of its format."""
    name = folder.name.rpartition("-")[0]
    (folder / "input.bin").touch()
    return Case([name], ("input.bin",), SIZE, "planted", CHECKS.get(name))


FORMATS = {name: Format(_planted, 1) for name in PLANTS}
