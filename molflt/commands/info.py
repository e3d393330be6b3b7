"""``molflt info``: a summary of a run."""

from __future__ import annotations

from collections.abc import Mapping
from json import dumps
from pathlib import Path
from typing import Any

from molflt.files import readable_size
from molflt.metrics import Metric
from molflt.training.checkpoint import count_parameters
from molflt.training.config import read_config
from molflt.training.recipes import Recipe
from molflt.training.run_folder import Best, best_of, read_provenance, read_versions, steps_of

__all__ = ["info"]


def info(run: Path, json: bool = False) -> None:
    """Prints a summary of a run: recipe, data, model size, steps, best validation, files.

    Args:
        run: folder of a training run.
        json: print one JSON object instead of text; unknown values are null.
    """
    run = Path(run)
    config, best = read_config(run), best_of(run)
    files = sorted(path for path in run.rglob("*") if path.is_file())
    found: dict[str, Any] = {
        "run": str(run),
        "recipe": str(config["recipe"]),
        "data": config["data"],
        "sets": {
            use: {name: count for name, count in own.items() if name != "sha256"}
            for use, own in read_provenance(run).get("data", {}).items()
        },
        "model": config["model"],
        "parameters": count_parameters(run, config),
        "seed": config["seed"],
        "steps": steps_of(run),
        "max_steps": int(str(config["trainer"]["max_steps"])),
        "best": None if best is None else best._asdict(),
        "versions": read_versions(run),
        "files": {path.relative_to(run).as_posix(): path.stat().st_size for path in files},
    }
    print(dumps(found) if json else _as_text(found, best))


def _as_text(found: Mapping[str, Any], best: Best | None) -> str:
    validated = "no validation yet"
    if best is not None:
        task: Any = Recipe.of(found).load("task")
        metric: Metric = task.metrics[best.metric]
        validated = f"validation {metric.shown(best.value)} at step {best.step:,}"
    sets = "; ".join(
        f"{use} " + ", ".join(f"{count:,} {name}" for name, count in own.items())
        for use, own in found["sets"].items()
    )
    places = [f"{key} {value}" for key, value in found["data"].items() if value is not None]
    model = [f"{key} {value}" for key, value in found["model"].items() if value is not None]
    rows = {
        "run": found["run"],
        "recipe": f"{found['recipe']}, seed {found['seed']}",
        "data": ", ".join(places),
        "sets": sets or "unknown",
        "model": f"{found['parameters']:,} parameters: {', '.join(model)}",
        "steps": f"{found['steps']:,} of {found['max_steps']:,}",
        "best": validated,
        "versions": ", ".join(f"{k} {v}" for k, v in found["versions"].items() if v) or "unknown",
        "files": ", ".join(f"{k} ({readable_size(size)})" for k, size in found["files"].items()),
    }
    return "\n".join(f"{name:<10}{text}" for name, text in rows.items())
