"""Learning to optimize: minimize the losses of small problems during training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from molflt.metrics import Metric
from molflt.optimizers.problems import draw_problem
from molflt.optimizers.unroll import Unrolled, unroll
from molflt.tasks.base import Task

if TYPE_CHECKING:
    from molflt.optimizers.coordinate import CoordinateOptimizer

__all__ = ["OptimizerTask"]


class _OptimizerSums(NamedTuple):
    mean: Tensor
    """log of the loss relative to the first one, averaged over steps"""
    last: Tensor
    """the same after the last step"""
    problems: Tensor

    @classmethod
    def of(cls, found: Unrolled) -> _OptimizerSums:
        count = torch.tensor(len(found.mean), dtype=torch.float64)
        return cls(found.mean.detach().sum(), found.last.detach().sum(), count)

    def metrics(self) -> dict[str, float]:
        return {
            "mean_log_loss": float(self.mean / self.problems),
            "last_log_loss": float(self.last / self.problems),
        }


class OptimizerTask(Task[Tensor, object]):
    """Mean over steps and problems of log(f / f_0), by truncated unrolls.

    Batches are seeds of problems, (batch,). Each problem is first optimized for a random number of
    steps, up to `burn_in` and uniform in its logarithm, and then for `unroll` steps that enter the
    loss. Meta-steps are therefore independent, training can resume from any of them, and late
    stages of an optimization are learned at low cost.

    Args:
        model: `molflt.optimizers.coordinate.CoordinateOptimizer`.
        unroll: number of steps in the loss, 20 to 100 in the literature.
        burn_in: largest number of steps before them. Validation measures all `burn_in` + `unroll`
            steps.
        optimization: further arguments of `molflt.tasks.base.Task`.
    """

    model: CoordinateOptimizer
    unit = "problems"
    sums: ClassVar[type[_OptimizerSums]] = _OptimizerSums
    metrics: ClassVar = {
        "mean_log_loss": Metric("mean log(f / f₀)", measured_in=("train", "val"), scale="linear"),
        "last_log_loss": Metric("last log(f / f₀)", measured_in=("train", "val")),
    }
    best = "mean_log_loss"

    def __init__(
        self, model: nn.Module, unroll: int = 20, burn_in: int = 80, **optimization: Any
    ) -> None:
        super().__init__(model, **optimization)
        if unroll < 1:
            raise ValueError(f"task.unroll must be at least 1; got {unroll}")
        if burn_in < 0:
            raise ValueError(f"task.burn_in must be at least 0; got {burn_in}")
        self.unroll = unroll
        self.burn_in = burn_in

    def loss(self, batch: Tensor, progress: float) -> tuple[Tensor, _OptimizerSums]:
        before = int((self.burn_in + 1) ** float(torch.rand(()))) - 1  # seeded at each step
        found = self._unroll(batch, self.unroll, before)
        return found.loss.to(next(self.model.parameters()).dtype), _OptimizerSums.of(found)

    def judge(self, batch: Tensor) -> _OptimizerSums:
        # problems cannot be differentiated with tensors of inference mode
        with torch.inference_mode(False), torch.no_grad():
            return _OptimizerSums.of(self._unroll(batch, self.burn_in + self.unroll, 0))

    def size(self, batch: Tensor) -> int:
        """Returns the number of problems."""
        return len(batch)

    def name(self, batch: Tensor) -> str:
        return f"problems of seeds {', '.join(map(str, batch.tolist()))}"

    def _unroll(self, batch: Tensor, steps: int, before: int) -> Unrolled:
        like = next(self.model.parameters())
        problems = [draw_problem(seed, like) for seed in batch.tolist()]
        return unroll(self.model, problems, steps, before)
