"""Learned optimizer that minimizes functions with a population, using only their values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from molflt.attention.checks import positive
from molflt.attention.numerics import randn64
from molflt.data.optimizers import generator_of
from molflt.optimizers.population_model import Noise, PopulationModel, PopulationState

MEMBERS = 32
START_SCALE = 2.5
"""standard deviation of initial coordinates, half of `molflt.optimizers.functions.HALF_WIDTH`"""


class Populations:
    """Batch of independent populations, each determined by its seed alone.

    `center` is the mean of the initial positions, (d,) or one number, and `scale` is the standard
    deviation of their coordinates. `state` is on the device of the model. The noise is drawn on the
    CPU.
    """

    def __init__(
        self,
        model: PopulationModel,
        seeds: Sequence[int],
        members: int = MEMBERS,
        center: float | Sequence[float] | Tensor = 0.0,
        scale: float = START_SCALE,
    ) -> None:
        if members < 2:
            raise ValueError(f"a population needs at least 2 members; got {members=}")
        self.model, self.members = model, members
        self.device = model.log_pressure.device
        self.generators = [generator_of(seed, 1) for seed in seeds]
        middle = torch.as_tensor(center, dtype=torch.float64, device="cpu")
        position = middle.to(self.device) + scale * self._normal(members, model.dimension)
        self.state = model.start(position, self._normal(model.waves, model.dimension))

    def tell(self, values: Tensor) -> None:
        """Moves the members, using the values (batch, members) at `state.position`."""
        pairs = self._normal(self.members, self.members)
        vectors = self._normal(self.members, self.model.dimension)
        self.state = self.model(self.state, values, Noise(pairs, vectors))

    def _normal(self, *shape: int) -> Tensor:
        """Draws float64 normal numbers (batch, *shape) on the CPU and moves them to the device."""
        draws = [randn64(shape, generator=generator) for generator in self.generators]
        return torch.stack(draws).to(self.device)


class Best(NamedTuple):
    """Smallest value so far and its position."""

    position: Tensor
    """(d,) float64"""
    value: float


class PopulationOptimizer:
    """Minimizes a function with learned steps, using only its values.

    ::

        optimizer = PopulationOptimizer.from_run("runs/population", dimension=10)
        while optimizer.evaluations < 5000:
            members = optimizer.ask()
            optimizer.tell([function(x) for x in members])
        print(optimizer.best)

    Args:
        model: model that moves the members.
        members: number of members of the population, at least 2.
        seed: seed of the initial positions and of the noise.
        start: mean of the initial positions: one number for all coordinates, or d numbers.
        scale: standard deviation of the initial coordinates; it should be about the distance from
            `start` to the minimum.

    Attributes:
        evaluations: number of function evaluations so far.
    """

    def __init__(
        self,
        model: PopulationModel,
        members: int = MEMBERS,
        seed: int = 0,
        start: float | Sequence[float] | Tensor = 0.0,
        scale: float = START_SCALE,
    ) -> None:
        positive(scale=scale)
        with torch.no_grad():
            self._populations = Populations(model, [seed], members, start, scale)
        self.model = model
        self.members = members
        self.evaluations = 0
        self._asked = False

    @classmethod
    def from_run(
        cls,
        run: str | Path,
        dimension: int | None = None,
        members: int | None = None,
        seed: int = 0,
        start: float | Sequence[float] | Tensor = 0.0,
        scale: float = START_SCALE,
        checkpoint: str = "best",
    ) -> PopulationOptimizer:
        """Creates the optimizer from a run folder of the recipe `population_optimizer`.

        By default, `dimension` and `members` have the values used in training. `checkpoint` is
        "best", "last", or a safetensors file. See the class for the other arguments.
        """
        from molflt.training.checkpoint import load_run

        model, config = load_run(Path(run), checkpoint, recipe="population_optimizer")
        assert isinstance(model, PopulationModel)
        model = model.of_dimension(model.dimension if dimension is None else dimension)
        members = config["task"]["members"] if members is None else members
        return cls(model, members, seed, start, scale)

    def ask(self) -> Tensor:
        """Returns the points to evaluate: float64 (members, d); only `tell` changes them."""
        self._asked = True
        return self._populations.state.position[0].cpu().clone()

    def tell(self, values: Tensor | Sequence[float]) -> None:
        """Moves the members, using the values at the points from `ask`.

        Args:
            values: (members,), finite numbers in the order of the points.
        """
        generation = self.generation
        if not self._asked:
            raise ValueError(
                f"tell before ask in generation {generation}; expected the values at the points "
                "that ask() returns; call ask() first"
            )
        given = torch.as_tensor(values, dtype=torch.float64, device="cpu").detach()
        if given.shape != (self.members,):
            shape = f"({self.members},), one for each member; got {tuple(given.shape)}"
            raise ValueError(f"values must have shape {shape}")
        if not bool(given.isfinite().all()):
            member = int((~given.isfinite()).nonzero()[0])
            raise ValueError(
                f"member {member} in generation {generation}: expected a finite value; got "
                f"{float(given[member])}; pass a large number where the function is undefined"
            )
        with torch.no_grad():
            self._populations.tell(given[None].to(self._populations.device))
        self.evaluations += self.members
        self._asked = False

    @property
    def generation(self) -> int:
        """Number of generations so far."""
        return int(self._populations.state.generation)

    @property
    def best(self) -> Best:
        """Smallest value so far, with its position; raises ValueError before the first `tell`."""
        state = self._populations.state
        member = int(state.best_value[0].argmin())
        value = float(state.best_value[0, member])
        if math.isinf(value):
            raise ValueError("best needs a call of tell(); got none; call ask() and tell() first")
        return Best(state.best_position[0, member].cpu().clone(), value)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the state of the population and of its random generator, without the weights."""
        state = self._populations.state._asdict()
        noise = self._populations.generators[0].get_state()
        kept = {**state, "noise": noise, "asked": torch.tensor(self._asked, device="cpu")}
        return {name: part.cpu().clone() for name, part in kept.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores a `state_dict`; with equal weights, later steps are bitwise identical."""
        populations = self._populations
        parts = {name: part.clone() for name, part in state.items()}
        populations.generators[0].set_state(parts.pop("noise"))
        self._asked = bool(parts.pop("asked"))
        on_device = {name: part.to(populations.device) for name, part in parts.items()}
        populations.state = PopulationState(**on_device)
        self.evaluations = self.generation * self.members
