"""Batches of a training and a validation set, as a pure function of seed, epoch and step.

A cap on structures times the atoms of the largest bounds the memory, the tighter the more alike the
sizes of a batch are. But a batch of one size is no random draw: see `bucket`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence, Sized
from pathlib import Path
from typing import ClassVar, Generic, TypeVar, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import DataLoader, Dataset, Sampler

__all__ = ["BatchedData", "Fingerprint", "SizeBucketedBatchSampler"]

_Items = TypeVar("_Items", bound=Sized)
_Indices = NDArray[np.int64]
Fingerprint = dict[str, int | str]


class SizeBucketedBatchSampler(Sampler[list[int]]):
    """Cuts a data set into batches of similar size; every structure comes exactly once per pass.

    Iterating makes one pass in order of size (``shuffle=False``) or through the epoch ``epoch``
    (``shuffle=True``). Rank r of w gets the batches r, r + w, ...: no structure is counted twice,
    and ranks may differ by one batch. Training uses :class:`TrainingStream`, where they do not.

    Args:
        natoms: atoms in each structure, (structures,).
        batch_size: most structures in a batch.
        max_atoms: most structures of a batch times the atoms of its largest; None for no cap.
        shuffle: draw the batches anew for every epoch.
        bucket: with `shuffle`, how many random batches are pooled, sorted by size and cut again.
            1 leaves random batches. More makes sizes alike, for models that pad, which
            `EnergyRegressor` hardly does; but structures of one size have much else in common, and
            gradients become noisier: measured in docs/results/emt-sample.md.
        seed: of the draws; a batch depends on `seed`, `epoch` and the sizes only.
        rank: index of this process.
        world: number of processes.

    Raises:
        ValueError: if there are no structures, or one that alone exceeds `max_atoms`.
    """

    def __init__(
        self,
        natoms: ArrayLike,
        batch_size: int,
        max_atoms: int | None = None,
        shuffle: bool = False,
        bucket: int = 1,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.natoms = np.asarray(natoms, dtype=np.int64)
        if self.natoms.ndim != 1 or len(self.natoms) == 0:
            raise ValueError(f"natoms must be (structures,), at least 1; got {self.natoms.shape}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1; got {batch_size}")
        if bucket < 1:
            raise ValueError(f"bucket must be at least 1; got {bucket}")
        if not 0 <= rank < world:
            raise ValueError(f"rank must be in 0..{world - 1}; got {rank}")
        if max_atoms is not None and self.natoms.max() > max_atoms:
            index = int(self.natoms.argmax())
            raise ValueError(
                f"structure {index} has {self.natoms[index]} atoms; expected at most "
                f"max_atoms={max_atoms}; raise max_atoms"
            )
        self.batch_size = batch_size
        self.max_atoms = max_atoms
        self.shuffle = shuffle
        self.bucket = bucket
        self.seed = seed
        self.epoch = 0
        self.rank = rank
        self.world = world

    def batches(self, epoch: int = 0) -> list[_Indices]:
        """All batches of one epoch, of all ranks, as arrays of indices."""
        if not self.shuffle:
            return self._cut(np.argsort(self.natoms, kind="stable"))
        draw = np.random.default_rng([self.seed, epoch])
        order = draw.permutation(len(self.natoms))
        width = self.bucket * self.batch_size
        batches: list[_Indices] = []
        for start in range(0, len(order), width):
            window = order[start : start + width]
            batches += self._cut(window[np.argsort(self.natoms[window], kind="stable")])
        return [batches[i] for i in draw.permutation(len(batches))]

    def _cut(self, order: _Indices) -> list[_Indices]:
        """Cuts indices that are sorted by size, smallest first."""
        if self.max_atoms is None:
            return np.split(order, range(self.batch_size, len(order), self.batch_size))
        sizes = self.natoms[order]
        cuts = []
        start = 0
        for end in range(1, len(order)):
            count = end - start + 1  # with the structure at `end`, the largest so far
            if count > self.batch_size or count * sizes[end] > self.max_atoms:
                cuts.append(end)
                start = end
        return np.split(order, cuts)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches(self.epoch)[self.rank :: self.world]:
            yield batch.tolist()

    def __len__(self) -> int:
        count = len(self.batches(self.epoch))
        return (count - self.rank + self.world - 1) // self.world


class _TrainingStream(Sampler[list[int]]):
    """Epoch after epoch without end, from any step on: what makes resuming in mid-epoch exact.

    The batches of all epochs stand in one line and rank r takes number ``step * world + r`` at each
    step. So all ranks always have a batch, every structure still comes exactly once per epoch, and
    the stream from step s is the same whether or not the steps before it were drawn.

    Args:
        batches: what to repeat; `shuffle`, `rank` and `world` are its own.
        start_step: first step to draw.
    """

    def __init__(self, batches: SizeBucketedBatchSampler, start_step: int = 0) -> None:
        self.sampler = batches
        self.start_step = start_step

    def __iter__(self) -> Iterator[list[int]]:
        number = self.start_step * self.sampler.world + self.sampler.rank
        epoch = 0
        batches = self.sampler.batches(epoch)
        while True:
            while number >= len(batches):
                number -= len(batches)
                epoch += 1
                batches = self.sampler.batches(epoch)
            yield batches[number].tolist()
            number += self.sampler.world


class BatchedData(Generic[_Items]):
    """Batches of a training and a validation set, as a pure function of seed, epoch and step.

    A subclass fills `datasets` in `setup`, under "train" and "val".

    Args:
        batch_size: items in a batch, per device.
        workers: processes that read ahead; 0 reads in the main process.

    Attributes:
        seed: of the order of training items.
        start_step: step that training starts from.
        datasets: "train" and "val".
        kept: folder with the `files` of a run that goes on, or whose first process has made them;
            None for a new run.
        initial: name and content of the domain.json of the weights that the run starts from; None
            without any.
        items: what a batch consists of.
        collate: makes a batch of a list of items; torch's own if None.

    Raises:
        ValueError: for a number outside its range.
    """

    items: ClassVar[str] = "items"
    collate: Callable[[list[object]], object] | None = None

    def __init__(self, batch_size: int, workers: int = 0) -> None:
        if batch_size < 1:
            raise ValueError(f"data.batch_size must be at least 1; got {batch_size}")
        if workers < 0:
            raise ValueError(f"data.workers must be at least 0; got {workers}")
        self.batch_size = batch_size
        self.workers = workers
        self.seed = 0
        self.start_step = 0
        self.datasets: dict[str, _Items] = {}
        self.kept: Path | None = None
        self.initial: tuple[str, object] | None = None

    def setup(self, stage: str = "fit") -> None:
        """Opens the sets that are not open yet."""
        raise NotImplementedError

    def describe(self) -> list[str]:
        """What the training and the validation set hold, one phrase each."""
        return [f"{use} {len(items):,} {self.items}" for use, items in self.datasets.items()]

    def sizes(self) -> dict[str, int]:
        """What the data decide about the model: arguments of its constructor."""
        return {}

    def files(self) -> dict[str, bytes]:
        """Files, by name, without which the model cannot be used later; the run keeps them."""
        return {}

    def fingerprints(self) -> dict[str, Fingerprint]:
        """Of the sets that are open: how many items they have, and a digest of what is in them."""
        return {
            use: {self.items: len(items), "sha256": self._digest(use)}
            for use, items in self.datasets.items()
        }

    def _digest(self, use: str, most: int | None = None) -> str:
        """Digest of all items of "train" or "val", or of at most so many, evenly spaced."""
        items = cast("Sequence[object]", self.datasets[use])
        count = len(items) if most is None else min(most, len(items))
        digest = hashlib.sha256()
        for i in range(count):
            for part in _parts(items[i * len(items) // count]):
                digest.update(part)
        return digest.hexdigest()

    def check(self, use: str, batch: object) -> None:
        """Raises ValueError for a batch of "train" or "val" that cannot be learned from."""

    def train_dataloader(self, rank: int = 0, world: int = 1) -> DataLoader[object]:
        """Endless batches from step `start_step` on."""
        batches = self._sampler("train", rank, world)
        return self._loader("train", _TrainingStream(batches, self.start_step))

    def batches_in(self, epochs: int) -> int:
        """Training batches of that many epochs, of all ranks."""
        sampler = self._sampler("train", 0, 1)
        if sampler.max_atoms is None:
            return epochs * len(sampler)
        return sum(len(sampler.batches(epoch)) for epoch in range(epochs))  # sizes decide

    def val_dataloader(self, rank: int = 0, world: int = 1) -> DataLoader[object]:
        """One pass over the validation set; no item on two ranks.

        Raises:
            ValueError: if there are fewer batches than ranks.
        """
        if (batches := len(self._sampler("val", 0, 1))) < world:
            raise ValueError(
                f"batches to validate on: expected one for each of {world} processes; got "
                f"{batches} of {self.batch_size} {self.items}; take a smaller --data.batch_size, "
                "more data, or fewer --trainer.devices"
            )
        return self._loader("val", self._sampler("val", rank, world))

    def _sampler(self, use: str, rank: int, world: int) -> SizeBucketedBatchSampler:
        return SizeBucketedBatchSampler(
            np.ones(len(self.datasets[use])),  # all items have one size
            self.batch_size,
            shuffle=use == "train",
            seed=self.seed,
            rank=rank,
            world=world,
        )

    def _loader(
        self, use: str, batches: SizeBucketedBatchSampler | _TrainingStream
    ) -> DataLoader[object]:
        return DataLoader(
            cast("Dataset[object]", self.datasets[use]),
            batch_sampler=batches,
            collate_fn=self.collate,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            pin_memory=torch.cuda.is_available(),
        )


def _parts(item: object) -> Iterator[bytes]:
    """Bytes that tell an item from others: of its tensors, and of the names and numbers in it."""
    if isinstance(item, torch.Tensor):
        yield f"{item.dtype}{tuple(item.shape)}".encode()
        yield item.contiguous().numpy().tobytes()
    elif isinstance(item, tuple | list):
        for part in item:
            yield from _parts(part)
    elif hasattr(item, "to_dict"):
        for name, part in sorted(item.to_dict().items()):
            yield name.encode()
            yield from _parts(part)
    else:
        yield repr(item).encode()
