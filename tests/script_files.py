"""Scripts as modules: they are files, not a package."""

import importlib.util
import shutil
import sys
import tarfile
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

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


def unpack_game_net(script: str, top: Path) -> list[str]:
    """Puts archived runs where the page says, below `top`; options of its command for a script."""
    results, config = SCRIPTS.parent / "docs" / "results", Path("configs") / "game-net-all.yaml"
    with tarfile.open(results / "game-net-runs.tar.xz") as archive:
        archive.extractall(top / "runs", filter="data")
    (top / config).parent.mkdir()
    shutil.copy(SCRIPTS.parent / config, top / config)
    command = (results / "dft.md").read_text().partition(f"python scripts/{script} ")[2]
    return command.partition("```")[0].replace("\\\n", " ").split()


class Trainings:
    """Takes the place of `subprocess.run`: notes each command, and leaves what it would leave.

    Attributes:
        commands: words after `python -m molflt`.
        broken: part of a command that fails.
    """

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.broken = ""

    def __call__(self, command: list[str], **_: object) -> SimpleNamespace:
        words = command[3:]
        self.commands.append(words)
        if self.broken and self.broken in " ".join(words):
            return SimpleNamespace(returncode=2)
        if words[0] == "evaluate":
            self.evaluate(Path(words[1]))
        return SimpleNamespace(returncode=0)

    def evaluate(self, run: Path) -> None:
        """Leaves what an evaluation of that run leaves."""
        raise NotImplementedError
