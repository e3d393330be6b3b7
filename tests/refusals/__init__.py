"""Tables of refused inputs, one module per subpackage; `tests/test_refusals.py` runs them."""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Refusal", "Refused", "command", "refused", "writes"]


class Refused(Exception):
    """Raised if a command exits with status 2; contains its output on stderr."""


class Refusal(NamedTuple):
    """One refused call.

    Args:
        call: function that raises the error; its argument is an empty folder.
        option: name of the option, argument, attribute or file in the message.
        expected: word for the expected value; "" if the message does not contain one.
        got: word for the actual value; "" if a value is missing.
        error: the exception.
    """

    call: Callable[[Path], Any]
    option: str
    expected: str = ""
    got: str = ""
    error: type[Exception] = ValueError

    @property
    def words(self) -> list[str]:
        return [word for word in (self.option, self.expected, self.got) if word]


def refused(call: Callable[[], Any], *words: Any, **error: type[Exception]) -> Refusal:
    """Returns a row for a call that does not need a folder."""
    return Refusal(lambda _: call(), *words, **error)


def writes(name: str, text: str | bytes) -> Callable[[Path], object]:
    content = text.encode() if isinstance(text, str) else text
    return lambda folder: (folder / name).write_bytes(content)


def command(line: str, prepare: Callable[[Path], Any] | None = None) -> Callable[[Path], None]:
    """Returns a function that runs a command; {folder} in the line is the empty folder.

    Args:
        line: the words after ``molflt``.
        prepare: writes what the command reads into the folder.
    """

    def call(folder: Path) -> None:
        from molflt.commands.cli import main

        if prepare is not None:
            prepare(folder)
        before = sorted(folder.rglob("*"))
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
            status = main(line.replace("{folder}", str(folder)).split())
        assert sorted(folder.rglob("*")) == before, "a refused command leaves nothing behind"
        if status == 2:
            raise Refused(printed.getvalue().strip())

    return call
