"""Base class for tasks: loss, metrics, optimizer and learning rate schedule."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from molflt.metrics import Metric

_Batch = TypeVar("_Batch", contravariant=True)
_Data = TypeVar("_Data", contravariant=True)


class _Sums(Protocol):
    """Sums over the items of batches: a named tuple of scalars, which are added in float64."""

    def __iter__(self) -> Iterator[Tensor]: ...

    def metrics(self) -> dict[str, float]:
        """Computes the metrics over all items in the sums."""


class Task(ABC, Generic[_Batch, _Data]):
    """Base class for tasks: a model, its loss, its metrics and its optimizer.

    Subclasses return the loss of a batch together with sums over its items. The sums are added over
    all batches and ranks, and `metrics()` of the total computes the metrics over all items. Ranges
    of options are checked by the command line (`molflt.training.limits`).

    Args:
        model: the model to train.
        lr: peak learning rate.
        warmup_steps: number of steps of linear warm-up.
        schedule: learning rate after the warm-up: "linear" or "cosine" (reaching 0 after the last
            step), "inverse_sqrt" (proportional to 1 / sqrt(step), independent of the number of
            steps), or "constant".
        optimizer: "adamw" (decoupled weight decay; fairseq and many papers call it Adam), or "adam"
            (weight decay added to the gradient).
        betas: coefficients of Adam's running averages.
        eps: constant added to the denominator of Adam.
        weight_decay: weight decay coefficient.
        redraw_every: number of steps after which the random features are redrawn; null keeps the
            initial features.
        freeze: names of parameters to freeze, with wildcards such as embedding.*; null freezes no
            parameters.
        lr_factors: learning rate factors by parameter name with wildcards, such as
            {"embedding.*": 0.1}; the first match applies. null sets all factors to 1.
        seed: seed for dropout, augmentation and redrawn features.

    Attributes:
        unit: unit of batch sizes and throughput, such as "atoms".
        sums: class of the sums, a NamedTuple of scalar tensors with `metrics()`.
        metrics: metrics by name, in the order in which tables and figures show them.
        best: validation metric that selects the best weights; see `ranking`.
    """

    unit: ClassVar[str]
    sums: ClassVar[Callable[..., _Sums]]
    metrics: ClassVar[Mapping[str, Metric]]
    best: ClassVar[str]

    def __init__(
        self,
        model: nn.Module,
        lr: float = 3e-4,
        warmup_steps: int = 100,
        schedule: Literal["linear", "inverse_sqrt", "cosine", "constant"] = "linear",
        optimizer: Literal["adamw", "adam"] = "adamw",
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        redraw_every: int | None = None,
        freeze: list[str] | None = None,
        lr_factors: dict[str, float] | None = None,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.lr = lr
        self.warmup_steps = warmup_steps
        self.schedule = schedule
        adam = AdamW if optimizer == "adamw" else Adam
        self.adam = partial(adam, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.redraw_every = redraw_every
        self.seed = seed
        parameters = dict(model.named_parameters())
        for pattern in freeze or []:
            for name in _matching(parameters, pattern, "freeze"):
                parameters[name].requires_grad_(False)
        if freeze and not any(parameter.requires_grad for parameter in parameters.values()):
            raise ValueError(f"task.freeze={freeze}: all parameters are frozen; remove a pattern")
        self.lr_factors = dict(lr_factors or {})

    def check_new(self) -> None:
        """Raises ValueError for options that have no effect; called only for new runs."""
        if self.redraw_every is not None:
            redrawn: Any = copy.deepcopy(self.model)
            if hasattr(redrawn, "redraw_"):
                redrawn.redraw_(torch.Generator().manual_seed(0))
            before, after = self.model.state_dict(), redrawn.state_dict()
            if all(torch.equal(before[k].nan_to_num(), after[k].nan_to_num()) for k in before):
                raise ValueError(
                    f"task.redraw_every={self.redraw_every} needs random features; remove it"
                )
        parameters = dict(self.model.named_parameters())
        free = {name for name, parameter in parameters.items() if parameter.requires_grad}
        for pattern in self.lr_factors:
            matching = _matching(parameters, pattern, "lr_factors")
            if free.isdisjoint(matching):
                raise ValueError(
                    f"task.lr_factors {pattern!r}: all {len(matching)} matching parameters are "
                    "frozen or match an earlier pattern; remove this pattern, or move it forward"
                )
            free.difference_update(matching)

    def prepare(self, data: _Data) -> None:
        """Sets buffers of the model from the training data before a new run."""

    @property
    def validates_start(self) -> bool:
        """Returns True if initial weights are validated and can be the best weights."""
        return False

    def files(self) -> dict[str, bytes]:
        """Returns files for the run folder that describe the data, as {name: content}."""
        return {}

    @abstractmethod
    def loss(self, batch: _Batch, progress: float) -> tuple[Tensor, _Sums]:
        """Returns the loss and sums of a training batch; `progress` is the share of steps done."""

    def validation_sums(self, batch: _Batch) -> _Sums:
        """Returns the sums of a validation batch; by default, they are computed as in training."""
        return self.loss(batch, 1.0)[1]

    def size(self, batch: _Batch) -> int:
        """Returns the size of a batch in `unit`: by default, the length of its last tensor."""
        parts: Any = batch
        return int((parts if isinstance(parts, Tensor) else parts[-1]).shape[0])

    def name(self, batch: _Batch) -> str:
        """Describes a batch for messages."""
        return f"a batch of {self.size(batch)} {self.unit}"

    def summarize(self, totals: Tensor) -> dict[str, float]:
        """Computes the metrics from `totals`, the sums over all batches, of shape (fields,)."""
        return self.sums(*totals).metrics()

    def ranking(self, metrics: Mapping[str, float]) -> list[str]:
        """Returns the names of the metrics that select the best weights, in order.

        The first finite metric decides; later metrics break ties.
        """
        measured = [name for name in self.metrics if name in metrics]
        return list(dict.fromkeys([self.best, *measured]))

    def optimizer(self) -> Optimizer:
        """Returns the optimizer for all trainable parameters, grouped by learning rate."""
        groups: dict[float, list[nn.Parameter]] = {1.0: []}  # the rate of the first group is logged
        for name, parameter in self.model.named_parameters():
            factors = (f for pattern, f in self.lr_factors.items() if fnmatchcase(name, pattern))
            if parameter.requires_grad:
                groups.setdefault(next(factors, 1.0), []).append(parameter)
        options = [{"params": group, "lr": self.lr * f} for f, group in groups.items() if group]
        # On CUDA, a fused optimizer would not unscale gradients before they are clipped
        on_cpu = all(parameter.device.type == "cpu" for parameter in self.model.parameters())
        return self.adam(options, fused=on_cpu or None)

    def lr_factor(self, step: int, max_steps: int) -> float:
        """Returns the learning rate of a step, counted from 0, relative to its peak."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "inverse_sqrt":
            return math.sqrt(max(1, self.warmup_steps) / (step + 1))
        if self.schedule == "constant":
            return 1.0
        remaining = max(0.0, (max_steps - step) / max(1, max_steps - self.warmup_steps))
        linear = self.schedule == "linear"
        return remaining if linear else 0.5 * (1 - math.cos(math.pi * remaining))


def _matching(parameters: Mapping[str, nn.Parameter], pattern: str, option: str) -> list[str]:
    names = [name for name in parameters if fnmatchcase(name, pattern)]
    if not names:
        known = ", ".join(dict.fromkeys(f"{name.partition('.')[0]}.*" for name in parameters))
        raise ValueError(f"task.{option} {pattern!r}: no parameter matches; expected {known}")
    return names
