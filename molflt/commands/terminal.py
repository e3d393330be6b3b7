"""What reaches the terminal: text from files and servers is shown there, never obeyed."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TextIO, cast

__all__ = ["guarded_output", "printable"]

_LONGEST = 1000  # characters of a line on stderr; what to do stands at its end, which is kept
_TAIL = 300
_SURROGATES = r"\ud800-\udfff"  # of file names that are not UTF-8; stdout cannot encode them
# C0 without tab, line feed and the carriage return of progress bars; DEL and C1; what turns the
# direction of writing.
_CONTROL = r"\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"


def printable(text: str, of: str = _CONTROL + _SURROGATES) -> str:
    r"""Text with control characters as ``\x1b``: none moves the cursor, hides or renames anything.

    Args:
        text: any.
        of: the characters to escape, as in a class of regular expressions.
    """
    return re.sub(f"[{of}]", lambda match: ascii(match[0])[1:-1], text)


@contextlib.contextmanager
def guarded_output() -> Iterator[None]:
    """Makes all that is printed inside of the block printable, and lines on stderr short.

    What goes to a file or a pipe from stdout, such as generated text, stays as it is.
    """
    shown = _CONTROL + _SURROGATES if sys.stdout.isatty() else _SURROGATES
    out = cast(TextIO, _Guarded(sys.stdout, shown))
    err = cast(TextIO, _Guarded(sys.stderr, _CONTROL + _SURROGATES, _LONGEST))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


class _Guarded:
    """A stream that escapes what is written to it, and is otherwise the stream behind it.

    Args:
        stream: behind it.
        escaped: as for `printable`.
        longest: characters of a line that are shown; None for all.
    """

    def __init__(self, stream: TextIO, escaped: str, longest: int | None = None) -> None:
        self._stream = stream
        self._escaped = escaped
        self._longest = longest

    def write(self, text: str) -> int:
        shown = printable(text, self._escaped)
        if self._longest is not None and len(shown) > self._longest:
            shown = "\n".join(map(self._shortened, shown.split("\n")))
        self._stream.write(shown)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def _shortened(self, line: str) -> str:
        if self._longest is None or len(line) <= self._longest:
            return line
        cut = f" [... {len(line):,} characters ...] "
        return line[: self._longest - _TAIL - len(cut)] + cut + line[-_TAIL:]

    if not TYPE_CHECKING:  # a type checker sees the stream behind it, see `guarded_output`

        def __getattr__(self, name):
            return getattr(self._stream, name)
