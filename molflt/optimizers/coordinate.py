"""Learned optimizer that applies one small model with a memory to each coordinate."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from molflt.attention.checks import at_least_one, no_effect, one_of, positive
from molflt.attention.stack import Redrawn
from molflt.optimizers.memories import (
    AttentionMemory,
    Memory,
    MemoryState,
    RecurrentMemory,
    StateSpaceMemory,
)

_MOMENTA = (0.5, 0.9, 0.99)
_SQUARES = (0.9, 0.999)  # the last value is Adam's
_FEATURES = 2 + 1 + len(_MOMENTA) + 1 + 1
_P = 10.0  # see Andrychowicz et al., appendix A
_EPS = 1e-8  # Adam's
_LARGEST = 1e15  # bound on gradients; their squares must fit into float32
_RATE = 3.0  # the learned factors of the learning rate are exp(-3) to exp(3)


class OptimizerState(NamedTuple):
    """State of each coordinate between steps."""

    step: int
    """number of steps so far"""
    moments: Tensor
    """running means of gradients and of squared gradients, (coordinates, 5)"""
    memory: MemoryState


class Observed(NamedTuple):
    """Features of a gradient."""

    features: Tensor
    """(coordinates, features)"""
    direction: Tensor
    """Adam's step in units of its learning rate, (coordinates,)"""
    moments: Tensor
    """as in `OptimizerState`"""


class CoordinateOptimizer(Redrawn):
    """Maps gradients (coordinates,) to updates (coordinates,), independently for each coordinate.

    The features of a gradient are its logarithm and sign (arXiv:1606.04474, appendix A), the
    gradient and its averages over several time scales in units of its root mean square
    (arXiv:1703.03633; arXiv:2009.11243), the change in this unit, and the logarithm of the step
    number. A memory of these features (Mnemosyne, Jain et al. 2023; FLT, arXiv:2302.01925, section
    5.4) computes d and s in

        update = -lr exp(s) (Adam's direction + d), |s| < 3.

    Before training, d and s are small random numbers, and the updates are close to those of Adam.

    Args:
        memory: kind of memory: "attention", "lstm" (arXiv:1606.04474) or "state_space"
            (arXiv:2206.11893).
        dim: width of the memory.
        layers: number of layers of the memory.
        lr: initial learning rate.
        states: number of complex states per channel of "state_space", 8 by default.
        attention: further arguments of `molflt.optimizers.memories.AttentionMemory`, if `memory` is
            "attention".
    """

    def __init__(
        self,
        memory: Literal["attention", "lstm", "state_space"] = "attention",
        dim: int = 16,
        layers: int = 1,
        lr: float = 0.01,
        states: int | None = None,
        **attention: Any,
    ) -> None:
        super().__init__()
        one_of("memory", memory, ("attention", "lstm", "state_space"))
        at_least_one(dim=dim, layers=layers)
        positive(lr=lr)
        self.dim = dim
        self.lr = lr
        self.take_in = nn.Linear(_FEATURES, dim)
        unused: dict[str, Any] = {} if memory == "state_space" else {"states": states}
        if memory != "attention":
            unused |= {name: one for name, one in attention.items() if one not in ("none", {})}
        no_effect(f"with memory={memory!r}", **unused)
        self.memory: Memory
        if memory == "attention":
            self.memory = AttentionMemory(dim, layers, **attention)
        elif memory == "lstm":
            self.memory = RecurrentMemory(dim, layers)
        else:
            self.memory = StateSpaceMemory(dim, layers, 8 if states is None else states)
        self.head = nn.Linear(dim, 2)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def observe(self, gradient: Tensor, moments: Tensor | None, step: int) -> Observed:
        """Returns the detached features of gradients (coordinates,) after `step` earlier steps."""
        with torch.no_grad():
            g = gradient.detach().clamp(-_LARGEST, _LARGEST)
            new = torch.stack((*(g for _ in _MOMENTA), *(g * g for _ in _SQUARES)), dim=-1)
            decay = new.new_tensor((*_MOMENTA, *_SQUARES))
            moments = torch.lerp(new, torch.zeros_like(new) if moments is None else moments, decay)
            means = moments / (1 - decay ** (step + 1))
            recent, long = means[:, -2], means[:, -1]
            scaled = torch.cat((g[:, None], means[:, : len(_MOMENTA)]), dim=-1)
            scaled = scaled / (long.sqrt() + _EPS)[:, None]
            change = 0.5 * ((recent + _EPS**2) / (long + _EPS**2)).log()
            large = g.abs() >= math.exp(-_P)
            logarithm = (g.abs().clamp(min=math.exp(-_P)).log() / _P).where(large, -1.0)
            sign = g.sign().where(large, g * math.exp(_P))
            time = torch.full_like(g, math.log1p(step) / 5)
            shown = torch.stack((logarithm, sign, change, time), dim=-1)
        direction = scaled[:, 1 + _MOMENTA.index(0.9)]
        return Observed(torch.cat((shown, scaled), dim=-1), direction, moments)

    def forward(
        self, features: Tensor, direction: Tensor, memory: MemoryState = (), start: int = 0
    ) -> Tensor:
        """Computes the updates (coordinates, steps) of all steps at once.

        Args:
            features, direction: stacked results of `observe`, (coordinates, steps, features) and
                (coordinates, steps).
            memory: state of the memory after earlier steps; empty at the start.
            start: number of earlier steps.
        """
        return self._decide(self.memory(self.take_in(features), memory, start), direction)

    def step(
        self, gradient: Tensor, state: OptimizerState | None = None
    ) -> tuple[Tensor, OptimizerState]:
        """Computes the update (coordinates,) of one step, and the next state.

        `gradient` has shape (coordinates,); `state` is None at the first step.
        """
        done, moments, memory = (0, None, ()) if state is None else state
        seen = self.observe(gradient, moments, done)
        update, memory = self.react(seen, memory, done)
        return update, OptimizerState(done + 1, seen.moments, memory)

    def react(self, seen: Observed, memory: MemoryState, start: int) -> tuple[Tensor, MemoryState]:
        """Computes the update and the next memory state for an observed gradient."""
        hidden, memory = self.memory.step(self.take_in(seen.features), memory, start)
        return self._decide(hidden, seen.direction), memory

    def _decide(self, hidden: Tensor, direction: Tensor) -> Tensor:
        own, rate = self.head(hidden).to(direction.dtype).unbind(dim=-1)
        return -self.lr * (_RATE * torch.tanh(rate / _RATE)).exp() * (direction + own)
