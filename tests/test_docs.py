"""What the documentation shows works: Python examples, commands, options and links."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
import torch
from ase.build import add_adsorbate, fcc111
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write
from tiny_run import start, write_data, write_points

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
    if page.parent.name != "tutorials"  # tests/test_tutorials.py
    for count, code in enumerate(
        re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    )
]


def commands() -> list[str]:
    """Every ``molflt ...`` line inside a code block of the documentation."""
    lines = []
    for page in PAGES:
        for block in re.findall(r"^```(?:bash|sh)?\n(.*?)^```", page.read_text(), re.M | re.S):
            joined = block.replace("\\\n", " ").splitlines()
            lines += [line for line in joined if line.startswith("molflt ")]
    return sorted(set(lines))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the examples assume that the reader has: runs and a file of slabs."""
    root = tmp_path_factory.mktemp("reader")
    data = write_data(root / "data")
    for seed, run in enumerate(("mine", "mine2")):
        steps = ("--trainer.max_steps=3", "--trainer.val_every=3", "--trainer.checkpoint_every=3")
        assert start(data, root / "runs" / run, *steps, f"--seed={seed}") == 0
    points = write_points(root / "points")
    words = f"--data.root={points} --run={root}/runs/potential --model.dim=16 --model.layers=1"
    words += " --trainer.max_steps=2 --trainer.val_every=2 --model.long_range=[1]"
    assert cli.main(["train", "--recipe=potential", *words.split()]) == 0
    words = f"--run={root}/runs/optimizer --data.batch_size=1 --trainer.max_steps=1"
    words += " --data.val_problems=1 --task.burn_in=1 --task.unroll=2"
    assert cli.main(["train", "--recipe=learned_optimizer", *words.split()]) == 0
    atoms = fcc111("Cu", (2, 2, 3), vacuum=8.0, periodic=True)
    add_adsorbate(atoms, "O", height=1.2, position="fcc")
    atoms.set_tags([0] * 4 + [1] * 8 + [2])
    write(root / "structures.extxyz", [atoms, atoms])
    atoms.calc = SinglePointCalculator(atoms, energy=-1.0)
    write(root / "runs" / "relaxation.traj", [atoms, atoms])
    return root


@pytest.mark.parametrize(("page", "example"), EXAMPLES)
def test_documentation_examples_print_their_comments(
    page: Path, example: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "torch_sim" in example:
        pytest.importorskip("torch_sim", reason="torch-sim is not installed")
    if "runs/" in example:
        monkeypatch.chdir(request.getfixturevalue("workplace"))
    torch.manual_seed(0)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, str(page), "exec"), {})
    expected = re.findall(r"^print\(.*\)(?: +# (torch\.Size\(.*?\)|\[.*?\]|True))?", example, re.M)
    for line, comment in zip(printed.getvalue().splitlines(), expected, strict=True):
        assert comment in ("", line)  # what depends on the reader's run has no comment


@pytest.mark.parametrize("line", commands())
def test_commands_exist_with_their_options(line: str) -> None:
    words = shlex.split(line.split("  #")[0].replace("[", "").replace("]", ""))[1:]
    path = tuple(words[:2]) if words[0] == "data" else tuple(words[:1])
    if path[0].startswith("-") or "--help" in words:
        return
    words = words[len(path) :]
    normalized(words, cli.parser_of(path, words))


def test_configurations_in_commands_exist() -> None:
    named = set(re.findall(r"--config[ =](\S+)", "\n".join(commands())))
    files = {name: (ROOT / name, ROOT / "configs" / f"{name}.yaml") for name in named}
    assert len(named) > 20
    assert not [name for name, paths in files.items() if not any(p.exists() for p in paths)]


def test_keys_named_in_the_documentation_exist() -> None:
    parsers = [cli.parser_of(("train",), ["--recipe", recipe]) for recipe in RECIPES]
    known = {name for parser in parsers for name in options_of(parser)}
    pages = "\n".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"--(?:model|data|task|trainer)\.[a-z]\w*", pages))
    assert named and named <= known


def anchors(page: Path) -> set[str]:
    """What a link to a heading of a page says behind the #."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*?)\s*$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}


def test_relative_links_lead_somewhere() -> None:
    pattern = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?[^)]*\)")
    links = [(page, *found) for page in PAGES for found in pattern.findall(page.read_text())]
    wrong = []
    for page, link, anchor in links:
        target = (page.parent / link).resolve() if link else page
        if "://" in link or (target.exists() and not anchor):
            continue
        if not (target.suffix == ".md" and target.exists() and anchor in anchors(target)):
            wrong.append(f"{page}: {link}#{anchor}" if anchor else f"{page}: {link}")
    assert links and not wrong


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    pages = "\n".join(page.read_text() for page in PAGES)
    named = set(" ".join(re.findall(r"^make ([a-z ]+?)(?: +#.*)?$", pages, re.M)).split())
    assert {"demo", "test"} <= named <= targets
