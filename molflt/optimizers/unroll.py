"""Unrolled optimization of problems, used to train learned optimizers."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from molflt.optimizers.coordinate import CoordinateOptimizer, MemoryState
from molflt.optimizers.problems import Problem

_FLOOR = 1e-3  # fraction of the first loss below which improvements have little weight


class Unrolled(NamedTuple):
    """Losses of an unrolled optimization."""

    loss: Tensor
    """mean of log((f + floor f_0) / f_0) over problems and steps; float64, differentiable"""
    mean: Tensor  # mean of this logarithm over steps for each problem, (problems,)
    last: Tensor  # the logarithm after the last step, (problems,)


def unroll(
    model: CoordinateOptimizer, problems: Sequence[Problem], steps: int, before: int = 0
) -> Unrolled:
    """Optimizes all problems in parallel and computes a loss for the weights of the model.

    Gradients of the problems are treated as constants, as in arXiv:1606.04474, section 2.1: an
    update affects later losses, but not the gradients that are inputs of the model. Steps are
    therefore taken first, without differentiation, and all updates are recomputed in one causal
    pass. The derivative of the loss with respect to the update of step s is the sum of df(x_t) / dx
    over t > s. The result equals that of backpropagation through the steps, with the memory of one
    pass.

    Args:
        model: model to train.
        problems: problems to optimize; the model treats their concatenated parameters as
            coordinates.
        steps: number of steps that enter the loss.
        before: number of earlier steps, which do not enter the loss.
    """
    sizes = [len(problem.start) for problem in problems]
    theta = torch.cat([problem.start for problem in problems]).detach()
    counts = torch.tensor(sizes, device=theta.device)
    moments: Tensor | None = None
    begun: MemoryState = ()  # memory after the steps that do not enter the loss
    memory = begun
    features, directions, logs, pulls = [], [], [], []
    with torch.no_grad():
        first, gradient = _slopes(problems, theta.split(sizes), 0)
        for step in range(before + steps):
            seen = model.observe(gradient, moments, step)
            update, memory = model.react(seen, memory, step)
            moments = seen.moments
            theta = theta + update
            losses, gradient = _slopes(problems, theta.split(sizes), step + 1)
            if step < before:
                begun = memory
                continue
            floored = losses + _FLOOR * first
            features.append(seen.features)
            directions.append(seen.direction)
            logs.append((floored / first).log())
            pulls.append(gradient / floored.to(gradient).repeat_interleave(counts))
        # derivative of the sum of later losses with respect to the update of each step
        pull = torch.stack(pulls, dim=1).flip(1).cumsum(dim=1).flip(1) / (steps * len(problems))
    log_losses = torch.stack(logs)  # [steps, problems]
    value = log_losses.mean()
    if torch.is_grad_enabled():
        updates = model(torch.stack(features, 1), torch.stack(directions, 1), begun, before)
        surrogate = (updates * pull).sum()
        value = value + (surrogate - surrogate.detach()).to(value)
    return Unrolled(value, log_losses.mean(dim=0), log_losses[-1])


def _slopes(
    problems: Sequence[Problem], parts: Sequence[Tensor], step: int
) -> tuple[Tensor, Tensor]:
    """Returns float64 losses (problems,) and their gradients, concatenated to (coordinates,)."""
    losses, gradients = list[Tensor](), list[Tensor]()
    with torch.enable_grad(), torch.autocast(parts[0].device.type, enabled=False):
        for problem, part in zip(problems, parts, strict=True):
            theta = part.detach().requires_grad_()
            loss = problem.loss(theta, step)
            gradients += torch.autograd.grad(loss, theta)
            losses.append(loss.detach().double())
    return torch.stack(losses), torch.cat(gradients)
