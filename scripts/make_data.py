"""Relax adsorbates on slabs with a potential: a data set in the OC20 IS2RE schema.

    python scripts/make_data.py DIR --calculator chgnet --train 5000 --val 500 --workers 2

Interrupted, the same command continues. `--help` lists the options.
"""

from __future__ import annotations

import sys

from jsonargparse import auto_cli
from making.run import make


def main(words: list[str] | None = None) -> int:
    """Make the data set; return 2 if it cannot be made."""
    try:
        auto_cli(make, args=words)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"make_data.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
