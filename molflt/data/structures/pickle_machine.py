"""A pickle's instructions, followed without running anything.

A pickle is a program for a stack machine. Only instructions that make plain values and fill dicts
and lists are followed; what a name, a call or a new object means is told by who reads.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, NamedTuple

__all__ = ["Damaged", "Machine", "Name", "Refused"]


class Refused(ValueError):
    """A pickle asks for something that is not on the list."""


class Damaged(ValueError):
    """A pickle does what no record does."""


class Name(NamedTuple):
    """A class or function that a pickle names; only a name."""

    text: str


class Machine:
    """Follows the instructions of a pickle.

    Args:
        calls: what is done when a pickle calls a name, without dots at its end.
        classes: what is made when it makes an object, likewise.
        build: gives an object of `classes` or `calls` the state that it had.
        elsewhere: what is made of a reference to something outside of the pickle.
        budget: one item is taken for each instruction; when none is left, reading ends.
    """

    def __init__(
        self,
        calls: Mapping[str, Callable[..., object]],
        classes: Mapping[str, Callable[[], object]],
        build: Callable[[object, object], None],
        elsewhere: Callable[[object], object],
        budget: Iterator[int],
    ) -> None:
        self._calls, self._classes, self._budget = calls, classes, budget
        self._build, self._elsewhere = build, elsewhere
        self._stack: list[object] = []
        self._marks: list[int] = []
        self._memo: dict[int, object] = {}

    def load(self, file: IO[bytes]) -> object:
        """The object that a pickle leaves behind; the file then stands where the pickle ends.

        Raises:
            Refused: for a name or an instruction that is not on the list.
            ValueError, TypeError, LookupError: for a pickle that is damaged.
        """
        last = ""
        for _, (opcode, argument, _) in zip(self._budget, pickletools.genops(file), strict=False):
            last = opcode.name
            if last in _CONSTANTS:
                self._stack.append(argument)
            elif last in _NEW:
                self._stack.append(_NEW[last]())
            elif last in _STEPS:
                _STEPS[last](self, argument)
            elif last in _RUN_CODE:
                raise Refused(f"the instruction {last}")
            elif last not in ("PROTO", "FRAME", "STOP"):
                raise Damaged(f"it has the instruction {last}")
        if last != "STOP":
            raise Damaged("it has too many instructions")
        return self._stack.pop()

    def _take(self, count: int) -> list[object]:
        """The topmost objects of the stack, removed from it."""
        if count > len(self._stack):
            raise Damaged("it takes more than there is")
        start = len(self._stack) - count
        found = self._stack[start:]
        del self._stack[start:]
        return found

    def _since_mark(self) -> list[object]:
        return self._take(max(len(self._stack) - self._marks.pop(), 0))

    def _push(self, value: object) -> None:
        self._stack.append(value)

    def _mark(self) -> None:
        self._marks.append(len(self._stack))

    def _remember(self, index: int | None) -> None:
        self._memo[len(self._memo) if index is None else index] = self._stack[-1]

    def _extend(self, items: list[object]) -> None:
        if not isinstance(self._stack[-1], list):
            raise Damaged("it appends to what is no list")
        self._stack[-1].extend(items)

    def _update(self, items: list[object]) -> None:
        if not isinstance(self._stack[-1], dict):
            raise Damaged("it sets items of what is no dict")
        # a tuple of tuples of ... would take all the time there is to be hashed
        if not all(isinstance(key, str) for key in items[::2]):
            raise Damaged("expected text as keys of a dict")
        self._stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def _find(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise Damaged("expected a name as text")
        text = f"{module}.{name}"
        if text not in self._calls and text not in self._classes:
            raise Refused(f"the global {text[:200]}")
        self._push(Name(text))

    def _make(self, named: object, arguments: object) -> None:
        if not isinstance(named, Name) or named.text not in self._classes or arguments != ():
            raise Damaged("it makes an object of no class, or with arguments")
        self._push(self._classes[named.text]())

    def _call(self, named: object, arguments: object) -> None:
        if not isinstance(named, Name) or not isinstance(arguments, tuple):
            raise Damaged("it calls what is no function")
        self._push(self._calls[named.text](*arguments))

    def _set_state(self, state: object) -> None:
        self._build(self._stack[-1], state)

    def _refer(self, reference: object) -> None:
        self._push(self._elsewhere(reference))


# Instructions that leave their argument on the stack, that run code, that leave something new on
# the stack; and those that are followed besides.
_CONSTANTS = {
    *("INT", "LONG", "LONG1", "LONG4", "BININT", "BININT1", "BININT2", "FLOAT", "BINFLOAT"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
}
_RUN_CODE = {"INST", "OBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "PERSID"}
_NEW: dict[str, Callable[[], object]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
}
_Step = Callable[[Machine, Any], None]
_STEPS: dict[str, _Step] = {
    "MARK": lambda m, _: m._mark(),
    "TUPLE": lambda m, _: m._push(tuple(m._since_mark())),
    "TUPLE1": lambda m, _: m._push(tuple(m._take(1))),
    "TUPLE2": lambda m, _: m._push(tuple(m._take(2))),
    "TUPLE3": lambda m, _: m._push(tuple(m._take(3))),
    "APPEND": lambda m, _: m._extend(m._take(1)),
    "APPENDS": lambda m, _: m._extend(m._since_mark()),
    "SETITEM": lambda m, _: m._update(m._take(2)),
    "SETITEMS": lambda m, _: m._update(m._since_mark()),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), Machine._remember),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda m, i: m._push(m._memo[i])),
    "GLOBAL": lambda m, text: m._find(*text.rsplit(" ", 1)),
    "STACK_GLOBAL": lambda m, _: m._find(*m._take(2)),
    "NEWOBJ": lambda m, _: m._make(*m._take(2)),
    "REDUCE": lambda m, _: m._call(*m._take(2)),
    "BUILD": lambda m, _: m._set_state(*m._take(1)),
    "BINPERSID": lambda m, _: m._refer(*m._take(1)),
}
