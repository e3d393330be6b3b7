"""Meta-train optimizers with different memories and compare them with Adam on unseen tasks.

    python scripts/optimizers.py --data datasets/fashion-mnist/train-images-idx3-ubyte.gz \\
        --out runs/optimizers --jobs 2
    python scripts/optimizers.py ... --memories flt lstm --tasks rosenbrock --steps 500 \\
        -- --trainer.max_steps 100      # options for every training run

The tasks are Rosenbrock's function, the factorization of a matrix and a deep network. --data adds a
fully connected and a convolutional network on images. On each task, Adam uses the best of 10
learning rates. Writes optimizers.md, optimizers.csv (loss curves) and optimizers.png. After an
interruption, the same command continues.
"""

import argparse
import hashlib
import json
import math
from pathlib import Path

import numpy as np
import torch
from kit.rows import Rows, markdown, names, pick, write_csv
from kit.runs import collect, expect_same, job_of, publish, work_all
from kit.words import guarded, parsed, trainings

from molflt import plots
from molflt.data.images.files import LabeledImages, open_images
from molflt.evaluation.optimizers import curve_rows, final_loss, tasks_of, tuned_adam
from molflt.evaluation.results import read_rows
from molflt.files import write_atomically

MEMORIES = ("flt", "performer", "softmax", "lstm", "state-space")
ADAM = "Adam, tuned"


def digest_of(images: LabeledImages) -> str:
    """Returns the SHA-256 digest of images and their labels, which may be in a separate file."""
    found = hashlib.sha256()
    for image, label in (images[i] for i in range(len(images))):
        found.update(image.numpy().tobytes() + f" {int(label)} ".encode())
    return found.hexdigest()


def evaluation(options: argparse.Namespace) -> tuple[str, ...]:
    """Returns the options for `molflt evaluate`, without the evaluation of Adam."""
    words = ["--steps", str(options.steps), "--repeats", str(options.repeats), "--rates=[]"]
    words += [] if options.data is None else ["--data", str(options.data)]
    words += [] if options.tasks is None else ["--tasks", *options.tasks]
    return tuple(words)


def of_adam(options: argparse.Namespace) -> dict[str, dict]:
    """Returns Adam's curves, final loss and learning rate by task; caches them in adam.json."""
    path = options.out / "adam.json"
    asked = {"steps": options.steps, "repeats": options.repeats, "tasks": options.tasks}
    asked["data"] = options.images
    kept = json.loads(path.read_text()) if path.exists() else {"asked": asked, "tasks": {}}
    expect_same(path, kept["asked"], asked)
    for name, made in tasks_of(options.tasks, options.data).items():
        if name not in kept["tasks"]:
            found = tuned_adam(made, options.steps, options.repeats, torch.zeros(()))
            own = curve_rows({name: {ADAM: found}})
            end, spread = final_loss(found.curves)
            kept["tasks"][name] = {"rows": own, "end": end, "sd": spread, "lr": found.setting}
            write_atomically(path, json.dumps(kept).encode())
    return kept["tasks"]


def curves_of(out: Path, ends: Rows) -> Rows:
    """Returns the loss curves of all runs that occur in `ends`, with a row for each point."""
    curves: Rows = []
    for memory, seed in dict.fromkeys((row["optimizer"], row["seed"]) for row in ends):
        for row in read_rows(out / memory / f"seed{seed}" / "curves.csv"):
            own = {**row, "optimizer": memory, "seed": seed}
            curves.append({**own, "step": float(row["step"]), "loss": float(row["loss"])})
    return curves


def table(ends: Rows, adam: dict[str, dict]) -> str:
    """Formats the final losses: geometric means, and standard deviations of decimal logarithms."""
    lines = [[ADAM, 1, *(f"{own['end']:.4g} (lr {float(own['lr']):.2g})" for own in adam.values())]]
    for memory in names(ends, "optimizer"):
        own = pick(ends, optimizer=memory)
        cells = [cell(pick(own, split=task)) for task in adam]
        lines.append([memory, len(names(own, "seed")), *cells])
    note = "The final loss is the mean over the last 10 % of the steps. The table lists its "
    note += "geometric mean over repeats and seeds, ± the sd of its decimal logarithm over seeds."
    return f"{markdown(['optimizer', 'seeds', *adam], lines)}\n\n{note}"


def cell(rows: Rows) -> str:
    """Formats the mean and spread of the final losses, or "diverged" if a final loss is missing."""
    ends = [math.inf if row["final_loss"] is None else row["final_loss"] for row in rows]
    if not ends or not np.isfinite(ends).all():
        return "diverged" if ends else "–"
    logs = np.log10(ends)
    spread = f" ± {logs.std(ddof=1):.2f}" if len(logs) > 1 else ""
    return f"{10 ** logs.mean():.4g}{spread}"


def draw(curves: Rows, png: Path, steps: int) -> None:
    """Draws the curves of each optimizer, with all seeds and repeats in one band."""
    tasks: dict[str, dict[str, np.ndarray]] = {}
    for task in names(curves, "task"):
        own = pick(curves, task=task)
        tasks[task] = {}
        for name in names(own, "optimizer"):
            lines: dict[tuple[object, object], list[float]] = {}
            for row in pick(own, optimizer=name):
                lines.setdefault((row.get("seed"), row["repeat"]), []).append(row["loss"])
            tasks[task][name] = np.array(list(lines.values()))
    plots.loss_curves(tasks, png, steps)


@guarded
def main(words: list[str] | None = None) -> int:
    parser = trainings(__doc__, "configs/optimizers/small.yaml", "runs/optimizers", seeds=[0, 1, 2])
    parser.add_argument("--data", type=Path, help="images, such as the idx file of Fashion-MNIST")
    parser.add_argument("--memories", nargs="+", default=list(MEMORIES), choices=MEMORIES)
    parser.add_argument("--tasks", nargs="+", help="default: all tasks whose data are available")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parsed(parser, words)
    tasks_of(options.tasks, options.data)
    options.images = None if options.data is None else digest_of(open_images(options.data))
    own = {"evaluation": list(evaluation(options))}
    own |= {} if options.images is None else {"images": options.images}
    jobs = {
        options.out / memory / f"seed{seed}": own
        | job_of(options, f"configs/optimizers/{memory}.yaml", seed)
        for seed in options.seeds
        for memory in options.memories
    }
    code = work_all(jobs, options, evaluation(options))
    adam = of_adam(options)
    ends = collect(options.out, "optimizer", options.memories, options.seeds)
    curves = curves_of(options.out, ends)
    keys = ["task", "optimizer", "tuned", "seed", "repeat", "step", "loss"]
    rows = [row for task in adam.values() for row in task["rows"]] + curves
    rows = [{key: row.get(key) for key in keys} for row in rows]
    write_csv(options.out / "optimizers.csv", rows)
    draw(rows, options.out / "optimizers.png", options.steps)
    publish(options.out / "optimizers.md", table(ends, adam))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
