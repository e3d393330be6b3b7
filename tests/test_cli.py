"""The command line: what people type arrives, and mistakes get one line that says what to do."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from jsonargparse import ArgumentParser
from tiny_run import error_of

from molflt import __version__
from molflt.commands import cli
from molflt.commands.cli import COMMANDS, _Command, main
from molflt.training.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[1]
CALLS: list[dict[str, Any]] = []
KINDS = {"short": 1, "long": 2}
KindName = Literal[tuple(KINDS)]  # type: ignore[valid-type]  # choices are the keys of a dictionary


def look(
    path: Path,
    out: Path | None = None,
    json: bool = False,
    skip_bad: bool = True,
    splits: list[str] = ["val_id", "val_ood_ads"],  # noqa: B006
    numbers: list[int] | None = None,
    limit: int | None = None,
    kind: KindName = "short",
) -> int | None:
    """Looks at a file.

    Args:
        path: What to look at.
        out: Where to write.
        json: Print one object.
        skip_bad: Leave bad ones out.
        splits: Which ones.
        numbers: Some numbers.
        limit: How many at most.
        kind: How.

    Returns:
        A status.
    """
    CALLS.append(dict(locals()))
    match str(path):
        case "bug":
            raise KeyError("no such thing")
        case "bad":
            raise ValueError("bad: expected this;\n  got that")
        case "absent":
            Path("/nonexistent/file.yaml").read_text()
        case "package":
            import a_package_that_is_not_there  # noqa: F401
        case "interrupt":
            raise KeyboardInterrupt
        case "status":
            return 130
    return None


class Model:
    """A model."""

    def __init__(
        self,
        dim: int = 8,
        heads: int = 2,
        normalize_qk: bool | None = None,
        rate: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.98),
    ) -> None:
        pass


def build_parser(words: list[str]) -> ArgumentParser:
    parser = ArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_class_arguments(Model, "model")
    return parser


def fit(**config: Any) -> None:
    CALLS.append(config)


@pytest.fixture(autouse=True)
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two commands of known behavior beside the real ones, in a directory of their own."""
    monkeypatch.setitem(COMMANDS, ("look",), _Command(f"{__name__}:look", "look at a file"))
    monkeypatch.setitem(
        COMMANDS, ("fit",), _Command(f"{__name__}:fit", "fit", f"{__name__}:build_parser")
    )
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    monkeypatch.delenv("MOLFLT_TRACEBACK", raising=False)
    monkeypatch.chdir(tmp_path)
    CALLS.clear()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["x"], {"json": False, "skip_bad": True, "splits": ["val_id", "val_ood_ads"]}),
        (["x", "--json"], {"path": Path("x"), "json": True}),
        (["--json", "x"], {"path": Path("x"), "json": True}),
        (["x", "--json", "false"], {"json": False}),
        (["x", "--json=true"], {"json": True}),
        (["x", "--no-skip-bad"], {"skip_bad": False}),
        (["x", "--no_skip_bad"], {"skip_bad": False}),
        (["x", "--skip-bad=false", "--limit", "3"], {"skip_bad": False, "limit": 3}),
        (["x", "--splits", "a"], {"splits": ["a"]}),
        (["x", "--splits", "a", "b", "c", "--json"], {"splits": ["a", "b", "c"], "json": True}),
        (["x", "--splits=[a,b]"], {"splits": ["a", "b"]}),
        (["x", "--splits", "[a, b]"], {"splits": ["a", "b"]}),
        (["x", "--splits", "12"], {"splits": ["12"]}),
        (["--splits", "a", "b", "--", "x"], {"splits": ["a", "b"], "path": Path("x")}),
        (["x", "--splits+", "c"], {"splits": ["val_id", "val_ood_ads", "c"]}),
        (["x", "--numbers", "1", "-2"], {"numbers": [1, -2]}),
        (["x", "--kind", "long", "--out", "a b"], {"kind": "long", "out": Path("a b")}),
    ],
)
def test_words_arrive_as_arguments(words: list[str], expected: dict[str, Any]) -> None:
    assert main(["look", *words]) == 0
    assert {key: CALLS[0][key] for key in expected} == expected


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["lok"], ["unknown command 'lok'", "did you mean look?"]),
        (["data", "inspct", "x"], ["unknown command 'inspct'", "did you mean inspect?"]),
        (["look", "x", "--limt", "3"], ["unknown option --limt", "did you mean --limit?"]),
        (["look", "x", "--skip-bat"], ["unknown option --skip-bat", "did you mean --skip_bad?"]),
        (["look", "x", "--lim=3"], ["unknown option --lim"]),
        (["look", "x", "--limit", "many"], ["--limit", "expected int or null", "got 'many'"]),
        (["look", "x", "--kind", "lnog"], ["--kind", "'short', 'long'", "got 'lnog'"]),
        (["fit", "--model.channels", "4"], ["--model.channels;", "did you mean --model.dim?"]),
        (["look", "x", "--json=perhaps"], ["--json", "expected bool", "'perhaps'"]),
        (["look", "x", "--splits"], ["--splits", "at least one value"]),
        (["look", "x", "--limit"], ["--limit", "expected one value"]),
        (["look", "x", "y"], ["unexpected y", "molflt look --help"]),
        (["look"], ["missing path", "molflt look --help"]),
        (["look", "bad"], ["bad: expected this; got that"]),
        (["look", "absent"], ["/nonexistent/file.yaml", "No such file"]),
        (["look", "package"], ["'a_package_that_is_not_there' is not installed"]),
        (["fit", "--model.head", "4"], ["--model.head;", "did you mean --model.heads?"]),
        (["fit", "--haeds", "4"], ["--haeds", "did you mean --model.heads?"]),
        (["fit", "--model.rate", "fast"], ["--model.rate", "expected float", "got 'fast'"]),
        (["fit", "--config", "no.yaml"], ["no.yaml", "no such file"]),
    ],
)
def test_mistakes_get_one_line(words: list[str], parts: list[str], capsys) -> None:
    line = error_of(capsys, *words)
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("model: {head: 3}", ["unknown key 'model.head'", "did you mean model.heads?"]),
        ("modle: {heads: 3}", ["unknown key 'modle.heads'", "did you mean model.heads?"]),
        ("sead: 1", ["unknown key 'sead'", "did you mean seed?"]),
        ("model: {heads: many}", ["key model.heads", "expected int", "got 'many'"]),
        ("model: {heads: null}", ["key model.heads", "expected int", "got null"]),
        ("model: {normalize_qk: 3}", ["key model.normalize_qk", "expected bool", "got 3"]),
        ("model:\n  heads: [", ["not a YAML configuration", "line "]),
        ("- 1", ["expected a configuration", "got [1]"]),
    ],
)
def test_mistakes_in_a_config_name_the_file(text: str, parts: list[str], capsys, tmp_path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    for words in (["--config", "c.yaml"], ["--config=c.yaml"]):
        line = error_of(capsys, "fit", *words)
        assert all(part in line for part in ["c.yaml", *parts]), line


def test_command_line_wins_over_config(tmp_path, capsys) -> None:
    (tmp_path / "c.yaml").write_text("seed: 3\nmodel: {heads: 4, rate: 1e-3}")
    words = ["--config", "c.yaml", "--model.heads", "6", "--model.normalize-qk"]
    for pair in (["--model.betas", "0.8", "0.9"], ["--model.betas=[0.8, 0.9]"]):
        assert main(["fit", *words, *pair]) == 0
        expected = {"dim": 8, "heads": 6, "normalize_qk": True, "rate": 1e-3, "betas": (0.8, 0.9)}
        assert CALLS[-1]["seed"] == 3
        assert CALLS[-1]["model"] == expected
    # the mistake in an option next to a configuration is not blamed on the file
    line = error_of(capsys, "fit", "--config", "c.yaml", "--model.normalize-qk=3")
    assert "option --model.normalize_qk" in line and "c.yaml" not in line


def test_print_config_is_a_config(capsys, tmp_path) -> None:
    assert main(["fit", "--model.heads", "4", "--print-config"]) == 0
    (tmp_path / "c.yaml").write_text(capsys.readouterr().out)
    assert main(["fit", "--config", "c.yaml"]) == 0
    assert CALLS[0]["model"]["heads"] == 4


def test_status_of_the_function_is_passed_on() -> None:
    assert main(["look", "status"]) == 130
    assert main(["look", "interrupt"]) == 130


def test_a_traceback_is_in_a_file_or_shown_on_request(capsys, tmp_path, monkeypatch) -> None:
    line = error_of(capsys, "look", "bug", status=1)
    assert "unexpected KeyError" in line and str(tmp_path / "molflt-error.log") in line
    log = (tmp_path / "molflt-error.log").read_text()
    assert "Traceback" in log and "no such thing" in log
    monkeypatch.setenv("MOLFLT_TRACEBACK", "1")
    assert main(["look", "bad"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_help_and_version(capsys) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"molflt {__version__}\n"
    assert main([]) == 0 == main(["--help"])
    assert "evaluate" in capsys.readouterr().out
    assert main(["data", "--help"]) == 0
    out = capsys.readouterr().out
    assert "convert" in out and "evaluate" not in out
    assert main(["look", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--splits ITEM ..." in out and "--json " in out and "{true,false}" not in out
    assert "Leave bad ones out." in out and "A status." not in out


@pytest.mark.parametrize("path", list(COMMANDS), ids=" ".join)
def test_every_option_has_a_help_text(path: tuple[str, ...]) -> None:
    parser = cli._parser(path, [])
    helps = {action.dest: (action.help or "").strip() for action in parser._actions}
    bare = [name for name, text in helps.items() if not text or text.startswith("(")]
    assert not bare, "document these in the docstring"
    assert len(parser._actions) > 1


def test_options_are_known_before_anything_heavy_is_imported() -> None:
    """What the parser needs is what `train` answers with after little more than torch's import."""
    code = """import sys
from molflt.commands.cli import main
from molflt.training.recipes import RECIPES
for recipe in RECIPES:
    for words in (["--help"], ["--model.dmi", "3"]):
        main(["train", "--recipe", recipe, *words])
print({name.partition(".")[0] for name in sys.modules})"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stderr.count("did you mean --model.dim") == len(RECIPES)
    loaded = ast.literal_eval(done.stdout.splitlines()[-1])
    heavy = {"torch_geometric", "lightning", "e3nn", "vesin", "ase", "matplotlib"}
    assert "torch" in loaded and not loaded & heavy


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["train"], "missing --data.root"),
        (["train", "--model.head", "4"], "did you mean --model.heads?"),
        (["train", "--model.mixing", "lineer"], "'linear'"),
        (["train", "--model.potions.num_nodes=4"], "unknown option --model.potions.num_nodes"),
        (["train", "--data.batchsize", "4"], "did you mean --data.batch_size?"),
        (["evaluate", "run", "--split", "val_id"], "did you mean --splits?"),
        (["data", "inspect", "d", "--jsn"], "did you mean --json?"),
        (["data", "inspect", "nothing-here.lmdb"], "nothing-here"),
        (["data", "convert", "nothing-here.lmdb", "out.safetensors"], "nothing-here"),
        (["evaluate", "nothing-here"], "nothing-here"),
        (["predict", "nothing-here", "structures.xyz", "--out", "out.csv"], "nothing-here"),
        (["train", "--config", "nothing-here.yaml"], "nothing-here"),
        (["train", "--resume", "nothing-here"], "nothing-here"),
        (["train", "--data.root", "nothing-here", "--run", "run"], "nothing-here"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_in_the_real_commands(words: list[str], hint: str, capsys) -> None:
    assert hint in error_of(capsys, *words)


def test_as_a_process(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MOLFLT_TRACEBACK": ""}
    options = {"capture_output": True, "text": True, "cwd": tmp_path, "env": environment}

    def molflt(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "molflt", *words]
        return subprocess.run(command, stdin=subprocess.DEVNULL, **options)

    done = molflt("data", "inspect", "absent.lmdb")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "absent.lmdb" in done.stderr
    done = molflt("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"molflt {__version__}\n", "")
