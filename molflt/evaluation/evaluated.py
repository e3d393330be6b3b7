"""Data sets to evaluate: the data of a run or other structures."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from molflt.data.structures import Structures
from molflt.data.structures.base import AS_TRAINED
from molflt.data.structures.data_set import DataSet
from molflt.data.structures.domain import Domain, domain_of
from molflt.data.structures.sources import exists, is_same
from molflt.data.structures.splits import VAL_SPLITS
from molflt.evaluation.ensemble import EnsembleRegressor
from molflt.evaluation.predictions import check_structures, domain_for
from molflt.evaluation.results import is_within
from molflt.files import warn
from molflt.training.config import Config, read_config
from molflt.training.recipes import Recipe
from molflt.training.run_folder import read_provenance


def warn_of_labels(split: str, dataset: Structures, faults: Mapping[int, str]) -> None:
    """Warns about the first implausible label of a split; `faults` maps indices to reasons."""
    for index, reason in list(faults.items())[:1]:
        warn(
            f"{split}: sid {int(dataset[index].sid)}: {reason}; the errors include {len(faults)} "
            "such structures; remove them with molflt data convert --skip-bad"
        )


class EvaluationData:
    """Data set on which a run is evaluated.

    If the run was trained on a single file, only the validation part of this file is evaluated. Any
    other file is evaluated as a whole, as one split with the name of the file.

    Args:
        run: folder of the run.
        config: configuration of the run.
        splits: names of splits; by default OC20's four validation splits and the validation split
            of the run, if they exist.
        data: folder of a data set, or a file, which is evaluated as a whole; by default the data of
            the run without the structures that training skipped.
        skip_bad: skip and list structures that cannot be used.
        energy_key: key of the energy (in eV) in files read by ASE; by default the key used in
            training, if the source contains it; null selects the usual keys, such as energy.
        reading: further options for reading files.

    Attributes:
        absent: message about missing default splits, or an empty string.
    """

    def __init__(
        self,
        run: Path,
        config: Config,
        splits: list[str] | None = None,
        data: Path | None = None,
        skip_bad: bool = False,
        energy_key: str | None = AS_TRAINED,
        **reading: Any,
    ) -> None:
        self.run = run
        self.own = DataSet.of_run(config["data"], config["seed"])
        if data is None and not exists(self.own.root):
            raise FileNotFoundError(
                f"{self.own.root}: no such folder or file; expected the data.root of "
                f"{run / 'config.yaml'}; run the command in the folder where the run was trained, "
                "or specify the data with --data"
            )
        own, reading = self.own.reading, {"energy_key": energy_key, **reading}
        given = {name: value for name, value in reading.items() if value != AS_TRAINED}
        new = own._replace(**given)
        if new.tags == "guess" and (domain := self.domain()) is not None:
            new = new._replace(surface=domain.surface)
        self.data = self.own._replace(reading=new)
        self._own_skip_bad = skip_bad or bool(config["data"].get("skip_bad"))
        self.skip_bad = self._own_skip_bad
        self.absent = ""
        self.stem: str | None = None  # name of a single file that is not the data of the run
        if data is not None and not self._is_own(Path(data)):
            self.skip_bad = skip_bad
            self.data = self.data._replace(root=Path(data), val_fraction=None)
            if self.data.is_one:
                self.stem = self.data.root.stem
        self.splits = self._chosen(splits)

    def _is_own(self, data: Path) -> bool:
        """Returns True if `data` is the data of the run, even if the file was moved."""
        root = self.own.root
        if exists(root) or not exists(data):
            return is_same(root, data)
        if data.name != root.name or not self.own._replace(root=data).is_one:
            return False
        warn(
            f"{data}: assumed to be the training data {root}, which no longer exist; only its "
            f"{self.own.val} part is evaluated"
        )
        self.data = self.data._replace(root=data)
        return True

    def __str__(self) -> str:
        return str(self.data.root)

    def _chosen(self, splits: Sequence[str] | None) -> list[str]:
        if self.stem is not None:
            if splits and list(splits) != [self.stem]:
                raise ValueError(
                    f"{self.data.root}: a single file has no splits; got --splits "
                    f"{' '.join(splits)}; omit --splits, or specify a folder with --data"
                )
            return [self.stem]
        if splits:
            return list(dict.fromkeys(splits))
        if self.data.is_one:
            return [self.data.val]
        usual = list(dict.fromkeys([*VAL_SPLITS, self.data.val]))
        there = [split for split in usual if self.data.has(split)]
        if not there:
            self.data.open(usual[:1])  # raises an error that lists the splits that exist
        if missing := [split for split in VAL_SPLITS if split not in there]:
            self.absent = f"missing splits: {', '.join(missing)}"
        return there

    def open(self, model: nn.Module, domain: Domain | None = None) -> dict[str, Structures]:
        """Opens and returns splits, and warns about skipped structures; see `check_structures`."""
        runs = model.data if isinstance(model, EnsembleRegressor) else {self.run: self.own}
        self._expect_same_unseen(runs)
        if self.stem is not None:
            opened = {self.stem: self.data.whole(self.skip_bad)}
        else:
            for run, own in runs.items() if self.data.is_one else ():
                self._expect_held_out(run, own)
            opened = self.data.open(self.splits, self.skip_bad)
        return {split: check_structures(one, model, domain) for split, one in opened.items()}

    def _expect_same_unseen(self, runs: Mapping[Path, DataSet]) -> None:
        for split in self.splits:
            learned = [
                run
                for run, own in runs.items()
                if is_within(self.data.root, own.root)
                and ((own.is_one and self.stem is not None) or own.train == split)
            ]
            if 0 < len(learned) < len(runs):
                raise ValueError(
                    f"{learned[0]}: was trained on {split} of {self.data.root}, unlike other runs "
                    "of this ensemble; expected splits on which all runs or no runs were trained; "
                    "select other splits with --splits, or other structures with --data"
                )

    def _expect_held_out(self, run: Path, own: DataSet) -> None:
        """Raises ValueError if a run was trained on any of the structures to evaluate."""
        if not (held := read_provenance(run).get("data", {}).get("val")):
            return  # unknown in runs from earlier versions
        config = read_config(run)

        def holds(split: DataSet) -> bool:
            given = {"split_seed": split.split_seed, "val_fraction": split.val_fraction}
            options = config["data"] | given | {"root": self.data.root}
            batches = Recipe.of(config).load("data")(**options)
            with warnings.catch_warnings(), redirect_stderr(io.StringIO()), suppress(ValueError):
                warnings.simplefilter("ignore")
                batches.setup()  # may fail with the options of a different run
            return bool(batches.fingerprints().get("val") == held)

        same = own.root in (self.own.root, self.data.root) or is_same(own.root, self.data.root)
        if not holds(self.own) and (same or holds(own)):  # a copy of the file may have been split
            raise ValueError(
                f"{self.data.root}: {run} held out other structures and may have been trained on "
                "those to evaluate, because the file has changed since then, or data.split_seed or "
                "data.val_fraction differ from those of the first run; restore the file, train all "
                "runs with the same options, or pass unseen structures with --data"
            )

    def domain(self, model: nn.Module | None = None) -> Domain | None:
        """Returns the domain of the training data; None for runs from earlier versions."""
        found = domain_of(model.data if isinstance(model, EnsembleRegressor) else [self.run])
        return found if found is None or model is None else domain_for(model, found)

    def training_median(self) -> tuple[float | None, str]:
        """Returns the median training energy in eV, or None, and a line that explains it."""
        source = self.own if exists(self.own.root) else self.data
        key = self.data.reading.energy_key
        if self.data.root == self.own.root and key != self.own.reading.energy_key:
            named = key or "y_relaxed or energy"
            return None, f"no baseline, because training used energies other than {named}"
        try:
            if self.stem is not None and source is self.data:
                raise FileNotFoundError(f"{self.own.root}: no such folder or file")
            dataset = source.open([source.train], self._own_skip_bad)[source.train]
        except FileNotFoundError as error:
            return None, f"no baseline, because the training split is missing: {error}"
        energy, where = dataset.y_relaxed, dataset.path
        added, what = self.own.reading.baseline_key, "energies"
        absent = added if added and np.isfinite(energy).any() else "labels"
        if added is not None:
            energy, what = energy - dataset.y_baseline, f"differences to {added}"
        if not np.isfinite(energy).any():
            return None, f"no baseline, because {where} has no {absent}"
        median = float(np.nanmedian(energy))
        plus = f"{added} + " if added else ""
        return median, f"baseline: {plus}{median:.4f} eV, the median of the {what} in {where}"
