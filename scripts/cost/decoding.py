"""Time of one new token, and size of what decoding remembers, against the number of tokens so far.

In every round all mechanisms take turns at all positions. A turn decodes 9 tokens one after another
from the state at its position; the first brings weights and state back into the caches and is not
counted. Times are the processor's, medians over tokens and rounds; a ratio is the median over
rounds of the ratio of two turns of one round. Exponents are fitted to the longer half of the
positions. Bytes are those of all memory that a state keeps alive.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from kit.decoders import SOFTMAX, decoders, held, keeps_sums
from kit.pictures import curves, legend
from kit.rows import (
    Promise,
    Rows,
    exponent,
    markdown,
    names,
    pick,
    upper_half,
)
from kit.turns import paired
from torch import Tensor
from tqdm import tqdm

from molflt.plots.figure import SERIES, picture
from molflt.sequence.language_model import LanguageModel, LanguageState

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "lm"
SIZES: dict[str, Any] = {
    **{"vocabulary": 1000, "dim": 128, "heads": 8, "layers": 4, "ffn_dim": 512},
    "absolute": "sinusoidal",
}
PIECE = 1000  # tokens of a prompt at once: softmax would need 10^8 logits per head for all of them
TOKENS = 8
QUICK = {"positions": (6, 12, 24), "rounds": 1}

Key = tuple[str, int]  # mechanism, position
Times = dict[Key, list[list[float]]]  # seconds of each token of each round


def chosen(given: Sequence[str], longest: int) -> dict[str, LanguageModel]:
    """Models for as many tokens by name, as `decoders` has them."""
    return decoders(CONFIGS, given, partial(LanguageModel, **SIZES, max_length=longest))


def states(
    model: LanguageModel, tokens: Tensor, positions: Sequence[int]
) -> Iterator[LanguageState]:
    """The state after each number of the tokens (1, n), the last of which came alone."""
    state: LanguageState | None = None
    for end in positions:
        start = 0 if state is None else state.length
        for piece in tokens[:, start : end - 1].split(PIECE, dim=1):
            if piece.shape[1]:
                _, state = model.advance(piece, state)
        _, state = model.advance(tokens[:, end - 1 : end], state)
        yield state


def turn(model: LanguageModel, state: LanguageState, tokens: Tensor) -> list[float]:
    """Seconds of each token but the first, one after another from a state.

    By the clock, a token longer than a slice of the scheduler would look three times as long on a
    busy machine, and a shorter one would not.
    """
    seconds = []
    for token in tokens.split(1, dim=1):
        start = time.thread_time()
        _, state = model.decode(token, state)
        seconds.append(time.thread_time() - start)
    return seconds[1:]


def measure(
    positions: tuple[int, ...] = (100, 300, 1000, 3000, 10_000),
    mechanisms: tuple[str, ...] = (),
    rounds: int = 25,
) -> Rows:
    """Times and sizes of states."""
    positions = tuple(sorted(positions))
    models = chosen(mechanisms, positions[-1] + TOKENS + 1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(SIZES["vocabulary"], (1, positions[-1]), generator=generator)
    new = torch.randint(SIZES["vocabulary"], (1, TOKENS + 1), generator=generator)
    with torch.inference_mode():
        kept: dict[Key, LanguageState] = {}
        for name, model in tqdm(models.items(), desc="prompts", leave=False):
            for position, state in zip(positions, states(model, tokens, positions), strict=True):
                kept[name, position] = state
        times: Times = {key: [] for key in kept}
        for _ in tqdm(range(rounds), desc="rounds", leave=False):
            for key in kept:
                times[key].append(turn(models[key[0]], kept[key], new))
    return rows_of(times, {key: held(state) for key, state in kept.items()})


def rows_of(times: Times, sizes: dict[Key, int]) -> Rows:
    """Rows of the CSV; `softmax_ratio` is softmax's time in units of this mechanism's."""
    first = next(iter(times))[1]
    of_turns = {key: [median(turn) for turn in turns] for key, turns in times.items()}

    def row(name: str, position: int) -> dict[str, Any]:
        key, softmax = (name, position), of_turns.get((SOFTMAX, position))
        return {
            **{"mechanism": name, "position": position},
            "median_ms": 1e3 * median(token for turn in times[key] for token in turn),
            "ratio": paired(of_turns[key], of_turns[name, first]),
            "softmax_ratio": paired(softmax, of_turns[key]) if softmax else None,
            **{"rounds": len(times[key]), "tokens_per_round": len(times[key][0])},
            "state_bytes": sizes[key],
        }

    return [row(*key) for key in times]


def growth(rows: Rows) -> float:
    """Exponent of a mechanism's ratios to the first position, at the longer half of them."""
    return exponent(upper_half([(row["position"], row["ratio"]) for row in rows]))


def table(rows: Rows) -> str:
    """Time at the first position, ratios to it, exponents, states."""
    places = names(rows, "position")
    first, last = places[0], places[-1]
    head = ["", f"ms at {first}", *(f"{n} / {first}" for n in places[1:]), "time ~ n^"]
    head += [f"softmax / it, {last}", f"state at {first}, KiB", f"at {last}"]
    lines = []
    for name in names(rows, "mechanism"):
        own = pick(rows, mechanism=name)
        ratios = [*(row["ratio"] for row in own[1:]), growth(own), own[-1]["softmax_ratio"]]
        cells = [None if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        states = [f"{row['state_bytes'] / 1024:.0f}" for row in (own[0], own[-1])]
        lines.append([name, f"{own[0]['median_ms']:.1f}", *cells, *states])
    return markdown(head, lines)


def draw(png: Path, rows: Rows) -> None:
    """Time per token and bytes of the state."""
    order = sorted(names(rows, "mechanism"), key=SOFTMAX.__eq__)
    colors = len(SERIES) - 1  # the last is softmax's
    styles = {name: (i % colors, "-" if i < colors else "--") for i, name in enumerate(order)}
    styles[SOFTMAX] = (colors, "-")
    with picture(png, figsize=(7.6, 4.6)) as figure:
        panels = figure.subplots(1, 2, sharex=True)
        labels = {"median_ms": "ms per token", "state_bytes": "state, bytes"}
        for axes, (column, label) in zip(panels, labels.items(), strict=True):
            points = {
                name: [(row["position"], row[column]) for row in pick(rows, mechanism=name)]
                for name in order
            }
            curves(axes, points, styles, xlabel="tokens so far", ylabel=label)
        legend(figure, panels[0])


def slowest(rows: Rows) -> float | None:
    """Largest ratio of a linear mechanism at 10,000 tokens to the first position."""
    far = [r["ratio"] for r in pick(rows, position=10_000) if keeps_sums(r["mechanism"])]
    return max(far, default=None)


def largest_growth_of_states(rows: Rows) -> float:
    """Ratio of times at the last and the first position, without softmax."""
    linear = [pick(rows, mechanism=name) for name in filter(keeps_sums, names(rows, "mechanism"))]
    return max((own[-1]["state_bytes"] / own[0]["state_bytes"] for own in linear), default=1.0)


def performer_gain(rows: Rows) -> float | None:
    """Softmax's time in units of the Performer's at 10,000 tokens."""
    found = pick(rows, mechanism="performer", position=10_000)
    return found[0]["softmax_ratio"] if found else None


PROMISES = [
    Promise("state of the last position / first", largest_growth_of_states, 1.0),
    Promise("time of a linear mechanism, 10,000 / first", slowest, 1.15),
    Promise("softmax / performer, 10,000", performer_gain, least=3.0),
]
