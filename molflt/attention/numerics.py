"""Shared arithmetic: draws, safe derivatives, precision, recomputation and compiled code."""

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

# Draws on the CPU, regardless of torch's default device, because the generator is on the CPU.
rand64 = functools.partial(torch.rand, dtype=torch.float64, device="cpu")
randn64 = functools.partial(torch.randn, dtype=torch.float64, device="cpu")


def haar_rotation(dim: int, generator: torch.Generator | None) -> Tensor:
    """Draws a float64 orthogonal matrix (dim, dim), possibly a reflection, from the Haar measure.

    Without the sign of diag(R), LAPACK's choice of signs would make Q deviate from this measure
    (Mezzadri, arXiv:math-ph/0609050).
    """
    q, r = torch.linalg.qr(randn64(dim, dim, generator=generator))
    return q * r.diagonal().sign()


def to_default(x: Tensor) -> Tensor:
    """Copies x to torch's default device and, if it has real numbers, to the default dtype."""
    dtype = torch.get_default_dtype() if x.is_floating_point() else x.dtype
    return torch.empty(x.shape, dtype=dtype).copy_(x)


def options_of(module: torch.nn.Module) -> str:
    """Formats the constructor arguments that a module stores as attributes, for `extra_repr`."""
    values = {name: getattr(module, name, None) for name in signature(type(module)).parameters}
    shown = (int, float, str, tuple)
    return ", ".join(f"{name}={x!r}" for name, x in values.items() if isinstance(x, shown))


def at_least_float32(x: Tensor) -> Tensor:
    """Casts half precision to float32 to prevent overflow in exp and inaccurate phases."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def unit(x: Tensor) -> Tensor:
    """Returns x / |x| along the last axis; the result is 0 where x is 0, and smooth there."""
    with torch.autocast(x.device.type, enabled=False):  # 1e-24 is 0 in half precision
        square = torch.linalg.vecdot(x, x).unsqueeze(-1)
    return x * (square + 1e-24).rsqrt()


def distances(vector: Tensor) -> Tensor:
    """Returns the lengths of vectors, with a gradient of 0 at 0: (..., l) -> (...).

    This gradient is correct for functions of the length that are flat at 0.
    """
    return root(vector.square().sum(dim=-1))


def root(square: Tensor) -> Tensor:
    """Returns the square root, with a gradient of 0 at 0."""
    positive = square > 0
    # The inner `where` keeps the infinite slope of the root at 0 out of the gradient.
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)


def sinc(x: Tensor) -> Tensor:
    """Returns sin(pi x) / (pi x), with a finite second derivative at 0, unlike torch.sinc."""
    phase = math.pi * x
    nonzero = phase != 0
    divisor = torch.where(nonzero, phase, 1.0)
    return torch.where(nonzero, divisor.sin() / divisor, 1 - phase.square() / 6)


def fade(x: Tensor) -> Tensor:
    """Returns 1 for x <= 0 and 0 for x >= 1, with a twice differentiable transition in between."""
    y = (1 - x).clamp(0.0, 1.0)  # distance from the end, to avoid cancellation there
    return y**3 * (10 - 15 * y + 6 * y**2)


def by_head(x: Tensor, matrices: Tensor) -> Tensor:
    """Multiplies x (batch, heads, n, d) by matrices (heads, d, m), one per head.

    Many short sequences are joined into one product per head to avoid copies of the matrices.
    """
    d, m = matrices.shape[-2:]
    # One compiled program serves all sizes.
    if torch.compiler.is_compiling() or len(x) == 1 or x.shape[2] * (d + m) >= d * m:
        return x @ matrices
    joined = x.transpose(0, 1).flatten(1, 2) @ matrices
    return joined.unflatten(1, (len(x), x.shape[2])).transpose(0, 1).contiguous()


def products_of_all(left: Tensor, right: Tensor) -> Tensor:
    """Returns left @ right^T, ignoring autocast: (..., n, p), (..., m, p) -> (..., n, m)."""
    with torch.autocast(left.device.type, enabled=False):
        return left @ right.mT


def finite(x: Tensor) -> Tensor:
    """Replaces infinities, such as maxima over empty sets, and NaN with 0."""
    return x.nan_to_num(0.0, 0.0, 0.0)


def recomputed(function: Callable[..., _R], *arguments: object, several: bool = True) -> _R:
    """Returns function(*arguments), recomputing intermediate tensors in the backward pass.

    The function must be deterministic and must not read anything that changes before the backward
    pass. With `several=False`, for a computation in one piece, nothing is recomputed.
    """
    if not several or not torch.is_grad_enabled() or in_transform():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


class Shared(Generic[_R]):
    """Tensor computed by the first layer that needs it and shared with the other layers.

    Layers with gradients do not reuse a tensor computed without gradients. Inside a checkpoint,
    each layer computes the tensor again; otherwise, the backward pass would use that of a later
    layer.
    """

    def __init__(self) -> None:
        self._stored: tuple[bool, _R] | None = None  # with gradients, tensor

    def get(self, compute: Callable[[], _R]) -> _R:
        """Returns the stored result of an earlier call, or else calls `compute`."""
        if in_checkpoint():
            return compute()
        grad = torch.is_grad_enabled()
        if self._stored is None or (grad and not self._stored[0]):
            self._stored = grad, compute()
        return self._stored[1]


def gauss_rule(count: int) -> tuple[list[float], list[float]]:
    """Returns the points and weights of Gauss-Legendre quadrature on [0, 1]."""
    points, weights = np.polynomial.legendre.leggauss(count)  # on [-1, 1]
    return ((points + 1) / 2).tolist(), (weights / 2).tolist()


# As `torch.compiler.assume_constant_result` does, but without loading the compiler.
vars(gauss_rule)["_dynamo_marked_constant"] = True


def opaque(fake: Callable[..., object]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates a function of tensors to make it one opaque operation in compiled graphs.

    The operation has no gradient. It may read values and raise errors when the graph runs. `fake`
    takes the same arguments and returns uninitialized tensors with the shapes of the results; sizes
    that depend on values come from `torch.library.get_ctx().new_dynamic_size`.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        name = f"molflt::{function.__name__.strip('_')}"
        operation = torch.library.custom_op(name, function, mutates_args=())
        operation.register_fake(fake)

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if not torch.compiler.is_compiling():
                return function(*args, **kwargs)
            return operation(*args, **kwargs)

        return call

    return decorate


def decided(condition: bool, *, otherwise: bool) -> bool:
    """Returns `condition`, or `otherwise` if it depends on sizes unknown at compile time."""
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    return guard_or_true(condition) if otherwise else guard_or_false(condition)


def ceil_div(count: int, size: int) -> int:
    """Returns count / size, rounded up."""
    return -(-count // size)


def next_power_of_two(count: int) -> int:
    """Returns the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def pieces(count: int, size: int) -> list[slice]:
    """Returns slices of length `size` that cover range(count); one slice in compiled code."""
    if torch.compiler.is_compiling():
        return [slice(None)]
    return [slice(start, start + size) for start in range(0, count, size)]


def counts_of(index: Tensor, size: int) -> Tensor:
    """Counts the occurrences of 0 to size - 1: (n,) -> (size,).

    Unlike that of `torch.bincount`, the shape of the result does not depend on values.
    """
    return index.new_zeros(size).index_add(0, index, torch.ones_like(index))


def uncompiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Applies `torch.compiler.disable` only if the compiler is loaded, to avoid loading it."""
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
