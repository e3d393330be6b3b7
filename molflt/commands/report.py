"""``molflt report``: an HTML page about a run."""

from __future__ import annotations

from pathlib import Path

from molflt.evaluation.page import page_of
from molflt.files import expect_ending, readable_size, warn, write_atomically


def report(run: Path, out: Path | None = None) -> None:
    """Writes an HTML page about a run: curves, metrics, errors, figures, settings.

    The page does not load other files. For a run that is unfinished, not evaluated or damaged, the
    page lists the missing parts and shows the other parts.

    Args:
        run: folder of a training run.
        out: file to write; by default report.html in the run folder.
    """
    out = run / "report.html" if out is None else out
    expect_ending(out, ".html", ".htm")
    page, missing = page_of(run)
    content = page.encode("utf-8", "backslashreplace")
    write_atomically(out, content)
    if missing:
        warn(" | ".join(missing))
    print(f"written: {out} ({readable_size(len(content))})")
