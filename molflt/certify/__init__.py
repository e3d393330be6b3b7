"""Physics checks for any ASE calculator: ``python -m molflt.certify module:Class``."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ase.calculators.calculator import PropertyNotImplementedError

from molflt.certify.checks import CHECKS, Case, one_line, quiet

__all__ = ["CHECKS", "Row", "certify"]


class Row(NamedTuple):
    """Largest error of a check, in `unit` (may be NaN): passed, FAILED, not supported or n/a."""

    check: str
    error: float
    bound: float
    unit: str
    result: str


def certify(
    make: Callable[[], Any],
    elements: Iterable[str] = (),
    float32: bool = False,
    names: Iterable[str] = (),
) -> Iterator[Row]:
    """Runs the checks on a calculator and yields a row for each check.

    Raises ValueError if the calculator does not support any of the test structures.

    Args:
        make: function that returns a new ASE calculator.
        elements: elements of the test structures; by default, those of Cu, O, C and H that the
            calculator supports.
        float32: for single precision, multiply bounds by 1000 and finite-difference steps by 20.
        names: names of the checks to run; by default all checks.
    """
    with quiet():
        case = Case(make, list(elements), float32)
    for name in names or CHECKS:
        (check, bound, unit), error = CHECKS[name], math.nan
        bound *= case.bound_factor
        try:
            with quiet():
                error = float(check(case))
            result = "n/a" if math.isnan(error) else "passed" if error <= bound else "FAILED"
        except PropertyNotImplementedError as problem:
            result = f"not supported: {problem}"
        except Exception as problem:
            result = f"FAILED: {one_line(problem)}"
        yield Row(name, error, bound, unit, result)
