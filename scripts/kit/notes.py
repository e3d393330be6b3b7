"""Notes next to a run about its settings, to recognize it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kit.files import digests
from molflt.files import write_atomically

Job = dict[str, Any]
STORES = "stores"


def on_data(job: Job, folder: Path) -> Job:
    """A training on the stores of a folder, with their digests: they may be made again, changed."""
    words = [*job["words"], f"--data.root={folder}"]
    return job | {"words": words, STORES: digests(folder)}


def prepare(run: Path, job: Job) -> None:
    """Notes the job in a new folder, or checks that the folder belongs to it.

    Raises:
        ValueError: if the folder holds a run with other options or data, or an earlier version
            has not said of which.
    """
    note = run / "job.json"
    was = json.loads(note.read_text()) if note.exists() else job
    if STORES not in was:  # archived runs, of earlier versions, can be gone on with
        job = {key: value for key, value in job.items() if key != STORES}
    if absent := ", ".join(key for key in job if key not in was):
        raise ValueError(
            f"{note}: expected {absent} of what this run was made with; an earlier version has not "
            "noted them; choose another --out, or remove the note if they are the same"
        )
    if was != job:
        old, new = was.get(STORES, {}), job.get(STORES, {})
        if changed := sorted(path for path in old | new if old.get(path) != new.get(path)):
            raise ValueError(
                f"{note}: this run was made with other content of {', '.join(changed)}; expected "
                f"the same; put it back, choose another --out, or remove {run}"
            )
        raise ValueError(
            f"{note}: this run was made with other options, other data or another {job['config']}; "
            "choose another --out, or remove it"
        )
    write_atomically(note, (json.dumps(job, indent=1) + "\n").encode())
