import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ase.io import write
from test_own_data import frames
from tiny_run import on_slab, write_points

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()

# Options that make the commands of README.md fast.
TINY = "--model.dim=16 --model.heads=2 --model.layers=1 --trainer.max_steps=2 --trainer.val_every=2"
SMALLER = {
    "train": f"{TINY} --trainer.checkpoint_every=2 --trainer.accelerator=cpu --data.batch_size=4",
    "evaluate": "--device=cpu",
    "relax": "--fmax=100",
    "adsorb": "--layers=3 --repeat=2,2 --rotation=360 --best=1",
}
# Commands of other programs, and commands that download.
ELSEWHERE = ("make ", "pip ", "conda ", "molflt data download ", "python -m molflt.certify ")

# Runs commands and examples in one process, which imports torch once.
DRIVER = """
import contextlib, io, json, sys, traceback
from molflt.commands.cli import main

done = []
for words in json.load(sys.stdin):
    out, error = io.StringIO(), ""
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            status = main(words) if isinstance(words, list) else exec(words, {}) or 0
        except Exception:
            status, error = 1, traceback.format_exc()
    done.append([status, out.getvalue(), err.getvalue() + error])
import molflt
print(json.dumps([molflt.__file__, done]))
"""


class Installed(NamedTuple):
    """The package in a virtual environment."""

    python: Path
    package: Path
    files: set[str]
    sdist: set[str]

    def run(self, folder: Path, steps: list[list[str] | str]) -> list[str]:
        """Runs commands (words) and examples (text), and returns their output."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(
            [self.python, "-c", DRIVER],
            **{"cwd": folder, "env": environment, "input": json.dumps(steps)},
            **{"capture_output": True, "text": True},
        )
        assert done.returncode == 0, done.stderr
        file, results = json.loads(done.stdout.splitlines()[-1])
        assert Path(file).parent == self.package
        for step, (status, _, error) in zip(steps, results, strict=True):
            assert status == 0, f"{step}: {error}"
        return [out for _, out, _ in results]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Installs the wheel of the sdist, with access to the packages of this environment."""
    build = pytest.importorskip("hatchling.build", reason="hatchling builds the wheel")
    folder = tmp_path_factory.mktemp("wheel")
    sdist = built(build.build_sdist, ROOT, folder)
    shutil.unpack_archive(sdist, folder)
    root = folder / sdist.name.removesuffix(".tar.gz")
    inside = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    wheel = built(build.build_wheel, root, folder)
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    paths = sysconfig.get_paths(vars={"base": str(folder / "venv")})
    there = Path(paths["purelib"])
    others = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (there / "others.pth").write_text("\n".join(others))  # after its own
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--quiet"]
    subprocess.run([*pip, "--no-index", "--force-reinstall", str(wheel)], check=True)
    return Installed(python, there / "molflt", set(zipfile.ZipFile(wheel).namelist()), inside)


def built(build: Any, source: Path, folder: Path) -> Path:
    with contextlib.chdir(source):
        return folder / build(str(folder))


def test_wheel_and_sdist_contain_all_files(installed: Installed) -> None:
    for folder, inside in (("molflt", "molflt"), ("configs", "molflt/shipped/configs")):
        tracked = {
            f"{inside}/{path.relative_to(ROOT / folder).as_posix()}"
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and path.suffix != ".pyc"
        }
        assert tracked <= installed.files
    assert {"molflt/py.typed", "molflt/shipped/datasets/chgnet-sample/train.safetensors"} <= (
        installed.files
    )
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in installed.files)
    assert not [name for name in installed.files if name.startswith(("tests", "scripts", "docs"))]
    assert {"CITATION.cff", "CHANGELOG.md", "tests/test_wheel.py", "Makefile"} <= installed.sdist


def shown() -> list[list[str] | str]:
    """Returns the commands and Python examples of README.md in order."""
    steps: list[list[str] | str] = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", README, re.M | re.S):
        if language == "python":
            steps.append(block)
            continue
        for line in filter(str.strip, block.splitlines()):
            if not line.startswith(ELSEWHERE):
                tool, *words = shlex.split(line, comments=True)
                assert tool == "molflt", f"{line}: neither run nor listed in ELSEWHERE"
                steps.append([*words, *SMALLER.get(words[0], "").split()])
    return steps


def test_readme_in_another_folder(installed: Installed, tmp_path: Path) -> None:
    write(tmp_path / "mine.extxyz", frames(12))
    for name in ("structures.extxyz", "slab.extxyz"):
        write(tmp_path / name, on_slab())
    write_points(tmp_path / "frames")
    steps = shown()
    assert {step[0] for step in steps if isinstance(step, list)} >= {"train", "evaluate", "predict"}
    assert any(isinstance(step, str) for step in steps)
    installed.run(tmp_path, steps)
