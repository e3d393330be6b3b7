"""What may import what, and how long things may get (see the table in CONTRIBUTING.md)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "molflt"
SOURCES = sorted(PACKAGE.rglob("*.py"))

MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 70

# The only module that may touch pickles: it resolves names from a fixed list and runs nothing.
UNPICKLER = "molflt.data.oc20_pickle"

# Parts of the package, and the other parts that each may import. What is not named here (train,
# evaluate, ...) is the top: it may import all but the command line.
ADAPTERS = {"graph", "sequence", "image"}
ALLOWED: dict[str, set[str]] = {
    "attention": set(),
    "files": set(),
    "data": {"files"},
    "plots": {"metrics"},
    "metrics": set(),
    "options": set(),
    **{adapter: {"attention"} for adapter in ADAPTERS},
    # the command line names functions as text and imports them when they are chosen
    "cli": {"options"},
    "__main__": {"cli"},
}
NAMES = {path.stem for path in PACKAGE.glob("*.py")} | {
    path.parent.name for path in PACKAGE.glob("*/__init__.py")
}
TOP = NAMES - ALLOWED.keys() - {"__init__"}
for top in TOP:
    ALLOWED[top] = NAMES - {"cli", "options", "__main__", "__init__"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part(module: str) -> str:
    """Part of the package that a dotted name belongs to: molflt.data.store -> data."""
    return module.split(".")[1] if "." in module else module


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module imported anywhere in a file, also inside functions, as absolute names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module_name(path).split(".")
                keep = len(package) - node.level + (path.name == "__init__.py")
                base = ".".join(filter(None, [*package[:keep], node.module]))
            if base == "molflt":  # from molflt import data
                for alias in node.names:
                    inner = (PACKAGE / alias.name).exists() or (
                        PACKAGE / f"{alias.name}.py"
                    ).exists()
                    yield (f"molflt.{alias.name}" if inner else "molflt"), node.lineno
            else:
                yield base, node.lineno


def loaded_after(statement: str) -> set[str]:
    """Top-level packages that a fresh interpreter has loaded after a statement."""
    code = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_point_downwards(path: Path) -> None:
    own = part(module_name(path))
    wrong = []
    for name, line in imports(path):
        if not name.startswith("molflt"):
            continue
        other = part(name)
        outward = other != own and "molflt" not in (own, other)
        if outward and other not in ALLOWED[own]:
            wrong.append(f"{path.name}:{line} imports {name}")
        if own == "molflt" and other != "molflt":
            wrong.append(f"{path.name}:{line}: molflt/__init__.py imports {name}")
    assert not wrong


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if part(module_name(p)) == "attention"], ids=module_name
)
def test_attention_needs_only_torch(path: Path) -> None:
    allowed = {"torch", "numpy", "scipy", "molflt", *sys.stdlib_module_names}
    assert {name.partition(".")[0] for name, _ in imports(path)} <= allowed


def test_import_rules_see_what_they_forbid(tmp_path: Path) -> None:
    lines = (
        "import molflt.graph\ndef f():\n    from molflt import data\n    from molflt.cli import x\n"
    )
    (tmp_path / "probe.py").write_text(lines)
    found = [name for name, _ in imports(tmp_path / "probe.py")]
    assert found == ["molflt.graph", "molflt.data", "molflt.cli"]


def test_attention_loads_torch_only() -> None:
    loaded = loaded_after("import molflt.attention")
    assert "torch" in loaded
    assert not loaded & {
        "torch_geometric",
        "lightning",
        "ase",
        "lmdb",
        "matplotlib",
        "jsonargparse",
    }


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["data", "--help"], []])
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    loaded = loaded_after(f"from molflt.cli import main; main({words!r})")
    assert not loaded & {"torch", "jsonargparse", "numpy", "ase", "lightning"}


def test_no_python_below_datasets() -> None:
    """A module there would shadow the package `datasets` of the same name."""
    assert list((ROOT / "datasets").rglob("*.py")) == []


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda p: p.stem)
def test_configs_name_no_classes(path: Path) -> None:
    def keys(node: object) -> Iterator[str]:
        if isinstance(node, dict):
            for key, value in node.items():
                yield str(key)
                yield from keys(value)
        elif isinstance(node, list):
            for value in node:
                yield from keys(value)

    assert not set(keys(yaml.safe_load(path.read_text()))) & {"_target_", "class_path", "init_args"}


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_nothing_unpickles(path: Path) -> None:
    wrong = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            options = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if called in ("torch.load", "load") and "weights_only" in options:
                if options["weights_only"] != "True":
                    wrong.append((node.lineno, ast.unparse(node)))
            elif called == "torch.load":
                wrong.append((node.lineno, "torch.load without weights_only=True"))
            if options.get("allow_pickle", "False") != "False":
                wrong.append((node.lineno, ast.unparse(node)))
            unpickles = called.endswith(("pickle.load", "pickle.loads", "Unpickler"))
            if unpickles and module_name(path) != UNPICKLER:
                wrong.append((node.lineno, called))
    assert not wrong


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_sizes(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and code_lines(node) > MAX_FUNCTION_LINES
    ]
    assert not long


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring, which may be as long as it needs to be."""
    assert node.end_lineno is not None
    total = node.end_lineno - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node) is not None and first.end_lineno is not None:
        total -= first.end_lineno - first.lineno + 1
    return total
