"""Shared arithmetic: safe derivatives, precision, recomputation in backward."""

import functools
import math
import sys
from collections.abc import Callable
from inspect import signature
from typing import Generic, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from molflt.attention.checks import in_checkpoint, in_transform

_P = ParamSpec("_P")
_R = TypeVar("_R")


def options_of(module: torch.nn.Module) -> str:
    """Arguments of the constructor that a module keeps; serves as `extra_repr`."""
    held = {name: getattr(module, name, None) for name in signature(type(module)).parameters}
    plain = {
        name: value for name, value in held.items() if isinstance(value, int | float | str | tuple)
    }
    return ", ".join(f"{name}={value!r}" for name, value in plain.items())


def at_least_float32(x: Tensor) -> Tensor:
    """Casts half precision to float32: it overflows exponentials and loses the phase of a few Å."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def unit(x: Tensor) -> Tensor:
    """x / |x| along the last axis; 0 where x is 0, and smooth there."""
    with torch.autocast(x.device.type, enabled=False):  # 1e-24 is 0 in half precision
        square = torch.linalg.vecdot(x, x).unsqueeze(-1)
    return x * (square + 1e-24).rsqrt()


def distances(vector: Tensor) -> Tensor:
    """|v|, (..., l) -> (...), with the gradient 0 at 0, for functions that are flat there."""
    return root(vector.square().sum(dim=-1))


def root(square: Tensor) -> Tensor:
    """Square root with the gradient 0 at 0."""
    above = square > 0
    # The inner `where` keeps the infinite slope of the root at 0 out of the gradient.
    return torch.where(above, torch.where(above, square, 1.0).sqrt(), 0.0)


def sinc(x: Tensor) -> Tensor:
    """sin(pi x) / (pi x) with two derivatives at 0, where the second one of torch.sinc is NaN."""
    phase = math.pi * x
    away = phase != 0
    divisor = torch.where(away, phase, 1.0)
    return torch.where(away, divisor.sin() / divisor, 1 - phase.square() / 6)


def fade(x: Tensor) -> Tensor:
    """1 for x <= 0, 0 for x >= 1, between them a polynomial; twice differentiable."""
    rest = (1 - x).clamp(0.0, 1.0)  # relative to the end, where nothing may cancel
    return rest**3 * (10 - 15 * rest + 6 * rest**2)


def by_head(x: Tensor, matrices: Tensor) -> Tensor:
    """x @ matrices, one matrix per head: (batch, heads, n, d), (heads, d, m) -> (..., n, m).

    Many short sequences, as in decoding, take one product per head, without a copy of the matrices.
    """
    d, m = matrices.shape[-2:]
    # One compiled program serves all sizes.
    if torch.compiler.is_compiling() or len(x) == 1 or x.shape[2] * (d + m) >= d * m:
        return x @ matrices
    joined = x.transpose(0, 1).flatten(1, 2) @ matrices
    return joined.unflatten(1, (len(x), x.shape[2])).transpose(0, 1).contiguous()


def products_of_all(left: Tensor, right: Tensor) -> Tensor:
    """left @ right^T in the precision of both, also under autocast: (..., n, p), (..., m, p)."""
    with torch.autocast(left.device.type, enabled=False):
        return left @ right.mT


def finite(x: Tensor) -> Tensor:
    """Returns x with 0 in place of infinite values, such as maxima over empty sets."""
    return torch.where(x.isfinite(), x, 0.0)


def recomputed(function: Callable[..., _R], *arguments: object, several: bool = True) -> _R:
    """Returns function(*arguments), recomputed in backward instead of keeping intermediate tensors.

    The function is deterministic and reads nothing that changes before backward. With `several`
    False, a single piece, nothing would be saved.
    """
    if not several or not torch.is_grad_enabled() or in_transform():
        return function(*arguments)
    out: _R = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return out


class Once(Generic[_R]):
    """A tensor that several layers share; the first of them computes it.

    A tensor without gradients does not serve layers with gradients. Inside a checkpoint each layer
    computes its own, because backward would find the one of a later layer.
    """

    def __init__(self) -> None:
        self._kept: tuple[bool, _R] | None = None

    def get(self, compute: Callable[[], _R]) -> _R:
        """Returns the result of the first call of `compute`."""
        if in_checkpoint():
            return compute()
        grad = torch.is_grad_enabled()
        if self._kept is None or (grad and not self._kept[0]):
            self._kept = grad, compute()
        return self._kept[1]


def constant(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`torch.compiler.assume_constant_result` for plain numbers, without loading the compiler."""
    vars(function)["_dynamo_marked_constant"] = True
    return function


@constant
def gauss_rule(count: int) -> tuple[list[float], list[float]]:
    """Points of Gauss's rule in [0, 1], and weights whose sum is 2."""
    points, steps = np.polynomial.legendre.leggauss(count)
    return ((points + 1) / 2).tolist(), steps.tolist()


def searched(
    fake: Callable[..., object],
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates a function of tensors that compilers treat as opaque.

    It becomes one operation of a compiled graph, without a gradient, which may read numbers and
    raise errors when the graph runs. `fake` returns empty results for the same arguments, of sizes
    by `torch.library.get_ctx().new_dynamic_size` where they depend on numbers.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        name = f"molflt::{function.__name__.strip('_')}"
        operation = torch.library.custom_op(name, function, mutates_args=())
        operation.register_fake(fake)

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if not torch.compiler.is_compiling():
                return function(*args, **kwargs)
            found: _R = operation(*args, **kwargs)
            return found

        return call

    return decorate


def undecided(condition: bool, otherwise: bool) -> bool:
    """Returns the condition; `otherwise` if compilers do not know its sizes."""
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    return guard_or_true(condition) if otherwise else guard_or_false(condition)


def pieces(count: int, size: int) -> list[slice]:
    """Yields slices of a range, `size` long each; one slice in compiled code."""
    if torch.compiler.is_compiling():
        return [slice(None)]
    return [slice(start, start + size) for start in range(0, count, size)]


def counts_of(index: Tensor, size: int) -> Tensor:
    """Count the indices 0 to size - 1: `torch.bincount` with a known size, (size,)."""
    return index.new_zeros(size).index_add(0, index, torch.ones_like(index))


def uncompiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Applies `torch.compiler.disable`, which loads the compiler, only if it is already loaded."""
    disabled: Callable[_P, _R] | None = None

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return call
