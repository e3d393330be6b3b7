"""What arguments are checked for, in one wording."""

from collections.abc import Iterable

import torch


def at_least_one(**counts: int) -> None:
    """Raises ValueError for the first count below 1."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1; got {count}")


def positive(**numbers: float) -> None:
    """Raises ValueError for the first number that is not positive and finite."""
    for name, value in numbers.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be positive and finite; got {value}")


def _head_width(dim: int, heads: int) -> int:
    """Width d of queries and keys per head; raises ValueError unless heads divide the width."""
    if heads < 1 or dim % heads:
        raise ValueError(f"dim={dim} must be a multiple of heads={heads}; change one of them")
    return dim // heads


def one_of(option: str, choice: str, choices: Iterable[str]) -> None:
    """Raises ValueError for a choice that is not among those known."""
    known = tuple(choices)
    if choice not in known:
        raise ValueError(f"{option}={choice!r} is unknown; expected one of {', '.join(known)}")


def no_effect(why: str, **options: object) -> None:
    """Raises ValueError for the first option that is given, not None, where it would do nothing.

    Args:
        why: what makes it idle, such as "with mixing='softmax'".
        options: values by name; None stands for an option that was left out.
    """
    for name, value in options.items():
        if value is not None:
            shown = f"={value!r}" if isinstance(value, str | int | float) else ""
            raise ValueError(f"{name}{shown} has no effect {why}; leave it out")


def on_cpu(generator: torch.Generator | None) -> None:
    """Raises ValueError for a generator elsewhere: equal seeds must give equal draws everywhere."""
    if generator is not None and generator.device.type != "cpu":
        raise ValueError(
            f"generator must be on the CPU; got one on {generator.device}; use torch.Generator() "
            "and seed it alike on every rank"
        )
