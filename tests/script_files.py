"""Loads scripts as modules, because they are files, not a package."""

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.append(str(SCRIPTS))


def load_script(name: str) -> ModuleType:
    """Returns a new module of scripts/NAME.py with each call."""
    spec = importlib.util.spec_from_file_location(f"{name}_script", SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def benchmark(name: str) -> ModuleType:
    return load_script("run").find(name)


def cells(text: str) -> dict[str, list[str]]:
    """Returns the rows of Markdown tables by their first cells."""
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    return {first.strip(): [cell.strip() for cell in rest] for first, *rest in rows}


def words_in(folder: Path) -> list[str]:
    """Writes a configuration, and returns the options of a script that uses folders in `folder`."""
    (folder / "c.yaml").write_text("seed: 0\n")
    options = {"config": "c.yaml", "data": "data", "out": "out"}
    return [word for name, path in options.items() for word in (f"--{name}", str(folder / path))]


def write_evaluation(run: Path, rows: Iterable[tuple[str, int, float, float]]) -> None:
    """Writes predictions.csv with (split, sid, energy, label) in each row, and results.json."""
    lines = ["split,sid,energy_eV,target_eV", *(",".join(map(str, row)) for row in rows)]
    (run / "predictions.csv").write_text("\n".join(lines))
    (run / "results.json").write_text("{}")


class Trainings:
    """Replaces `subprocess.run`: records each command, and writes the files that it would write.

    Attributes:
        commands: words after `python -m molflt`.
    """

    def __init__(self) -> None:
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **_: object) -> SimpleNamespace:
        words = command[3:]
        self.commands.append(words)
        if words[0] == "evaluate":
            self.evaluate(Path(words[1]))
        return SimpleNamespace(returncode=0)

    def evaluate(self, run: Path) -> None:
        """Writes the files that an evaluation of this run writes."""
        raise NotImplementedError

    def replace(self, monkeypatch: pytest.MonkeyPatch) -> "Trainings":
        """Replaces `subprocess.run` in all scripts."""
        monkeypatch.setattr("kit.runs.subprocess", SimpleNamespace(run=self))
        return self
