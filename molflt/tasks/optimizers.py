"""Learned optimizers: meta-training of coordinate and population optimizers."""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from molflt.data.optimizers import ProblemData, generator_of
from molflt.metrics import Metric
from molflt.optimizers.coordinate import CoordinateOptimizer
from molflt.optimizers.functions import FAMILIES, Functions
from molflt.optimizers.population import MEMBERS, PopulationModel, Populations, PopulationState
from molflt.optimizers.problems import draw_problem
from molflt.optimizers.unroll import unroll
from molflt.tasks.base import Task

SMALLEST = 1e-12
"""Lower bound on best values, below which they are rounding errors."""


class _OptimizerSums(NamedTuple):
    mean: Tensor  # logarithm of loss / initial loss, averaged over steps
    last: Tensor  # logarithm of loss / initial loss after the last step
    problems: Tensor

    def metrics(self) -> dict[str, float]:
        return {
            "mean_log_loss": float(self.mean / self.problems),
            "last_log_loss": float(self.last / self.problems),
        }


class OptimizerTask(Task[Tensor, object]):
    """Mean of log(f / f_0 + 0.001) over steps and problems, in truncated unrolls.

    A batch contains the seeds (batch,) of problems. Each problem is first optimized for a random
    number of steps, drawn log-uniformly from 0 to `burn_in`, and then for `unroll` steps that
    contribute to the loss. Meta-steps are therefore independent, which allows exact resuming, and
    include late stages of an optimization at low cost.

    Args:
        model: `molflt.optimizers.coordinate.CoordinateOptimizer`.
        unroll: number of steps that contribute to the loss; 20 to 100 in the literature.
        burn_in: maximum number of preceding steps. Validation measures all `burn_in` + `unroll`
            steps.
        optimization: further arguments of `molflt.tasks.base.Task`.
    """

    model: CoordinateOptimizer
    unit = "problems"
    sums: ClassVar[type[_OptimizerSums]] = _OptimizerSums
    metrics: ClassVar = {
        "mean_log_loss": Metric("mean log(f / f₀)"),
        "last_log_loss": Metric("last log(f / f₀)"),
    }
    best = "mean_log_loss"

    def __init__(
        self, model: nn.Module, unroll: int = 20, burn_in: int = 80, **optimization: Any
    ) -> None:
        super().__init__(model, **optimization)
        self.unroll = unroll
        self.burn_in = burn_in

    def loss(self, batch: Tensor, progress: float) -> tuple[Tensor, _OptimizerSums]:
        burn_in = int((self.burn_in + 2) ** float(torch.rand(()))) - 1  # seeded at each step
        return self._loss_and_sums(batch, self.unroll, burn_in)

    def validation_sums(self, batch: Tensor) -> _OptimizerSums:
        # problems cannot be differentiated if their tensors are created in inference mode
        with torch.inference_mode(False), torch.no_grad():
            return self._loss_and_sums(batch, self.burn_in + self.unroll, 0)[1]

    def name(self, batch: Tensor) -> str:
        return f"problems of seeds {', '.join(map(str, batch.tolist()))}"

    def _loss_and_sums(
        self, batch: Tensor, steps: int, burn_in: int
    ) -> tuple[Tensor, _OptimizerSums]:
        like = next(self.model.parameters())
        problems = [draw_problem(seed, like) for seed in batch.tolist()]
        loss, mean, last = unroll(self.model, problems, steps, burn_in)
        count = torch.tensor(len(mean), dtype=torch.float64)
        return loss.to(like.dtype), _OptimizerSums(mean.detach().sum(), last.detach().sum(), count)


class _PopulationSums(NamedTuple):
    best: Tensor  # log10 of the best value after the last generation
    problems: Tensor

    def metrics(self) -> dict[str, float]:
        return {"log10_best": float(self.best / self.problems)}


class PopulationTask(Task[Tensor, ProblemData]):
    """Meta-training by truncated unrolls on shifted and rotated Rastrigin-like functions.

    A batch contains the seeds (batch,) of problems. Each problem is a function of the family
    "rastrigin_like" (`molflt.optimizers.functions`) with a population that starts from
    N(0, 2.5^2). The loss is the mean over generations and problems of

        log(b_t / b_0 + resolution)

    where b_t is the best value after generation t (the minimum of the functions is 0) and b_0 is
    the median of the first generation. The functions are differentiable. Gradients flow through
    values and positions within windows of `window` generations (truncated backpropagation).

    Args:
        model: `molflt.optimizers.population.PopulationModel`.
        members: number of members of a population.
        generations: number of generations in an unroll.
        window: number of generations between truncations of the gradient.
        resolution: fraction of b_0 below which improvements hardly change the loss.
        optimization: further arguments of `molflt.tasks.base.Task`.
    """

    model: PopulationModel
    unit = "problems"
    sums: ClassVar[type[_PopulationSums]] = _PopulationSums
    metrics: ClassVar = {"log10_best": Metric("log10 of the best value")}
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
        self.members = members
        self.generations = generations
        self.window = window
        self.resolution = resolution

    def loss(self, batch: Tensor, progress: float) -> tuple[Tensor, _PopulationSums]:
        generators = [generator_of(seed, 0) for seed in batch.tolist()]
        functions = Functions.draw(next(iter(FAMILIES)), self.model.dimension, generators)
        functions = functions.to(batch.device)
        populations = Populations(self.model, batch.tolist(), self.members)
        populations.tell(functions(populations.state.position))
        first = populations.state.best_value.median(dim=1).values  # before any member has moved
        terms = []
        for generation in range(1, self.generations):
            if generation % self.window == 0:
                detached = (part.detach() for part in populations.state)
                populations.state = PopulationState(*detached)
            populations.tell(functions(populations.state.position))
            best = populations.state.best_value.amin(dim=1)
            terms.append((best / first + self.resolution).log().mean())
        best = populations.state.best_value.detach().amin(dim=1).clamp(min=SMALLEST).log10()
        sums = _PopulationSums(best.sum(), best.new_tensor(len(best)))
        return torch.stack(terms).mean().float(), sums
