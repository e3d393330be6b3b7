"""Ensembles of trained runs that predict the mean energy of their members."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from molflt.atoms import Batch
from molflt.data.structures.base import Structures
from molflt.data.structures.sources import DataSet
from molflt.graph.heads import by_contact
from molflt.training.checkpoint import load_run
from molflt.training.config import Config, read_config

ENSEMBLE = "ensemble"
"""Name of the subfolder of the first run that contains the files of the ensemble."""

_RECIPE = "is2re"
_COMPARED = 256  # number of structures for which references are compared
_NEGLIGIBLE = 0.01  # negligible difference between references, in eV per atom


class EnsembleRegressor(nn.Module):
    """Mean of several energy regressors, which are evaluated one after another.

    Args:
        members: two or more models on the same device.
        data: training data by run, if known.

    Attributes:
        weights: SHA-256 digest of each member's weights.
    """

    def __init__(
        self, members: Sequence[nn.Module], data: Mapping[Path, DataSet] | None = None
    ) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.weights = tuple(map(digest_of, members))
        self.data = dict(data or {})

    def forward(self, batch: Batch) -> Mapping[str, Tensor]:
        """Predicts a batch; see `molflt.graph.EnergyRegressor`.

        Returns:
            "energy" (graphs,), the mean over members, and "energy_by_member" (graphs, members),
            both in eV. If all members predict these outputs, also the means over members of
            "displacement" (atoms, 3), in Å, and "adsorbate_energy" (atoms,), in eV.
        """
        outputs = [member(batch) for member in self.members]
        by_member = torch.stack([out["energy"].double() for out in outputs], dim=1)
        means = {
            name: torch.stack([out[name] for out in outputs]).mean(dim=0)
            for name in ("displacement", "adsorbate_energy")
            if all(name in out for out in outputs)
        }
        return {"energy": by_member.mean(dim=1), "energy_by_member": by_member, **means}


def load_ensemble(
    runs: Sequence[Path], checkpoint: str = "best", device: str = "cpu"
) -> tuple[EnsembleRegressor, Config]:
    """Loads several runs as one model; their seeds, data and configurations may differ.

    Returns the ensemble in evaluation mode and the configuration of the first run, with the
    `data.baseline_key` of any member. `checkpoint` is best or last; see
    `molflt.training.checkpoint.load_run` for `device`.
    """
    runs = [Path(run) for run in runs]
    first = runs[0]
    for run in runs:
        if (recipe := read_config(run)["recipe"]) != _RECIPE:
            raise ValueError(
                f"{run}: expected runs of recipe {_RECIPE} with --also; got {recipe}; omit --also"
            )
    models, configs = zip(*(load_run(run, checkpoint, device) for run in runs), strict=True)
    data = {
        run: DataSet.of_run(config["data"], config["seed"])
        for run, config in zip(runs, configs, strict=True)
    }
    baseline_keys = filter(None, (data_set.reading.baseline_key for data_set in data.values()))
    baseline = next(baseline_keys, None)
    configs[0]["data"]["baseline_key"] = baseline
    ensemble = EnsembleRegressor(models, data)
    digests = ensemble.weights
    for i, (run, model) in enumerate(zip(runs, models, strict=True)):
        reading = data[run].reading
        for option, value, expected in (
            ("data.baseline_key", reading.baseline_key or baseline, baseline),
            ("data.tags", reading.tags, data[first].reading.tags),
            ("model.readout=contact:", by_contact(model), by_contact(models[0])),
        ):
            if value != expected:
                raise ValueError(
                    f"{run}: trained with {option} {value}; expected {expected}, as in another run "
                    "of the ensemble; train all members in the same way"
                )
        if digests[i] in digests[:i]:
            raise ValueError(
                f"{run}: has the same weights as {runs[digests.index(digests[i])]}; expected "
                "different training runs in an ensemble"
            )
    return ensemble.eval(), configs[0]


def digest_of(model: nn.Module) -> str:
    """Returns the SHA-256 digest of the parameters; excludes buffers, which vary by version."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(weight.shape)} ".encode())
        digest.update(weight.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def expect_same_totals(ensemble: EnsembleRegressor, dataset: Structures) -> None:
    """Raises ValueError if members were trained on different kinds of energies.

    Compares totals (references plus mean) for the structures to predict, because compositions in
    the training data may not determine every reference. If only some members add a baseline, their
    totals include it.
    """
    indices = np.unique(np.linspace(0, len(dataset) - 1, _COMPARED).astype(np.int64))
    atoms = torch.from_numpy(dataset.compositions(indices, by_contact(ensemble)[0]))
    first, *others = ensemble.members
    negligible = _NEGLIGIBLE * float(atoms.sum(dim=1).median()) if has_references(first) else 0.0
    names = [str(run) for run in ensemble.data]
    names = names or [f"model {i + 1} of the ensemble" for i in range(len(others) + 1)]
    adds = [bool(getattr(member, "adds_baseline", False)) for member in ensemble.members]
    none, deviations = atoms.new_zeros(len(atoms)), 1.0
    baseline = none
    if any(adds) and not all(adds):
        deviations = 3.0  # because the baseline varies as much as the labels
        baseline = torch.tensor([float(dataset[int(i)].y_baseline) for i in indices]).to(atoms)
        if not baseline.isfinite().all():
            return  # the member with a baseline rejects these structures
    added = [baseline if adds_baseline else none for adds_baseline in adds]
    totals, std = _totals(first, atoms, added[0])
    for name, member, its_baseline in zip(names[1:], others, added[1:], strict=True):
        other_totals, other_std = _totals(member, atoms, its_baseline)
        difference = float((other_totals - totals).abs().median())
        limit = max(deviations * std, deviations * other_std, negligible)
        if difference > limit:
            raise ValueError(
                f"{name}: for the structures of {dataset.path}, the sums of references, mean and "
                f"baseline differ from those of {names[0]} by {difference:.3g} eV; expected at "
                f"most {limit:.3g} eV; train all members on the same kind of energy, "
                "with the same task.references"
            )


def _totals(model: nn.Module, atoms: Tensor, baseline: Tensor) -> tuple[Tensor, float]:
    """Returns totals (structures,) and the standard deviation of the learned energies, in eV."""
    buffers = dict(model.named_buffers())
    if not {"energy_mean", "energy_std"} <= buffers.keys():
        return atoms.new_zeros(len(atoms)), float("inf")
    mean, std = float(buffers["energy_mean"]), float(buffers["energy_std"])
    references = buffers.get("element_energies", torch.zeros(atoms.shape[1]))
    return atoms @ references.detach().to("cpu", atoms.dtype) + mean + baseline, std


def has_references(model: nn.Module) -> bool:
    """Returns True if a model adds per-element energies to its output."""
    energies = getattr(model, "element_energies", None)
    return isinstance(energies, Tensor) and bool(energies.any())
