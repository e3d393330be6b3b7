"""Data sets to evaluate: the data of a run or other structures."""

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
from molflt.data.structures.domain import Domain, domain_of
from molflt.data.structures.sources import VAL_SPLITS, DataSet, exists, is_same
from molflt.evaluation.ensemble import EnsembleRegressor
from molflt.evaluation.predictions import check_structures, domain_for
from molflt.evaluation.results import is_within
from molflt.files import warn
from molflt.training.config import Config, read_config
from molflt.training.recipes import Recipe
from molflt.training.run_folder import read_provenance


def warn_of_labels(split: str, dataset: Structures, faults: Mapping[int, str]) -> None:
    """Warns about the first implausible label of a split; `faults` maps indices to reasons."""
    if faults:
        index, reason = next(iter(faults.items()))
        warn(
            f"{split}: sid {int(dataset[index].sid)}: {reason}; the errors include {len(faults)} "
            "such structures; remove them with molflt data convert --skip-bad"
        )


class EvaluationData:
    """Data set on which a run is evaluated.

    If the run was trained on a single file, only the validation part of this file is evaluated. Any
    other file is evaluated as a whole, as one split with the name of the file.

    Args:
        run, config: folder and configuration of the run.
        splits: names of splits; by default OC20's four validation splits and the validation split
            of the run, if they exist.
        data: folder of a data set, or a file, which is evaluated as a whole; by default the data of
            the run without the structures that training skipped.
        skip_bad: skip and list structures that cannot be used.
        energy_key: key of the energy (in eV) in files read by ASE, which must contain it; by
            default the key used in training; null selects the usual keys, such as energy.
        reading: further options for reading files.

    Attributes:
        data: the data set to evaluate.
        own: the training data of the run.
        is_whole: True for a single file that is not the data of the run.
        splits: names of the splits to evaluate.
        learned: name of the training split, or "" for a file that is not part of the own data.
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
                f"{self.own.root}: no such folder or file; expected the data.root of {run}; run "
                "the command in the folder where the run was trained, or pass --data"
            )
        options = {"energy_key": energy_key, **reading}
        changed = {name: value for name, value in options.items() if value != AS_TRAINED}
        new_reading = self.own.reading._replace(**changed)
        if new_reading.tags == "guess" and (domain := self.domain()) is not None:
            new_reading = new_reading._replace(surface=domain.surface)
        path = self.own.root if data is None else Path(data)
        own = _own_data(self.own, path)
        other = self.own._replace(root=path, val_fraction=None)
        self.data = (other if own is None else own)._replace(reading=new_reading)
        self._own_skip_bad = skip_bad or bool(config["data"].get("skip_bad"))
        self.skip_bad = skip_bad if own is None else self._own_skip_bad
        self.is_whole = own is None and self.data.is_one
        self.splits = _splits_of(self.data, self.is_whole, splits or [])
        is_other = self.is_whole and not is_within(path, self.own.root)
        self.learned = "" if is_other else self.own.train
        missing = [split for split in VAL_SPLITS if split not in self.splits]
        by_default = not splits and len(self.splits) > 1
        self.absent = f"missing splits: {', '.join(missing)}" if by_default and missing else ""

    def open(self, model: nn.Module, domain: Domain | None = None) -> dict[str, Structures]:
        """Opens and returns splits, and warns about skipped structures; see `check_structures`."""
        runs = model.data if isinstance(model, EnsembleRegressor) else {self.run: self.own}
        self._expect_same_unseen(runs)
        if self.is_whole:
            whole = self.data.opened(self.data.root, self.skip_bad)
            opened = dict.fromkeys(self.splits, whole)
        else:
            if self.data.is_one:
                for run, trained_on in runs.items():
                    self._expect_held_out(run, trained_on)
            opened = self.data.open(self.splits, self.skip_bad)
        return {name: check_structures(split, model, domain) for name, split in opened.items()}

    def _expect_same_unseen(self, runs: Mapping[Path, DataSet]) -> None:
        """Raises ValueError if only some runs of an ensemble were trained on a split."""
        for split in self.splits:
            trained = [
                run
                for run, data in runs.items()
                if is_within(self.data.root, data.root)
                and ((data.is_one and self.is_whole) or data.train == split)
            ]
            if 0 < len(trained) < len(runs):
                raise ValueError(
                    f"{trained[0]}: was trained on {split} of {self.data.root}, unlike other runs "
                    "of this ensemble; expected splits on which all runs or no runs were trained; "
                    "select other splits with --splits, or other structures with --data"
                )

    def _expect_held_out(self, run: Path, data: DataSet) -> None:
        """Raises ValueError if a run, with this training data, saw any structure to evaluate."""
        held_out = read_provenance(run).get("data", {}).get("val")
        if not held_out:
            return  # unknown without last.ckpt
        config, domain = read_config(run), domain_of([run])

        def is_held_out(split: DataSet) -> bool:
            options = config["data"] | {"root": self.data.root}
            options |= {"split_seed": split.split_seed, "val_fraction": split.val_fraction}
            batches = Recipe.of(config).load("data")(**options)
            batches.initial = domain and next(iter(domain.initial), None)
            with warnings.catch_warnings(), redirect_stderr(io.StringIO()), suppress(ValueError):
                warnings.simplefilter("ignore")
                batches.setup()  # may fail with the options of a different run
            return bool(batches.fingerprints().get("val") == held_out)

        root = self.data.root
        same_file = data.root in (self.own.root, root) or is_same(data.root, root)
        # another file may be a copy, which was split with the options of its own run
        if not is_held_out(self.own) and (same_file or is_held_out(data)):
            raise ValueError(
                f"{self.data.root}: {run} held out other structures and may have been trained on "
                "those to evaluate, because the file has changed since then, or data.split_seed or "
                "data.val_fraction differ from those of the first run; restore the file, train all "
                "runs with the same options, or pass unseen structures with --data"
            )

    def domain(self, model: nn.Module | None = None) -> Domain | None:
        """Returns the domain of the training data; None for runs from earlier versions."""
        domain = domain_of(model.data if isinstance(model, EnsembleRegressor) else [self.run])
        return domain if domain is None or model is None else domain_for(model, domain)

    def training_median(self) -> tuple[float | None, str]:
        """Returns the median training energy in eV, or None, and a line that explains it."""
        source = self.own if exists(self.own.root) else self.data
        key = self.data.reading.energy_key
        if self.data.root == self.own.root and key != self.own.reading.energy_key:
            expected = key or "y_relaxed or energy"
            return None, f"no baseline, because training used energies other than {expected}"
        try:
            if self.is_whole and source is self.data:
                raise FileNotFoundError(f"{self.own.root}: no such folder or file")
            dataset = source.open([source.train], self._own_skip_bad)[source.train]
        except FileNotFoundError as error:
            return None, f"no baseline, because the training split is missing: {error}"
        path, baseline_key = dataset.path, self.own.reading.baseline_key
        energies, kind, offset = dataset.y_relaxed, "training energies", ""
        if not np.isfinite(energies).any():
            return None, f"no baseline, because {path} has no labels"
        if baseline_key is not None:
            energies = energies - dataset.y_baseline
            kind, offset = f"training differences to {baseline_key}", f"{baseline_key} + "
            if not np.isfinite(energies).any():
                return None, f"no baseline, because {path} has no {baseline_key}"
        median = float(np.nanmedian(energies))
        return median, f"baseline: {offset}{median:.4f} eV, the median of the {kind} in {path}"


def _own_data(own: DataSet, path: Path) -> DataSet | None:
    """Returns the data of a run, which may have moved, if `path` leads to them; otherwise None."""
    if exists(own.root) or not exists(path):
        return own if is_same(own.root, path) else None
    moved = own._replace(root=path)
    if path.name != own.root.name or not moved.is_one:
        return None
    warn(
        f"{path}: assumed to be the training data {own.root}, which no longer exist; only its "
        f"{own.val} part is evaluated"
    )
    return moved


def _splits_of(data: DataSet, is_whole: bool, chosen: Sequence[str]) -> list[str]:
    """Returns the splits to evaluate, by default all validation splits that exist."""
    if is_whole:
        name = data.root.stem if data.root.exists() else "all"  # the matches of a pattern
        if chosen and list(chosen) != [name]:
            raise ValueError(
                f"{data.root}: a single file has no splits; got --splits {' '.join(chosen)}; omit "
                "--splits, or specify a folder with --data"
            )
        return [name]
    if chosen:
        return list(dict.fromkeys(chosen))
    if data.is_one:
        return [data.val]
    usual = list(dict.fromkeys([*VAL_SPLITS, data.val]))
    existing = [split for split in usual if data.has(split)]
    if not existing:
        data.open(usual[:1])  # raises an error that lists the splits that exist
    return existing
