"""The command line: words become arguments, and errors become one line and an exit status."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentParser
from tiny_run import error_of

from molflt import __version__
from molflt.commands.cli import COMMANDS, Command, main, parser_of
from molflt.training.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[1]
CALLS: list[dict[str, Any]] = []


def look(
    path: Path,
    out: Path | None = None,
    json: bool = False,
    skip_bad: bool = True,
    splits: list[str] = ["val_id", "val_ood_ads"],  # noqa: B006
    numbers: list[int] | None = None,
    limit: int | None = None,
) -> int | None:
    """Looks at a file.

    Args:
        path: a
        out: b
        json: c
        skip_bad: d
        splits: Some splits.
        numbers: f
        limit: g

    Returns:
        A status.
    """
    CALLS.append(dict(locals()))
    return 130 if str(path) == "status" else None


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
    """Adds two commands with known options, and changes to an empty folder."""
    monkeypatch.setitem(COMMANDS, ("look",), Command(f"{__name__}:look", "look at a file"))
    monkeypatch.setitem(
        COMMANDS, ("fit",), Command(f"{__name__}:fit", "fit", f"{__name__}:build_parser")
    )
    monkeypatch.delenv("MOLFLT_TRACEBACK", raising=False)
    monkeypatch.chdir(tmp_path)
    CALLS.clear()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["x"], {"json": False, "skip_bad": True, "splits": ["val_id", "val_ood_ads"]}),
        (["x", "--json"], {"path": Path("x"), "json": True}),
        (["x", "--no-skip-bad"], {"skip_bad": False}),
        (["x", "--skip-bad=false", "--limit", "3"], {"skip_bad": False, "limit": 3}),
        (["x", "--splits", "a", "b", "c", "--json"], {"splits": ["a", "b", "c"], "json": True}),
        (["x", "--splits", "[a, b]"], {"splits": ["a", "b"]}),
        (["--splits", "a", "b", "--", "x"], {"splits": ["a", "b"], "path": Path("x")}),
        (["x", "--splits+", "c"], {"splits": ["val_id", "val_ood_ads", "c"]}),
        (["x", "--numbers", "1", "-2", "--out", "a b"], {"numbers": [1, -2], "out": Path("a b")}),
    ],
)
def test_words_become_arguments(words: list[str], expected: dict[str, Any]) -> None:
    assert main(["look", *words]) == 0
    assert {key: CALLS[0][key] for key in expected} == expected


def test_words_win_over_a_configuration(tmp_path, capsys) -> None:
    (tmp_path / "c.yaml").write_text("seed: 3\nmodel: {heads: 4, rate: 1e-3}")
    words = ["--config", "c.yaml", "--model.heads", "6", "--model.normalize-qk"]
    for pair in (["--model.betas", "0.8", "0.9"], ["--model.betas=[0.8, 0.9]"]):
        assert main(["fit", *words, *pair]) == 0
        expected = {"dim": 8, "heads": 6, "normalize_qk": True, "rate": 1e-3, "betas": (0.8, 0.9)}
        assert CALLS[-1]["seed"] == 3
        assert CALLS[-1]["model"] == expected
    line = error_of(capsys, "fit", "--config", "c.yaml", "--model.normalize-qk=3")
    assert "model.normalize_qk" in line and "bool" in line


@pytest.fixture
def act(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Lets ``molflt act`` raise an error."""

    def becomes(error: BaseException) -> None:
        def function() -> None:
            raise error

        monkeypatch.setitem(sys.modules, "acting", type(sys)("acting"))
        sys.modules["acting"].act = function
        monkeypatch.setitem(COMMANDS, ("act",), Command("acting:act", "act"))

    return becomes


@pytest.mark.parametrize(
    ("error", "status", "word"),
    [
        (ValueError("bad:\n  got that"), 2, "bad: got that"),
        (FileNotFoundError(2, "No such file", "a.yaml"), 2, "a.yaml: No such file"),
        (ModuleNotFoundError("x", name="absent_package"), 2, "pip install absent_package"),
        (MemoryError(), 2, "lower the batch size"),
        (KeyError("no such thing"), 1, "molflt-error.log"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_becomes_one_line(act, capsys, error, status, word) -> None:
    act(error)
    assert word in error_of(capsys, "act", status=status)


def test_the_traceback_of_a_bug_is_written_or_shown(act, capsys, tmp_path, monkeypatch) -> None:
    act(KeyError("no such thing"))
    error_of(capsys, "act", status=1)
    log = (tmp_path / "molflt-error.log").read_text()
    assert "Traceback" in log and "no such thing" in log
    monkeypatch.setenv("MOLFLT_TRACEBACK", "1")
    assert main(["act"]) == 1
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
    assert "Some splits." in out and "A status." not in out


@pytest.mark.parametrize("path", list(COMMANDS), ids=" ".join)
def test_every_option_has_a_help_text(path: tuple[str, ...]) -> None:
    parser = parser_of(path)
    helps = {action.dest: (action.help or "").strip() for action in parser._actions}
    bare = [name for name, text in helps.items() if not text or text.startswith("(")]
    assert not bare, "document these in the docstring"
    assert len(parser._actions) > 1


def test_options_are_known_before_anything_heavy_is_imported() -> None:
    code = """import sys
from molflt.commands.cli import main
from molflt.training.recipes import RECIPES
for recipe in RECIPES:
    main(["train", "--recipe", recipe, "--model.dmi", "3"])
main(["train", "--help"])
print({name.partition(".")[0] for name in sys.modules})"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stderr.count("did you mean --model.dim") == len(RECIPES)
    loaded = ast.literal_eval(done.stdout.splitlines()[-1])
    heavy = {"torch_geometric", "lightning", "e3nn", "vesin", "ase", "matplotlib"}
    assert "torch" in loaded and not loaded & heavy
