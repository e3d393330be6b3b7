"""Data sets to evaluate: the data of a run, or other structures."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from molflt.data.structures import Structures
from molflt.data.structures.base import AS_TRAINED
from molflt.data.structures.data_set import VAL_FRACTION, DataSet
from molflt.data.structures.domain import DOMAIN, Domain, read_domain
from molflt.data.structures.sources import exists, is_same
from molflt.data.structures.splits import VAL_SPLITS
from molflt.evaluation.ensemble import EnsembleRegressor
from molflt.evaluation.predictions import check_structures
from molflt.evaluation.results import is_within, warn
from molflt.graph.heads import by_contact
from molflt.training.config import Config, read_config
from molflt.training.recipes import Recipe
from molflt.training.run_folder import read_provenance

__all__ = ["EvaluationData", "warn_of_labels"]


def warn_of_labels(split: str, sids: NDArray[np.int64], faults: Mapping[int, str]) -> None:
    """Warns about the first implausible label of a split; `faults` contains reasons by index."""
    for index, reason in list(faults.items())[:1]:
        warn(
            f"{split}: sid {sids[index]}: {reason}; the errors include {len(faults)} such "
            "structures; remove them with molflt data convert --skip-bad"
        )


class EvaluationData:
    """Data set on which a run is evaluated.

    If the run was trained on a single file, only the validation part of this file is evaluated. Any
    other single file is evaluated as a whole, as one split with the name of the file.

    `data` is the value of --data. None means the data of the run, excluding structures that
    training omitted. `reading` contains options for reading files. The attribute `absent` is a line
    about missing default splits, or empty.
    """

    def __init__(
        self,
        run: Path,
        config: Config,
        data: Path | None,
        skip_bad: bool = False,
        **reading: Any,
    ) -> None:
        self.run, self.config = run, config
        self.own = DataSet.of_run(config["data"], config["seed"])
        if data is None and not exists(self.own.root):
            raise FileNotFoundError(
                f"{self.own.root}: no such folder or file; expected the data.root of "
                f"{run / 'config.yaml'}; start in the folder where the run was trained, or name "
                "the data with --data"
            )
        own = self.own.reading
        given = {name: value for name, value in reading.items() if value != AS_TRAINED}
        new = own._replace(**given)
        if new.tags == "guess" and (domain := self.domain()) is not None:
            new = new._replace(surface=domain.surface)
        self.data = self.own._replace(reading=new, trained=own)
        self._own_skip_bad = skip_bad or bool(config["data"].get("skip_bad"))
        self.skip_bad = self._own_skip_bad
        self.absent = ""
        self.stem: str | None = None  # name of a single file that is not the data of the run
        if data is not None and not self._is_own(Path(data)):
            self.skip_bad = skip_bad
            self.data = self.data._replace(root=Path(data), val_fraction=None)
            if self.data.is_one:
                self.stem = self.data.root.stem

    def _is_own(self, data: Path) -> bool:
        """Returns True if `data` is the data of the run, which may be a moved file."""
        root = self.own.root
        if exists(root) or not exists(data):
            return is_same(root, data)
        if data.name != root.name or not self.own._replace(root=data).is_one:
            return False
        warn(
            f"{data}: assumed to be the training data {root}, which no longer exist; only the part "
            f"{self.own.val} is evaluated"
        )
        self.data = self.data._replace(root=data)
        return True

    def __str__(self) -> str:
        return str(self.data.root)

    def choose(self, splits: Sequence[str] | None) -> list[str]:
        """Returns the splits to evaluate: `splits`, or the default splits that exist."""
        if self.stem is not None:
            if splits and list(splits) != [self.stem]:
                raise ValueError(
                    f"{self.data.root}: a single file has no splits; got --splits "
                    f"{' '.join(splits)}; omit --splits, or name a folder with --data"
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
        missing = [split for split in VAL_SPLITS if split not in there]
        if missing:
            self.absent = f"missing splits: {', '.join(missing)}"
        return there

    def open(
        self, splits: Sequence[str], model: nn.Module, domain: Domain | None = None
    ) -> dict[str, Structures]:
        """Returns structures by split, and warns about omissions; see `check_structures`."""
        if isinstance(model, EnsembleRegressor):
            if self.data.is_one and self.stem is None:
                self._expect_same_split(model)
            self._expect_same_unseen(splits, model)
        if self.stem is not None:
            opened = {self.stem: self.data.whole(self.skip_bad)}
        else:
            if self.data.is_one:
                self._expect_unchanged(self.run)
            opened = self.data.open(splits, self.skip_bad)
        return {split: check_structures(one, model, domain) for split, one in opened.items()}

    def _expect_same_split(self, model: EnsembleRegressor) -> None:
        first, here = self.own, self.data.root
        for run, member in model.data.items():
            shared = member.root in (first.root, here) or is_same(member.root, here)
            fractions = {one.val_fraction or VAL_FRACTION for one in (first, member)}
            if len(fractions) == 1 and member.split_seed == first.split_seed:
                if shared and run != self.run:
                    self._expect_unchanged(run)
                continue
            with suppress(ValueError):  # raised if the options of the run cannot read the file
                # also shared if one run used a copy of the other run's file
                shared = shared or bool(self._same_held_out(run))
            if shared:
                raise ValueError(
                    f"{first.root}: the runs of this ensemble held out different structures, with "
                    f"data.split_seed {first.split_seed} and {member.split_seed}, and would be "
                    "evaluated on their training structures; train all with the same "
                    "data.split_seed and data.val_fraction, or evaluate other structures with "
                    "--data"
                )

    def _expect_same_unseen(self, splits: Sequence[str], model: EnsembleRegressor) -> None:
        for split in splits:
            learned = [
                run
                for run, own in model.data.items()
                if is_within(self.data.root, own.root)
                and ((own.is_one and self.stem is not None) or own.train == split)
            ]
            if 0 < len(learned) < len(model.data):
                raise ValueError(
                    f"{learned[0]}: was trained on {split} of {self.data.root}, unlike other runs "
                    "of this ensemble; expected splits on which all runs or no runs were trained; "
                    "name other splits with --splits, or other structures with --data"
                )

    def _expect_unchanged(self, run: Path) -> None:
        if self._same_held_out(run) is False:
            raise ValueError(
                f"{self.data.root}: has changed since {run} was trained on it, and the held-out "
                "structures may include training structures; restore the file, or name a file of "
                "unseen structures with --data"
            )

    def _same_held_out(self, run: Path) -> bool | None:
        """Returns True if a run would still hold out the same structures, and None if unknown."""
        if not (held := read_provenance(run).get("data", {}).get("val")):
            return None
        config = self.config if run == self.run else read_config(run)
        seed = DataSet.of_run(config["data"], config["seed"]).split_seed
        more = {"root": self.data.root, "split_seed": seed}
        batches = Recipe.of(config).load("data")(**config["data"] | more)
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            batches.setup()
        return bool(batches.fingerprints()["val"] == held)

    def domain(self, model: nn.Module | None = None) -> Domain | None:
        """Returns the domain of the training data; None for runs of earlier versions."""
        path = self.run / DOMAIN
        found = read_domain(path)
        zero = (False, False) if model is None else by_contact(model)
        return None if found is None else replace(Domain.from_json(found, str(path)), zero=zero)

    def training_median(self) -> tuple[float | None, str]:
        """Returns the median of the energies learned in training, eV, and a line about it."""
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
        if added is not None:
            energy, what = energy - dataset.y_baseline, f"differences to {added}"
        if not np.isfinite(energy).any():
            return None, f"no baseline, because {where} has no labels"
        median = float(np.nanmedian(energy))
        plus = f"{added} + " if added else ""
        return median, f"baseline: {plus}{median:.4f} eV, the median of the {what} in {where}"
