"""What tasks on batches of structures share."""

# No `from __future__ import annotations`: jsonargparse would import all that stands below
# TYPE_CHECKING, PyG included, to read annotations that are strings.

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch_geometric.data import Batch

    from molflt.data.structures.base import Structures
    from molflt.data.structures.element_energies import ElementEnergies

__all__ = ["OfStructures"]


class _WithElements(Protocol):
    datasets: "dict[str, Structures]"

    def setup(self) -> None: ...

    def refuse_copies(self) -> None: ...

    def element_energies(
        self, references: Path | None = None, of_adsorbates: bool = False
    ) -> "ElementEnergies": ...


class OfStructures:
    """Energies of elements, and names of what is in a batch; goes before `Task`."""

    unit: ClassVar[str] = "atoms"
    model: nn.Module
    _fitted: dict[str, float] | None = None

    def store_references(
        self,
        data: _WithElements,
        references: Literal["none", "fit"] | Path | None,
        of_adsorbates: bool = False,
    ) -> "ElementEnergies | None":
        """Stores an energy for each element, fitted or from a file, in the model's buffer."""
        # `references` has the type of the options: typing caches unions, in the order of the first
        from ase.data import chemical_symbols

        if references in (None, "none"):
            return None
        fit = data.element_energies(
            None if references == "fit" else Path(references), of_adsorbates
        )
        self.model.get_buffer("element_energies").copy_(torch.from_numpy(fit.energies))
        there = np.flatnonzero(fit.present)
        self._fitted = {chemical_symbols[number]: float(fit.energies[number]) for number in there}
        return fit

    def check_data(self, data: _WithElements) -> None:
        """Refuses structures of validation that training has, and elements without descriptors."""
        from molflt.data.structures.parts import element_faults
        from molflt.graph.heads import undescribed

        data.refuse_copies()
        beyond = undescribed(self.model)
        for dataset in data.datasets.values():
            if faults := element_faults(dataset, beyond):
                index, reason = next(iter(faults.items()))
                raise ValueError(
                    f"{dataset.path}: sid {int(dataset[index].sid)}: {reason} ({len(faults)} such "
                    f"of {len(dataset)}); leave such structures out of the file, or train with "
                    "--model.descriptors false"
                )

    def files(self) -> dict[str, bytes]:
        """references.json, eV by symbol, if there are energies of elements."""
        if not self._fitted:
            return {}
        return {"references.json": (json.dumps(self._fitted, indent=2) + "\n").encode()}

    def size(self, batch: "Batch") -> int:
        """Atoms."""
        return int(batch.num_nodes)

    def name(self, batch: "Batch") -> str:
        """The structures of a batch, for messages."""
        return f"sids {', '.join(map(str, batch.sid.tolist()))}"

    def blame(self, batch: "Batch", diverges: Callable[["Batch"], bool]) -> str:
        """Structures that diverge on their own, or else those with two atoms at one place."""
        from molflt.data.structures.overlaps import atoms_coincide

        records = {int(record.sid): record.cpu() for record in batch.to_data_list()}
        together = [sid for sid, record in records.items() if atoms_coincide(record)]
        device = batch.pos.device
        found = [
            sid
            for sid, record in records.items()
            if diverges(type(batch).from_data_list([record]).to(device))
        ]
        named = ", ".join(
            f"{sid} (two atoms at one place)" if sid in together else f"{sid}"
            for sid in found or together
        )
        return f"sids {named}" if named else ""

    def _predict(self, batch: "Batch") -> Mapping[str, Tensor]:
        found: Mapping[str, Tensor] = self.model(batch)
        return found
