"""Train variants of a configuration with several seeds and compare their metrics.

    python scripts/compare.py --config configs/demo.yaml --out runs/compare --jobs 2
    python scripts/compare.py --config configs/lm/wikitext2.yaml --out runs/lm \\
        --variants configs/lm/performer.yaml configs/lm/flt-local.yaml,model.normalize_qk=true
    python scripts/compare.py ... -- --trainer.max_steps 600      # options for every training run
    python scripts/compare.py ... -- --init runs/gaps/{variant}/seed{seed}

A variant consists of a configuration file and optional changes, separated by commas. The options
for all training runs may contain {variant} and {seed}. All runs are evaluated. Writes the mean and
standard deviation over seeds of one metric to comparison.md (first split: comparison.png), and all
results to comparison.csv. After an interruption, the same command continues.
"""

import statistics
from pathlib import Path

from kit.rows import Rows, markdown, mean_sd, names, pick, write_csv
from kit.runs import collect, errors_of_mean, job_of, name_of, publish, work_all
from kit.words import guarded, parsed, trainings

from molflt.plots.figure import SERIES, panels, plain
from molflt.training.checkpoint import count_parameters
from molflt.training.config import read_config
from molflt.training.run_folder import read_provenance

PAPERS = [f"configs/atoms/{name}.yaml" for name in ("flt", "performer", "softmax-mask", "softmax")]
# Heading and number of digits of each metric in results.json.
MEASURES = {
    "mae_eV": ("MAE, eV", 4),
    "bleu": ("BLEU", 2),
    "residue_perplexity": ("perplexity per residue", 2),
    "perplexity": ("perplexity", 2),
    "top1_percent": ("top-1, %", 2),
    "accuracy_percent": ("accuracy, %", 2),
    "bits_per_dim": ("bits/dim", 3),
    "matthews_percent": ("Matthews, %", 2),
    "pearson_percent": ("Pearson, %", 2),
    "log10_best": ("log10 of the best value", 2),
    "final_loss": ("final loss", 4),
    "force_mae_meV_per_A": ("force MAE, meV/Å", 2),
}

LARGE_IS_GOOD = ("bleu", *(name for name in MEASURES if name.endswith("_percent")))


def expect_same_data(runs: list[Path]) -> None:
    """Raises ValueError if the runs were trained on different data."""
    every = {run: read_provenance(run).get("data") for run in runs}
    known = {run: data for run, data in every.items() if data}  # empty in earlier versions
    first = next(iter(known), None)
    for run, data in known.items():
        if data != known[first]:
            raise ValueError(f"{run}: trained on different data than {first}; remove one of them")


def values(rows: Rows, measure: str, **labels: object) -> list[float]:
    """Returns the values of a metric, or an empty list if any value is missing."""
    found = [row.get(measure) for row in pick(rows, **labels)]
    return [] if None in found else found


def table(rows: Rows, measure: str, out: Path) -> str:
    """Formats the metric of each variant on each split, EwT for energies, and the baselines."""
    splits, energies = names(rows, "split"), measure == "mae_eV"
    label, digits = MEASURES[measure]
    head = ["variant", "parameters", "seeds", *(f"{split} {label}" for split in splits)]
    columns = [(split, measure, digits) for split in splits]
    columns += [("val_id", "ewt_percent", 1)] if energies else []
    lines = []
    for variant in names(rows, "variant"):
        seeds = names(pick(rows, variant=variant), "seed")
        run = out / variant / f"seed{seeds[0]}"
        found = [(values(rows, m, variant=variant, split=s), d) for s, m, d in columns]
        cells = [mean_sd(own, d) if own else "–" for own, d in found]
        lines.append([variant, f"{count_parameters(run, read_config(run)):,}", len(seeds), *cells])
        if energies and len(seeds) > 1:
            lines.append(_of_mean([out / variant / f"seed{seed}" for seed in seeds], splits))
    for name in ("histogram", "uniform") if measure == "bits_per_dim" else ():
        known = [values(rows, f"{name}_{measure}", split=split) for split in splits]
        cells = [f"{own[0]:.{digits}f}" if own else "–" for own in known]
        lines.append([f"{name}, no model", None, None, *cells])
    if not energies:
        return markdown(head, lines)
    known = {row["split"]: row["baseline_mae_eV"] for row in rows}
    baseline = {split: "–" if mae is None else f"{mae:.4f}" for split, mae in known.items()}
    lines.append(["training median", None, None, *(baseline[split] for split in splits), None])
    return markdown([*head, "val_id EwT, %"], lines)


def _of_mean(runs: list[Path], splits: list[str]) -> list[object]:
    """Returns the table line with the errors of energies that are averaged over several runs."""
    found = {split: errors_of_mean(runs, split) for split in splits}
    cells = ["–" if own is None else f"{own[0]:.4f}" for own in found.values()]
    known = found.get("val_id")
    ewt = None if known is None else f"{known[1]:.1f}"
    return ["their mean", None, len(runs), *cells, ewt]


def draw(rows: Rows, measure: str, png: Path) -> None:
    """Draws the mean and spread of each variant on the first split, with the best one on top."""
    split, variants = rows[0]["split"], names(rows, "variant")
    found = {name: values(rows, measure, variant=name, split=split) for name in variants}
    panel = {
        name: (statistics.fmean(own), statistics.stdev(own) if len(own) > 1 else 0.0)
        for name, own in found.items()
        if own
    }
    if not panel:
        return
    label = f"{split} {MEASURES[measure][0]}\nmean ± standard deviation over seeds"
    large_is_good = measure in LARGE_IS_GOOD
    order = sorted(panel, key=lambda name: panel[name][0], reverse=not large_is_good)
    with panels(png, 1, 1, (3.2, 0.3 * len(order)), (3.2, 1.3)) as (_, (axes,)):
        for place, name in enumerate(order):
            mean, spread = panel[name]
            axes.errorbar(mean, place, xerr=spread, fmt="o", capsize=3, color=SERIES[0])
        axes.set_yticks(range(len(order)), map(plain, order))
        axes.set_ylim(-0.6, len(order) - 0.4)
        axes.locator_params(axis="x", nbins=5)
        axes.set_xlabel(f"{label}\n({'higher' if large_is_good else 'lower'} is better)")
        axes.grid()


def write(out: Path, variants: list[str], seeds: list[int]) -> None:
    """Writes and prints the comparison of all finished runs."""
    for variant in variants:
        expect_same_data([out / variant / f"seed{seed}" for seed in seeds])
    if rows := collect(out, "variant", variants, seeds):
        measure = next((name for name in MEASURES if name in rows[0]), None)
        if measure is None:
            raise ValueError(f"{out}: expected one of {', '.join(MEASURES)} in results.json")
        text = table(rows, measure, out)
        draw(rows, measure, out / "comparison.png")
        write_csv(out / "comparison.csv", rows)
        publish(out / "comparison.md", text)


@guarded
def main(words: list[str] | None = None) -> int:
    parser = trainings(__doc__, "configs/demo.yaml", "runs/compare", seeds=[0, 1, 2])
    form = "FILE.yaml[,key=value ...]"
    parser.add_argument("--variants", nargs="+", default=PAPERS, metavar="VARIANT", help=form)
    options = parsed(parser, words)
    variants = [name_of(variant) for variant in options.variants]
    if len(set(variants)) < len(variants):
        raise ValueError(f"--variants: expected distinct names; got {', '.join(variants)}")
    # The runs with the first seed come first.
    jobs = {
        options.out / name_of(variant) / f"seed{seed}": job_of(options, variant, seed)
        for seed in options.seeds
        for variant in options.variants
    }
    code = work_all(jobs, options)
    write(options.out, variants, options.seeds)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
