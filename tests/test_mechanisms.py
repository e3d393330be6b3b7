"""The table of mechanisms lists every class with its paper."""

from __future__ import annotations

from script_files import load_script


def test_the_page_is_up_to_date():
    script = load_script("mechanisms")
    assert script.PAGE.read_text() == script.page(), "run: python scripts/mechanisms.py --write"


def test_every_mechanism_has_a_line_with_a_link():
    script = load_script("mechanisms")
    text = script.page()
    for option, entries in script.OPTIONS.items():
        for key in entries:
            assert f"| {option} | `{key}` |" in text
    assert script.cited("2302.01925, eq. 6; molflt") == (
        "[2302.01925](https://arxiv.org/abs/2302.01925), eq. 6; molflt"
    )
    assert "softmax, kernelized, state" in text
