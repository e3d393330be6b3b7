"""scripts/structure.py: its numbers on a tree small enough to count by hand."""

from pathlib import Path

import pytest
from script_files import load_script

FILES = {
    "molflt/__init__.py": "from molflt.a import one\n",
    "molflt/a.py": (
        "from typing import Any\n"
        "from molflt.low import deep\n"
        "LIMIT: int = 3\n"
        "_hidden = other = 1\n"
        "def one(x: Any) -> int:\n"
        '    """Two\n    lines."""\n'
        "    if x:\n        return 1\n"
        "    for _ in x:\n        pass\n"
        "    match x:\n        case 1:\n            pass\n        case _:\n            pass\n"
        "\n    # a comment\n    return 2\n"
    ),
    "molflt/low/__init__.py": "",
    "molflt/low/deep.py": "def f():\n    from .. import a\nclass C:\n    inner = 1\n",
    "tests/test_a.py": "x = 1\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_numbers_are_those_counted_by_hand(tree: Path, capsys) -> None:
    assert load_script("structure").main(["--tree", str(tree), "--rounds", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert dict(line.strip("| ").split(" | ") for line in lines[2:]) == {
        "molflt: files, lines": "4, 24",
        "tests: files, lines": "1, 1",
        "scripts: files, lines": "0, 0",
        "lines in all": "25",
        "lines of a file: median, largest": "2, 19",
        "functions": "2",
        "above 50 code lines": "0",
        "complexity: mean, largest": "2.50, 4",  # of one: if, for, a case
        "complexity above 12": "0",
        "folders": "2",
        "rooms, arrows": "3, 2",  # the package, a, low
        "circles of modules": "1: molflt.a molflt.low.deep",
        "circles of rooms": "1: molflt.a molflt.low",
        "public names": "5",  # LIMIT, other, one, f, C
        "the word Any": "2",
    }


def test_code_lines_leave_out_docstring_comments_and_blank_lines(tree: Path) -> None:
    script = load_script("structure")
    file = next(file for file in script.sources(tree) if file.module == "molflt.a")
    assert script.code_lines(file.tree.body[-1], file.text) == 11
