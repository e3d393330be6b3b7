"""Generate the table of mechanisms from the dictionaries of the attention core.

    python scripts/mechanisms.py > docs/mechanisms.md

Papers, costs and capabilities are attributes of the classes.
"""

from collections.abc import Callable, Mapping

from kit.rows import markdown

from molflt.attention import FEATURE_MAPS, NODES, POSITIONS, PROJECTIONS, SPECTRA, TOKEN_MIXERS

OPTIONS: dict[str, Mapping[str, Callable[..., object]]] = {
    "feature_map": FEATURE_MAPS,
    "projection": PROJECTIONS,
    "position": POSITIONS,
    "spectrum": SPECTRA,
    "nodes": NODES,
    "token mixer": TOKEN_MIXERS,
}
HEAD = """# Mechanisms

The table lists all feature maps, projections, positions, spectra, node rules and token mixers
([terms](attention.md#the-parts)); token mixers replace attention, as in FNet. N is the number of
tokens, m the number of features, d the width of a head (of a token for mixers), r the number of
nodes or prepended columns, K the number of Gaussians or waves, P the length of filters, and R the
number of realizations. Costs of projections are per token. The last column lists the attention
("softmax", "kernelized") that a position supports, "state" if kernelized attention can decode step
by step, and "potentials" for smooth feature maps with positive sums.
"""


def cited(paper: str) -> str:
    """Adds arXiv links to sources such as "2302.01925, eq. 7; 2106.12566"."""
    parts = [part.strip().partition(",") for part in paper.split(";") if part.strip()]
    return "; ".join(
        f"[{number}](https://arxiv.org/abs/{number}){comma}{where}"
        if number[:1].isdigit()
        else number
        for number, comma, where in parts
    )


def abilities(cls: object) -> str:
    """Returns the kinds of attention that a class supports, or "potentials" for suitable maps."""
    if getattr(cls, "smooth", False) and getattr(cls, "positive_kernel", False):
        return "potentials"
    mixings = getattr(cls, "mixings", ())
    words = ["softmax"] * ("softmax" in mixings) + ["kernelized"] * ("linear" in mixings)
    state = getattr(cls, "decodes", False) and "linear" in mixings
    return ", ".join(words + ["state"] * state)


def page() -> str:
    """Returns the page, whose table has a line for each key of each dictionary in `OPTIONS`."""
    lines = []
    for option, entries in OPTIONS.items():
        for key, build in entries.items():
            cls = getattr(build, "__self__", build)  # some entries are classmethods
            paper, cost = (getattr(cls, name, "") for name in ("paper", "cost"))
            lines.append([option, f"`{key}`", cited(paper), cost, abilities(cls)])
    head = ("option", "value", "paper (arXiv)", "cost", "supports")
    return f"{HEAD}\n{markdown(head, lines)}\n"


if __name__ == "__main__":
    print(page(), end="")
