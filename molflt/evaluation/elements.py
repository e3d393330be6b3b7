"""Elements that a model cannot take, or has not learned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from molflt.evaluation.ensemble import _has_references
from molflt.evaluation.report import _warn
from molflt.graph.heads import by_contact

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

    def those_without(members: Sequence[nn.Module], buffer: str) -> str:
        known = [held for one in members if (held := getattr(one, buffer, None)) is not None]
        lacking = [z for z in sorted(present) if not all(bool(each[z]) for each in known)]
        return ", ".join(chemical_symbols[z] for z in lacking)

    members = _members(model)
    if unknown := those_without(members, "trained_elements"):
        _warn(
            f"{name}: {unknown} did not occur in training; energies of structures with them "
            f"{_worth(model)}; train on data that have them"
        )
    # References of models that read adsorbates are of adsorbate atoms, whose elements are few.
    fitted = [one for one in members if _has_references(one) and not by_contact(one)[0]]
    if unknown := those_without(fitted, "element_energies"):
        _warn(
            f"{name}: no reference energy of {unknown}, which the training split does not have; "
            "total energies of structures with them are off by that"
        )


def _members(model: nn.Module) -> Sequence[nn.Module]:
    """Those of an ensemble, or the model itself."""
    return list(getattr(model, "members", [model]))


def _worth(model: nn.Module) -> str:
    """What energies of elements that training did not see are worth."""
    described = all(getattr(member, "descriptors", False) for member in _members(model))
    return "rest on descriptors alone: expect larger errors" if described else "mean nothing"
