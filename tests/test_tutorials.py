"""The tutorials run from top to bottom, as a reader would run them, in an empty folder."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex
from pathlib import Path
from unittest import mock

import pytest
import torch

from molflt.attention import FEATURE_MAPS
from molflt.commands import cli
from molflt.training.recipes import RECIPES

PAGES = sorted((Path(__file__).resolve().parents[1] / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r"^```(python|text|)\n(.*?)^```", re.M | re.S)


def run_python(code: str, page: Path, names: dict[str, object]) -> str:
    """What a block prints; what its comments say about that has to be so."""
    if file := re.match(r"# (\w+)\.py\n", code):
        Path(f"{file[1]}.py").write_text(code)
        importlib.import_module(file[1])
        return ""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, str(page), "exec"), names)
    said = re.findall(r"^print\(.*\)(?:  # (torch\.Size\(.*?\)|True)$)?", code, re.M)
    for line, comment in zip(printed.getvalue().splitlines(), said, strict=True):
        assert comment in ("", line)
    return printed.getvalue()


def run_commands(lines: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    for line in lines.replace("\\\n", " ").splitlines():
        program, *words = shlex.split(line)
        assert program in ("molflt", "python"), line
        assert cli.main(words[program == "python" :]) == 0, line
    return capsys.readouterr().out


def pattern(text: str) -> str:
    """An output with ... for what is left out; decimals depend on the machine."""
    escaped = re.escape(text.strip()).replace(re.escape("..."), ".*?")
    decimals = re.sub(r"(\\-)?\d+\\\.\d+", r"-?\\d+\\.\\d+", escaped)
    return re.sub(r"(\\ )+", r"\\s+", decimals)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tutorials_print_the_shown_output(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {}
    output = ""
    with mock.patch.dict(FEATURE_MAPS), mock.patch.dict(RECIPES):  # removes additions
        for kind, content in BLOCK.findall(page.read_text()):
            if kind == "text":
                assert re.search(pattern(content), output, re.S), f"{content}\nis not in\n{output}"
            elif kind == "python":
                output = run_python(content, page, names)
            else:
                output = run_commands(content, capsys)
