"""Size and shape of source trees, one column each, from the syntax of their files alone.

    python scripts/structure.py --tree . --tree ../before      # before and after
    python scripts/structure.py --tree . --rounds 0            # without the times of imports

Lines and files are those of molflt/, tests/ and scripts/; everything else is about molflt/. A room
is a folder of modules; where a folder has rooms within, each of its loose modules is one as well.
An arrow goes from one room to another of which it imports something, inside functions and for type
checks too. A package's __init__ that gathers names from below makes no arrow. Public names are the
functions, classes and variables that a module makes at its top level under a name without a leading
underscore, one by one. Code lines are without docstring, comments and blank lines; complexity is
McCabe's as ruff counts it (C901).
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from kit.words import described

PACKAGE = "molflt"
IMPORTED = ("attention", "graph")
LONG, COMPLEX = 50, 12
TIMED = (
    "import sys, time, torch; n, t = len(sys.modules), time.perf_counter(); import {};"
    "print(time.perf_counter() - t, len(sys.modules) - n)"
)
Function = ast.FunctionDef | ast.AsyncFunctionDef
Graph = dict[str, set[str]]


class Source(NamedTuple):
    """A file of the package."""

    module: str
    is_package: bool
    text: str
    tree: ast.Module

    @property
    def folder(self) -> str:
        """Its dotted name."""
        return self.module if self.is_package else self.module.rpartition(".")[0]

    def imports(self, known: set[str]) -> Iterator[str]:
        """Modules of the package that the file imports anywhere."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                parts = self.folder.split(".")[: 1 - node.level or None] if node.level else []
                base = ".".join([*parts, *([node.module] if node.module else [])])
                inner = [f"{base}.{alias.name}" for alias in node.names]
                names = [name if name in known else base for name in inner]
            else:
                continue
            yield from (name for name in names if name in known and name != self.module)


def sources(tree: Path) -> list[Source]:
    """All files of the package."""
    found = []
    for path in sorted((tree / PACKAGE).rglob("*.py")):
        parts = path.relative_to(tree).with_suffix("").parts
        package, text = parts[-1] == "__init__", path.read_text()
        found.append(
            Source(".".join(parts[:-1] if package else parts), package, text, ast.parse(text))
        )
    return found


def code_lines(node: Function, text: str) -> int:
    """Lines of a function without its docstring, comments and blank lines."""
    body = node.body[ast.get_docstring(node) is not None :]
    lines = text.splitlines()
    code = lines[node.lineno - 1 : node.body[0].lineno - 1]
    code += lines[body[0].lineno - 1 : node.end_lineno] if body else []
    return sum(not line.strip().startswith("#") for line in code if line.strip())


def complexities(tree: Path) -> list[int]:
    """McCabe's of every function of the package, as ruff counts it."""
    options = ["--isolated", "--ignore-noqa", "--select=C901"]
    options.append("--config=lint.mccabe.max-complexity=0")
    command = [sys.executable, "-m", "ruff", "check", *options, str(tree / PACKAGE)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode > 1:
        raise SystemExit(f"structure.py: ruff cannot count complexity: {found.stderr.strip()}")
    return [int(number) for number in re.findall(r"is too complex \((\d+) > 0\)", found.stdout)]


def public_names(module: ast.Module) -> list[str]:
    """Names that a module makes at its top level and does not hide."""
    names = []
    for node in module.body:
        if isinstance(node, Function | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found = (part for target in targets for part in ast.walk(target))
            names += [
                part.id
                for part in found
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
            ]
    return [name for name in names if not name.startswith("_")]


def edges(files: list[Source]) -> tuple[Graph, Graph]:
    """Who imports whom, among modules and among rooms."""
    modules: Graph = {file.module: set() for file in files}
    folders = {file.folder for file in files}
    divided = {folder.rpartition(".")[0] for folder in folders}
    room_of = {f.module: f.module if f.folder in divided else f.folder for f in files}
    rooms: Graph = {room: set() for room in room_of.values()}
    for file in files:
        for name in file.imports(set(modules)):
            if not (file.is_package and name.startswith(f"{file.module}.")):
                modules[file.module].add(name)
                rooms[room_of[file.module]] |= {room_of[name]} - {room_of[file.module]}
    return modules, rooms


def circles(graph: Graph) -> list[list[str]]:
    """Groups of nodes that can reach each other."""
    reach = {}
    for start in graph:
        seen, waiting = set[str](), list(graph[start])
        while waiting:
            if (node := waiting.pop()) not in seen:
                seen.add(node)
                waiting += graph[node]
        reach[start] = seen
    groups = {tuple(b for b in graph if b in reach[a] and a in reach[b]) for a in graph}
    return [list(group) for group in sorted(groups) if len(group) > 1]


def import_cost(trees: list[Path], rounds: int) -> dict[tuple[Path, str], str]:
    """Median seconds beyond torch, and modules loaded, in fresh interpreters that take turns."""
    runs: dict[tuple[Path, str], list[list[float]]] = {}
    for _ in range(rounds):
        for tree in trees:
            for name in IMPORTED:
                command = [sys.executable, "-c", TIMED.format(f"{PACKAGE}.{name}")]
                text = subprocess.check_output(command, cwd=tree, text=True)
                runs.setdefault((tree, name), []).append([float(x) for x in text.split()])
    return {
        key: f"{median(run[0] for run in own):.2f} s, {own[0][1]:.0f} modules"
        for key, own in runs.items()
    }


def column(tree: Path) -> dict[str, str]:
    """Report about a tree."""
    cells, total = {}, 0
    for folder in (PACKAGE, "tests", "scripts"):
        texts = [path.read_text() for path in (tree / folder).rglob("*.py")]
        lines = sum(len(text.splitlines()) for text in texts)
        total += lines
        cells[f"{folder}: files, lines"] = f"{len(texts)}, {lines:,}"
    cells["lines in all"] = f"{total:,}"
    files = sources(tree)
    lengths = [len(file.text.splitlines()) for file in files]
    cells["lines of a file: median, largest"] = f"{median(lengths):.0f}, {max(lengths)}"
    functions = [(n, f.text) for f in files for n in ast.walk(f.tree) if isinstance(n, Function)]
    branches = complexities(tree)
    cells["functions"] = f"{len(functions):,}"
    cells[f"above {LONG} code lines"] = str(sum(code_lines(*own) > LONG for own in functions))
    cells["complexity: mean, largest"] = f"{fmean(branches):.2f}, {max(branches)}"
    cells[f"complexity above {COMPLEX}"] = str(sum(value > COMPLEX for value in branches))
    modules, rooms = edges(files)
    cells["folders"] = str(len({file.folder for file in files}))
    cells["rooms, arrows"] = f"{len(rooms)}, {sum(map(len, rooms.values()))}"
    for label, graph in (("modules", modules), ("rooms", rooms)):
        found = circles(graph)
        members = "; ".join(" ".join(group) for group in found)
        cells[f"circles of {label}"] = f"{len(found)}: {members}" if found else "0"
    cells["public names"] = str(sum(len(public_names(file.tree)) for file in files))
    cells["the word Any"] = str(sum(len(re.findall(r"\bAny\b", file.text)) for file in files))
    return cells


def main(words: list[str] | None = None) -> int:
    parser = described(__doc__)
    parser.add_argument("--tree", type=Path, action="append", required=True)
    parser.add_argument("--rounds", type=int, default=5, help="imports of each, in turns")
    options = parser.parse_args(words)
    for tree in options.tree:
        if not (tree / PACKAGE).is_dir():
            parser.error(f"{tree}: no folder {PACKAGE!r} in it; expected the root of a checkout")
    columns = {tree: column(tree) for tree in options.tree}
    for (tree, name), cell in import_cost(options.tree, options.rounds).items():
        columns[tree][f"import {PACKAGE}.{name}, beyond torch"] = cell
    print(f"| | {' | '.join(map(str, columns))} |\n|{'---|' * (1 + len(columns))}")
    for label in next(iter(columns.values())):
        print(f"| {label} | {' | '.join(cells[label] for cells in columns.values())} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
