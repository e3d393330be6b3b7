"""scripts/run.py: every benchmark runs, and writes rows, a table and a picture."""

import json
import os
import re
import shlex
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from ase.io import write
from data.oc20_files import old_record, write_lmdb
from script_files import SCRIPTS, benchmark, load_script  # makes the kit importable
from tiny_run import on_slab
from torch import nn

from kit import layers  # isort: skip
from kit.rows import Rows, exponent  # isort: skip

ROOT = SCRIPTS.parent
RESULTS = ROOT / "docs" / "results"
RUN = load_script("run")
NAMES = list(RUN.benchmarks())
# Rows of benchmarks of earlier commits.
HISTORY = {"arena", "beam", "dimers", "kernel_error", "layers", "long_range", "masks", "norms"}
HISTORY |= {"patches", "precision", "sampling"}
STORED = sorted({path.stem for path in RESULTS.glob("*.csv")} - HISTORY)
MEMORY = {"scaling", "atoms"}
# Only the weekly workflow runs these: they train, predict or build BERT-base in other processes.
LONG = set() if os.environ.get("MOLFLT_FULL") else {"interruptions", "large_cells", "pretraining"}
needs_linux = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="peak memory is read from Linux's /proc"
)


def bound(folder: Path) -> Path:
    """Writes atoms on a small slab, with invented DFT energies."""
    frames = []
    for number, element in enumerate("HCO"):
        frame = on_slab(element)
        frame.arrays["fixed"] = 1 * (frame.get_tags() == 0)
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
        "labels": ["--file", str(bound(folder)), "--calculator", "emt"],
    }


def every_page() -> str:
    return "\n".join(page.read_text() for page in sorted(RESULTS.glob("*.md")))


def check_memory(study: layers.Study, rows: Rows) -> None:
    """Memory is linear in the length except for layers with an N x N matrix."""
    matrix = ("softmax, spectral mask", "softmax, Toeplitz bias", "softmax, exact mask")
    for mechanism in study.mechanisms:
        for causal in (False, True):
            points = layers.curve(rows, mechanism, "MiB", causal)
            if len(points) > 1 and points[0][0] >= 500:
                assert (exponent(points) < 1.4) == (mechanism not in matrix), (mechanism, points)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=needs_linux) if n in MEMORY else n for n in NAMES if n not in LONG],
)
def test_quick_run_writes_rows_block_and_picture(name, inputs, tmp_path, monkeypatch) -> None:
    module = benchmark(name)
    if name == "compiled":
        # tests/graph/test_computation.py covers machine code
        monkeypatch.setattr(module, "compile_energies", lambda model, path: path)
        eager = lambda model, path: Mock(side_effect=model, matrix=False)  # noqa: E731
        monkeypatch.setattr(module, "CompiledEnergies", eager)
    if name not in MEMORY:  # this process has unused memory
        here = lambda module, key, _: {**layers.cost(module, *key), "MiB": 1.0}  # noqa: E731
        monkeypatch.setattr(layers, "ask", here)
    monkeypatch.setattr(layers, "SLOW", ())
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


def test_figures_of_forward_passes_have_curves(tmp_path, monkeypatch) -> None:
    module, rows, drawn = benchmark("crystals"), RUN.read_csv(RESULTS / "crystals.csv"), Mock()
    monkeypatch.setattr(layers, "curves", drawn)
    monkeypatch.setattr(layers, "legend_outside", Mock())
    module.draw(tmp_path / "a.png", [row for row in rows if row["pass"] == layers.FORWARD])
    assert all(any(call.args[1].values()) for call in drawn.mock_calls)
    assert drawn.mock_calls[0].kwargs["ylabel"] == "forward, s"


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
    with pytest.raises(SystemExit):
        load_script("certificate").main(["--help"])


# --- accuracy ------------------------------------------------------------------------------------


def test_scatter_is_the_part_of_the_error_that_directions_make() -> None:
    """The squared error is at least the squared scatter; far pairs have the variance 0.5 / r."""
    script = benchmark("nodes")
    nodes = script.NODES["gaussian"](heads=64, num_nodes=50, sigma=script.OWN_SIGMA).double()
    found = script.errors(nodes, 10.0, 64, pairs=1000, turned=32)
    assert found["error"] == pytest.approx((0.5 / 50) ** 0.5, rel=0.1)
    assert 0.8 * found["error"] < found["scatter"] < 1.05 * found["error"]


class Leaky(nn.Module):
    """Each atom sees the mean of the whole batch."""

    def forward(self, x: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
        return x + 0.5 * x.mean(dim=0)


def test_the_measure_of_isolation_finds_leaks() -> None:
    row = benchmark("isolation").changes("leaky", Leaky, cases=1, large=40)
    assert min(row["batch"], row["padding"], row["gradient"]) > 1e-3
    assert torch.get_default_dtype() == torch.float32


# --- costs ---------------------------------------------------------------------------------------

MECHANISMS = ["softmax", "performer", "rfa-gate-gaussian", "flt-local"]


def test_bytes_are_those_of_the_states_and_only_softmax_has_more_for_more_tokens() -> None:
    """States contain float32 sums (m, d + 1) and scales (m or 1) per head and layer, or K and V.

    The last position is also kept if an encoding reads it.
    """
    width, sums = 16, 4 * 4 * 8 * 64
    expected = {
        "performer": lambda n: sums * (width + 1 + 1),
        "flt-local": lambda n: 4 + sums * (width + 1 + 1),
        "rfa-gate-gaussian": lambda n: 4 * 4 * 8 * (128 * (width + 1) + 1),
        "softmax": lambda n: 4 * n * 4 * 2 * 128,
    }
    for row in benchmark("decoding").measure((6, 12, 24), tuple(MECHANISMS), rounds=1):
        assert row["state_bytes"] == expected[row["mechanism"]](row["position"]), row
        assert row["rounds"] == 1 and row["median_ms"] > 0


# --- a machine with a GPU ------------------------------------------------------------------------


def test_numbers_and_resume_are_written_and_not_replaced(
    shared_data, tmp_path, monkeypatch, capsys
):
    script, words = load_script("gpu"), ["--device", "cpu", "--tiny", "--out", str(tmp_path)]
    monkeypatch.setattr(script, "without_kernels", lambda: "no GPU")
    monkeypatch.setattr(script, "GRAPHS", (7, 1, 5))
    monkeypatch.setattr(script, "SAMPLE", shared_data / "train.safetensors")
    assert script.main(words) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    differences = [row["difference"] for row in found["numbers"]]
    exact = [row["difference"] for row in found["numbers"] if row["precision"] == "float64"]
    assert max(differences) > 0 and max(exact) == 0, "float64 on the CPU is its own reference"
    assert found["resume"] == 0
    assert (tmp_path / "gpu.md").read_text() in capsys.readouterr().out
    with pytest.raises(SystemExit):
        script.main(words)
    assert str(tmp_path) in capsys.readouterr().err
    one, nan = torch.ones(2), torch.tensor([1.0, float("nan")])
    wrong = {"case": "additive", "difference": script.difference([one, nan], [one, one])}
    monkeypatch.setattr(script, "numbers", lambda *_: [{**wrong, "precision": "float32"}])
    monkeypatch.setattr(script, "resume", lambda *_: 1e-9)
    assert script.main([*words[:-1], str(tmp_path / "wrong")]) == 1
    assert re.search("additive.*nan.*after resuming", capsys.readouterr().err, re.S)
