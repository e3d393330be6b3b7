"""Run a benchmark and write its rows, table and figure.

    python scripts/run.py                           # list the benchmarks
    python scripts/run.py decoding                  # measure, and update the documentation
    python scripts/run.py decoding --out runs/d     # write to a folder instead
    python scripts/run.py decoding --redraw         # read the CSV instead of measuring

Writes NAME.csv, NAME.png and NAME.md to a folder, by default runs/NAME. If a page in docs/results
contains markers for the benchmark, the table is written between them, and the other files are
written next to the page. The exit status is 1 if a row could not be measured, for example because
of a missing package.
"""

import argparse
import inspect
import sys
import types
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_origin

import torch
from kit.layers import SKIPPED
from kit.rows import Rows, read_csv, write_csv
from kit.words import described, guarded

SCRIPTS = Path(__file__).resolve().parent
LABELS = ("mechanism", "length", "pass")
RESULTS = SCRIPTS.parent / "docs" / "results"


def benchmarks() -> dict[str, Path]:
    """Returns the files of all benchmarks, keyed by name."""
    folders = ("cost", "accuracy", "training")
    paths = [path for folder in folders for path in sorted((SCRIPTS / folder).glob("*.py"))]
    return {path.stem: path for path in paths}


def find(name: str) -> ModuleType:
    """Imports the module of a benchmark."""
    return import_module(f"{benchmarks()[name].parent.name}.{name}")


def titles() -> str:
    """Returns the name and title of each benchmark as text, without importing the modules."""
    first = {name: path.read_text().splitlines()[0] for name, path in benchmarks().items()}
    return "\n".join(f"{name:14s} {title.strip(chr(34))}" for name, title in first.items())


def add_options(parser: argparse.ArgumentParser, measure: Any, redraw: bool) -> None:
    """Adds the arguments of `measure` as options; tuples become options with several values."""
    for name, parameter in inspect.signature(measure, eval_str=True).parameters.items():
        needed = parameter.default is parameter.empty
        default = "required" if needed else f"default: {parameter.default}"
        options: dict[str, Any] = {"help": default, "required": needed and not redraw}
        kind = parameter.annotation
        if isinstance(kind, types.UnionType):  # Path | None
            kind = next(each for each in get_args(kind) if each is not type(None))
        if get_origin(kind) is tuple:
            options |= {"nargs": "+", "type": get_args(kind)[0]}
        else:
            options |= {"action": "store_true"} if kind is bool else {"type": kind}
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, **options)


def page_of(name: str) -> Path | None:
    """Returns the results page that contains markers for a benchmark."""
    pages = sorted(RESULTS.glob("*.md"))
    return next((page for page in pages if f"<!-- bench: {name} -->" in page.read_text()), None)


def marked(text: str, name: str, block: str) -> str:
    """Returns a page with the block inserted between the markers of a benchmark."""
    begin, end = f"<!-- bench: {name} -->", "<!-- end -->"
    before, mark, rest = text.partition(begin)
    if not mark or end not in rest:
        raise ValueError(f"no {begin} ... {end}; add these markers, or use --out FOLDER")
    return f"{before}{begin}\n\n{block}\n\n{end}{rest.partition(end)[2]}"


def write(benchmark: Any, name: str, rows: Rows, out: Path | None) -> bool:
    """Writes and prints the table and draws the figure; returns False if a row has failed."""
    text = benchmark.table(rows)
    page = None if out else page_of(name)
    folder = out or RESULTS
    if page:
        page.write_text(marked(page.read_text(), name, text))
    else:
        (folder / f"{name}.md").write_text(f"{text}\n")
    if hasattr(benchmark, "draw"):
        benchmark.draw(folder / f"{name}.png", rows)
    print(text)
    failed = [row for row in rows if not str(row.get("note") or SKIPPED).startswith(SKIPPED)]
    for row in failed:
        labels = ", ".join(str(row[key]) for key in LABELS if key in row)
        print(f"not measured: {labels}: {row['note']}", file=sys.stderr)
    return not failed


def parse(words: Sequence[str]) -> tuple[str, argparse.Namespace, Mapping[str, Any]]:
    """Returns the name of the benchmark, this script's options, and the arguments of `measure`."""
    parser = described(f"{__doc__}\n{titles()}", "run.py")
    parser.add_argument("name", choices=benchmarks(), metavar="NAME")
    name = parser.parse_args(words[:1]).name
    benchmark = find(name)
    parser = described(benchmark.__doc__, f"run.py {name}")
    parser.add_argument("--out", type=Path, help="folder for all files, instead of docs/results")
    parser.add_argument("--quick", action="store_true", help="smallest sizes; needs --out")
    parser.add_argument("--redraw", action="store_true", help="read the CSV instead of measuring")
    own = [action.dest for action in parser._actions]
    add_options(parser, benchmark.measure, "--redraw" in words)
    given = vars(parser.parse_args(words[1:]))
    options = argparse.Namespace(**{key: given[key] for key in given if key in own})
    if options.out is None and page_of(name) is None:
        options.out = Path("runs") / name
    if options.quick and options.out is None:
        parser.error("results of --quick do not belong on a page; add --out FOLDER")
    rest = {key: given[key] for key in given if key not in own}
    if options.redraw and (rest or options.quick):
        parser.error("--redraw does not measure; only --out has an effect with it")
    return name, options, rest


@guarded
def main(words: Sequence[str] | None = None) -> int:
    """Returns 0 if all rows were measured, 1 if a row failed, and 2 if an option is invalid."""
    words = sys.argv[1:] if words is None else words
    if not words:
        print(titles())
        return 0
    name, options, given = parse(words)
    benchmark = find(name)
    path = (options.out or RESULTS) / f"{name}.csv"
    torch.set_num_threads(1)
    if not options.redraw:
        rows = benchmark.measure(**{**(benchmark.QUICK if options.quick else {}), **given})
        if not rows:
            raise ValueError("expected rows; got none with these options; choose different options")
        write_csv(path, rows)
    return 0 if write(benchmark, name, read_csv(path), options.out) else 1


if __name__ == "__main__":
    sys.exit(main())
