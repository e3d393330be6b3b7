"""What all tasks share: a loss, sums that become metrics, the optimizer and its schedule."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import ClassVar, Generic, Literal, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from molflt.metrics import Metric

__all__ = ["Task"]

_Batch = TypeVar("_Batch", contravariant=True)
_Data = TypeVar("_Data", contravariant=True)


class _Sums(Protocol):
    """A NamedTuple of scalars, float64: sums over items, which add up over batches and ranks."""

    def __iter__(self) -> Iterator[Tensor]: ...

    def metrics(self) -> dict[str, float]:
        """Metrics of all items whose sums were added up."""


class _Redrawn(Protocol):
    """A model with random features."""

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws them anew."""


class Task(ABC, Generic[_Batch, _Data]):
    """Base class: a model, how it is optimized, and how it is judged.

    A subclass says what one loss is, and returns sums over items beside it: sums of batches and
    ranks add up, and their `metrics()` are those of all items together.

    Args:
        model: what is trained.
        lr: peak learning rate.
        warmup_steps: steps of linear growth of the learning rate.
        schedule: what follows: "linear" or "cosine" (to 0 at the last step), "inverse_sqrt"
            (as 1 / sqrt(step), whatever the last step is), or "constant".
        optimizer: "adamw" (decoupled weight decay: what fairseq, and so the papers, call Adam), or
            "adam" (coupled: added to the gradient, where it swamps small ones).
        betas: Adam's averaging coefficients.
        eps: Adam's term in the denominator.
        weight_decay: Adam's.
        redraw_every: steps between draws of new random features; null keeps the first ones.
        freeze: names of parameters that stay as they are, with wildcards: embedding.*; null for
            none.
        lr_factors: what multiplies the learning rate of parameters, by names with wildcards, of
            which the first that fits counts: {"embedding.*": 0.1}; null for none.
        seed: of dropout, augmentation and redrawn features.

    Attributes:
        unit: what the throughput counts.
        sums: class of the sums, a NamedTuple of scalar tensors with `metrics()`.
        metrics: what is written down and drawn, in order.
        best: metric of validation that chooses the best weights; see `ranking`.
    """

    unit: ClassVar[str]
    sums: ClassVar[type[_Sums]]
    metrics: ClassVar[Mapping[str, Metric]]
    best: ClassVar[str]

    def __init_subclass__(cls) -> None:
        missing = [name for name in ("unit", "sums", "metrics", "best") if not hasattr(cls, name)]
        if missing or cls.best not in cls.metrics:
            raise TypeError(
                f"{cls.__name__} must define unit, sums, metrics, and best, one of them"
            )

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
        for name, value, low in (
            ("lr", lr, 0.0),
            ("warmup_steps", warmup_steps, -1),
            ("redraw_every", 1 if redraw_every is None else redraw_every, 0),
        ):
            if not value > low:
                raise ValueError(f"task.{name} must be more than {low}; got {value}")
        self.model = model
        self.lr = lr
        self.warmup_steps = warmup_steps
        self.schedule = schedule
        self.optimizer_class = AdamW if optimizer == "adamw" else Adam
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.redraw_every = redraw_every
        self.seed = seed
        _freeze(model, freeze or [])
        self.lr_factors = dict(lr_factors or {})
        for pattern, factor in self.lr_factors.items():
            _named(dict(model.named_parameters()), pattern, "lr_factors")
            if not 0 < factor < math.inf:
                raise ValueError(
                    f"task.lr_factors {pattern!r} must be more than 0; got {factor}; task.freeze "
                    "is for parameters that stay"
                )

    def check_new(self) -> None:
        """Refuses options of a new run that have no effect; those of earlier ones may go on."""
        if self.redraw_every is not None and not _is_random(self.model):
            raise ValueError(
                f"task.redraw_every={self.redraw_every}: this model has no random features; leave "
                "it out"
            )
        for pattern in self.lr_factors:
            named = _named(dict(self.model.named_parameters()), pattern, "lr_factors")
            if not any(self.model.get_parameter(name).requires_grad for name in named):
                raise ValueError(
                    f"task.lr_factors {pattern!r}: all {len(named)} parameters of such a name are "
                    "frozen; expected some to learn; leave it out, or a pattern of task.freeze"
                )

    def prepare(self, data: _Data) -> None:
        """Takes from the training data what the model needs of them, before a new run."""

    def files(self) -> dict[str, bytes]:
        """What `prepare` has taken, as files by name for who reads the run folder."""
        return {}

    @abstractmethod
    def loss(self, batch: _Batch, progress: float) -> tuple[Tensor, _Sums]:
        """Loss of a training batch, and its sums; `progress` is the share of steps done, 0 to 1."""

    @abstractmethod
    def judge(self, batch: _Batch) -> _Sums:
        """Sums of a validation batch."""

    @abstractmethod
    def size(self, batch: _Batch) -> int:
        """How many of `unit` a batch holds."""

    def name(self, batch: _Batch) -> str:
        """What is in a batch, for messages."""
        return f"a batch of {self.size(batch)} {self.unit}"

    def blame(self, batch: _Batch, diverges: Callable[[_Batch], bool]) -> str:
        """Names of items of a batch that diverge on their own; empty if none does."""
        return ""

    def summarize(self, totals: Tensor) -> dict[str, float]:
        """Metrics of all items whose sums were added up: those of `sums`, (fields,), in a row."""
        make: Callable[..., _Sums] = self.sums
        return make(*totals).metrics()

    def ranking(self, found: Mapping[str, float]) -> list[str]:
        """Names of the metrics of a validation that choose the best weights.

        The first finite one decides. Each of the others decides between equal values of those
        before it.
        """
        return list(dict.fromkeys([self.best, *(name for name in self.metrics if name in found)]))

    def redraw(self, generator: torch.Generator) -> None:
        """Draws the random features of the model anew."""
        cast(_Redrawn, self.model).redraw_(generator)

    def optimizer(self) -> Optimizer:
        """Of the parameters of the model that are not frozen; those of one rate are a group."""
        groups: dict[float, list[nn.Parameter]] = {1.0: []}  # the first is the one that is logged
        for name, parameter in self.model.named_parameters():
            fits = (f for pattern, f in self.lr_factors.items() if fnmatchcase(name, pattern))
            if parameter.requires_grad:
                groups.setdefault(next(fits, 1.0), []).append(parameter)
        return self.optimizer_class(
            [{"params": own, "lr": self.lr * f} for f, own in groups.items() if own],
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
        )

    def lr_factor(self, step: int, max_steps: int) -> float:
        """Learning rate of a step (from 0) in units of its peak: up linearly, then as scheduled."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "inverse_sqrt":
            return math.sqrt(max(1, self.warmup_steps) / (step + 1))
        if self.schedule == "constant":
            return 1.0
        left = max(0.0, (max_steps - step) / max(1, max_steps - self.warmup_steps))
        return left if self.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))


def _is_random(model: nn.Module) -> bool:
    """Whether a redraw changes a model; none of its own numbers is drawn."""
    other = copy.deepcopy(model)
    if not hasattr(other, "redraw_"):
        return False
    cast(_Redrawn, other).redraw_(torch.Generator().manual_seed(0))
    before, after = model.state_dict(), other.state_dict()
    return any(not torch.equal(before[k].nan_to_num(), after[k].nan_to_num()) for k in before)


def _freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Has no gradients of the parameters whose names match."""
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        for name in _named(parameters, pattern, "freeze"):
            parameters[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in parameters.values()):
        raise ValueError(
            f"task.freeze: all {len(parameters)} parameters are frozen; expected some to learn; "
            "leave a pattern out"
        )


def _named(parameters: Mapping[str, nn.Parameter], pattern: str, option: str) -> list[str]:
    """Names that match a pattern."""
    found = [name for name in parameters if fnmatchcase(name, pattern)]
    if not found:
        count = Counter(f"{name.partition('.')[0]}.*" for name in parameters)
        there = ", ".join(f"{rooms} ({names})" for rooms, names in count.items())
        raise ValueError(
            f"task.{option} {pattern!r}: no parameter has such a name; expected some of {there}, "
            f"such as {next(iter(parameters), 'none')}"
        )
    return found
