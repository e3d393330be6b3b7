"""The README's table of mechanisms is what the dictionaries hold, and what it claims is tested."""

from __future__ import annotations

import re
from pathlib import Path

import contract
import pytest
from contract import CASES, Combination
from script_files import load_script

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def script():
    return load_script("mechanisms")


def test_readme_holds_the_table(script):
    text = script.README.read_text()
    assert script.written(text) == text, "run: python scripts/mechanisms.py --write"


def test_every_mechanism_has_a_line(script):
    assert script.LINES.keys() == script.DICTIONARIES.keys()
    for kind, lines in script.LINES.items():
        assert list(lines) == list(script.DICTIONARIES[kind]), kind


def test_every_oracle_is_a_test(script):
    for lines in script.LINES.values():
        for line in lines.values():
            file, _, name = line.test.partition("::")
            source = (ROOT / "tests" / "attention" / f"test_{file}.py").read_text()
            assert re.search(rf"^def test_{name}", source, re.M), line.test


def test_papers_are_those_of_the_sources(script):
    sources = "\n".join(p.read_text() for p in (ROOT / "molflt" / "attention").glob("*.py"))
    for lines in script.LINES.values():
        for line in lines.values():
            assert f"arXiv:{line.paper}" in sources, line.paper


@pytest.mark.parametrize("case", [name for name in CASES if name != "none"])
def test_abilities_are_what_the_encodings_do(script, case):
    """Causal, cross, decode state and periodic images, each tried out."""
    name = CASES[case].name
    key = CASES[case].options["spectrum"] if name == "spectral" else name
    kind = "spectrum" if name == "spectral" else "position"
    causal, cross, _, decodes, periodic = (bool(w) for w in script.abilities(kind, key))
    position = CASES[case].build()
    mixing = "linear" if "linear" in position.mixings else "softmax"
    plain = Combination("positive", case, mixing, False)
    assert causal
    contract.check_causality(plain._replace(causal=True))
    if mixing == "linear":
        if decodes:
            contract.check_decoding(plain._replace(causal=True))
        else:
            with pytest.raises(ValueError, match="no state of constant size"):
                contract.check_decoding(plain._replace(causal=True))
    assert cross
    contract.check_cross(plain)
    if periodic and CASES[case].positions is contract.cloud:
        contract.check_key_copies(plain)
