"""OC20's references of adsorption energies: gas-phase H2, H2O, CO and N2, linear per element.

E_H = E(H2) / 2, E_O = E(H2O) - E(H2), E_C = E(CO) - E_O, E_N = E(N2) / 2, and the adsorption energy
is E(slab with adsorbate) - E(relaxed slab) - sum over the adsorbate's atoms of E_element (Chanussot
et al., ACS Catal. 11, 6059, 2021). They follow from the composition alone, so that a model of the
structure can know them, unlike the energy of each adsorbate's own molecule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from making.calculators import relax

__all__ = ["adsorption_energy", "linear_references", "molecule_energies"]

_MOLECULES = ("H2", "H2O", "CO", "N2")
_TOLERANCE = 0.01  # eV/Å
_VACUUM = 8.0  # Å on each side; CHGNet sees 6 Å far


def molecule_energies(potential: str) -> dict[str, float]:
    """Energies of the relaxed gas-phase molecules that references are made of, eV.

    Args:
        potential: a key of `CALCULATORS`.
    """
    from ase.build import molecule

    energies = {}
    for name in _MOLECULES:
        atoms = molecule(name, vacuum=_VACUUM, pbc=True)  # learned potentials want a cell
        relaxed = relax(atoms, potential, _TOLERANCE)
        if not relaxed.converged:
            raise ValueError(
                f"calculator {potential}: gas-phase {name} does not relax; expected forces below "
                f"{_TOLERANCE} eV/Å; take another calculator"
            )
        energies[name] = relaxed.after
    return energies


def linear_references(molecules: Mapping[str, float]) -> dict[str, float]:
    """Energy of each element, eV, from those of H2, H2O, CO and N2."""
    oxygen = molecules["H2O"] - molecules["H2"]
    return {
        "H": molecules["H2"] / 2,
        "C": molecules["CO"] - oxygen,
        "N": molecules["N2"] / 2,
        "O": oxygen,
    }


def adsorption_energy(
    total: float, slab: float, adsorbate: Iterable[str], references: Mapping[str, float]
) -> float:
    """E(slab with adsorbate) - E(slab) - the references of the adsorbate's atoms, eV.

    Args:
        total: energy of the slab with adsorbate, eV.
        slab: energy of the relaxed clean slab, eV.
        adsorbate: element of each of its atoms.
        references: element -> eV, of :func:`linear_references`.
    """
    return total - slab - sum(references[element] for element in adsorbate)
