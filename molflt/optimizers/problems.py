"""Small random training problems for learned optimizers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from molflt.data.problems import generator_of

_ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (torch.tanh, torch.relu, F.gelu)
_POINTS = 256  # size of a data set


class Problem(NamedTuple):
    """Function to minimize."""

    start: Tensor  # initial parameters, (n,)
    loss: Callable[[Tensor, int], Tensor]
    """non-negative loss of parameters (n,) at a step; the step determines the minibatch"""


def draw_problem(seed: int, like: Tensor) -> Problem:
    """Draws a problem with a random family, size and scale, determined by the seed.

    Coordinates are rescaled by exp(N(0, 0.5^2)), and losses by a log-uniform factor from 10^-2 to
    10^2; the model thus learns to handle any scale (arXiv:1703.03633). Tensors have the dtype and
    device of `like`.
    """
    generator = generator_of(seed)
    family = list(FAMILIES)[_integer(generator, 0, len(FAMILIES) - 1)]
    inner = FAMILIES[family](seed, generator, like)
    scale = torch.exp(0.5 * _normal(generator, like, len(inner.start)))
    height = 10 ** (4 * float(torch.rand((), generator=generator, device="cpu")) - 2)
    return Problem(inner.start / scale, lambda x, step: height * inner.loss(x * scale, step))


def _quadratic(seed: int, generator: torch.Generator, like: Tensor) -> Problem:
    """Returns the problem |A x - y|^2 / (2 n); the columns of A have different scales."""
    n = _integer(generator, 8, 64)
    spread = torch.exp(1.5 * (2 * torch.rand(n, generator=generator, device="cpu").to(like) - 1))
    matrix = _normal(generator, like, n, n) / math.sqrt(n) * spread
    wanted, start = _normal(generator, like, n), _normal(generator, like, n)
    return Problem(start, lambda x, _: 0.5 * (matrix @ x - wanted).square().mean())


def _regression(seed: int, generator: torch.Generator, like: Tensor) -> Problem:
    """Returns a softmax regression problem with labels from a noisy linear model."""
    inputs, classes = _integer(generator, 4, 24), _integer(generator, 2, 6)
    x = _normal(generator, like, _POINTS, inputs) * torch.exp(_normal(generator, like, inputs) / 2)
    logits = x @ _normal(generator, like, inputs, classes)
    labels = (logits + _normal(generator, like, *logits.shape)).argmax(dim=1)
    start = 0.1 * _normal(generator, like, (inputs + 1) * classes)
    shapes = ((inputs, classes), (classes,))
    return fit(seed, start, shapes, lambda x, parts: x @ parts[0] + parts[1], x, labels)


def _network(seed: int, generator: torch.Generator, like: Tensor) -> Problem:
    """Returns the problem of fitting a small network to classes or outputs of another network."""
    depth = _integer(generator, 1, 2)
    widths = [_integer(generator, 4, 16) for _ in range(depth + 1)]
    widths.append(_integer(generator, 2, 6))
    act = _ACTIVATIONS[_integer(generator, 0, len(_ACTIVATIONS) - 1)]
    labeled = bool(_integer(generator, 0, 1))
    shapes, net = layer_shapes(widths), partial(perceptron, act=act)
    x = _normal(generator, like, _POINTS, widths[0])
    wanted = net(x, cut(start_of(shapes, generator, like, 2.0), shapes))
    start = start_of(shapes, generator, like)
    return fit(seed, start, shapes, net, x, wanted.argmax(dim=1) if labeled else wanted)


FAMILIES: dict[str, Callable[[int, torch.Generator, Tensor], Problem]] = {
    "quadratic": _quadratic,
    "regression": _regression,
    "network": _network,
}


def fit(
    seed: int,
    start: Tensor,
    shapes: Sequence[Sequence[int]],
    net: Callable[[Tensor, list[Tensor]], Tensor],
    x: Tensor,
    wanted: Tensor,
    batch: int = 32,
) -> Problem:
    """Returns the problem of fitting a network to targets in minibatches.

    `net` maps inputs (points, ...) and parameters of the given `shapes` to outputs. The targets
    `wanted` are outputs or integer classes. The seed and the step determine the `batch` points of a
    minibatch.
    """
    score = F.mse_loss if wanted.is_floating_point() else F.cross_entropy

    def loss(theta: Tensor, step: int) -> Tensor:
        generator = generator_of(seed, 1, step)
        rows = torch.randint(len(x), (batch,), generator=generator, device="cpu").to(x.device)
        return score(net(x[rows], cut(theta, shapes)), wanted[rows])

    return Problem(start, loss)


def cut(theta: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Splits parameters (n,) into tensors with the given shapes."""
    parts = theta.split([math.prod(shape) for shape in shapes])
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]


def layer_shapes(widths: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the shapes of the weights and biases of a fully connected network."""
    return [shape for a, b in itertools.pairwise(widths) for shape in ((b, a), (b,))]


def start_of(
    shapes: Sequence[Sequence[int]], generator: torch.Generator, like: Tensor, gain: float = 1.0
) -> Tensor:
    """Draws initial parameters (n,): weights N(0, gain^2 / fan-in), biases 0."""
    parts = [
        gain * _normal(generator, like, *shape) / math.sqrt(math.prod(shape[1:]))
        if len(shape) > 1
        else like.new_zeros(*shape)
        for shape in shapes
    ]
    return torch.cat([part.flatten() for part in parts])


def perceptron(x: Tensor, layers: Sequence[Tensor], act: Callable[[Tensor], Tensor]) -> Tensor:
    """Applies fully connected layers; `layers` alternates between weights and biases."""
    for i in range(0, len(layers), 2):
        x = F.linear(x if i == 0 else act(x), layers[i], layers[i + 1])
    return x


def _integer(generator: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, (), generator=generator, device="cpu"))


def _normal(generator: torch.Generator, like: Tensor, *shape: int) -> Tensor:
    """Draws normal numbers on the CPU, which makes problems independent of the device."""
    return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32).to(like)
