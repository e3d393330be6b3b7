"""Descriptors of elements from the periodic table."""

import math

import numpy as np
import torch
from torch import Tensor

from molflt.atoms import MAX_ATOMIC_NUMBER

_NOBLE_GASES = (0, 2, 10, 18, 36, 54, 86, 118)

# Electronegativities of elements 1 to 103 on Pauling's scale; nan if no bonds are known.
_ELECTRONEGATIVITY = """
2.20 nan
0.98 1.57 2.04 2.55 3.04 3.44 3.98 nan
0.93 1.31 1.61 1.90 2.19 2.58 3.16 nan
0.82 1.00 1.36 1.54 1.63 1.66 1.55 1.83 1.88 1.91 1.90 1.65 1.81 2.01 2.18 2.55 2.96 3.00
0.82 0.95 1.22 1.33 1.60 2.16 1.90 2.20 2.28 2.20 1.93 1.69 1.78 1.96 2.05 2.10 2.66 2.60
0.79 0.89 1.10 1.12 1.13 1.14 1.13 1.17 1.20 1.20 1.10 1.22 1.23 1.24 1.25 1.10 1.27
1.30 1.50 2.36 1.90 2.20 2.20 2.28 2.54 2.00 1.62 2.33 2.02 2.00 2.20 2.20
0.70 0.90 1.10 1.30 1.50 1.38 1.36 1.28 1.30 1.30 1.30 1.30 1.30 1.30 1.30 1.30 1.30
"""


def period_and_group(number: int) -> tuple[int, int]:
    """Returns the period and group of an element; lanthanides and actinides are in group 3."""
    period = next(i for i, last in enumerate(_NOBLE_GASES) if number <= last)
    column = number - _NOBLE_GASES[period - 1]
    if column <= 2 and number != 2:
        return period, column
    return period, max(3, 18 - (_NOBLE_GASES[period] - number))


def _valence(number: int) -> tuple[int, int, int, int]:
    """Returns the numbers of s, p, d and f electrons outside closed shells, except for He."""
    period, group = period_and_group(number)
    d = group - 2 if 3 <= group <= 12 else 0
    f = max(0, min(14, number - _NOBLE_GASES[period - 1] - 3)) if group == 3 and period >= 6 else 0
    return min(2, group), max(0, group - 12), d, f


def descriptors() -> Tensor:
    """Returns a float32 table (119, 8) of element descriptors; row indices are atomic numbers.

    Columns are period, group, covalent radius, electronegativity, and the numbers of s, p, d and f
    electrons, with mean 0 and standard deviation 1 over the elements for which all are known. The
    rows of number 0 and of elements without known bonds (He, Ne, Ar, and 104 to 118) are NaN.

    Sources: covalent radii from Cordero et al., doi:10.1039/b801115j, as in ASE;
    electronegativities on Pauling's scale from the CRC Handbook of Chemistry and Physics.
    """
    from ase.data import covalent_radii  # imported here: reading signatures must not load ASE

    # in NumPy, because torch computes no values when a model is built on the meta device
    rows = np.full((MAX_ATOMIC_NUMBER + 1, 8), np.nan)
    for number, electronegativity in enumerate(map(float, _ELECTRONEGATIVITY.split()), start=1):
        if not math.isnan(electronegativity):
            period, group = period_and_group(number)
            radius = covalent_radii[number]
            rows[number] = period, group, radius, electronegativity, *_valence(number)
    rows = (rows - np.nanmean(rows, axis=0)) / np.nanstd(rows, axis=0)
    return torch.tensor(rows, dtype=torch.float32)
