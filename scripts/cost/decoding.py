"""Time per new token and size of the decoding state against the number of previous tokens.

In each round, all mechanisms are timed at all positions in turn. A turn decodes 9 tokens one after
another, starting from the state at its position. The first token fills the caches and is not
counted. Times are medians of CPU times over tokens and rounds. Ratios of times are computed for two
turns in the same round, and the median over rounds is reported. Exponents are fitted to the larger
half of the positions. The size of a state includes all memory that the state holds.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from kit.pictures import curves, styles_of
from kit.rows import Rows, choose, exponent, markdown, names, pick, upper_half
from kit.turns import paired
from torch import Tensor
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from molflt.plots.figure import legend_outside, picture
from molflt.sequence.language_model import LanguageModel, LanguageState

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "lm"
SOFTMAX = "softmax"
SIZES: dict[str, Any] = {
    **{"vocabulary": 1000, "dim": 128, "heads": 8, "layers": 4, "ffn_dim": 512},
    "absolute": "sinusoidal",
}
PIECE = 1000  # tokens that are processed at once; 10^4 would need 10^8 logits per head
TOKENS = 8
QUICK = {"positions": (6, 12, 24), "rounds": 1, "mechanisms": ("softmax", "performer")}

Key = tuple[str, int]  # mechanism, position
Times = dict[Key, list[list[float]]]  # time of each token in s, by round


def decoders(given: Sequence[str], longest: int) -> dict[str, LanguageModel]:
    """Returns models that can decode from a state, keyed by the name of their configuration.

    If `given` is empty, these are all models in configs/lm that can decode from a state and whose
    configuration does not contain data.
    """
    paths = sorted(CONFIGS.glob("*.yaml"))
    configs = {path.stem: yaml.safe_load(path.read_text()) for path in paths}
    known = {name: one.get("model", {}) for name, one in configs.items() if "data" not in one}
    models = {}
    for name in choose(given, known):
        torch.manual_seed(0)
        model = LanguageModel(**SIZES, max_length=longest, **known[name]).eval()
        if model.decodes:
            models[name] = model
        elif given:
            raise ValueError(f"mechanism {name!r} has no state to decode from; remove it")
    return models


def held(state: object) -> int:
    """Returns the total size, in bytes, of the tensors in a state; counts each storage once."""
    tensors = (leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor))
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def states(
    model: LanguageModel, tokens: Tensor, positions: Sequence[int]
) -> Iterator[LanguageState]:
    """Yields the state after each number of tokens in `positions`."""
    state: LanguageState | None = None
    for end in positions:
        start = 0 if state is None else state.length
        for piece in tokens[:, start : end - 1].split(PIECE, dim=1):
            if piece.shape[1]:
                _, state = model.advance(piece, state)
        _, state = model.advance(tokens[:, end - 1 : end], state)
        yield state


def turn(model: LanguageModel, state: LanguageState, tokens: Tensor) -> list[float]:
    """Decodes tokens from a state; returns the time, in s, of each token except the first."""
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
    """Returns the times and state sizes of all mechanisms at all positions."""
    positions = tuple(sorted(positions))
    models = decoders(mechanisms, positions[-1] + TOKENS + 1)
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
    """Returns one row per mechanism and position.

    `ratio` is the time relative to the first position, and `softmax_ratio` is the time of softmax
    at the same position relative to the time of the mechanism.
    """
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
    """Fits the exponent of time against position to the larger half of the positions."""
    return exponent(upper_half([(row["position"], row["ratio"]) for row in rows]))


def table(rows: Rows) -> str:
    """Formats times at the first position, times relative to these, exponents, and state sizes."""
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
    """Draws the time per token and the size of the state; softmax has the last color."""
    shown = names(rows, "mechanism")
    styles = styles_of(shown, SOFTMAX if SOFTMAX in shown else None)
    with picture(png, figsize=(7.6, 4.6)) as figure:
        panels = figure.subplots(1, 2, sharex=True)
        labels = {"median_ms": "ms per token", "state_bytes": "state, bytes"}
        for axes, (column, label) in zip(panels, labels.items(), strict=True):
            points = {
                name: [(row["position"], row[column]) for row in pick(rows, mechanism=name)]
                for name in styles
            }
            curves(axes, points, styles, xlabel="tokens so far", ylabel=label)
        legend_outside(figure, panels[0], "lower", 4, fontsize="small")
