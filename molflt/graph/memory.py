"""Whether nodes, images and neighbors of a batch fit into memory, told by their number before."""

from collections.abc import Callable

from torch import Tensor

from molflt.attention.checks import at_hand
from molflt.graph.geometry import Geometry
from molflt.memory import available_memory

_WHILE_MADE = 1.5  # memory that waves of nodes take while they are computed, over their own
_SMALL = 2**26  # bytes that are taken without looking at what is free, which takes a while


def _expect_memory(weights: Tensor, geometry: Geometry, heads: int) -> None:
    """Refuses a batch whose reciprocal nodes take more memory than is free, before it is taken.

    Their number grows with the volume of a cell, and each has two waves per atom and head. The
    system grants more than it has, and then ends the process without a word. A GPU does not.

    Args:
        weights: of the nodes, (graphs, r); 0 for those that are none.
        geometry: the batch; elsewhere than on the CPU it is not looked at.
        heads: number of heads.

    Raises:
        MemoryError: saying what is too large.
    """
    if not at_hand(weights):
        return
    counts, atoms = (weights != 0).sum(dim=1), geometry.ptr.diff()
    # each graph by itself: classes of similar size hardly pad
    size = _WHILE_MADE * geometry.pos.element_size() * 2 * 2 * int((counts * atoms).sum()) * heads
    most = int((counts * atoms).argmax()) if len(atoms) else 0
    expect_memory(
        size,
        lambda: (
            f"{int(counts[most]):,} reciprocal nodes x {int(atoms[most]):,} atoms x {heads} heads "
            f"of the largest of {len(atoms)} structures, and those of the others,"
        ),
        "a smaller max_frequency has fewer nodes, periodic='mesh' (predict: --mesh_order 5) none",
    )


def expect_memory(size: float, what: Callable[[], str], advice: str) -> None:
    """Refuses what takes more memory than is free.

    Args:
        size: bytes.
        what: names, in the plural, what takes them; called only then.
        advice: what to do.

    Raises:
        MemoryError: saying what is too large.
    """
    free = available_memory() if size > _SMALL else None
    if free is not None and size > free:
        raise MemoryError(
            f"{what()} take {size / 1e9:.1f} GB; {free / 1e9:.1f} GB are free; {advice}"
        )
