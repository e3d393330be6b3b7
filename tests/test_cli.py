import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser
from tiny_run import SMALL, error_of, printed, python, write_data

from molflt import __version__
from molflt.commands.cli import COMMANDS, GROUPS, Command, main, parser_of
from molflt.commands.options import parse
from molflt.shipped import config_names, find_config
from molflt.training.recipes import RECIPES
from molflt.training.start import build_parser

ROOT = Path(__file__).resolve().parents[1]


def parsed(line: str) -> dict[str, Any]:
    words = line.split()
    depth = 2 if words[0] == "data" else 1
    path, rest = tuple(words[:depth]), words[depth:]
    return dict(vars(parse(parser_of(path, rest), rest).as_flat()))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("data inspect x y", {"path": [Path("x"), Path("y")], "json": False, "limit": None}),
        ("data inspect x --json --limit 3", {"json": True, "limit": 3}),
        ("data inspect x --json false --limit 3", {"json": False, "limit": 3}),
        ("evaluate x --no-skip-bad", {"skip_bad": False}),
        ("evaluate x --splits a b --skip-bad", {"splits": ["a", "b"], "skip_bad": True}),
        ("evaluate --splits a b -- x", {"splits": ["a", "b"], "run": Path("x")}),
        ("evaluate x --splits a --splits+ b", {"splits": ["a", "b"]}),
        ("evaluate x --also a b --splits c --also d", {"also": list(map(Path, "abd"))}),
        ("train --data.root x --task.energy-mean -2", {"task.energy_mean": -2.0}),
        ("train --data.root x --task.betas 0.8 0.9", {"task.betas": (0.8, 0.9)}),
        ("adsorb x y --facet=1,-1,1 --repeat 2,3", {"facet": (1, -1, 1), "repeat": (2, 3)}),
        ("predict r x", {"file": [Path("r"), Path("x")], "run": None}),
    ],
)
def test_words_become_arguments(line: str, expected: dict[str, Any]) -> None:
    found = parsed(line)
    assert {key: found[key] for key in expected} == expected


def test_empty_text_is_a_value_where_it_is_the_default() -> None:
    for words in (["x", "--prompt", ""], ["x", "--prompt="]):
        assert parse(parser_of(("generate",), words), words).prompt == ""
    parser = ArgumentParser()
    parser.add_argument("--note", type=str, default="")
    assert parse(parser, ["--note="]).note == ""


def test_words_win_over_a_configuration(tmp_path, capsys) -> None:
    (tmp_path / "c.yaml").write_text("seed: 3\nmodel: {heads: 4, dropout: 1e-3}\ndata: {root: x}")
    found = parsed(f"train --config {tmp_path}/c.yaml --model.heads 6 --model.normalize-qk")
    expected = {"seed": 3, "model.heads": 6, "model.dropout": 1e-3, "model.normalize_qk": True}
    assert {key: found[key] for key in expected} == expected
    words = ("train", "--data.root=x", "--model.heads", "4", "--print-config")
    (tmp_path / "c.yaml").write_text(printed(capsys, *words).out)
    assert parsed(f"train --config {tmp_path}/c.yaml")["model.heads"] == 4


def test_the_traceback_of_a_bug_is_shown(capsys, monkeypatch) -> None:
    errors = [KeyError("no such thing"), ValueError("bad input"), ValueError("bad input")]

    def act() -> None:
        raise errors.pop(0)

    monkeypatch.delenv("MOLFLT_TRACEBACK", raising=False)
    monkeypatch.setitem(sys.modules, "acting", SimpleNamespace(act=act))
    monkeypatch.setitem(COMMANDS, ("act",), Command("act", "acting:act"))
    told = printed(capsys, "act", status=1).err
    assert "Traceback (most" in told and "unexpected KeyError: 'no such thing'" in told
    assert error_of(capsys, "act") == "bad input"
    monkeypatch.setenv("MOLFLT_TRACEBACK", "1")
    assert "Traceback (most recent call last)" in printed(capsys, "act", status=2).err


def test_help_and_version(capsys) -> None:
    assert printed(capsys, "--version").out == f"molflt {__version__}\n"
    assert "evaluate" in printed(capsys).out and "evaluate" in printed(capsys, "--help").out
    out = printed(capsys, "data", "--help").out
    assert "convert" in out and "evaluate" not in out


def test_the_line_about_data_names_commands() -> None:
    verbs = re.split(", | or ", GROUPS["data"].partition(" data")[0])
    assert {("data", verb) for verb in verbs} < COMMANDS.keys()


@pytest.mark.parametrize("path", list(COMMANDS), ids=" ".join)
def test_every_option_has_a_help_text(path: tuple[str, ...]) -> None:
    parser = parser_of(path)
    helps = {action.dest: (action.help or "").strip() for action in parser._actions}
    bare = [name for name, text in helps.items() if not text or text.startswith("(")]
    assert not bare, "document these in the docstring"
    assert len(parser._actions) > 1


def test_models_and_options_load_only_torch() -> None:
    """They load neither packages that only computations need nor torch's slow compiler."""
    code = """import sys
from molflt.commands.cli import main
from molflt.training.recipes import RECIPES
main(["train", "--help"])
assert "molflt.sequence" not in sys.modules  # models of other recipes
for recipe in RECIPES:
    main(["train", "--recipe", recipe, "--model.dmi", "3"])
print(*sys.modules)"""
    done = python("-c", code, cwd=ROOT)
    assert done.stderr.count("did you mean --model.dim") == len(RECIPES)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert {f"molflt.{part}" for part in ("attention", "graph", "sequence", "image")} < loaded
    heavy = {"triton", "torch_geometric", "lightning", "e3nn", "vesin", "ase", "lmdb", "matplotlib"}
    assert not loaded & {*heavy, "torch._dynamo"}


# --- shipped configurations -----------------------------------------------------------------------


STEPS = ("--trainer.max_steps=2", "--task.warmup_steps=1")


def options(*words: str):
    return build_parser(words).parse_args(list(words))


def test_every_configuration_has_a_name(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert {"demo", "atoms/flt", "oc20/base"} <= set(config_names())
    for name in config_names():
        assert find_config(name) == ROOT / "configs" / f"{name}.yaml"
    (tmp_path / "demo").write_text("seed: 7\n")  # a file takes precedence over a name
    assert options("--config", "demo", "--data.root=x").seed == 7


def test_paths_are_relative_to_the_configuration_that_names_them(tmp_path, monkeypatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "c.yaml").write_text("data: {root: ../data}\n")
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    assert options("--config", "../a/c.yaml").data.root == tmp_path / "data"
    assert options("--config=../a/c.yaml", "--data.root=mine").data.root == Path("mine")
    text = "recipe: language\ndata: {train: t.txt, val: 'hf:some/set:test'}\n"
    (tmp_path / "a" / "lm.yaml").write_text(text)
    data = options("--config", "../a/lm.yaml").data
    assert (data.train, str(data.val)) == (tmp_path / "a" / "t.txt", "hf:some/set:test")


@pytest.mark.usefixtures("undrawn")
def test_the_run_folder_contains_absolute_paths(tmp_path, monkeypatch) -> None:
    """Runs of earlier versions contain relative paths."""
    write_data(tmp_path / "data", 6, 3)
    monkeypatch.chdir(tmp_path)
    assert main(["train", *SMALL, *STEPS, "--data.root=data", "--run=runs/a"]) == 0
    saved = yaml.safe_load(Path("runs/a/config.yaml").read_text())
    assert (saved["data"]["root"], saved["run"]) == (f"{tmp_path}/data", f"{tmp_path}/runs/a")
    saved["data"]["root"], saved["run"] = "data", "runs/a"
    Path("runs/a/config.yaml").write_text(yaml.safe_dump(saved))
    assert main(["evaluate", "runs/a", "--device=cpu"]) == 0
    assert main(["train", "--resume", "runs/a", "--trainer.max_steps=4"]) == 0
    assert yaml.safe_load(Path("runs/a/config.yaml").read_text())["data"]["root"].startswith("/")


def test_advice_can_be_copied(capsys):
    """Config names, lists of files, nested options and spaces are recognized in suggestions."""
    for words, advice in (
        (["train", "demo"], "--config demo?"),
        (["train", "--data", "my file.xyz"], "--data.root 'my file.xyz'?"),
        (["train", "--data.root", "a.xyz", "b.xyz"], "quote a pattern"),
        (["train", "--model.num_nodes", "4"], "--model.position_options.num_nodes?"),
    ):
        assert main(words) == 2 and advice in capsys.readouterr().err
