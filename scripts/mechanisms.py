"""The table of mechanisms, made from the dictionaries of the attention core.

    python scripts/mechanisms.py             # print it
    python scripts/mechanisms.py --write     # renew docs/mechanisms.md

Papers, costs and abilities are attributes of the classes.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from kit.rows import markdown

from molflt.attention import FEATURE_MAPS, NODES, POSITIONS, PROJECTIONS, SPECTRA, TOKEN_MIXERS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "mechanisms.md"
OPTIONS: dict[str, Mapping[str, Callable[..., object]]] = {
    "feature_map": FEATURE_MAPS,
    "projection": PROJECTIONS,
    "position": POSITIONS,
    "spectrum": SPECTRA,
    "nodes": NODES,
    "token mixer": TOKEN_MIXERS,
}
HEAD = """# Mechanisms

Values of the options of attention; `python scripts/mechanisms.py --write` updates the page from the
classes. N tokens, m features, d the width of a head, r nodes. "softmax" and "kernelized" are the
kinds of attention that support a position; without a "state" it cannot decode step by step.
Feature maps that support "potentials" are smooth and have positive sums.
"""


def cited(paper: str) -> str:
    """ "2302.01925, eq. 7; ..." with links to arXiv."""
    parts = [part.strip().partition(",") for part in paper.split(";") if part.strip()]
    return "; ".join(
        f"[{number}](https://arxiv.org/abs/{number}){comma}{where}"
        if number[:1].isdigit()
        else number
        for number, comma, where in parts
    )


def abilities(cls: object) -> str:
    """Returns the mixings of a position, or "potentials" for a feature map that supports them."""
    if getattr(cls, "smooth", False) and getattr(cls, "positive_kernel", False):
        return "potentials"
    mixings = getattr(cls, "mixings", ())
    words = ["softmax"] * ("softmax" in mixings) + ["kernelized"] * ("linear" in mixings)
    state = getattr(cls, "decodes", False) and "linear" in mixings
    return ", ".join(words + ["state"] * state)


def page() -> str:
    """The page: a line for each key of each dictionary."""
    lines = []
    for option, entries in OPTIONS.items():
        for key, build in entries.items():
            cls = getattr(build, "__self__", build)  # some are built by a class method
            paper, cost = (getattr(cls, name, "") for name in ("paper", "cost"))
            lines.append([option, f"`{key}`", cited(paper), cost, abilities(cls)])
    head = ("option", "value", "paper (arXiv)", "cost", "supports")
    return f"{HEAD}\n{markdown(head, lines)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.name}")
    if parser.parse_args().write:
        PAGE.write_text(page())
    else:
        print(page())


if __name__ == "__main__":
    main()
