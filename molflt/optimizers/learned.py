"""`torch.optim.Optimizer` that applies a learned optimizer to any model."""

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from molflt.attention.checks import at_least_one
from molflt.optimizers.coordinate import CoordinateOptimizer, OptimizerState

_OF_OTHERS = ("betas", "maximize", "momentum", "weight_decay")  # options of Adam and SGD


class LearnedOptimizer(Optimizer):
    """Computes the update of each coordinate from its past gradients with a meta-trained model.

    ::

        optimizer = LearnedOptimizer.from_run("runs/flt", net.parameters())
        loss.backward()
        optimizer.step()

    The model contains the learning rate. Schedulers, parameter groups, closures and `state_dict`
    work as in other `torch.optim` optimizers. Parameters without a gradient do not change.

    Args:
        params: parameters, named parameters, or parameter groups, each with an optional `lr`.
        model: trained model, which is copied once for each device and precision.
        lr: factor that multiplies the updates.
        chunk: number of coordinates that are updated at once. It limits the memory of a step, but
            not the size of the state between steps.
    """

    def __init__(
        self,
        params: Iterable[Any],
        model: CoordinateOptimizer,
        lr: float = 1.0,
        chunk: int = 65_536,
    ) -> None:
        at_least_one(chunk=chunk)
        self._models: dict[tuple[torch.device, torch.dtype], CoordinateOptimizer] = {}
        self.model = model
        self.chunk = chunk
        super().__init__(params, {"lr": lr})

    @classmethod
    def from_run(
        cls,
        run: str | Path,
        params: Iterable[Any],
        lr: float = 1.0,
        checkpoint: str = "best",
        chunk: int = 65_536,
    ) -> Self:
        """Creates the optimizer from the folder of a run of the recipe `learned_optimizer`.

        `checkpoint` is "best", "last", or a safetensors file. See the class for the other
        arguments.
        """
        from molflt.training.checkpoint import load_run

        model, _ = load_run(Path(run), checkpoint, recipe="learned_optimizer")
        assert isinstance(model, CoordinateOptimizer)
        return cls(params, model, lr, chunk)

    def __getstate__(self) -> dict[str, Any]:
        # the base class returns only its own attributes; copies of the model are rebuilt
        return {**super().__getstate__(), "model": self.model, "chunk": self.chunk, "_models": {}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group; raises ValueError if an option is invalid."""
        super().add_param_group(param_group)
        group, number, why = self.param_groups[-1], len(self.param_groups) - 1, ""
        if not 0 <= group["lr"] < float("inf"):
            why = f"lr of group {number} must be at least 0 and finite; got {group['lr']}"
        if wrong := {one.dtype for one in group["params"]} - {torch.float32, torch.float64}:
            why = f"group {number} has parameters in {wrong.pop()}; expected float32 or float64"
        for name in _OF_OTHERS:
            if group.get(name):
                why = f"{name}={group[name]} of group {number} has no effect here; remove it"
        if why:
            self.param_groups.pop()
            raise ValueError(why)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient and returns the result of the closure.

        The closure recomputes the loss and its gradients and returns the loss. Raises ValueError,
        before any parameter changes, if a gradient is sparse or not finite.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for number, group in enumerate(self.param_groups):  # before any parameter changes
            for i, parameter in enumerate(group["params"]):
                if parameter.grad is not None and (fault := _fault(parameter.grad)):
                    names = group.get("param_names")
                    name = names[i] if names else f"parameter {i} of group {number}"
                    raise ValueError(f"the gradient of {name}, {fault}; no parameter was changed")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group["lr"])
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, lr: float) -> None:
        if not parameter.numel():
            return
        key = parameter.device, parameter.dtype
        if key not in self._models:
            self._models[key] = copy.deepcopy(self.model).to(*key).eval().requires_grad_(False)
        model, kept = self._models[key], self.state[parameter]
        gradients = gradient.reshape(-1).split(self.chunk)
        states: list[OptimizerState | None] = [None] * len(gradients)
        if kept:
            memories = zip(*(part.split(self.chunk) for part in kept["memory"]), strict=True)
            pieces = zip(kept["moments"].split(self.chunk), memories, strict=True)
            states = [OptimizerState(kept["step"], *piece) for piece in pieces]
        updates, after = zip(*map(model.step, gradients, states), strict=True)
        memories = zip(*(state.memory for state in after), strict=True)
        kept["step"] = after[0].step
        kept["moments"] = torch.cat([state.moments for state in after])
        kept["memory"] = [torch.cat(parts) for parts in memories]
        parameter.add_(torch.cat(updates).view_as(parameter), alpha=lr)


def _fault(gradient: Tensor) -> str:
    """Describes a gradient that is sparse or not finite; returns "" for other gradients."""
    if gradient.layout is not torch.strided:
        return "which is sparse, must be dense; use Embedding(sparse=False)"
    if not bool(gradient.isfinite().all()):
        return (
            f"shape {tuple(gradient.shape)}, contains NaN or infinite values; expected finite "
            "numbers; check the batch, or clip gradients"
        )
    return ""
