"""Problems for learned optimizers: small random ones for training, and different ones for tests."""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from molflt.data.images.files import open_images
from molflt.data.optimizers import generator_of

_ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (torch.tanh, torch.relu, F.gelu)
_POINTS = 256  # size of a data set
_TEST_POINTS, _TEST_BATCH = 2048, 64
_IMAGES = 16_384  # maximum number of images, which are evenly spaced in the data set
_HIDDEN, _CHANNELS = 32, (8, 16)

_Net = Callable[[Tensor, list[Tensor]], Tensor]


class Problem(NamedTuple):
    """Function to minimize."""

    start: Tensor  # initial parameters, (n,)
    loss: Callable[[Tensor, int], Tensor]
    """non-negative loss of parameters (n,) at a step; the step determines the minibatch"""


def draw_problem(seed: int, like: Tensor) -> Problem:
    """Draws a problem with a random family, size and scale, determined by the seed.

    Coordinates are rescaled by exp(N(0, 0.5^2)), and losses by a log-uniform factor from 10^-2 to
    10^2; the model learns to handle any scale (arXiv:1703.03633). Tensors have the dtype and device
    of `like`.
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
    net: _Net,
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


def _rosenbrock(seed: int, like: Tensor) -> Problem:
    start = 0.5 * _normal(generator_of(seed), like, 100)

    def loss(x: Tensor, step: int) -> Tensor:
        return (100 * (x[1:] - x[:-1].square()).square() + (1 - x[:-1]).square()).mean()

    return Problem(start, loss)


def _factorization(seed: int, like: Tensor) -> Problem:
    generator = generator_of(seed)
    shapes = ((40, 5), (5, 60))
    left, right = (_normal(generator, like, *shape) for shape in shapes)
    wanted = left @ right
    start = 0.1 * _normal(generator, like, sum(map(math.prod, shapes)))

    def loss(theta: Tensor, step: int) -> Tensor:
        u, v = cut(theta, shapes)
        return (u @ v - wanted).square().mean()

    return Problem(start, loss)


def _deep_network(seed: int, like: Tensor) -> Problem:
    generator = generator_of(seed)
    shapes, teacher = layer_shapes((32, 32, 32, 32, 10)), layer_shapes((32, 32, 10))
    x = _normal(generator, like, _TEST_POINTS, 32)
    logits = perceptron(x, cut(start_of(teacher, generator, like, 2.0), teacher), torch.tanh)
    start, net = start_of(shapes, generator, like), partial(perceptron, act=F.silu)
    return fit(seed, start, shapes, net, x, logits.argmax(dim=1), _TEST_BATCH)


UNSEEN: dict[str, Callable[[int, Tensor], Problem]] = {
    "rosenbrock": _rosenbrock,
    "factorization": _factorization,
    "deep_network": _deep_network,
}
"""test problems outside the training distribution: different functions and larger networks"""


def image_problems(source: Path) -> dict[str, Callable[[int, Tensor], Problem]]:
    """Returns image classification problems for a one-hidden-layer and a convolutional network.

    Reads up to 16,384 images from `source` with `molflt.data.images.files.open_images`.
    """
    images = open_images(source)
    count = min(len(images), _IMAGES)
    read = [images[i * len(images) // count] for i in range(count)]
    pixels = torch.stack([image for image, _ in read]).float()
    labels = torch.stack([label for _, label in read])
    pixels = (pixels - pixels.mean()) / pixels.std().clamp(min=1.0)
    channels, *sides = pixels.shape[1:]
    first, second = _CHANNELS
    left = math.prod((side + 3) // 4 for side in sides)  # two strides of 2, rounded up
    flat = layer_shapes((pixels[0].numel(), _HIDDEN, len(images.classes)))
    deep = [(first, channels, 3, 3), (first,), (second, first, 3, 3), (second,)]
    deep += layer_shapes((second * left, len(images.classes)))

    def plain(x: Tensor, parts: list[Tensor]) -> Tensor:
        return perceptron(x.flatten(1), parts, torch.relu)

    def convolved(x: Tensor, parts: list[Tensor]) -> Tensor:
        for i in (0, 2):
            x = F.conv2d(x, parts[i], parts[i + 1], stride=2, padding=1).relu()
        return F.linear(x.flatten(1), parts[4], parts[5])

    def made(net: _Net, shapes: Sequence[tuple[int, ...]], seed: int, like: Tensor) -> Problem:
        start = start_of(shapes, generator_of(seed), like, math.sqrt(2))
        x, wanted = pixels.to(like), labels.to(like.device)
        return fit(seed, start, shapes, net, x, wanted, _TEST_BATCH)

    networks = {"image_network": (plain, flat), "image_convolutions": (convolved, deep)}
    return {name: partial(made, net, shapes) for name, (net, shapes) in networks.items()}
