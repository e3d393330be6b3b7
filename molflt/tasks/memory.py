"""Whether a batch of structures fits into memory, where its size tells before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from molflt.graph.geometry import Geometry
from molflt.graph.regressor import EnergyRegressor
from molflt.memory import available_memory

if TYPE_CHECKING:
    from torch_geometric.data import Batch

__all__ = ["expect_memory"]

_WHILE_MADE = 1.5  # memory that waves of nodes take while they are computed, over their own


def expect_memory(model: nn.Module, batch: Batch) -> None:
    """Refuses a batch whose reciprocal nodes take more memory than is free, before it is taken.

    Their number grows with the volume of a cell, and each has two waves per atom and head. The
    system grants more than it has, and then ends the process without a word. A GPU does not.

    Args:
        model: any; only one with nodes on the reciprocal lattice is looked at.
        batch: of structures, on the CPU.

    Raises:
        MemoryError: saying what is too large.
    """
    encoding = model.encoding if isinstance(model, EnergyRegressor) else None
    free = available_memory()
    if encoding is None or free is None or batch.pos.device.type != "cpu":
        return
    with torch.no_grad():
        geometry = Geometry.of_data(batch)
        nodes = encoding.periodic.nodes(geometry, encoding.position)
    if nodes is None:
        return
    counts, atoms = (nodes.weights != 0).sum(dim=1), geometry.ptr.diff()
    heads = encoding.position.spectrum.heads
    # each graph by itself: classes of similar size hardly pad
    size = _WHILE_MADE * 4 * 2 * 2 * int((counts * atoms).sum()) * heads
    if size > free:
        most = int((counts * atoms).argmax())
        raise MemoryError(
            f"{int(counts[most]):,} reciprocal nodes x {int(atoms[most]):,} atoms x {heads} heads "
            f"of the largest of {len(atoms)} structures, and those of the others, take "
            f"{size / 1e9:.1f} GB; {free / 1e9:.1f} GB are free; a smaller max_frequency has "
            "fewer nodes"
        )
