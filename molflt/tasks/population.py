"""Population-based optimization of functions drawn from a family."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from molflt.data.problems import ProblemData, generator_of
from molflt.metrics import Metric
from molflt.optimizers.functions import FAMILIES, Functions
from molflt.optimizers.population import MEMBERS, Populations
from molflt.optimizers.population_model import PopulationState
from molflt.tasks.base import Task

if TYPE_CHECKING:
    from molflt.optimizers.population_model import PopulationModel

__all__ = ["PopulationTask"]

_SMALLEST = 1e-12  # lower bound of best values, for the logarithm


class _PopulationSums(NamedTuple):
    best: Tensor
    """log10 of the best value after the last generation"""
    problems: Tensor

    def metrics(self) -> dict[str, float]:
        best, problems = (float(part) for part in self)
        return {"log10_best": best / problems}


class PopulationTask(Task[Tensor, ProblemData]):
    """Meta-training by truncated unrolls on shifted, rotated Rastrigin-like functions.

    Batches are seeds of problems, (batch,). Each is a function of the family "rastrigin_like"
    (`molflt.optimizers.functions`) with a population that starts from N(0, 2.5^2). The loss is the
    mean over generations and problems of

        log(b_t / b_0 + resolution)

    with b_t the best value after generation t (the minimum of the functions is 0) and b_0 the
    median of the first generation. Functions are differentiable; the gradient flows through their
    values and the positions within windows of `window` generations (truncated backpropagation).

    Args:
        model: `molflt.optimizers.population_model.PopulationModel`.
        members: number of members of a population.
        generations: number of generations in an unroll.
        window: number of generations between cuts of the gradient.
        resolution: fraction of b_0 below which improvements hardly change the loss.
        optimization: further arguments of `molflt.tasks.base.Task`.
    """

    model: PopulationModel
    unit = "problems"
    sums: ClassVar[type[_PopulationSums]] = _PopulationSums
    metrics: ClassVar = {"log10_best": Metric("log10 of the best value", digits=3)}
    best = "log10_best"

    def __init__(
        self,
        model: nn.Module,
        members: int = MEMBERS,
        generations: int = 50,
        window: int = 10,
        resolution: float = 1e-3,
        **optimization: Any,
    ) -> None:
        super().__init__(model, **optimization)
        for name, value, low in (
            ("members", members, 2),
            ("generations", generations, 2),
            ("window", window, 2),
        ):
            if value < low:
                raise ValueError(f"task.{name} must be at least {low}; got {value}")
        if not resolution > 0:
            raise ValueError(f"task.resolution must be more than 0; got {resolution}")
        self.members = members
        self.generations = generations
        self.window = window
        self.resolution = resolution

    def loss(self, batch: Tensor, progress: float) -> tuple[Tensor, _PopulationSums]:
        functions, populations = self._begin(batch)
        terms, first = [], None
        for number in range(self.generations):
            if number and number % self.window == 0:
                detached = (part.detach() for part in populations.state)
                populations.state = PopulationState(*detached)
            populations.tell(functions(populations.state.position))
            values = populations.state.best_value
            if first is None:
                first = values.median(dim=1).values  # before any member has moved
                continue
            terms.append((values.amin(dim=1) / first + self.resolution).log().mean())
        return torch.stack(terms).mean().float(), _sums(populations.state)

    @torch.no_grad()
    def judge(self, batch: Tensor) -> _PopulationSums:
        functions, populations = self._begin(batch)
        for _ in range(self.generations):
            populations.tell(functions(populations.state.position))
        return _sums(populations.state)

    def _begin(self, batch: Tensor) -> tuple[Functions, Populations]:
        """Returns the functions of seeds, and populations to minimize them."""
        seeds, family = batch.tolist(), next(iter(FAMILIES))
        generators = [generator_of(seed, 0) for seed in seeds]
        functions = Functions.draw(family, self.model.dimension, generators)
        return functions.to(batch.device), Populations(self.model, seeds, self.members)

    def size(self, batch: Tensor) -> int:
        """Returns the number of problems."""
        return len(batch)


def _sums(state: PopulationState) -> _PopulationSums:
    best = state.best_value.detach().amin(dim=1).clamp(min=_SMALLEST).log10()
    return _PopulationSums(best.sum(), best.new_tensor(len(best)))
