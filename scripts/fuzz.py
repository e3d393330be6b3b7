"""Damaged and hostile inputs through the command line: all have to be read rightly, or refused.

    python scripts/fuzz.py --inputs 10000 --seed 0 --jobs 2    # what `make fuzz` does
    python scripts/fuzz.py --only store record                 # some formats alone
    python scripts/fuzz.py --case store:17                     # one input again; its files stay

Each input is made from a valid file by damage that the seed, its format and its number decide. It
fails if it runs code or writes outside of its folder, ends in a traceback or a signal, takes more
than 5 s or more memory than 200 MB and four times its size, gives other numbers than an independent
decoder (of files with a digest: than the undamaged one), or is refused in words that do not help.
Failures go to --out, with their files and a line of failures.jsonl each; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from queue import SimpleQueue

from fuzzing import media, payloads, runs, shards, structures
from fuzzing.cases import Format
from fuzzing.pool import FAILURES, Outcome, Worker, seeds_in, start_server
from kit.rows import markdown
from kit.words import described
from tqdm import tqdm

FORMATS: dict[str, Format] = {
    **structures.FORMATS, **runs.FORMATS, **media.FORMATS, **shards.FORMATS, **payloads.FORMATS
}  # fmt: skip
ENTRANCE = "molflt.commands.cli:main"
SLOWER = 4  # a quick run has so many times fewer of the inputs that train


def inputs(formats: Mapping[str, Format], count: int, quick: bool = False) -> list[tuple[str, int]]:
    """(format, index) of so many inputs by the shares of the formats, one of each in turn."""
    shares = {
        name: each.share / (SLOWER if quick and each.trains else 1)
        for name, each in formats.items()
    }
    total = sum(shares.values())
    ends, so_far = {}, 0.0
    for name, share in shares.items():
        first = round(so_far * count / total)
        so_far += share
        ends[name] = round(so_far * count / total) - first
    columns = ([(name, i) for i in range(number)] for name, number in ends.items())
    return [one for row in zip_longest(*columns) for one in row if one is not None]


def outcomes(
    cases: Sequence[tuple[str, int]], workers: Sequence[Worker], keep: bool
) -> Iterator[Outcome]:
    """Runs inputs on all workers, in any order."""
    free: SimpleQueue[Worker] = SimpleQueue()
    for worker in workers:
        free.put(worker)

    def run(case: tuple[str, int]) -> Outcome:
        worker = free.get()
        try:
            return worker.run(*case, keep=keep)
        finally:
            free.put(worker)

    with ThreadPoolExecutor(len(workers)) as pool:
        yield from pool.map(run, cases)


def save(outcome: Outcome, folder: Path, out: Path) -> None:
    """Keeps the files of a failure, and a line that says what it is."""
    name = f"{outcome.name}-{outcome.number}"
    kept = out / name
    shutil.rmtree(kept, ignore_errors=True)
    if (folder / name).is_dir():
        shutil.copytree(folder / name, kept, symlinks=True, ignore=shutil.ignore_patterns(".*"))
    case = outcome.case
    row = {
        "case": f"{outcome.name}:{outcome.number}",
        "kind": outcome.kind,
        "detail": outcome.detail,
        "made": case.what,
        "words": case.words,
        "seconds": round(outcome.seconds, 2),
        "megabytes": outcome.peak >> 20,
    }
    with (out / "failures.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def table(found: Sequence[Outcome]) -> str:
    """A line for each format, and one for all of them."""
    columns = ("accepted", "refused", *FAILURES)
    groups: dict[str, list[Outcome]] = {}
    for outcome in found:
        groups.setdefault(outcome.name, []).append(outcome)
    if len(groups) > 1:
        groups["all"] = list(found)
    lines = []
    for name, group in groups.items():
        kinds = Counter(outcome.kind for outcome in group)
        cpu = sum(outcome.seconds for outcome in group)
        slow = max(outcome.seconds for outcome in group)
        peak = max(outcome.peak for outcome in group) >> 20
        counts = [kinds[kind] or None for kind in columns]
        lines.append([name, len(group), *counts, f"{cpu:.0f}", f"{slow:.1f}", peak])
    return markdown(("format", "inputs", *columns, "CPU / s", "slowest / s", "peak / MB"), lines)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command."""
    parser = described(__doc__)
    parser.add_argument("--inputs", type=int, default=10_000, help="of all formats together")
    parser.add_argument("--seed", type=int, default=0, help="of all draws")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--quick", action="store_true", help="fewer of the inputs that train")
    parser.add_argument("--only", nargs="+", choices=FORMATS, metavar="FORMAT", help="some formats")
    parser.add_argument("--case", help="FORMAT:INDEX; one input alone, whose files stay")
    parser.add_argument("--seeds", type=Path, help="valid files; made if there are none")
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"), help="for failures")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Returns 1 if an input has failed."""
    options = parse(words)
    formats = {name: FORMATS[name] for name in options.only or FORMATS}
    cases = inputs(formats, options.inputs, options.quick)
    if options.case:
        name, _, index = options.case.partition(":")
        cases = [(name, int(index))]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "failures.jsonl").unlink(missing_ok=True)
    start_server()
    found = []
    with tempfile.TemporaryDirectory(prefix="molflt-fuzz-") as temporary:
        folder = Path(temporary)
        seeds = (options.seeds or folder / "seeds").absolute()
        if not seeds.exists():
            seeds_in(seeds)
        count = min(options.jobs, len(cases))
        workers = [
            Worker("fuzz:FORMATS", ENTRANCE, seeds, folder / "inputs", options.seed)
            for _ in range(count)
        ]
        bar = tqdm(outcomes(cases, workers, bool(options.case)), total=len(cases), unit=" inputs")
        try:
            for outcome in bar:
                found.append(outcome)
                if outcome.kind in FAILURES or options.case:
                    save(outcome, folder / "inputs", options.out)
                    bar.write(f"{outcome.name}:{outcome.number} {outcome.kind}: {outcome.detail}")
        finally:
            for worker in workers:
                worker.stop()
    print(table(found))
    failures = [outcome for outcome in found if outcome.kind in FAILURES]
    if failures:
        print(f"{len(failures)} failures; their files: {options.out}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
