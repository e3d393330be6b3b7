"""Fine-tune trained weights on the GLUE tasks and compute the average score.

    python scripts/glue.py --init runs/fnet --root datasets/glue --out runs/glue
    python scripts/glue.py --init hf:google-bert/bert-base-uncased ... --tasks RTE CoLA --jobs 2
    python scripts/glue.py ... -- --task.lr 2e-5      # options for every training run

All tasks use the same hyperparameters and number of epochs. Scores are medians over seeds. Tasks
with missing files are skipped and listed below the table. Writes glue.md and glue.csv. After an
interruption, the same command continues.
"""

import argparse
import statistics
from pathlib import Path

from kit.rows import Rows, markdown, names, pick, write_csv
from kit.runs import Job, collect, job_of, publish, work_all
from kit.words import guarded, parsed, trainings

from molflt.data.text.sentences import GLUE, find_split, read_examples
from molflt.training.start import build_parser


def available(root: Path, tasks: list[str]) -> tuple[list[str], list[str]]:
    """Returns the tasks whose files exist, and messages about the other tasks."""
    there, absent = [], []
    for task in tasks:
        try:
            for split in ("train", "val"):
                find_split(root, task, split)
        except FileNotFoundError as error:
            absent.append(str(error))
        else:
            there.append(task)
    return there, absent


def job(options: argparse.Namespace, task: str, seed: int) -> Job:
    """Returns the settings of a training run on a task, with validation after each epoch."""
    examples = read_examples(find_split(options.root, task, "train"), task)
    steps = max(1, round(options.epochs * len(examples) / options.batch_size))
    own = [f"--data.task={task}", f"--data.root={options.root}", f"--init={options.init}"]
    own += [f"--trainer.max_steps={steps}", f"--task.warmup_steps={round(0.06 * steps)}"]
    own += [f"--trainer.val_every={max(1, round(steps / options.epochs))}"]
    own += ["--task.measure=correlation"] if "matthews" in GLUE[task].metrics else []
    found = job_of(options, str(options.config), seed)
    return found | {"words": [*own, f"--seed={seed}", *options.words]}


def table(rows: Rows, absent: list[str]) -> str:
    """Formats the median metrics of each task and the average over tasks."""
    lines, scores = [], []
    for task in names(rows, "task"):
        own = []
        for split in names(pick(rows, task=task), "split"):
            found = pick(rows, task=task, split=split)
            own.append(statistics.median(row["glue_percent"] for row in found))
            cells = [
                f"{name} {statistics.median(row[f'{name}_percent'] for row in found):.1f}"
                for name in GLUE[task].metrics
            ]
            lines.append([task, split, len(found), ", ".join(cells), f"{own[-1]:.1f}"])
        scores.append(statistics.fmean(own))
    head = ["task", "split", "seeds", "median, %", "counts as"]
    count = f"average of {len(scores)} of {len(GLUE)} tasks"
    lines.append([count, None, None, None, f"{statistics.fmean(scores):.1f}"])
    return "\n".join([markdown(head, lines), *(f"\nskipped: {line}" for line in absent)])


@guarded
def main(words: list[str] | None = None) -> int:
    parser = trainings(__doc__, "configs/masked/glue.yaml", "runs/glue", seeds=[0, 1, 2, 3, 4])
    parser.add_argument("--init", required=True, help="run or file of the initial weights")
    parser.add_argument("--root", type=Path, required=True, help="folder with the tasks' files")
    parser.add_argument("--tasks", nargs="+", default=list(GLUE), choices=list(GLUE))
    parser.add_argument("--epochs", type=float, default=5)
    options = parsed(parser, words)
    tasks, absent = available(options.root, options.tasks)
    if not tasks:
        raise ValueError(f"{options.root}: does not contain a GLUE task; {absent[0]}")
    words = ["--config", str(options.config), f"--data.root={options.root}", *options.words]
    words = ["--run=none", f"--data.task={tasks[0]}", *words]
    options.batch_size = build_parser(words).parse_args(words).data.batch_size
    jobs = {
        options.out / task / f"seed{seed}": job(options, task, seed)
        for seed in options.seeds
        for task in tasks
    }
    code = work_all(jobs, options)
    if rows := collect(options.out, "task", tasks, options.seeds):
        write_csv(options.out / "glue.csv", rows)
        publish(options.out / "glue.md", table(rows, absent))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
