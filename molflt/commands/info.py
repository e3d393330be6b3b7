"""``molflt info``: a summary of a run."""

from json import dumps
from pathlib import Path
from typing import Any

from molflt.commands.options import yaml_of
from molflt.training.checkpoint import count_parameters
from molflt.training.config import read_config
from molflt.training.run_folder import best_of, read_provenance, read_versions, steps_of


def info(run: Path, json: bool = False) -> None:
    """Prints a summary of a run: recipe, data, model size, steps, best validation, files.

    Sizes of files are in bytes. The text omits options that are null.

    Args:
        run: folder of a training run.
        json: print one JSON object instead of YAML.
    """
    config, best = read_config(run), best_of(run)
    files = sorted(path for path in run.rglob("*") if path.is_file())
    summary: dict[str, Any] = {
        "run": str(run),
        "recipe": config["recipe"],
        "data": config["data"],
        "sets": {
            part: {name: count for name, count in counts.items() if name != "sha256"}
            for part, counts in read_provenance(run).get("data", {}).items()
        },
        "model": config["model"],
        "parameters": count_parameters(run, config),
        "seed": config["seed"],
        "steps": steps_of(run),
        "max_steps": config["trainer"]["max_steps"],
        "best": None if best is None else best._asdict(),
        "versions": read_versions(run),
        "files": {path.relative_to(run).as_posix(): path.stat().st_size for path in files},
    }
    if not json:
        for key in ("data", "model"):
            summary[key] = {name: x for name, x in summary[key].items() if x is not None}
    print(dumps(summary) if json else yaml_of(summary))
