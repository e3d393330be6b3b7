"""Test problems outside the training distribution: different functions and larger networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from molflt.data.images.files import open_images
from molflt.data.problems import generator_of
from molflt.optimizers.problems import (
    Problem,
    _normal,
    cut,
    fit,
    layer_shapes,
    perceptron,
    start_of,
)

_POINTS, _BATCH = 2048, 64
_IMAGES = 16_384  # maximum number of images, which are evenly spaced in the data set
_HIDDEN, _CHANNELS = 32, (8, 16)

_Made = Callable[[int, Tensor], Problem]
_Net = Callable[[Tensor, list[Tensor]], Tensor]


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
    x = _normal(generator, like, _POINTS, 32)
    logits = perceptron(x, cut(start_of(teacher, generator, like, 2.0), teacher), torch.tanh)
    start, net = start_of(shapes, generator, like), partial(perceptron, act=F.silu)
    return fit(seed, start, shapes, net, x, logits.argmax(dim=1), _BATCH)


UNSEEN: dict[str, _Made] = {
    "rosenbrock": _rosenbrock,
    "factorization": _factorization,
    "deep_network": _deep_network,
}


def image_problems(source: Path) -> dict[str, _Made]:
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
        return fit(seed, start, shapes, net, x, wanted, _BATCH)

    networks = {"image_network": (plain, flat), "image_convolutions": (convolved, deep)}
    return {name: partial(made, net, shapes) for name, (net, shapes) in networks.items()}
