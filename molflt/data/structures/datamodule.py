"""Batches of structures for training and validation."""

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from molflt.atoms import Batch, Data, symbol
from molflt.data.batches import BatchedData, Fingerprint
from molflt.data.structures import Reading, Structures, labels
from molflt.data.structures.base import Tags, quantity_of, with_bar, without
from molflt.data.structures.domain import DOMAIN, Domain
from molflt.data.structures.geometry import Survey, equal_structures, one_tagged, overlaps_of
from molflt.data.structures.sources import DataSet
from molflt.data.structures.store import StructureStore
from molflt.files import is_first_process


class _Surveyed(NamedTuple):
    domain: Domain  # of the training split and of the initial weights
    copies: list[int]  # sids of validation structures that are also in the training split
    charged: dict[str, list[int]]  # indices of structures with a total charge, by use
    untagged: dict[str, list[int]]  # indices of structures without tags, by use


class IS2REData(BatchedData[Structures]):
    """Batches of structures with relaxed energies.

    Args:
        root: folder of the data set, with a file or a folder per split, or one file of any readable
            format, which is split at random with `split_seed`.
        train_split: split to train on.
        val_split: split to validate on.
        batch_size: number of structures in a batch, per device.
        max_atoms: limit on the number of structures in a batch times the number of atoms in the
            largest structure; null for no limit.
        bucket: number of random batches that are pooled and divided again by size, for models that
            pad. 1 keeps random batches, with which models learn faster per step
            (docs/results/emt-sample.md).
        workers: number of processes that prefetch data; 0 reads in the main process.
        skip_bad: skip and count invalid structures, and structures with missing or implausible
            labels, instead of stopping at the first of them.
        val_fraction: share of the structures in one file to validate on; null means 0.1.
        split_seed: seed of the random split of one file. Runs of an ensemble must share it and
            differ in `seed`; otherwise, members are validated on each other's training structures.
        energy_key: name of the energy, in eV, in ASE's formats; null for y_relaxed, else energy
            (potentials: energy, else REF_energy).
        tags: convention of the tags in files that ASE reads: oc20 (0 subsurface, 1 surface, 2
            adsorbate), or ase (ase.build's layer numbers from the top, 1, 2, ..., and 0 for
            adsorbates); guess determines tags from the geometry, in any source.
        allow_duplicates: accept validation structures with the elements, charge, cell and positions
            of a training structure, which are otherwise rejected.
        baseline_key: name of the energy, in eV, from a cheaper method, such as a universal
            potential; y_baseline in compact stores. The model learns the difference from this
            energy, which is added to predictions; null disables this.
    """

    items = "systems"
    datasets: dict[str, Structures]
    initial: Domain | None = None  # domain of the initial weights, if known

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
        val_fraction: float | None = None,
        split_seed: int = 0,
        energy_key: str | None = None,
        tags: Tags = "oc20",
        allow_duplicates: bool = False,
        baseline_key: str | None = None,
    ) -> None:
        super().__init__(batch_size, workers)
        self.data_set = DataSet(Path(root), train_split, val_split, val_fraction, split_seed)
        self.reading = Reading(energy_key, tags, baseline_key=baseline_key)
        self.splits = {"train": train_split, "val": val_split}
        self.max_size = max_atoms
        self.bucket = bucket
        self.skip_bad = skip_bad
        self.allow_duplicates = allow_duplicates

    def setup(self, stage: str = "fit") -> None:
        if self.datasets.keys() >= self.splits.keys():
            return
        surface = None if self.initial is None else self.initial.surface  # for guessed tags
        data = self.data_set._replace(reading=self.reading._replace(surface=surface))
        self._refuse_options(data)
        opened = data.open(self.splits.values(), self.skip_bad)
        is_first = is_first_process()
        if is_first:
            for dataset in opened.values():
                dataset.verify()
        labeled = self._labeled(opened)
        for use, split in self.splits.items():
            dataset = labeled[split]
            if len(dataset) == 0:
                reason = f": {dataset.bad[0][1]}" if dataset.bad else ""
                raise ValueError(
                    f"{dataset.path}: split {split!r} is empty; expected at least one structure; "
                    f"got 0 ({len(dataset.bad)} skipped as invalid{reason})"
                )
            self.datasets[use] = dataset
            largest = int(dataset.natoms.argmax())
            if self.max_size is not None and dataset.natoms[largest] > self.max_size:
                raise ValueError(
                    f"{dataset.path}: sid {int(dataset[largest].sid)}: expected at most "
                    f"data.max_atoms={self.max_size} atoms; got {dataset.natoms[largest]}"
                )
        skipped = dict.fromkeys(dataset.skipped() for dataset in self.datasets.values())
        for text in filter(None, skipped):
            warnings.warn(text, stacklevel=3)
        train_set, val_set = (self.datasets[use] for use in self.splits)
        if is_first and train_set is val_set:
            warnings.warn(
                f"{val_set.path}: training and validation use the same structures; errors say "
                "nothing about other structures; choose another split with --data.val_split",
                stacklevel=3,
            )
        unused = {dataset.path: self._unused(dataset) for dataset in opened.values()}
        if names := dict.fromkeys(chain.from_iterable(unused.values())):
            path = next(path for path, found in unused.items() if found)
            warnings.warn(f"{path}: unused labels: {', '.join(names)}", stacklevel=3)

    def _refuse_options(self, data: DataSet) -> None:
        """Rejects options for one file if the root is a folder of splits, and vice versa."""
        if data.is_one:
            names = ["train", "val"]
            reason = "is for a folder of splits; got one file, split by data.split_seed"
        else:
            names = ["val_fraction", "split_seed"]
            reason = "is for one file; got a folder of splits"
        for name in names:
            if (value := getattr(data, name)) != DataSet._field_defaults[name]:
                option = f"{name}_split" if name in ("train", "val") else name
                raise ValueError(f"{data.root}: data.{option}={value} {reason}; remove it")

    def _labeled(self, opened: Mapping[str, Structures]) -> dict[str, Structures]:
        """Rejects structures with missing or implausible labels (with `skip_bad`, skips them)."""
        energies = {split: part.y_relaxed for split, part in opened.items() if len(part)}
        natoms = {split: opened[split].natoms for split in energies}
        labeled = dict(opened)
        kind: labels.EnergyKind | None = "unknown" if quantity_of(opened.values()) else None
        is_one_file = len({part.path for part in opened.values()}) == 1
        if kind is None and energies and is_one_file:
            joined = (np.hstack([*parts.values()]) for parts in (energies, natoms))
            kind = labels.energy_kind(*joined)
        for split, known in energies.items():
            dataset = opened[split]
            limits = partial(labels.limit_in, dataset)
            faults = labels.label_faults(known, natoms[split], True, kind=kind, limits=limits)
            if key := self.reading.baseline_key:
                reason = f"data.baseline_key={key} must be a finite energy in eV; got none"
                absent = np.flatnonzero(~np.isfinite(dataset.y_baseline)).tolist()
                faults = dict.fromkeys(absent, reason) | faults
            advice = "correct the labels, or leave these structures out with --data.skip_bad"
            if np.isnan(known).all():
                advice = "store energies and structures in one file, such as .extxyz, as y_relaxed"
            labeled[split] = without(dataset, faults, dataset.hint or advice)
        train, val = self.splits.values()
        if kind is None and train in energies and val in energies:
            learned = labels.energy_kind(energies[train], natoms[train])
            if text := labels.other_kind(energies[val], natoms[val], learned):
                warnings.warn(f"{opened[val].path}: {text}", stacklevel=4)
        return labeled

    def targets(self) -> np.ndarray:
        """Returns the training energies that the model learns, in eV: labels minus the baseline."""
        self.setup()
        dataset = self.datasets["train"]
        has_baseline = self.reading.baseline_key is not None
        return dataset.y_relaxed - (dataset.y_baseline if has_baseline else 0.0)

    def refuse_copies(self) -> None:
        """Rejects validation structures that also occur in the training set, unless allowed."""
        copies, val = self._surveyed.copies, self.datasets["val"]
        if not copies:
            return
        text = (
            f"{val.path}: {len(copies)} of {len(val)} validation structures are also in training, "
            f"for instance sid {copies[0]}; errors do not apply to other structures"
        )
        if not self.allow_duplicates:
            raise ValueError(
                f"{text}; remove them from a split, or set --data.allow_duplicates true"
            )
        warnings.warn(text, stacklevel=3)

    def refuse_charges(self) -> None:
        """Rejects structures with a total charge."""
        rest = "only potentials with --model.total_charge true read it; remove them"
        self._refuse(self._surveyed.charged, "a total charge", f"expected 0, because {rest}")

    def expect_tags(self) -> None:
        """Rejects structures without tags, for which some readouts are not defined."""
        guess = "" if self.reading.tags == "guess" else "add --data.tags guess, "
        expected = "expected 1 for surface and 2 for adsorbate atoms"
        rest = f"{guess}remove them, or use --model.readout all for total energies"
        self._refuse(self._surveyed.untagged, "no tags", f"{expected}; {rest}")

    def _refuse(self, found: dict[str, list[int]], what: str, rest: str) -> None:
        for use, indices in found.items():
            if indices:
                dataset, first = self.datasets[use], indices[0]
                raise ValueError(
                    f"{dataset.path}: {len(indices)} of {len(dataset)} structures have {what}, for "
                    f"instance sid {dataset.name(first, int(dataset[first].sid))}; {rest}"
                )

    def _unused(self, dataset: Structures) -> list[str]:
        """Returns the names of labels that the model does not learn."""
        names = [name for name, field in dataset.labels.items() if field != "y_relaxed"]
        if self.reading.baseline_key is None and len(dataset) and dataset[0].y_baseline.isfinite():
            names.append("y_baseline")
        return names

    def describe(self) -> list[str]:
        return [f"{self.splits[use]} {self._described(use)}" for use in self.datasets]

    def _described(self, use: str) -> str:
        dataset = self.datasets[use]
        bad = f", {len(dataset.bad)} bad skipped" if dataset.bad else ""
        return f"{super()._described(use)} ({int(dataset.natoms.sum()):,} atoms{bad})"

    def files(self) -> dict[str, bytes]:
        """Returns domain.json, the domain of the training split and of known initial weights."""
        return {DOMAIN: self._surveyed.domain.to_bytes()}

    def elements(self) -> list[int]:
        """Returns the atomic numbers in the training split."""
        return sorted(self._surveyed.domain.elements.all)

    @cached_property
    def _surveyed(self) -> _Surveyed:
        """Results of one pass over both splits, which also warns about implausible structures."""
        self.setup()
        train, val = self.datasets["train"], self.datasets["val"]
        of_train, of_val = Survey(), Survey()
        domain = Domain.of(train, of_train)
        if self.reading.baseline_key is not None:
            domain = replace(domain, baseline=train.baseline or None)
            made = "; ".join(dict.fromkeys(filter(None, (train.baseline, val.baseline))))
            if "; " in made:
                expected = "expected one calculator with one set of options"
                text = f"{train.path}: the baseline energies are from {made}; {expected}"
                warnings.warn(f"{text}; compute them again for all structures", stacklevel=4)
        if val is not train:
            for record in with_bar(val, "reading positions"):
                of_val(record)
        for use, survey in (("train", of_train), ("val", of_val)):
            if sids := survey.overlapping:
                name = f"{self.datasets[use].path}: split {self.splits[use]!r}"
                warnings.warn(overlaps_of(name, sids, len(self.datasets[use])), stacklevel=4)
        if self.reading.tags != "any" and (sids := of_train.one_tag):
            warnings.warn(f"{train.path}: {one_tagged(sids, len(train))}", stacklevel=4)
        equal = equal_structures(np.array([*of_train.features, *of_val.features]))
        is_copy = np.isin(equal[len(train) :], equal[: len(train)])
        copies = [of_val.sids[i] for i in np.flatnonzero(is_copy)]
        if self.initial is not None:
            domain = domain.after(self.initial)
            if self.reading.tags == "guess":  # evaluation and prediction guess the same tags
                domain = replace(domain, surface=self.initial.surface)
        charged = {"train": of_train.charged, "val": of_val.charged}
        untagged = {"train": of_train.untagged, "val": of_val.untagged}
        return _Surveyed(domain, copies, charged, untagged)

    def fingerprints(self) -> dict[str, Fingerprint]:
        return {
            use: {**fingerprint, "atoms": int(self.datasets[use].natoms.sum())}
            for use, fingerprint in super().fingerprints().items()
        }

    def _digest(self, use: str, most: int | None = None) -> str:
        dataset = self.datasets[use]
        if not isinstance(dataset, StructureStore) or dataset.bad:
            return super()._digest(use, most)
        digest = hashlib.sha256()
        for name, column in sorted(dataset.columns.items()):
            digest.update(f"{name}{column.dtype}{column.shape}".encode())
            digest.update(np.ascontiguousarray(column).data)
        return digest.hexdigest()

    def normalizer(self) -> tuple[float, float]:
        """Returns the mean and standard deviation (1 instead of 0) of `targets`, in eV."""
        energies = self.targets()
        spread = labels.beyond_rounding(float(energies.std()), energies)
        return float(energies.mean()), spread or 1.0

    def refuse_totals(self) -> None:
        """Rejects training energies that look like total energies."""
        self.setup()
        dataset = self.datasets["train"]
        energies, natoms = self.targets(), dataset.natoms
        minus, advice = "", "check the unit, subtract the energies of slab and molecule, or "
        if key := self.reading.baseline_key:
            minus, advice = f" minus {key}", "check the baseline's tags and calculator, or "
        if not dataset.quantity and labels.energy_kind(energies, natoms) == "total":
            raise ValueError(
                f"{dataset.path}: y_relaxed{minus} looks like total energies; expected adsorption "
                f"energies; got {labels.per_atom(energies, natoms):.1f} eV per atom; {advice}use "
                "--model.readout all with --task.references fit or --task.references none"
            )

    def expect_slabs(self, option: str) -> None:
        """Rejects an option for slabs if no training structure is an adsorbate on a slab."""
        domain, dataset = self._surveyed.domain, self.datasets["train"]
        if not (domain.adsorbate_atoms and any("xy" in axes for axes in domain.periodic)):
            raise ValueError(
                f"{dataset.path}: no structure has tags and is periodic along x and y; expected "
                f"adsorbates on slabs for {option}; add --data.tags guess, or remove it"
            )

    def expect_relaxed(self, option: str) -> None:
        """Warns about missing relaxed training positions; raises ValueError if all are missing."""
        known, dataset = self._surveyed.domain.relaxed, self.datasets["train"]
        if not known:
            raise ValueError(
                f"{dataset.path}: no structure has relaxed positions; expected pos_relaxed for "
                f"{option}, which moves structures toward it; remove the option"
            )
        if known < len(dataset):
            warnings.warn(
                f"{dataset.path}: {len(dataset) - known:,} of {len(dataset):,} structures have no "
                f"relaxed positions; {option} has no effect on them",
                stacklevel=2,
            )

    def element_energies(
        self,
        references: Path | None = None,
        of_adsorbates: bool = False,
        explained: np.ndarray | float = 0.0,
    ) -> labels.ElementEnergies:
        """Fits an energy for each element to the training split; warns if some are undetermined.

        `explained`, of shape (structures,) in eV, is subtracted from the labels before the fit.
        """
        self.setup()
        train, val = self.datasets["train"], self.datasets["val"]
        given = None if references is None else labels.read_element_energies(references)
        fit = labels.fit_element_energies(train, given, of_adsorbates, self.targets() - explained)
        if fit.undetermined:
            warnings.warn(
                f"{train.path}: compositions leave {fit.undetermined} of "
                f"{int(fit.present.sum())} element energies undetermined; energies of structures "
                "with other ratios of these elements will be wrong",
                stacklevel=2,
            )
        atoms = val.compositions(np.arange(len(val)), of_adsorbates)
        present = np.asarray(atoms.any(axis=0))
        if given is not None:
            labels.expect_elements(str(val.path), present, given)
        elif (missing := ~fit.present & present).any():
            names = ", ".join(map(symbol, np.flatnonzero(missing)))
            warnings.warn(
                f"{val.path}: no reference energy for {names}, which the training split does "
                "not contain; it is missing from the predicted energies",
                stacklevel=2,
            )
        return fit

    @staticmethod
    def collate(items: list[Data]) -> Batch:
        from torch_geometric.data import Batch

        return Batch.from_data_list(items)

    def _lengths(self, use: str) -> np.ndarray:
        return self.datasets[use].natoms
