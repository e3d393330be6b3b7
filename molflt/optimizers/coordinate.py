"""Learned optimizer that applies one small model to each coordinate, and the model's memories."""

import math
from abc import ABC, abstractmethod
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from molflt.attention import Stack
from molflt.attention.checks import at_least_one, no_effect, one_of, positive
from molflt.attention.encodings import Bias
from molflt.attention.features import FEATURE_MAPS, FeatureMapName
from molflt.attention.layer import DEFAULT_MAP
from molflt.attention.mixing.causal import DecodeState, KeyValues, State
from molflt.attention.positions import PositionName, known_options
from molflt.attention.positions.grid import expect_unit_scale
from molflt.attention.stack import Block, Redrawn, StackState

_MOMENTA = (0.5, 0.9, 0.99)
_SQUARES = (0.9, 0.999)  # the last value is Adam's
_FEATURES = 2 + 1 + len(_MOMENTA) + 1 + 1
_P = 10.0  # see Andrychowicz et al., appendix A
_EPS = 1e-8  # Adam's
_LARGEST = 1e15  # bound on gradients; their squares must fit into float32
_RATE = 3.0  # the learned factors of the learning rate are exp(-3) to exp(3)

MemoryState = tuple[Tensor, ...]  # tensors of shape (coordinates, ...); empty at the start


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
        attention: further arguments of `AttentionMemory`, if `memory` is "attention".
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


class Memory(Redrawn, ABC):
    """Base class for causal maps from a sequence of features to one hidden vector per step.

    Each coordinate has a separate sequence. `forward` processes a whole sequence, and `step`
    processes a single step with a state; both give the same hidden vectors.
    """

    def forward(self, x: Tensor, state: MemoryState = (), start: int = 0) -> Tensor:
        """Maps `x` (coordinates, steps, dim) to one hidden vector per step, of the same shape.

        `state` is the state after `start` earlier steps.
        """
        hidden_states = []
        for number, features in enumerate(x.unbind(dim=1)):
            hidden, state = self.step(features, state, start + number)
            hidden_states.append(hidden)
        return torch.stack(hidden_states, dim=1)

    @abstractmethod
    def step(self, x: Tensor, state: MemoryState, start: int) -> tuple[Tensor, MemoryState]:
        """Computes the hidden vector (coordinates, dim) of one step and the next state."""


class AttentionMemory(Memory):
    """Causal attention over the steps of each coordinate.

    With Performers, this is Mnemosyne (Jain et al. 2023, NeurIPS). With the spectral encoding of
    time, it is the memory of FLT (arXiv:2302.01925), section 5.4. The state of linear attention has
    a constant size. The state of softmax attention contains the keys and values of all steps, or of
    the last `window` steps.

    Args:
        dim: width of the memory.
        layers: number of layers.
        heads: number of attention heads, 2 by default.
        ffn_dim: hidden width of the feed-forward networks of attention, twice `dim` by default.
        mixing: "linear" (the default) or "softmax".
        feature_map: feature map of linear attention; see `molflt.attention.Attention`.
        num_features: number of features of the map; 16 by default for random and learned maps.
        normalize_qk: see `molflt.attention.Attention`.
        position: encoding of time: "none" or a key of `molflt.attention.POSITIONS` that supports
            decoding, such as "spectral" for FLT.
        position_options: further arguments of the encoding; `dim` is 1.
        position_scale: distance between neighboring steps, in the unit of length of the encoding;
            0.01 by default.
        window: number of steps that softmax attends to, including the current step; None for all
            steps.
    """

    def __init__(
        self,
        dim: int,
        layers: int,
        heads: int | None = None,
        ffn_dim: int | None = None,
        mixing: Literal["linear", "softmax"] | None = None,
        feature_map: FeatureMapName | None = None,
        num_features: int | None = None,
        normalize_qk: bool | None = None,
        position: PositionName = "none",
        position_options: dict[str, Any] | None = None,
        position_scale: float | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__()
        features = FEATURE_MAPS[feature_map or DEFAULT_MAP]
        if num_features is None and mixing != "softmax" and (features.random or features.learned):
            num_features = 16
        if position == "none":
            timing = {"position_scale": position_scale, "position_options": position_options}
            no_effect("with position='none'", **timing)
        else:
            position_options = {**known_options(position, dim=1), **(position_options or {})}
        self.position_scale = 0.01 if position_scale is None else position_scale
        positive(position_scale=self.position_scale)
        self.stack = Stack(
            dim,
            2 if heads is None else heads,
            layers,
            causal=True,
            ffn_dim=2 * dim if ffn_dim is None else ffn_dim,
            mixing=mixing or "linear",
            feature_map=feature_map,
            num_features=num_features,
            normalize_qk=normalize_qk,
            position=position,
            position_options=position_options,
        )
        encoding = self.stack.position
        if encoding is not None and not encoding.decodes:
            why = "does not support decoding, which a memory needs; use one such as 'spectral'"
            raise ValueError(f"position={position!r} {why}")
        self.softmax = mixing == "softmax"
        if encoding is not None:
            expect_unit_scale(encoding, self.position_scale)
        if window is not None and (not self.softmax or encoding is not None):
            raise ValueError(
                f"window={window} needs mixing='softmax' and position='none'; remove it"
            )
        at_least_one(window=1 if window is None else window)
        self.window = window

    def forward(self, x: Tensor, state: MemoryState = (), start: int = 0) -> Tensor:
        steps, before = x.shape[1], self._unpacked(state)
        if self.window is None:
            return self.stack.decode(x, self._positions(start, steps, x), before)[0]
        keys = steps + (state[0].shape[2] if state else 0)
        key_step = torch.arange(keys, device=x.device) - (keys - steps)
        lag = torch.arange(steps, device=x.device)[:, None] - key_step  # [query, key]
        far = torch.zeros_like(lag, dtype=x.dtype).masked_fill(lag >= self.window, -torch.inf)
        seen = Bias(far[None, None])
        states = [None] * len(self.stack.blocks) if before is None else before.blocks
        for block, earlier in zip(self.stack.blocks, states, strict=True):
            x = cast(Block, block).decode(x, state=earlier, encoding=seen)[0]
        return self.stack.norm(x)

    def step(self, x: Tensor, state: MemoryState, start: int) -> tuple[Tensor, MemoryState]:
        if self.window is not None:  # window - 1 earlier steps and the current step
            state = tuple(part[:, :, max(0, part.shape[2] + 1 - self.window) :] for part in state)
        positions = self._positions(start, 1, x)
        hidden, last = self.stack.decode(x[:, None], positions, self._unpacked(state))
        parts = [(b[:2],) if isinstance(b, KeyValues) else b for b in last.blocks]
        return hidden[:, 0], tuple(tensor for states in parts for one in states for tensor in one)

    def _positions(self, start: int, steps: int, x: Tensor) -> Tensor | None:
        """Returns the positions of new steps relative to the first step, of shape (1, steps, 1)."""
        if self.stack.position is None:
            return None
        index = torch.arange(start, start + steps, device=x.device)
        real = index.to(torch.promote_types(x.dtype, torch.float32))
        return (real * self.position_scale)[None, :, None]

    def _unpacked(self, state: MemoryState) -> StackState | None:
        if not state:
            return None
        count = len(self.stack.blocks)
        each = len(state) // count
        parts = [state[i * each : (i + 1) * each] for i in range(count)]
        blocks: list[DecodeState] = (
            [KeyValues(*part) for part in parts]
            if self.softmax
            else [tuple(State(*part[i : i + 2]) for i in range(0, each, 2)) for part in parts]
        )
        seen = self._positions(0, state[0].shape[2], state[0]) if self.softmax else None
        return StackState(seen, blocks)


class RecurrentMemory(Memory):
    """LSTM from "Learning to learn by gradient descent by gradient descent" (arXiv:1606.04474)."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.cells = nn.LSTM(dim, dim, layers, batch_first=True)

    def forward(self, x: Tensor, state: MemoryState = (), start: int = 0) -> Tensor:
        return self._run(x, state)[0]

    def step(self, x: Tensor, state: MemoryState, start: int) -> tuple[Tensor, MemoryState]:
        out, (hidden, cell) = self._run(x[:, None], state)
        return out[:, 0], (hidden.transpose(0, 1), cell.transpose(0, 1))

    def _run(self, x: Tensor, state: MemoryState) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        parts = [part.transpose(0, 1).contiguous() for part in state]
        return self.cells(x, tuple(parts) if parts else None)


class StateSpaceMemory(Memory):
    """Diagonal linear state-space layers with normalized inputs and gated outputs.

    In each channel, h_t = a h_(t-1) + x_t and y_t = Re(c . h_t) + d x_t, where a = exp(-exp(r) + i
    w). This is S4D (arXiv:2206.11893) with learned decay rates and frequencies; c absorbs the
    zero-order hold. Initial rates exp(r) are evenly spaced on a logarithmic scale, from 0.5 to
    0.001 per step. `states` is the number of complex states h per channel.
    """

    def __init__(self, dim: int, layers: int, states: int) -> None:
        super().__init__()
        at_least_one(states=states)
        self.layers = nn.ModuleList(_Diagonal(dim, states) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def step(self, x: Tensor, state: MemoryState, start: int) -> tuple[Tensor, MemoryState]:
        last = []
        for number, layer in enumerate(self.layers):
            x, new = layer(x, state[number] if state else None)
            last.append(new)
        return self.norm(x), tuple(last)


class _Diagonal(nn.Module):
    """Layer x + gate(SSM(LN x)); complex states are kept as real (coordinates, dim, states, 2)."""

    def __init__(self, dim: int, states: int) -> None:
        super().__init__()
        rates = torch.linspace(math.log(0.5), math.log(1e-3), states)
        self.log_rate = nn.Parameter(rates.repeat(dim, 1))
        self.frequency = nn.Parameter(torch.linspace(0, math.pi / 4, states).repeat(dim, 1))
        # y is then about as large as x, for any rates
        size = (2 * rates.exp() / states).sqrt()[None, :, None]
        self.out = nn.Parameter(torch.randn(dim, states, 2) * size)
        self.skip = nn.Parameter(torch.ones(dim))
        self.norm = nn.LayerNorm(dim)
        self.gate = nn.Linear(dim, 2 * dim)

    def forward(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the outputs (coordinates, dim) of one step, and the next state."""
        u = self.norm(x)
        a = torch.complex(-self.log_rate.exp(), self.frequency).exp()
        h = u[..., None].to(a.dtype).expand(-1, -1, a.shape[-1])
        if state is not None:
            h = a * torch.view_as_complex(state) + h
        y = (torch.view_as_complex(self.out) * h).real.sum(dim=-1) + self.skip * u
        return x + F.glu(self.gate(F.gelu(y)), dim=-1), torch.view_as_real(h.contiguous())
