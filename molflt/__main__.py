"""``python -m molflt`` is the ``molflt`` command."""

import sys

from molflt.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
