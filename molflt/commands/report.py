"""``molflt report``: a run as one HTML page to look at, keep or send."""

from __future__ import annotations

import sys
from pathlib import Path

from molflt.evaluation.page.build import page_of
from molflt.files import readable_size, write_atomically

__all__ = ["report"]


def report(run: Path, out: Path | None = None) -> None:
    """Write one HTML page of a run: curves, metrics, errors, pictures, settings, how to repeat it.

    The page holds all that it shows, and loads nothing. Of a run that is not finished, not
    evaluated or damaged, it says what is missing and shows the rest.

    Args:
        run: folder of a training run.
        out: file to write; by default report.html in the run.

    Raises:
        FileNotFoundError: if it is no folder of a run.
        ValueError: if the file would not be a page.
    """
    run = Path(run)
    out = run / "report.html" if out is None else Path(out)
    if out.suffix not in (".html", ".htm"):
        raise ValueError(f"--out {out}: expected a file that ends in .html; rename it")
    page, missing = page_of(run)
    content = page.encode("utf-8", "backslashreplace")
    write_atomically(out, content)
    if missing:
        print(f"molflt: warning: {run}: missing: {' | '.join(missing)}", file=sys.stderr)
    print(f"written: {out} ({readable_size(len(content))})")
