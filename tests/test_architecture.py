"""Rules for imports and sizes (see CONTRIBUTING.md); all imports count, at any place in a file."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "molflt"
SOURCES = sorted(PACKAGE.rglob("*.py"))
CORE_FILES = sorted((PACKAGE / "attention").rglob("*.py"))

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

# Parts in the order of their imports, and the parts that each may import.
LEAVES = {"version", "atoms", "files", "optional", "lock", "memory", "metrics"}
LEAVES |= {"attention"}
ADAPTERS = {"graph", "sequence", "image"}
BASE = LEAVES | ADAPTERS | {"data", "plots", "shipped"}
ALLOWED: dict[str, set[str]] = {
    **{leaf: set() for leaf in LEAVES},
    "shipped": {"files"},
    **{adapter: {"atoms", "attention", "memory"} for adapter in ADAPTERS},
    "data": {"atoms", "files", "optional", "lock"},
    "adsorption": {"atoms", "data"},
    "plots": {"atoms", "files", "metrics"},
    "optimizers": {"attention", "data", "files", "memory"},
    "tasks": BASE | {"optimizers"},
    "training": BASE | {"tasks"},
    "evaluation": BASE | {"tasks", "training", "optimizers"},
    "pretrained": BASE | {"tasks", "training", "optimizers", "evaluation"},
    "certify": set(),
    "commands": BASE | {"adsorption", "tasks", "training", "evaluation", "pretrained"},
    "__main__": {"commands"},
}
# `from_run` of the optimizers, imported inside the methods.
EXCEPTIONS = {("optimizers", "molflt.training.checkpoint")}
NAMES = {path.stem for path in PACKAGE.glob("*.py")} | {
    path.parent.name for path in PACKAGE.glob("*/__init__.py")
}
# Subpackages and modules of the core in the order of their imports.
CORE = ["checks", "numerics", "keys", "features", "spectra", "nodes", "mixing"]
CORE += ["encodings", "positions", "fnet", "layer", "stack", "decoder", "convert"]


def test_every_part_has_a_rule_and_a_place_in_the_order() -> None:
    order = list(ALLOWED)
    assert NAMES - {"__init__"} == ALLOWED.keys()
    for part, others in ALLOWED.items():
        assert all(order.index(other) < order.index(part) for other in others), part


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part(module: str) -> str:
    """Returns the part of a dotted name: molflt.data.structures.store -> data."""
    return module.split(".")[1] if "." in module else module


@functools.cache
def text(path: Path) -> str:
    return path.read_text()


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(text(path))


def nodes(paths: Iterable[Path], *kinds: type[ast.AST]) -> Iterator[tuple[Path, Any]]:
    """Yields all nodes of these kinds with their files."""
    for path in paths:
        yield from ((path, node) for node in ast.walk(tree(path)) if isinstance(node, kinds))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yields every module imported in a file, also inside functions; no import is relative."""
    for _, node in nodes([path], ast.Import, ast.ImportFrom):
        if isinstance(node, ast.ImportFrom) and node.module != "molflt":
            yield node.module or "", node.lineno
            continue
        for alias in node.names:
            if isinstance(node, ast.Import):
                yield alias.name, node.lineno
            else:  # from molflt import data
                yield (f"molflt.{alias.name}" if alias.name in NAMES else "molflt"), node.lineno


def loaded_after(statement: str) -> set[str]:
    """Returns the top-level packages that a new interpreter has loaded after a statement."""
    code = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


def forbidden(path: Path) -> list[str]:
    """Returns the imports of a file that ALLOWED does not contain."""
    own, wrong = part(module_name(path)), []
    for name, line in imports(path):
        other = part(name) if name.startswith("molflt") else own
        inside = other == own or "molflt" in (own, other)
        if not inside and other not in ALLOWED[own] and (own, name) not in EXCEPTIONS:
            wrong.append(f"{path}:{line} imports {name}")
    return wrong


def test_imports_follow_the_order() -> None:
    assert [line for path in SOURCES for line in forbidden(path)] == []
    assert not [path for path, node in nodes(SOURCES, ast.ImportFrom) if node.level]


def test_subpackages_of_the_core_are_ordered() -> None:
    wrong = []
    for path in CORE_FILES:
        own = module_name(path).split(".")[2:3]
        above = CORE[CORE.index(own[0]) + 1 :] if own else []
        for name, line in imports(path):
            if name.count(".") > 1 and name.split(".")[2] in above:
                wrong.append(f"{path}:{line} imports {name}")
    assert not wrong


def test_private_names_stay_in_their_subpackage() -> None:
    wrong = []
    for path, node in nodes(SOURCES, ast.ImportFrom):
        own, other = module_name(path), node.module or ""
        package = own if path.name == "__init__.py" else own.rpartition(".")[0]
        if other.startswith("molflt") and package not in (other, other.rpartition(".")[0]):
            names = [alias.name for alias in node.names if re.match("_(?!_)", alias.name)]
            wrong += [f"{path}:{node.lineno}: {name} of {other}" for name in names]
    assert not wrong


def test_attention_needs_only_torch() -> None:
    allowed = {"torch", "numpy", "scipy", "molflt", *sys.stdlib_module_names}
    files = [path for path in CORE_FILES if path.stem != "triton_kernels"]  # loaded on first use
    found = {name.partition(".")[0]: f"{p}:{n}" for p in files for name, n in imports(p)}
    assert not [f"{where} imports {name}" for name, where in found.items() if name not in allowed]


def test_top_level_names_are_loaded_lazily() -> None:
    assert "torch" not in loaded_after("import molflt; dir(molflt)")
    import molflt

    assert {name for name in molflt.__all__ if getattr(molflt, name)} == set(molflt.__all__)
    with pytest.raises(AttributeError, match="Regressor"):
        molflt.Regressor  # noqa: B018


def test_help_loads_nothing_heavy() -> None:
    words = [["--help"], ["--version"], ["data", "--help"], []]
    loaded = loaded_after(f"from molflt.commands.cli import main; [main(w) for w in {words!r}]")
    assert not loaded & {"torch", "jsonargparse", "numpy", "ase", "lightning"}


def test_no_python_below_datasets() -> None:
    """A module there would shadow the package `datasets`."""
    assert list((ROOT / "datasets").rglob("*.py")) == []


def unpickles(call: ast.Call) -> bool:
    called = ast.unparse(call.func)
    options = {k.arg: ast.unparse(k.value) for k in call.keywords}
    loads = called == "torch.load" or (called == "load" and "weights_only" in options)
    return (
        (loads and options.get("weights_only") != "True")
        or options.get("allow_pickle", "False") != "False"
        or (
            called.endswith(("pickle.load", "pickle.loads", "Unpickler"))
            and not ast.unparse(call).startswith("pickle.loads(pickle.dumps(")
        )
    )


def test_unpickling_is_seen() -> None:
    wrong = ["torch.load(file)", "torch.load(file, weights_only=False)"]
    wrong += ["load(file, weights_only=some)", "np.load(file, allow_pickle=True)"]
    wrong += ["pickle.loads(data)"]
    right = ["pickle.loads(pickle.dumps(mine))", "torch.load(file, weights_only=True)"]
    right += ["json.load(file)", "np.load(file, allow_pickle=False)"]
    calls = [ast.parse(line, mode="eval").body for line in (*wrong, *right)]
    assert list(map(unpickles, calls)) == [True] * len(wrong) + [False] * len(right)


def test_nothing_unpickles() -> None:
    """Only the reader of OC20's records unpickles; other tests check that it does not run code."""
    calls = nodes(SOURCES, ast.Call)
    assert not [f"{path}:{call.lineno}" for path, call in calls if unpickles(call)]
    classes = nodes(SOURCES, ast.ClassDef)
    unpicklers = [
        path for path, each in classes if "Unpickler" in str(list(map(ast.unparse, each.bases)))
    ]
    assert [path.name for path in unpicklers] == ["oc20.py"]


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef, path: Path) -> int:
    """Counts the lines of a function without docstring, comments and blank lines."""
    lines = text(path).splitlines()[node.lineno - 1 : node.end_lineno]
    if ast.get_docstring(node) is not None:
        start, end = node.body[0].lineno - node.lineno, (node.body[0].end_lineno or 0) - node.lineno
        lines[start : end + 1] = []
    return sum(1 for line in lines if line.strip() and not line.strip().startswith("#"))


def test_sizes() -> None:
    lengths = {path: len(text(path).splitlines()) for path in SOURCES}
    long = [f"{path}: {lines} lines" for path, lines in lengths.items() if lines > MAX_FILE_LINES]
    for path, node in nodes(SOURCES, ast.FunctionDef, ast.AsyncFunctionDef):
        lines = 0 if node.name == "__init__" else code_lines(node, path)  # one line per option
        if lines > MAX_FUNCTION_LINES:
            long.append(f"{path}:{node.lineno}: {node.name}: {lines} lines")
    assert not long
