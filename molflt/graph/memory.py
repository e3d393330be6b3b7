"""Memory checks for nodes and pairs before these are computed."""

from torch import Tensor

from molflt.attention.checks import readable
from molflt.graph.geometry import Geometry
from molflt.memory import available_memory

_WAVES_PER_PHASE = 4  # cosine and sine, of queries and of keys
_WHILE_MADE = 1.5  # peak memory for computing waves of nodes, relative to their own memory
_SMALL = 2**26  # bytes; for smaller sizes, free memory is not measured, because this is slow


def expect_memory_of_nodes(weights: Tensor, geometry: Geometry, heads: int) -> None:
    """Raises MemoryError if waves of nodes exceed free CPU memory; `weights` is (graphs, nodes)."""
    if not readable(weights):
        return
    nodes, atoms = (weights != 0).sum(dim=1), geometry.ptr.diff()
    phases = nodes * atoms  # per graph, because classes of similar size have little padding
    waves = _WAVES_PER_PHASE * int(phases.sum()) * heads
    largest = int(phases.argmax()) if len(atoms) else 0
    expect_memory(
        _WHILE_MADE * waves * geometry.pos.element_size(),
        f"{int(nodes[largest]):,} reciprocal nodes x {int(atoms[largest]):,} atoms x {heads} heads "
        f"of the largest of {len(atoms)} structures, plus those of the others,",
        "reduce max_frequency, or use periodic='mesh' (predict: --mesh-order 5)",
    )


def expect_memory(size: float, contents: str, advice: str) -> None:
    """Raises MemoryError if `size` bytes, which the plural noun `contents` takes, are not free."""
    free = available_memory() if size > _SMALL else None
    if free is not None and size > free:
        needed = f"{contents} take {size / 1e9:.1f} GB"
        raise MemoryError(f"{needed}; {free / 1e9:.1f} GB are free; {advice}")
