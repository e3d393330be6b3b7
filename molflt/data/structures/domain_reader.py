"""The keys of a domain.json, each checked when it is taken."""

from __future__ import annotations

import math
from collections.abc import Mapping

from molflt.atoms import MAX_ATOMIC_NUMBER
from molflt.files import shown

__all__ = ["DomainReader"]

_MOST = 10**12


class DomainReader:
    """The keys of a domain that a file holds.

    Args:
        content: of the file.
        name: of the file, for messages.
    """

    def __init__(self, content: object, name: str) -> None:
        self.content: Mapping[object, object] = content if isinstance(content, dict) else {}
        self.name = name

    def take(self, key: str) -> object:
        """Its value, None if there is none."""
        return self.content.get(key)

    def wrong(self, key: str, expected: str) -> ValueError:
        """What to raise for a key."""
        got = shown(self.content[key]) if key in self.content else "no such key"
        return ValueError(
            f"{self.name}: key {key}: expected {expected}; got {got}; put back the file that "
            "training wrote"
        )

    def count(self, key: str) -> int:
        """A number of things; ValueError for anything else, as of the others."""
        value = self.take(key)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST:
            return value
        raise self.wrong(key, "a number")

    def range(self, key: str, optional: bool = False) -> tuple[int, int] | None:
        """The fewest and the most of things; with `optional` None where the file has null."""
        value = self.take(key)
        if value is None and optional and key in self.content:
            return None
        if isinstance(value, list) and len(value) == 2:
            low, high = value
            if type(low) is type(high) is int and 0 <= low <= high < _MOST:
                return low, high
        raise self.wrong(key, "two numbers, the first not above the second")

    def energies(self) -> tuple[float, float] | None:
        """The least and the largest energy, eV."""
        value = self.take("energy_eV")
        if value is None:
            return None
        if isinstance(value, list) and len(value) == 2:
            low, high = value
            number = all(type(one) in (int, float) and math.isfinite(one) for one in value)
            if number and low <= high:
                return float(low), float(high)
        raise self.wrong("energy_eV", "two energies, the first not above the second")

    def elements(self, parts: tuple[str, ...]) -> list[frozenset[int]]:
        """Atomic numbers in each part of a structure."""
        from ase.data import atomic_numbers

        value = self.take("elements")
        given = value if isinstance(value, dict) else {}
        found = []
        for part in parts:
            symbols = given.get(part)
            known = isinstance(symbols, list) and all(
                isinstance(one, str) and 0 < atomic_numbers.get(one, 0) <= MAX_ATOMIC_NUMBER
                for one in symbols
            )
            if not known:
                raise self.wrong("elements", "lists of symbols by part of a structure")
            found.append(frozenset(atomic_numbers[one] for one in symbols or ()))
        return found

    def initial(self) -> list[object]:
        """The domains of initial weights, which have no such key themselves."""
        value = self.take("initial") if "initial" in self.content else []
        if isinstance(value, list) and all(
            isinstance(one, dict) and "initial" not in one for one in value
        ):
            return value
        raise self.wrong("initial", "a list of domains")
