"""Time of one new token, and size of the decoding state, against the number of tokens so far.

In every round all mechanisms take turns at all positions. A turn decodes 9 tokens one after another
from the state at its position; the first, which fills the caches, is not counted. Times are
processor times, medians over tokens and rounds. A ratio is the median over rounds of the ratio of
two turns of one round. Exponents are fitted to the longer half of the positions. Bytes count all
memory that a state keeps.
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from kit.decoding import SOFTMAX, decoders, held, styles_of
from kit.pictures import curves, legend
from kit.rows import Rows, exponent, markdown, names, pick, upper_half
from kit.turns import paired
from torch import Tensor
from tqdm import tqdm

from molflt.plots.figure import picture
from molflt.sequence.language_model import LanguageModel, LanguageState

SIZES: dict[str, Any] = {
    **{"vocabulary": 1000, "dim": 128, "heads": 8, "layers": 4, "ffn_dim": 512},
    "absolute": "sinusoidal",
}
PIECE = 1000  # tokens of a prompt at once: softmax would need 10^8 logits per head for all of them
TOKENS = 8
QUICK = {"positions": (6, 12, 24), "rounds": 1}

Key = tuple[str, int]  # mechanism, position
Times = dict[Key, list[list[float]]]  # seconds of each token of each round


def states(
    model: LanguageModel, tokens: Tensor, positions: Sequence[int]
) -> Iterator[LanguageState]:
    """The state after each number of the tokens (1, n); the last token is decoded by itself."""
    state: LanguageState | None = None
    for end in positions:
        start = 0 if state is None else state.length
        for piece in tokens[:, start : end - 1].split(PIECE, dim=1):
            if piece.shape[1]:
                _, state = model.advance(piece, state)
        _, state = model.advance(tokens[:, end - 1 : end], state)
        yield state


def turn(model: LanguageModel, state: LanguageState, tokens: Tensor) -> list[float]:
    """Processor seconds of each token but the first, one after another from a state."""
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
    build = partial(LanguageModel, **SIZES, max_length=positions[-1] + TOKENS + 1)
    models = decoders("lm", mechanisms, build)
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
    """Markdown: time at the first position, ratios to it, exponents, states."""
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
    styles = styles_of(names(rows, "mechanism"))
    with picture(png, figsize=(7.6, 4.6)) as figure:
        panels = figure.subplots(1, 2, sharex=True)
        labels = {"median_ms": "ms per token", "state_bytes": "state, bytes"}
        for axes, (column, label) in zip(panels, labels.items(), strict=True):
            points = {
                name: [(row["position"], row[column]) for row in pick(rows, mechanism=name)]
                for name in styles
            }
            curves(axes, points, styles, xlabel="tokens so far", ylabel=label)
        legend(figure, panels[0])
