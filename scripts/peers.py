"""Compare molflt with other models trained with the same data, seeds and CPU time.

    python scripts/peers.py --data datasets/chgnet-sample --out runs/peers --minutes 10 --jobs 2
    python scripts/peers.py --data DIR --out runs/peers-few --minutes 10 --fractions 0.1 0.3 1.0 \\
        --models molflt painn kernel-ridge configs/atoms/near.yaml,model.heads=4
    python scripts/peers.py ... --tune --tune-most 5        # tune learning rates on val_id first
    python scripts/peers.py ... --against molflt            # differences from one model
    python scripts/peers.py ... -- --trainer.ema_decay 0.99 # options for training all networks

DIR contains compact stores: train, val_id and other val and test splits. A model is SchNet,
DimeNet++, ViSNet, PaiNN, kernel ridge regression (needs molflt[bench]), the median of the training
energies, one of molflt's models, or a configuration file and changes that are separated by commas.

Each network has one thread and --minutes of CPU time for training; evaluation is not counted. The
schedule of learning rates depends on the used fraction of this time, and the last weights are
evaluated. Kernel ridge regression has no time limit. All networks use the batches, energies, loss,
optimizer, gradient clipping and selection of atoms of --config; only molflt learns displacements.
The inputs of peers are elements, tags and edges to periodic images. Unless options after -- set
other values, peers use their usual learning rates, and DimeNet++ uses batches of 8. Averages of
weights use the decay of --config but cover at most a tenth of the steps. Tuning tries three
learning rates. With --tune-most, it tries more rates while the best rate is the largest or the
smallest. Standard errors of differences include the spread over seeds and systems. Systems are
treated as independent unless they have the same value in a column of DIR/systems.csv (--alike
molecule metal). Writes comparison.md, comparison.csv, error-cpu.png, error-size.png (with several
--fractions), and results and weights to jobs/. After an interruption, the same command continues.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from kit.words import described, guarded, parsed, refuse_idle
from peers_kit import pool, report
from peers_kit.jobs import open_structures, options_of, run_job, split_path
from peers_kit.models import MODELS, REPOSITORY, TRIED, title


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Parses the options; arguments after -- are options for all training runs."""
    parser = described(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of compact stores")
    parser.add_argument("--out", type=Path, default=Path("runs/peers"))
    # The path is relative, because a comparison may be continued in a different clone.
    demo = Path(os.path.relpath(REPOSITORY / "configs/demo.yaml"))
    parser.add_argument("--config", type=Path, default=demo)
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--minutes", type=float, default=10.0, help="CPU time of each training run")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, starting at 0")
    parser.add_argument("--fractions", nargs="+", type=float, default=[1.0], metavar="F")
    parser.add_argument("--jobs", type=int, default=1, help="simultaneous training runs")
    parser.add_argument("--evaluations", type=int, default=10, help="number of points of a curve")
    parser.add_argument("--tune", action="store_true", help="tune the learning rates")
    parser.add_argument("--tune-minutes", type=float, help="default: a fifth of --minutes")
    parser.add_argument("--tune-most", type=int, default=len(TRIED), help="maximum number of rates")
    parser.add_argument("--against", metavar="MODEL", help="list differences from this model")
    alike = "columns of systems.csv, for --against"
    parser.add_argument("--alike", nargs="+", default=[], metavar="COLUMN", help=alike)
    options = parsed(parser, words)
    if not options.tune:
        refuse_idle(parser, options, "without --tune", "tune_minutes", "tune_most")
    if options.against and options.against not in map(title, options.models):
        parser.error(f"--against {options.against}: expected one of --models")
    if options.alike and not (options.against and len(options.alike) <= 2):
        parser.error("--alike needs --against, and takes at most two columns of systems.csv")
    options.tune_minutes = options.tune_minutes or options.minutes / 5
    options.fractions = sorted(options.fractions)
    return options


def check(options: argparse.Namespace) -> None:
    """Raises ValueError for invalid options before the first training run."""
    titles = [title(model) for model in options.models]
    if len(set(titles)) < len(titles):
        raise ValueError(f"--models: expected distinct names; got {', '.join(titles)}")
    options_of(["--config", str(options.config), *options.words])
    for split in pool.splits_of(options.data):
        dataset = open_structures(split_path(options.data, split), False)
        report.groups_of(options.data, dataset, options.alike)


def compare(options: argparse.Namespace) -> bool:
    """Tunes if options.tune is set, trains, and writes results; returns False if a job failed."""
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
        report.write(options.out, results, tried, options.against, options.alike)
    return well


@guarded
def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    if words[:1] == ["--job"]:  # a process of the pool, which reads the job from stdin
        run_job(json.loads(sys.stdin.read()), Path(words[1]))
        return 0
    return 0 if compare(parse(words)) else 1


if __name__ == "__main__":
    sys.exit(main())
