import contextlib
import importlib
import io
import re
import shlex
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write
from recipe_runs import trained
from script_files import load_script
from tiny_run import on_slab

from molflt.attention import FEATURE_MAPS
from molflt.commands import cli
from molflt.commands.options import normalized, options_of
from molflt.training.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[1]
DOCS = [page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts]
PAGES = [*ROOT.glob("*.md"), *DOCS, *(ROOT / "datasets").rglob("*.md")]
PAGES = sorted([*PAGES, *(ROOT / "configs").rglob("README.md")])
EXAMPLES = [
    pytest.param(page, code, id=f"{page.stem}-{count}")
    for page in PAGES
    if page.parent.name != "tutorials"
    for count, code in enumerate(
        re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    )
]


def commands() -> list[str]:
    """Returns all ``molflt ...`` lines in code blocks of the documentation."""
    lines = []
    for page in PAGES:
        for block in re.findall(r"^```(?:bash|sh)?\n(.*?)^```", page.read_text(), re.M | re.S):
            joined = block.replace("\\\n", " ").splitlines()
            lines += [line for line in joined if line.startswith("molflt ")]
    return sorted(set(lines))


@pytest.fixture(scope="module")
def workplace(energy_runs: list[Path], potential_run: Path, tmp_path_factory) -> Path:
    """Returns a folder with the runs and the file of slabs that the examples assume."""
    root = tmp_path_factory.mktemp("reader")
    runs = dict(zip(("mine", "mine2"), energy_runs, strict=False))
    runs |= {"potential": potential_run, "optimizer": trained("learned_optimizer")}
    for name, run in runs.items():
        shutil.copytree(run, root / "runs" / name)
    atoms = on_slab()
    write(root / "structures.extxyz", [atoms, atoms])
    write(root / "runs" / "POSCAR_1", atoms, format="vasp")
    (root / "runs" / "labels.csv").write_text("file,energy\nPOSCAR_1,-1.5\n")
    atoms.calc = SinglePointCalculator(atoms, energy=-1.0)
    write(root / "runs" / "relaxation.traj", [atoms, atoms])
    return root


def output_of(code: str, page: Path, names: dict[str, object]) -> str:
    """Returns what a block prints, after a comparison with its comments."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, str(page), "exec"), names)
    expected = re.findall(r"^print\(.*\)(?: +# (torch\.Size\(.*?\)|\[.*?\]|True))?", code, re.M)
    for line, comment in zip(printed.getvalue().splitlines(), expected, strict=True):
        assert comment in ("", line)  # numbers that depend on the reader's run have no comment
    return printed.getvalue()


@pytest.mark.parametrize(("page", "example"), EXAMPLES)
def test_documentation_examples_print_their_comments(page, example, request, monkeypatch) -> None:
    if "torch_sim" in example:
        pytest.importorskip("torch_sim", reason="torch-sim is not installed")
    if "runs/" in example:
        monkeypatch.chdir(request.getfixturevalue("workplace"))
    torch.manual_seed(0)
    output_of(example, page, {})


# --- tutorials, which run from top to bottom in an empty folder -----------------------------------

TUTORIALS = [page for page in PAGES if page.parent.name == "tutorials"]


def run_commands(lines: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    for line in lines.replace("\\\n", " ").splitlines():
        program, *words = shlex.split(line)
        assert program in ("molflt", "python"), line
        assert cli.main(words[program == "python" :]) == 0, line
    return capsys.readouterr().out


def pattern(text: str) -> str:
    """Returns a regular expression of an output; ... matches anything, and decimals may differ."""
    escaped = re.escape(text.strip()).replace(re.escape("..."), ".*?")
    decimals = re.sub(r"(\\-)?\d+\\\.\d+", r"-?\\d+\\.\\d+", escaped)
    return re.sub(r"(\\ )+", r"\\s+", decimals)


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_tutorials_print_the_shown_output(page: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, object] = {}
    output = ""
    blocks = re.findall(r"^```(python|text|)\n(.*?)^```", page.read_text(), re.M | re.S)
    with mock.patch.dict(FEATURE_MAPS), mock.patch.dict(RECIPES):  # removes additions
        for kind, content in blocks:
            if kind == "text":
                assert re.search(pattern(content), output, re.S), f"{content}\nis not in\n{output}"
            elif kind == "":
                output = run_commands(content, capsys)
            elif file := re.match(r"# (\w+)\.py\n", content):
                Path(f"{file[1]}.py").write_text(content)
                importlib.import_module(file[1])
            else:
                output = output_of(content, page, names)


# --- commands, keys and links ---------------------------------------------------------------------


@pytest.mark.parametrize("line", commands())
def test_commands_exist_with_their_options(line: str) -> None:
    words = shlex.split(line.split("  #")[0].replace("[", "").replace("]", ""))[1:]
    path = tuple(words[:2]) if words[0] == "data" else tuple(words[:1])
    if path[0].startswith("-") or "--help" in words:
        return
    words = words[len(path) :]
    normalized(words, cli.parser_of(path, words))


def test_named_configurations_keys_and_targets_exist() -> None:
    named = set(re.findall(r"--config[ =](\S+)", "\n".join(commands())))
    files = {name: (ROOT / name, ROOT / "configs" / f"{name}.yaml") for name in named}
    assert len(named) > 20
    assert not [name for name, paths in files.items() if not any(p.exists() for p in paths)]
    parsers = [cli.parser_of(("train",), ["--recipe", recipe]) for recipe in RECIPES]
    known = {name for parser in parsers for name in options_of(parser)}
    pages = "\n".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"--(?:model|data|task|trainer)\.[a-z]\w*", pages))
    assert named and named <= known
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(" ".join(re.findall(r"^make ([a-z ]+?)(?: +#.*)?$", pages, re.M)).split())
    assert {"demo", "test"} <= named <= targets


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*?)\s*$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}


def test_relative_links_lead_somewhere() -> None:
    link_of = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?[^)]*\)")
    links = [(page, *found) for page in PAGES for found in link_of.findall(page.read_text())]
    wrong = []
    for page, link, anchor in links:
        target = (page.parent / link).resolve() if link else page
        if "://" in link or (target.exists() and not anchor):
            continue
        if not (target.suffix == ".md" and target.exists() and anchor in anchors(target)):
            wrong.append(f"{page}: {link}#{anchor}" if anchor else f"{page}: {link}")
    assert links and not wrong


# --- docs/mechanisms.md ---------------------------------------------------------------------------


def test_the_page_is_up_to_date():
    script = load_script("mechanisms")
    assert (ROOT / "docs/mechanisms.md").read_text() == script.page()
