"""Methods shared by tasks on atomic structures."""

import json
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from molflt.atoms import Batch, symbol
from molflt.data.structures.base import element_faults
from molflt.data.structures.datamodule import IS2REData
from molflt.data.structures.labels import ElementEnergies
from molflt.data.structures.potential_data import PotentialData
from molflt.graph.heads import undescribed


def expect_same_shape(name: str, predicted: Tensor, label: Tensor) -> None:
    """Raises ValueError if predictions and labels differ in shape, to prevent broadcasting."""
    if predicted.shape != label.shape:
        raise ValueError(
            f"{name} and labels must have the same shape; got {tuple(predicted.shape)} and "
            f"{tuple(label.shape)}"
        )


class OfStructures:
    """Mixin for `Task` that stores element energies and names the structures in a batch."""

    unit: ClassVar[str] = "atoms"
    model: nn.Module
    _fitted: dict[str, float] | None = None

    def store_references(
        self,
        data: IS2REData | PotentialData,
        references: Literal["none", "fit", "adapt"] | Path | None,
        of_adsorbates: bool = False,
        predicted: NDArray[np.float64] | float = 0.0,
    ) -> ElementEnergies | None:
        """Stores element energies, fitted or read from a file, in a buffer of the model.

        `predicted` contains the energies, in eV, that the fit subtracts from the labels.
        """
        # same annotation as in the tasks, because typing caches the order of a union's members
        if references in (None, "none"):
            return None
        fit = data.element_energies(
            None if references in ("fit", "adapt") else Path(references), of_adsorbates, predicted
        )
        self.model.get_buffer("element_energies").copy_(torch.from_numpy(fit.energies))
        self._fitted = {symbol(z): float(fit.energies[z]) for z in np.flatnonzero(fit.present)}
        return fit

    def check_data(self, data: IS2REData | PotentialData) -> None:
        """Raises ValueError for shared structures, and for charges and elements not supported."""
        data.refuse_copies()
        if getattr(self.model, "charge_share", None) is None:
            data.refuse_charges()
        unsupported = undescribed(self.model)
        for dataset in data.datasets.values():
            if faults := element_faults(dataset, unsupported):
                index, reason = next(iter(faults.items()))
                raise ValueError(
                    f"{dataset.path}: sid {int(dataset[index].sid)}: {reason} ({len(faults)} of "
                    f"{len(dataset)} structures); remove them, or use --model.descriptors false"
                )

    def files(self) -> dict[str, bytes]:
        """Returns references.json, which lists energies in eV by symbol; {} if none were stored."""
        if not self._fitted:
            return {}
        return {"references.json": (json.dumps(self._fitted, indent=2) + "\n").encode()}

    def size(self, batch: Batch) -> int:
        return int(batch.num_nodes)

    def name(self, batch: Batch) -> str:
        """Returns the sids of a batch as text for messages."""
        return f"sids {', '.join(map(str, batch.sid.tolist()))}"
