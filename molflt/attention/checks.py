"""Checks of arguments, and of the state of torch that decides whether values can be read."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from inspect import signature
from typing import TypeVar

import torch

_T = TypeVar("_T")


def at_least_one(**counts: int) -> None:
    """Raises ValueError for the first count below 1."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1; got {count}")


def positive(**numbers: float) -> None:
    """Raises ValueError for the first number that is not positive and finite."""
    for name, value in numbers.items():
        if isinstance(value, str) or value is None:
            raise TypeError(f"{name} must be a number; got {value!r}")
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be positive and finite; got {value}")


def not_negative(**numbers: float) -> None:
    """Raises ValueError for the first number that is negative or NaN."""
    for name, value in numbers.items():
        if not value >= 0:
            raise ValueError(f"{name} must be at least 0; got {value}")


def interval(name: str, ends: Sequence[float], above: float = -math.inf) -> None:
    """Raises ValueError unless `ends` are two finite numbers above a limit, smallest first."""
    if len(ends) != 2 or not above < ends[0] <= ends[1] < math.inf:
        limit = "" if above == -math.inf else f" above {above:g}"
        raise ValueError(f"{name} must be two finite numbers{limit}, smallest first; got {ends}")


def share(**numbers: float) -> None:
    """Raises ValueError for the first rate, such as a dropout rate, that is outside [0, 1)."""
    for name, value in numbers.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name} must be in [0, 1); got {value}")


def _head_width(dim: int, heads: int) -> int:
    """Returns the head width d = dim / heads."""
    if heads < 1 or dim < 1 or dim % heads:
        raise ValueError(f"dim={dim} must be a multiple of heads={heads}, both above 0")
    return dim // heads


def one_of(option: str, choice: object, choices: Iterable[object]) -> None:
    """Raises ValueError for an unknown choice."""
    known = tuple(choices)
    if choice not in known:
        expected = ", ".join(map(str, known))
        raise ValueError(f"{option}={choice!r} is unknown; expected one of {expected}")


def no_effect(why: str, **options: object) -> None:
    """Raises ValueError for the first option that is set although it has no effect.

    `why` states the condition, such as "with mixing='softmax'".
    """
    for name, value in options.items():
        if value is not None:
            shown = f"={value!r}" if isinstance(value, str | int | float) else ""
            raise ValueError(f"{name}{shown} has no effect {why}; remove it")


def known_names(
    owner: Callable[..., object], options: Iterable[str], *takers: Callable[..., object]
) -> None:
    """Raises TypeError for the first option that neither `owner` nor a class in `takers` accepts.

    Args:
        owner: class to build; its arguments are also allowed.
        options: names of arguments that `owner` passes on.
        takers: classes that receive these arguments.
    """
    known = {name for taker in (owner, *takers) for name in signature(taker).parameters}
    name = getattr(owner, "__name__", str(owner))
    for option in options:
        if option not in known:
            close = get_close_matches(option, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"see help({name})"
            raise TypeError(f"{name} does not take the argument {option!r}; {hint}")


def from_options(
    part: Callable[..., _T], options: Mapping[str, object], prefix: str = "", **fixed: object
) -> _T:
    """Builds a part of a model from `fixed` arguments and options whose names have a prefix.

    Raises ValueError, with the names of all options, if an option is unknown or missing.
    """
    own = {name.removeprefix(prefix): value for name, value in options.items()}
    try:
        arguments = signature(part).bind(**fixed, **own)
    except TypeError as error:
        names = ", ".join(prefix + x for x in signature(part).parameters if x not in fixed)
        raise ValueError(f"{part.__qualname__} {error}; expected {names}") from None
    return part(*arguments.args, **arguments.kwargs)


def accepted(part: Callable[..., object], **options: object) -> dict[str, object]:
    """Returns the options that a part takes as arguments."""
    known = signature(part).parameters
    return {name: value for name, value in options.items() if name in known}


def tensors(**arguments: object) -> None:
    """Raises TypeError for the first argument that is neither a tensor nor None."""
    for name, value in arguments.items():
        if value is not None and not isinstance(value, torch.Tensor):
            plain = isinstance(value, list | tuple) or hasattr(value, "__array__")
            hint = f"use torch.as_tensor({name})" if plain else "pass a tensor"
            raise TypeError(f"{name} must be a torch.Tensor; got {type(value).__name__}; {hint}")


def whole(name: str, values: torch.Tensor, low: int, high: int, of: str) -> None:
    """Raises ValueError unless all values are integers from `low` to `high`.

    `of` tells what the values are, such as "the places of tokens". The range is checked only if the
    values can be read on the CPU; see `readable`.
    """
    if values.dtype.is_floating_point or values.dtype.is_complex or values.dtype == torch.bool:
        raise ValueError(f"{name} must be integers, {of}; got {values.dtype}; use .long()")
    if readable(values) and values.numel():
        for found in map(int, values.long().aminmax()):
            if not low <= found <= high:
                raise ValueError(f"{name} must be {low} to {high}, {of}; got {found}")


def graph_name(index: int, graphs: int) -> str:
    """Returns the name of one of several graphs for messages; "the structure" if it is alone."""
    return f"graph {index}" if graphs > 1 else "the structure"


def in_transform() -> bool:
    """Returns True inside `torch.func` transforms, which do not support recomputation."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_traced() -> bool:
    """Returns True if code is compiled or transformed, where values cannot be read."""
    return torch.compiler.is_compiling() or in_transform()


def in_checkpoint() -> bool:
    """Returns True if hooks for saved tensors are active, as in non-reentrant checkpoints."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def readable(values: torch.Tensor) -> bool:
    """Returns True if values are on the CPU and code is neither compiled nor transformed."""
    return not is_traced() and values.device.type == "cpu"
