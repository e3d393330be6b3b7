"""Data sets: folders with a file for each split, or single files that are split at random."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Self, cast

import numpy as np

from molflt.data.structures import AS_IT_IS, Reading, Structures, open_dataset
from molflt.data.structures.parts import Part
from molflt.data.structures.sources import is_one_source, split_path


class DataSet(NamedTuple):
    """Root and splits of a data set.

    The root is a folder with a file or a folder for each split. Alternatively, it is one file, a
    pattern, or a folder of other files, which is split at random into `train` and `val`.
    """

    root: Path
    train: str = "train"
    """split to train on"""
    val: str = "val_id"
    """split to validate on"""
    val_fraction: float | None = None
    """share of one file for `val`; None for folders, or for the default 0.1"""
    split_seed: int = 0
    """seed of the random split"""
    reading: Reading = AS_IT_IS
    """interpretation of the entries in files that ASE reads"""
    trained: Reading = AS_IT_IS
    """`reading` of the training run, which sources without such options ignore"""

    @classmethod
    def of_run(cls, data: Mapping[str, object], seed: int) -> Self:
        """Returns the data set of a run; `seed` is the split seed of runs from version 0.1."""
        reading = Reading(**{name: data[name] for name in Reading._fields if name in data})  # type: ignore[arg-type]
        return cls(
            Path(str(data["root"])),
            str(data["train_split"]),
            str(data["val_split"]),
            cast("float | None", data.get("val_fraction")),
            cast("int", data.get("split_seed", seed)),
            reading,
            reading,
        )

    @property
    def is_one(self) -> bool:
        """True if the root contains structures without splits."""
        return is_one_source(self.root) and not (self.root.is_dir() and self.has(self.train))

    def has(self, split: str) -> bool:
        """Returns True if the folder contains a split with this name."""
        try:
            return split_path(self.root, split).exists()
        except FileNotFoundError:
            return False
        except ValueError:  # several splits have this name
            return True

    def open(self, splits: Iterable[str], skip_bad: bool = False) -> dict[str, Structures]:
        """Opens splits and returns them, keyed by name."""
        if not self.is_one:
            return {split: self._open(split_path(self.root, split), skip_bad) for split in splits}
        whole = self.whole(skip_bad)
        count = len(whole)
        order = np.random.default_rng([self.split_seed, count]).permutation(count)
        size = round(count * (self.val_fraction or 0.1))  # of the validation part
        size = min(count - 1, max(1, size))
        indices = {self.train: np.sort(order[size:]), self.val: np.sort(order[:size])}
        for split in splits:
            if split not in indices:
                raise FileNotFoundError(
                    f"{self.root}: no split {split!r}; expected {' or '.join(indices)}, the splits "
                    "of one file; use a folder with a file for each split"
                )
        return {split: Part(whole, indices[split]) for split in splits}

    def whole(self, skip_bad: bool = False) -> Structures:
        """Returns all structures of the single file."""
        return self._open(self.root, skip_bad)

    def _open(self, path: Path, skip_bad: bool) -> Structures:
        return open_dataset(path, skip_bad, self.reading, trained=self.trained)
