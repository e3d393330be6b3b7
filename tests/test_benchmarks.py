"""scripts/run.py: every benchmark runs, and writes rows, a table and a picture."""

import os
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import add_adsorbate, fcc111
from ase.io import write
from data.oc20_files import old_record, write_lmdb
from script_files import SCRIPTS, benchmark, load_script  # makes the kit importable
from torch_geometric.data import Batch

from kit import layers  # isort: skip
from kit.rows import Rows, exponent  # isort: skip

ROOT = SCRIPTS.parent
RESULTS = ROOT / "docs" / "results"
RUN = load_script("run")
NAMES = list(RUN.benchmarks())
# Rows of benchmarks of earlier commits.
HISTORY = {"arena", "beam", "kernel_error", "layers", "long_range", "masks", "norms", "patches"}
HISTORY |= {"precision", "sampling"}
STORED = sorted({path.stem for path in RESULTS.glob("*.csv")} - HISTORY)
MEMORY = {"scaling", "atoms"}
# Trains in subprocesses, which other tests cover; only the weekly workflow runs it.
LONG = {"interruptions"} if not os.environ.get("MOLFLT_FULL") else set()
needs_linux = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="peak memory is read from Linux's /proc"
)


def dimers(folder: Path) -> Path:
    """Writes ions of charges +1 and -1, of one and two atoms; E = -14.4 eV Å / r of centers."""
    generator = np.random.default_rng(0)
    far = {"train": np.linspace(6.0, 12.0, 8), "test": np.linspace(13.0, 15.0, 3)}
    for split, distances in far.items():
        frames = []
        for distance in distances:
            axis = generator.normal(size=3)
            center = distance * axis / np.linalg.norm(axis)
            half = np.array([0.6, 0.0, 0.0])
            places = [np.zeros(3), center + half, center - half]
            frame = Atoms("NaO2", places, cell=[40, 40, 40], pbc=True)
            energy = {"inter_energy": -14.4 / distance, "distance": distance}
            frame.info = {"indexB": 1, "label": "CC", **energy}
            frames.append(frame)
        write(folder / f"{split}-id0.xyz", frames, format="extxyz")
    return folder


def bound(folder: Path) -> Path:
    """Writes atoms on a small slab, with invented DFT energies."""
    frames = []
    for number, element in enumerate("HCO"):
        frame = fcc111("Cu", (1, 1, 3), vacuum=8.0)
        add_adsorbate(frame, element, 1.2, "fcc")
        frame.set_tags([0, 0, 1, 2])
        frame.arrays["fixed"] = np.array([1, 1, 0, 0])
        frame.info = {"name": f"{element}.xyz", "adsorbate": "X", "y_relaxed": float(number)}
        frames.append(frame)
    write(folder / "bound.extxyz", frames, format="extxyz")
    return folder / "bound.extxyz"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("inputs")
    write_lmdb(folder / "oc20.lmdb", {str(i): old_record(i) for i in range(4)})
    return {
        "reading": ["--records", str(folder / "oc20.lmdb")],
        "dimers": ["--data", str(dimers(folder))],
        "labels": ["--file", str(bound(folder)), "--calculator", "emt"],
    }


def every_page() -> str:
    return "\n".join(page.read_text() for page in sorted(RESULTS.glob("*.md")))


def check_memory(study: layers.Study, rows: Rows) -> None:
    """Memory is linear in the length exactly for the mechanisms that are marked as linear."""
    for mechanism, (_, kinds, linear) in study.mechanisms.items():
        for causal in kinds:
            points = layers.curve(rows, mechanism, "MiB", causal)
            if len(points) > 1 and points[0][0] >= 500:
                assert (exponent(points) < 1.4) == linear, (mechanism, points)


class NotCompiled:
    """Replaces machine code, which tests/graph/test_computation.py covers, with the model."""

    matrix = False

    def __init__(self, model: torch.nn.Module, path: Path) -> None:
        self.model = model

    def __call__(self, batch: Batch) -> dict[str, torch.Tensor]:
        return self.model(batch)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=needs_linux) if n in MEMORY else n for n in NAMES if n not in LONG],
)
def test_quick_run_writes_rows_block_and_picture(name, inputs, tmp_path, monkeypatch) -> None:
    module = benchmark(name)
    if name == "compiled":
        monkeypatch.setattr(module, "compile_energies", lambda model, path: path)
        monkeypatch.setattr(module, "CompiledEnergies", NotCompiled)
    pages, threads = every_page(), torch.get_num_threads()
    words = [name, "--quick", *inputs.get(name, []), "--out", str(tmp_path)]
    assert RUN.main(words) == 0
    torch.set_num_threads(threads)
    rows = RUN.read_csv(tmp_path / f"{name}.csv")
    if name in MEMORY:
        check_memory(module.STUDY, rows)
    assert rows and not any(row.get("note") for row in rows)
    block = (tmp_path / f"{name}.md").read_text()
    lengths = [line.count(" | ") for line in block.splitlines() if line.startswith("| ")]
    assert len(lengths) > 2 and block == f"{module.table(rows)}\n"
    if hasattr(module, "draw"):
        assert 10_000 < (tmp_path / f"{name}.png").stat().st_size < 300_000
    assert every_page() == pages  # --out does not change the documentation


@pytest.mark.parametrize("name", [name for name in NAMES if name in STORED])
def test_documented_tables_equal_stored_rows(name: str) -> None:
    module, rows = benchmark(name), RUN.read_csv(RESULTS / f"{name}.csv")
    text = RUN.page_of(name).read_text()
    assert RUN.marked(text, name, module.table(rows)) == text, f"run.py {name} --redraw"
    picture = RESULTS / f"{name}.png"
    assert picture.exists() == hasattr(module, "draw")


def test_all_stored_rows_have_a_benchmark_and_all_blocks_rows() -> None:
    marks = re.findall(r"^<!-- bench: (\w+) -->$", every_page(), re.M)
    assert sorted(marks) == [name for name in STORED if name in NAMES] == STORED


def test_commands_of_the_documentation_exist() -> None:
    text = "\n".join(page.read_text() for page in ROOT.glob("docs/**/*.md")).replace("\\\n", " ")
    text = re.sub(r"^git checkout .*?^```", "", text, flags=re.M | re.S)  # of earlier commits
    quoted = re.findall(r'make bench NAME=(\w+)(?: +ARGS="([^"]*)")?', text)
    assert {name for name, _ in quoted} >= set(STORED)
    for name, words in quoted:
        RUN.parse([name, *shlex.split(words)])
    for script in re.findall(r"python (scripts/\w+\.py)", text):
        assert (ROOT / script).exists(), script
