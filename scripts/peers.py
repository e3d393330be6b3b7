"""Compare molflt with other models: same data, seeds and CPU time.

    python scripts/peers.py --data datasets/chgnet-sample --out runs/peers --minutes 10 --jobs 2
    python scripts/peers.py --data DIR --out runs/peers-few --minutes 10 --fractions 0.1 0.3 1.0 \\
        --models molflt painn kernel-ridge configs/atoms/near.yaml,model.heads=4
    python scripts/peers.py ... --tune --tune-most 5        # tune learning rates on val_id first
    python scripts/peers.py ... --against molflt            # differences of the others
    python scripts/peers.py ... -- --trainer.ema_decay 0.99 # options of molflt train, for all nets

DIR holds compact stores: train, val_id and other val and test splits. A model is one of molflt's, a
file of options of molflt train with changes behind commas, or one of SchNet, DimeNet++, ViSNet,
PaiNN, kernel ridge (needs molflt[bench]) and the median of training energies.

Each job has one thread and --minutes of CPU time for training; evaluation does not count. Learning
rates decrease with the used share of the time. The last weights are evaluated. All nets share the
batches, targets, loss, optimizer, clipping and choice of atoms of --config. Their inputs are
elements, tags and edges to periodic images. Peers have their usual learning rates, and DimeNet++
has batches of 8, unless options behind -- set others. Averages of weights have the decay of
--config, but cover at most a tenth of the steps. Tuning tries three learning rates; with
--tune-most it tries more while the best one is the largest or smallest. Differences have standard
errors over seeds and systems. Systems count as independent, except those that share a value in a
column of DIR/systems.csv (--alike molecule metal). Writes comparison.md and .csv, error-cpu.png,
error-size.png, and jobs/* with predictions. The same command continues an interrupted comparison.
"""

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path

from kit.words import described, guarded, parsed
from peers_kit import pool, report
from peers_kit.jobs import open_structures, options_of, run_job, split_path
from peers_kit.models import MODELS, REPOSITORY, TRIED, title


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Options of the script; the words after -- go to every training run."""
    parser = described(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of compact stores")
    parser.add_argument("--out", type=Path, default=Path("runs/peers"))
    # relative paths, to continue results in another clone
    demo = Path(os.path.relpath(REPOSITORY / "configs/demo.yaml"))
    parser.add_argument("--config", type=Path, default=demo)
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--minutes", type=float, default=10.0, help="CPU time of each training")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 0")
    parser.add_argument("--fractions", nargs="+", type=float, default=[1.0], metavar="F")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at the same time")
    parser.add_argument("--evaluations", type=int, default=10, help="points of a curve")
    parser.add_argument("--tune", action="store_true", help="try learning rates of each net")
    parser.add_argument("--tune-minutes", type=float, help="of each; a fifth of --minutes")
    parser.add_argument("--tune-most", type=int, default=len(TRIED), help="at most so many rates")
    parser.add_argument("--against", metavar="MODEL", help="add the differences from this model")
    parser.add_argument(
        "--alike", nargs="+", default=[], metavar="COLUMN", help="for --against, of systems.csv"
    )
    options = parsed(parser, words)
    tuned = options.tune_minutes is not None or options.tune_most != len(TRIED)
    if tuned and not options.tune:
        parser.error("--tune-minutes and --tune-most are for --tune; add it, or leave them out")
    if options.tune_most < len(TRIED):
        parser.error(f"--tune-most must be at least {len(TRIED)}; got {options.tune_most}")
    if options.against and options.against not in map(title, options.models):
        parser.error(f"--against {options.against}: expected one of --models")
    if options.alike and not (options.against and len(options.alike) <= 2):
        parser.error("--alike is for --against, and takes at most two columns of systems.csv")
    options.tune_minutes = options.tune_minutes or options.minutes / 5
    options.fractions = sorted(set(options.fractions))
    options.models = list(dict.fromkeys(options.models))
    return options


def check(options: argparse.Namespace) -> None:
    """Refuses impossible options before anything is trained."""
    titles = [title(model) for model in options.models]
    if len(set(titles)) < len(titles):
        raise ValueError(f"--models: expected different names; got {', '.join(titles)}")
    if "kernel-ridge" in titles and importlib.util.find_spec("sklearn") is None:
        raise ValueError("kernel-ridge needs scikit-learn; pip install 'molflt[bench]'")
    options_of(["--config", str(options.config), *options.words])
    for split in pool.splits_of(options.data):
        dataset = open_structures(split_path(options.data, split), False)
        report.groups_of(options.data, dataset, options.alike)


def compare(options: argparse.Namespace) -> bool:
    """Tunes on request, trains and writes the results. Returns False if a job failed."""
    check(options)
    well, rates, tried = True, {}, {}
    if options.tune:
        trials, more = pool.tuning(options), True
        while more:
            every = {path: job for jobs in trials.values() for path, job in jobs.items()}
            well = pool.run(every, options.jobs) and well
            more = pool.widen(options, trials)
        rates = {name: pool.best_rate(jobs) for name, jobs in trials.items()}
        tried = {name: len(jobs) for name, jobs in trials.items()}
    jobs = pool.comparison(options, rates)
    well = pool.run(jobs, options.jobs) and well
    if results := [pool.read(path) for path in jobs if path.exists()]:
        print(report.write(options.out, results, tried, options.against, options.alike))
    return well


@guarded
def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    if words[:1] == ["--job"]:  # a process of the pool, which sends the job
        run_job(json.loads(sys.stdin.read()), Path(words[1]))
        return 0
    return 0 if compare(parse(words)) else 1


if __name__ == "__main__":
    sys.exit(main())
