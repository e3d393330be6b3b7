"""Prints the table of ``python -m molflt.certify``."""

import argparse
import itertools
import json
import math
import pkgutil
import sys
from functools import partial

from molflt import certify as checks
from molflt.certify.checks import one_line


def main(words: list[str] | None = None) -> int:
    """Prints a table of all checks and returns the exit status, which is 1 if a check fails."""
    parser = argparse.ArgumentParser("python -m molflt.certify", description=checks.__doc__)
    elements = "elements of the test structures"
    parser.add_argument("calculator", help="module:Class, or module:function that creates it")
    parser.add_argument("--args", default="{}", type=json.loads, help="arguments as JSON")
    parser.add_argument("--elements", nargs="+", action="extend", default=[], help=elements)
    parser.add_argument("--float32", action="store_true", help="use 1000 times wider bounds")
    options = parser.parse_args(words)
    failed = 0
    try:
        make = partial(pkgutil.resolve_name(options.calculator), **options.args)
        rows = checks.certify(make, options.elements, options.float32)
        first = next(rows)
    except Exception as problem:  # checks do not raise
        parser.error(f"{options.calculator}: {one_line(problem)}")
    print(f"{'check':40}{'error':>9}{'bound':>9}  {'unit':9} result")
    for row in itertools.chain([first], rows):
        error = "" if math.isnan(row.error) else f"{row.error:.1e}"
        print(f"{row.check:40}{error:>9}{row.bound:9.0e}  {row.unit:9} {row.result}", flush=True)
        failed += row.result.startswith("FAILED")
    print(f"{failed} of {len(checks.CHECKS)} checks failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
