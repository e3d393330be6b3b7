"""Training and validation data as Lightning wants them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import Dataset
from torch_geometric.data import Batch
from torch_geometric.loader import DataLoader

from molflt.data import open_dataset, relaxed_energies
from molflt.data.sampler import SizeBucketedBatchSampler, TrainingStream
from molflt.data.splits import split_path

__all__ = ["BatchedData", "IS2REData"]


class BatchedData(pl.LightningDataModule):
    """Batches of a training and a validation set, as a pure function of seed, epoch and step.

    A subclass fills `datasets` in `setup`, under "train" and "val".

    Args:
        batch_size: items in a batch, per device.
        workers: processes that read ahead; 0 reads in the main process.

    Attributes:
        seed: of the order of training items.
        start_step: step that training starts from; a checkpoint sets it.
        datasets: "train" and "val".
        items: what a batch consists of.

    Raises:
        ValueError: for a number outside its range.
    """

    items: ClassVar[str] = "items"
    # One process more than validation batches is no error: each item is counted once all the same
    allow_zero_length_dataloader_with_multiple_devices = True

    def __init__(self, batch_size: int, workers: int = 0) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"data.batch_size must be at least 1; got {batch_size}")
        if workers < 0:
            raise ValueError(f"data.workers must be at least 0; got {workers}")
        self.batch_size = batch_size
        self.workers = workers
        self.seed = 0
        self.start_step = 0
        self.datasets: dict[str, Any] = {}

    def describe(self) -> list[str]:
        """What the training and the validation set hold, one phrase each."""
        return [f"{use} {len(dataset):,} {self.items}" for use, dataset in self.datasets.items()]

    def sizes(self) -> dict[str, Any]:
        """What the data decide about the model: arguments of its constructor."""
        return {}

    def files(self) -> dict[str, bytes]:
        """Files, by name, without which the model cannot be used later; the run keeps them."""
        return {}

    def train_dataloader(self) -> DataLoader:
        """Endless batches from step `start_step` on."""
        trainer = self.trainer
        rank, world = (trainer.global_rank, trainer.world_size) if trainer else (0, 1)
        stream = TrainingStream(self._sampler("train", rank, world), self.start_step)
        return self._loader("train", stream)

    def val_dataloader(self) -> DataLoader:
        """One pass over the validation set; no item on two ranks."""
        trainer = self.trainer
        rank, world = (trainer.global_rank, trainer.world_size) if trainer else (0, 1)
        return self._loader("val", self._sampler("val", rank, world))

    def state_dict(self) -> dict[str, int]:
        """The position in the stream of batches is the number of steps taken."""
        return {"step": self.trainer.global_step if self.trainer else self.start_step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.start_step = int(state_dict["step"])

    def _sampler(self, use: str, rank: int, world: int) -> SizeBucketedBatchSampler:
        return SizeBucketedBatchSampler(
            np.ones(len(self.datasets[use])),  # all items have one size
            self.batch_size,
            shuffle=use == "train",
            seed=self.seed,
            rank=rank,
            world=world,
        )

    def _loader(self, use: str, batches: SizeBucketedBatchSampler | TrainingStream) -> DataLoader:
        dataset: Dataset[Any] = self.datasets[use]
        return DataLoader(
            dataset,
            batch_sampler=batches,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            pin_memory=torch.cuda.is_available(),
        )


class IS2REData(BatchedData):
    """Structures with relaxed energies, in batches.

    Args:
        root: folder of the data set, with a file or a folder per split.
        train_split: split to train on.
        val_split: split to validate on.
        batch_size: structures in a batch, per device.
        max_atoms: most padded atoms in a batch (its structures times the atoms of its largest one);
            null for no cap.
        bucket: random batches that are pooled and cut again by size, to pad less in training. 1:
            batches stay random, which learns faster per step (docs/results.md).
        workers: processes that read ahead; 0 reads in the main process.
        skip_bad: leave out records with NaN or infinite numbers, counted and listed, instead of
            stopping at the first one.
    """

    items = "systems"

    def __init__(
        self,
        root: Path,
        train_split: str = "train",
        val_split: str = "val_id",
        batch_size: int = 32,
        max_atoms: int | None = None,
        bucket: int = 1,
        workers: int = 0,
        skip_bad: bool = False,
    ) -> None:
        super().__init__(batch_size, workers)
        if bucket < 1:
            raise ValueError(f"data.bucket must be at least 1; got {bucket}")
        self.root = Path(root)
        self.splits = {"train": train_split, "val": val_split}
        self.max_atoms = max_atoms
        self.bucket = bucket
        self.skip_bad = skip_bad

    def setup(self, stage: str = "fit") -> None:
        """Opens both splits, once.

        Raises:
            ValueError: if a split is empty, or a structure exceeds `max_atoms`.
        """
        for use, split in self.splits.items():
            if use in self.datasets:
                continue
            path = split_path(self.root, split)
            dataset = open_dataset(path, skip_bad=self.skip_bad)
            if len(dataset) == 0:
                raise ValueError(
                    f"{path}: split {split!r} is empty; expected at least one structure; "
                    f"got 0 ({len(dataset.bad)} left out as bad)"
                )
            self.datasets[use] = dataset
            self._sampler(use, rank=0, world=1)

    def describe(self) -> list[str]:
        return [
            f"{self.splits[use]} {len(dataset):,} systems ({int(dataset.natoms.sum()):,} atoms"
            + (f", {len(dataset.bad)} bad left out)" if dataset.bad else ")")
            for use, dataset in self.datasets.items()
        ]

    def normalizer(self) -> tuple[float, float]:
        """Mean and standard deviation of the relaxed energies of the training split, eV.

        Raises:
            ValueError: naming the file and the sid of a structure without a finite label.
        """
        self.setup()
        dataset = self.datasets["train"]
        energies = relaxed_energies(dataset)
        missing = np.flatnonzero(~np.isfinite(energies))
        if len(missing):
            raise ValueError(_no_label(dataset.path, [int(dataset[int(missing[0])].sid)]))
        spread = float(energies.std())
        return float(energies.mean()), spread if spread > 0 else 1.0

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Refuses structures without a finite energy; a missing label must not count as zero.

        Raises:
            ValueError: naming the file and the sids.
        """
        finite = torch.isfinite(batch.y_relaxed)
        if not bool(finite.all()):
            use = "train" if self.trainer is None or self.trainer.training else "val"
            raise ValueError(_no_label(self.datasets[use].path, batch.sid[~finite].tolist()))
        return batch

    def _sampler(self, use: str, rank: int, world: int) -> SizeBucketedBatchSampler:
        dataset = self.datasets[use]
        try:
            return SizeBucketedBatchSampler(
                dataset.natoms,
                self.batch_size,
                self.max_atoms,
                shuffle=use == "train",
                bucket=self.bucket,
                seed=self.seed,
                rank=rank,
                world=world,
            )
        except ValueError as error:
            raise ValueError(f"{dataset.path}: {error}") from None


def _no_label(path: Path, sids: list[int]) -> str:
    shown = ", ".join(map(str, sids[:5])) + (", ..." if len(sids) > 5 else "")
    return (
        f"{path}: sid {shown}: y_relaxed must be a finite energy in eV; got none; "
        "train and validate on labeled splits, or convert the file without these records"
    )
