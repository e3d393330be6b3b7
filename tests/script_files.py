"""Scripts as modules: they are files, not a package."""

import importlib.util
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.append(str(SCRIPTS))


def load_script(name: str) -> ModuleType:
    """The module of scripts/NAME.py, a new one with every call."""
    spec = importlib.util.spec_from_file_location(f"{name}_script", SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def benchmark(name: str) -> ModuleType:
    """The benchmark of that name."""
    return import_module(load_script("run").benchmarks()[name])
