"""Deterministic batches of training and validation sets, and shards of data sets."""

import hashlib
import itertools
import math
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from molflt.files import counted, shown

MOST_SHARDS = 10_000
"""Largest number of parts of a data set."""
_Items = TypeVar("_Items", bound=Sized)
_Indices = NDArray[np.int64]
Fingerprint = dict[str, int | str]


@dataclass(eq=False, repr=False)
class SizeBucketedBatchSampler(Sampler[list[int]]):
    """Divides a data set into batches; an epoch contains every structure once.

    Without `shuffle`, structures are sorted by size. Rank r of w takes the batches r, r + w, ... of
    an epoch, so the number of batches may differ by one between ranks. With `start_step`, batches
    come from an endless sequence of epochs, which makes resuming exact.

    Args:
        natoms: number of atoms in each structure, of shape (structures,).
        batch_size: maximum number of structures in a batch.
        max_atoms: limit on the number of structures in a batch times the number of atoms in its
            largest structure, which bounds the memory of models that pad; None for no limit. A
            structure with more atoms forms a batch.
        shuffle: draw new batches for every epoch.
        bucket: number of random batches that are pooled, sorted by size and divided again, if
            `shuffle` is set; 1 keeps random batches. Larger values reduce padding, but make
            gradients noisier, because structures of equal size are also similar in other respects
            (docs/results/emt-sample.md).
        seed: random seed; a batch depends only on `seed`, the epoch and the sizes.
        rank: index of this process.
        world: number of processes.
        start_step: first step of an endless sequence, which has no length; None for one epoch.
    """

    natoms: ArrayLike
    batch_size: int
    max_atoms: int | None = None
    shuffle: bool = False
    bucket: int = 1
    seed: int = 0
    rank: int = 0
    world: int = 1
    start_step: int | None = None

    def __post_init__(self) -> None:
        self.sizes = np.asarray(self.natoms, dtype=np.int64)

    def batches(self, epoch: int = 0) -> list[_Indices]:
        """Returns the batches of all ranks in one epoch, as arrays of indices."""
        if not self.shuffle:
            return self._cut(np.argsort(self.sizes, kind="stable"))
        generator = np.random.default_rng([self.seed, epoch])
        order = generator.permutation(len(self.sizes))
        pool_size = self.bucket * self.batch_size
        batches: list[_Indices] = []
        for start in range(0, len(order), pool_size):
            pool = order[start : start + pool_size]
            batches += self._cut(pool[np.argsort(self.sizes[pool], kind="stable")])
        return [batches[i] for i in generator.permutation(len(batches))]

    def _cut(self, order: _Indices) -> list[_Indices]:
        """Divides indices, sorted by increasing size, into batches."""
        if self.max_atoms is None:
            return np.split(order, range(self.batch_size, len(order), self.batch_size))
        sizes = self.sizes[order]
        cuts = []
        start = 0
        for end in range(1, len(order)):
            count = end - start + 1  # including the structure at `end`, the largest so far
            if count > self.batch_size or count * sizes[end] > self.max_atoms:
                cuts.append(end)
                start = end
        return np.split(order, cuts)

    def __iter__(self) -> Iterator[list[int]]:
        number = (self.start_step or 0) * self.world + self.rank
        for epoch in itertools.count():
            batches = self.batches(epoch)
            while number < len(batches):
                yield batches[number].tolist()
                number += self.world
            if self.start_step is None:
                return
            number -= len(batches)  # continues in the next epoch

    def __len__(self) -> int:
        if self.start_step is not None:
            raise TypeError("an endless sequence of batches has no length")
        return len(range(self.rank, len(self.batches()), self.world))


class BatchedData(Generic[_Items]):
    """Base class for data modules. Batches depend only on the data, the seed and the step.

    Subclasses open each data set in `open`, or all of them in `setup`.

    Args:
        batch_size: number of items in a batch, per device.
        workers: number of processes that prefetch data; 0 reads in the main process.
        sources: sources of "train", "val" and optionally "test"; None for an unused source.

    Attributes:
        seed: seed of the random order of the training items.
        start_step: step at which training starts.
        datasets: open data sets, keyed by use.
        kept: folder with the `files` of a resumed run, or those that the first process of the run
            has written; None for a new run.
        initial: summary of the training data of the initial weights, or None.
        items: plural noun for the items of a batch.
        max_size: limit on the number of items in a batch times the size of the largest item.
        bucket: see `SizeBucketedBatchSampler`.
        collate: function that makes a batch from a list of items; None for torch's default.
    """

    items: ClassVar[str] = "items"
    max_size: int | None = None
    bucket: int = 1
    collate: Callable[[list[object]], object] | None = None

    def __init__(
        self, batch_size: int, workers: int = 0, sources: Mapping[str, object] | None = None
    ) -> None:
        self.sources = {use: str(path) for use, path in (sources or {}).items() if path is not None}
        self.batch_size = batch_size
        self.workers = workers
        self.seed = 0
        self.start_step = 0
        self.datasets: dict[str, _Items] = {}
        self.kept: Path | None = None
        self.initial: Any = None

    def setup(self, stage: str = "fit") -> None:
        """Opens the data sets that are not open yet; skips "test" in stage "fit"."""
        for use in self.sources:
            if use not in self.datasets and (use != "test" or stage != "fit"):
                self.datasets[use] = self.open(use)

    def open(self, use: str) -> _Items:
        """Opens one data set; "train" is opened first and sets, for instance, the vocabulary."""
        raise NotImplementedError

    def describe(self) -> list[str]:
        """Describes each data set in one phrase."""
        return [f"{use} {self._described(use)}" for use in self.datasets]

    def _described(self, use: str) -> str:
        return counted(len(self.datasets[use]), self.items.removesuffix("s"))

    def sizes(self) -> dict[str, int]:
        """Returns the arguments of the model's constructor that depend on the data."""
        return {}

    def files(self) -> dict[str, bytes]:
        """Returns the contents of the files that a run keeps for its model, keyed by file name."""
        return {}

    def fingerprints(self) -> dict[str, Fingerprint]:
        """Returns, for each open data set, the number of items and a digest."""
        return {
            use: {self.items: len(dataset), "sha256": self._digest(use)}
            for use, dataset in self.datasets.items()
        }

    def _digest(self, use: str, most: int | None = None) -> str:
        """Returns a digest of all items, or of `most` evenly spaced items."""
        dataset = cast("Sequence[object]", self.datasets[use])
        count = len(dataset) if most is None else min(most, len(dataset))
        digest = hashlib.sha256()
        for i in range(count):
            for content in _bytes_in(dataset[i * len(dataset) // count]):
                digest.update(content)
        return digest.hexdigest()

    def train_dataloader(self, rank: int = 0, world: int = 1) -> DataLoader[object]:
        """Returns an endless loader that begins at step `start_step`."""
        return self._loader("train", self._sampler("train", rank, world, self.start_step))

    def batches_in(self, epochs: int) -> int:
        """Returns the total number of training batches in `epochs` epochs on all ranks."""
        sampler = self._sampler("train")
        if sampler.max_atoms is None:
            return epochs * len(sampler)
        return sum(len(sampler.batches(epoch)) for epoch in range(epochs))

    def val_dataloader(self, rank: int = 0, world: int = 1) -> DataLoader[object]:
        """Returns a loader for one pass over the validation set, divided among the ranks."""
        if (batches := len(self._sampler("val"))) < world:
            raise ValueError(
                f"expected a validation batch for each of {world} processes; got {batches} batches "
                f"of {self.batch_size} {self.items}; decrease --data.batch_size"
            )
        return self._loader("val", self._sampler("val", rank, world))

    def _sampler(
        self, use: str, rank: int = 0, world: int = 1, start_step: int | None = None
    ) -> SizeBucketedBatchSampler:
        return SizeBucketedBatchSampler(
            self._lengths(use),
            self.batch_size,
            self.max_size,
            shuffle=use == "train",
            bucket=self.bucket,
            seed=self.seed,
            rank=rank,
            world=world,
            start_step=start_step,
        )

    def _lengths(self, use: str) -> ArrayLike:
        """Returns the size of each item, of shape (items,)."""
        return np.ones(len(self.datasets[use]))

    def _loader(self, use: str, batches: SizeBucketedBatchSampler) -> DataLoader[object]:
        return DataLoader(
            cast("Dataset[object]", self.datasets[use]),
            batch_sampler=batches,
            collate_fn=self.collate,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=_outlast_signals,
        )


def _outlast_signals(_: int) -> None:
    """Lets a worker end only with its parent, which saves its state after signals to a run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "alarm"):  # not on Windows
        for signum in (signal.SIGHUP, signal.SIGUSR1):
            signal.signal(signum, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(60))  # Python may also have sent it
    if hasattr(signal, "sigwaitinfo"):  # on Linux, to know the sender
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_await_parent, daemon=True).start()
    parent = parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(0)  # the parent died before torch, which ends orphans, looks for it


def _await_parent() -> None:
    parent = parent_process()  # torch ends the worker if it has died
    while parent and signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
        pass
    os._exit(0)


def _bytes_in(item: object) -> Iterator[bytes]:
    if isinstance(item, torch.Tensor):
        yield f"{item.dtype}{tuple(item.shape)}".encode()
        yield item.contiguous().numpy().tobytes()
    elif isinstance(item, tuple | list):
        for part in item:
            yield from _bytes_in(part)
    elif hasattr(item, "to_dict"):
        for name, part in sorted(item.to_dict().items()):
            if name == "y_baseline" and part.isnan().all():  # absent in earlier versions
                continue
            yield name.encode()
            yield from _bytes_in(part)
    else:
        yield repr(item).encode()


class Shard(NamedTuple):
    """Part of a data set; the sizes of all parts differ by at most one batch."""

    number: int
    """number of this part, from 1 to `total`"""
    total: int

    @classmethod
    def of(cls, text: str) -> Self:
        """Parses text such as "2/8", the second of eight parts."""
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
        number, total = (int(match[1]), int(match[2])) if match else (0, 0)
        if not 1 <= number <= total <= MOST_SHARDS:
            raise ValueError(
                f"option --shard; expected I/N with 1 <= I <= N <= {MOST_SHARDS}, such as 2/8; got "
                f"{shown(text)}"
            )
        return cls(number, total)

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"

    def path(self, out: Path) -> Path:
        """Returns the path of this shard of an output file."""
        return out.with_name(f"{out.stem}.{self.number}-of-{self.total}{out.suffix}")

    def indices(self, natoms: ArrayLike, batch_size: int) -> NDArray[np.int64]:
        """Returns the sorted indices of the structures in this shard, which form whole batches.

        `natoms` (structures,) contains the number of atoms in each structure of the data set.
        """
        batches = math.ceil(len(np.asarray(natoms)) / batch_size)
        if self.total > batches:  # raised for every shard, because shards are merged together
            raise ValueError(
                f"option --shard {self}: expected no more shards than batches; got {batches:,} "
                f"batches of {batch_size} structures; use fewer shards or a smaller --batch_size"
            )
        part = SizeBucketedBatchSampler(natoms, batch_size, rank=self.number - 1, world=self.total)
        return np.sort(np.concatenate([*part])).astype(np.int64)


def held_out(labels: Tensor, fraction: float, source: Path, items: str) -> Tensor:
    """Returns a mask (n,) that selects the last rows of each class.

    `labels` (n,) contains the class of each row. `fraction` is the share of rows to select in each
    class, rounded down. `source` and `items` describe rows in messages.
    """
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = (labels == label).nonzero()[:, 0]
        count = int(round(fraction * len(members), 6))  # 0.29 * 100 is 28.999999999999996
        held[members[len(members) - count :]] = True
    if not bool(held.any()) or bool(held.all()):
        raise ValueError(
            f"{source}: expected a data.val_fraction that leaves {items} for training and for "
            f"validation; got {fraction} of {len(labels):,} {items}"
        )
    return held
