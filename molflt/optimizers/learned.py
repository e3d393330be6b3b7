"""A learned optimizer as a `torch.optim.Optimizer`, for any model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from molflt.files import shown
from molflt.optimizers.coordinate import CoordinateOptimizer, OptimizerState

__all__ = ["LearnedOptimizer"]

_DTYPES = (torch.float32, torch.float64)


class LearnedOptimizer(Optimizer):
    """Updates each parameter coordinate from its past gradients with a meta-trained model.

    ::

        optimizer = LearnedOptimizer.from_run("runs/flt", net.parameters())
        loss.backward()
        optimizer.step()

    The learning rate does not need tuning; `lr` scales the learned steps. Schedulers, parameter
    groups, closures and `state_dict` are those of torch. Parameters without a gradient do not
    change.

    Args:
        params: parameters, named parameters, or groups of these, which can have their own `lr`.
        model: the trained model; one copy is used for each device and precision.
        lr: factor of the updates.
        chunk: number of coordinates that are updated at once, which limits the memory of a step.
            The state between steps covers all coordinates.

    """

    def __init__(
        self,
        params: Iterable[Any],
        model: CoordinateOptimizer,
        lr: float = 1.0,
        chunk: int = 65_536,
    ) -> None:
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1; got {chunk}")
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
        """Creates the optimizer from a run of the recipe `learned_optimizer`.

        Args:
            run: folder of the run.
            params, lr, chunk: see the class.
            checkpoint: best, last, or a safetensors file.
        """
        from molflt.training.checkpoint import load_run

        model, _ = load_run(Path(run), checkpoint, recipe="learned_optimizer")
        assert isinstance(model, CoordinateOptimizer)
        return cls(params, model, lr, chunk)

    def __getstate__(self) -> dict[str, Any]:
        # torch saves the common attributes; copies of the model are recreated
        return {**super().__getstate__(), "model": self.model, "chunk": self.chunk, "_models": {}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state, as in torch; raises ValueError for that of another optimizer or model."""
        saved = (number for group in state_dict["param_groups"] for number in group["params"])
        own = (parameter for group in self.param_groups for parameter in group["params"])
        for number, parameter in zip(saved, own, strict=False):  # torch refuses other counts
            if kept := state_dict["state"].get(number):
                self._expect_state(f"state of parameter {number}", kept, parameter)
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def _expect_state(self, name: str, kept: dict[str, Any], parameter: Tensor) -> None:
        if kept.keys() != {"step", "moments", "memory"}:
            raise ValueError(
                f"{name}: expected step, moments, memory; got {', '.join(kept)}; take what "
                "state_dict() of a LearnedOptimizer has returned"
            )
        own = self._model_for(parameter).step(parameter.new_zeros(1))[1]
        wanted = [[parameter.numel(), *shape] for shape in _shapes(own.moments, *own.memory)]
        parts = kept["moments"], *kept["memory"]
        found = [[len(part), *shape] for part, shape in zip(parts, _shapes(*parts), strict=True)]
        if found != wanted:
            raise ValueError(
                f"{name}: expected tensors of {shown(wanted)}, as this model keeps them; got "
                f"{shown(found)}; build the optimizer with the model and parameters of that state"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in torch; raises ValueError for an invalid lr or precision."""
        super().add_param_group(param_group)
        group, number = self.param_groups[-1], len(self.param_groups) - 1
        if not 0 <= group["lr"] < float("inf"):
            self.param_groups.pop()
            raise ValueError(
                f"lr of group {number} must be at least 0 and finite; got {group['lr']}; 1 is what "
                "was learned"
            )
        for name, parameter in _named(group, number):
            if parameter.dtype not in _DTYPES:
                self.param_groups.pop()
                raise ValueError(
                    f"{name} is {parameter.dtype}; expected float32 or float64; keep the weights "
                    "in float32, and compute with torch.autocast"
                )

    @overload
    def step(self, closure: None = ...) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates all parameters that have a gradient.

        Args:
            closure: function that recomputes the loss and its gradients; its result is returned. If
                `step` raises ValueError for a gradient, the parameters are unchanged.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for own in list(self._gradients()):  # all are checked before one is changed
            self._update(*own)
        return loss

    def _gradients(self) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yields the parameters that have a gradient, their gradients and learning rates."""
        found = count = 0
        for number, group in enumerate(self.param_groups):
            for name, parameter in _named(group, number):
                count += 1
                if parameter.grad is None:
                    continue
                found += 1
                yield parameter, self._checked(name, parameter), group["lr"]
        if count and not found:
            raise ValueError(
                f"{count} parameters without any gradient; expected some; call "
                "loss.backward() before step()"
            )

    def _checked(self, name: str, parameter: Tensor) -> Tensor:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout != torch.strided:
            raise ValueError(
                f"the gradient of {name} is sparse; expected a dense one; use sparse=False in the "
                "embedding"
            )
        if not bool(gradient.isfinite().all()):
            wrong = int((~gradient.isfinite()).sum())
            step = self.state[parameter].get("step", 0) if parameter in self.state else 0
            raise ValueError(
                f"the gradient of {name}, shape {tuple(parameter.shape)}, has {wrong:,} values "
                f"that are NaN or infinite at step {step}; expected finite numbers; look at that "
                "batch, or clip gradients; no parameter has been changed"
            )
        return gradient

    def _update(self, parameter: Tensor, gradient: Tensor, lr: float) -> None:
        """Updates one parameter in chunks."""
        model, kept = self._model_for(parameter), self.state[parameter]
        before = None
        if kept:
            before = OptimizerState(kept["step"], kept["moments"], tuple(kept["memory"]))
        gradient = gradient.reshape(-1)
        updates, states = [], []
        for start in range(0, len(gradient), self.chunk):
            rows = slice(start, start + self.chunk)
            piece = None
            if before is not None:
                memory = tuple(part[rows] for part in before.memory)
                piece = OptimizerState(before.step, before.moments[rows], memory)
            update, state = model.step(gradient[rows], piece)
            updates.append(update)
            states.append(state)
        if not states:  # a parameter without elements
            return
        memories = zip(*(state.memory for state in states), strict=True)
        kept["step"] = states[0].step
        kept["moments"] = _joined([state.moments for state in states])
        kept["memory"] = [_joined(parts) for parts in memories]
        parameter.add_(_joined(updates).view_as(parameter), alpha=lr)

    def _model_for(self, parameter: Tensor) -> CoordinateOptimizer:
        """Returns the model on the device and in the precision of a parameter."""
        key = parameter.device, parameter.dtype
        if key not in self._models:
            own = copy.deepcopy(self.model).to(*key).eval().requires_grad_(False)
            self._models[key] = own
        return self._models[key]


def _named(group: dict[str, Any], number: int) -> Iterator[tuple[str, Tensor]]:
    """Yields the names and parameters of a group; parameters without a name are numbered."""
    for i, parameter in enumerate(group["params"]):
        if "param_names" in group:
            yield group["param_names"][i], parameter
        else:
            yield f"parameter {i} of group {number}", parameter


def _shapes(*parts: Tensor) -> list[list[int]]:
    """Returns shapes per coordinate, without the axis that grows with the steps of softmax."""
    return [[*part.shape[1:2], *part.shape[3:]] for part in parts]


def _joined(parts: Iterable[Tensor]) -> Tensor:
    """Concatenates chunks; a single one is returned unchanged."""
    own = list(parts)
    return own[0].contiguous() if len(own) == 1 else torch.cat(own)
