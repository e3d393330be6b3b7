"""Plain English: patterns that native documentation does not have."""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "molflt").rglob("*.py"))
OPENINGS = re.compile(r"(What|Whether|Which|Of|That|Whose)\b")
PATTERNS = {
    "so that": r"\bso that\b",
    "likewise": r"\blikewise\b",
    "beside": r"\bbeside [a-z]",
    "nobody": r"\bnobody\b",
    "for want of": r"\bfor want of\b",
    "predicate none": r"\b(is|are|has|have) none\b(?! of)",
    "goes on": r"\b(goes|go|went) on\b",
    "has not": r"\b(has|have) not\b(?! (been|yet|\w+(ed|en|wn)\b))",
    "is no": r"(?<!there )\b(is|are) no (?!longer|more|less|such|default)[a-z]+",
    "rooms": r"\b(rooms?|halls?)\b",
    "seeded alike": r"\bseeded? (\w+ )?alike\b",
}


@cache
def prose(path: Path) -> list[tuple[int, str]]:
    """Returns comments and strings that contain spaces, with their line numbers."""
    return [
        (token.start[0], " ".join(token.string.split()))
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        if token.type in (tokenize.COMMENT, tokenize.STRING) and " " in token.string
    ]


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = [
        f"{path}: {text.splitlines()[0]}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, kinds) and OPENINGS.match(text := ast.get_docstring(node) or "")
    ]
    assert found == []


@pytest.mark.parametrize("name", PATTERNS)
def test_prose_is_plain(name: str) -> None:
    pattern = re.compile(PATTERNS[name])
    found = [
        f"{path}:{line}: {text[max(0, hit.start() - 40) : hit.end() + 40]}"
        for path in SOURCES
        for line, text in prose(path)
        for hit in pattern.finditer(text)
    ]
    assert found == []
