"""``python -m molflt`` is the ``molflt`` command."""

from molflt.cli import entry

entry()
