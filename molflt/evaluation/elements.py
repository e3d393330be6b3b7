"""Elements that a model cannot take, or has not learned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from molflt.evaluation.report import _warn

if TYPE_CHECKING:
    from torch_geometric.data import Data

__all__ = ["expect_described", "refuse_undescribed", "warn_of_elements"]


def expect_described(records: Sequence[Data], beyond: frozenset[int], path: Path) -> None:
    """Raises ValueError for an element that the model cannot take; here it costs no GPU a wait."""
    for record in records if beyond else ():
        present = set(record.atomic_numbers.unique().tolist())
        refuse_undescribed(present, beyond, f"{path}: sid {int(record.sid)}")


def refuse_undescribed(present: set[int], beyond: frozenset[int], name: str) -> None:
    """Raises ValueError if one of these elements of a structure is beyond the model."""
    if unknown := beyond & present:
        raise ValueError(
            f"{name}: no descriptors are known of element {min(unknown)}; leave such structures "
            "out, as --skip_bad does, or take a model that was trained without descriptors"
        )


def warn_of_elements(model: nn.Module, present: set[int], name: str) -> None:
    """Warns of elements that did not occur in training, or have no reference energy."""
    from ase.data import chemical_symbols

    def those_without(buffer: str) -> str:
        known = getattr(model, buffer, None)
        if known is None:
            return ""
        return ", ".join(chemical_symbols[z] for z in sorted(present) if not bool(known[z]))

    if unknown := those_without("trained_elements"):
        _warn(
            f"{name}: {unknown} did not occur in training; energies of structures with them "
            f"{_worth(model)}; train on data that have them"
        )
    fitted = getattr(model, "element_energies", None)
    if fitted is not None and fitted.any() and (unknown := those_without("element_energies")):
        _warn(
            f"{name}: no reference energy of {unknown}, which the training split does not have; "
            "total energies of structures with them are off by that"
        )


def _worth(model: nn.Module) -> str:
    """What energies of elements that training did not see are worth."""
    members = getattr(model, "members", [model])
    described = all(getattr(member, "descriptors", False) for member in members)
    return "rest on descriptors alone: expect larger errors" if described else "mean nothing"
