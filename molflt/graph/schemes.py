"""Schemes of periodic boundaries by name."""

import inspect
from typing import TYPE_CHECKING, Literal

from molflt.attention.checks import no_effect, one_of
from molflt.graph.mesh import OnMesh
from molflt.graph.periodic import Images, Open, Reciprocal

PERIODIC: dict[str, type[Open]] = {
    "none": Open,
    "images": Images,
    "reciprocal": Reciprocal,
    "mesh": OnMesh,
}

# The command line lists the choices of an option from its type.
if TYPE_CHECKING:
    PeriodicName = str
else:
    PeriodicName = Literal[tuple(PERIODIC)]


def make_periodic(periodic: str | Open, **options: float | None) -> Open:
    """Builds a scheme from its name and the given options; returns existing schemes."""
    if isinstance(periodic, Open):
        no_effect(f"with periodic={periodic!r}", **options)
        return periodic
    one_of("periodic", periodic, PERIODIC)
    scheme = PERIODIC[periodic]
    known = inspect.signature(scheme).parameters
    no_effect(
        f"with periodic={periodic!r}",
        **{name: value for name, value in options.items() if name not in known},
    )
    return scheme(**{k: v for k, v in options.items() if k in known and v is not None})
