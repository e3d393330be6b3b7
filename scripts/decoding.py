"""Time of one new token, and size of what decoding remembers, against the number of tokens so far.

    python scripts/decoding.py --out runs/decoding
    python scripts/decoding.py --mechanisms softmax performer --positions 100 1000 --rounds 5

`LanguageModel.decode` of one token at a time, for the mechanisms of configs/lm that leave a state;
softmax, beside them, keeps the keys and values of all tokens. 4 layers, width 128, 8 heads,
feed-forward width 512, 1000 token ids, sinusoidal positions, random weights, one sequence,
float32, one thread, on the CPU. The state at position n is that after n random tokens.

Time is the processor's, for the one thread that there is. In every round all mechanisms take turns
at all positions, so that a busy moment hits all. A turn decodes 9 tokens one after another from the
state at its position; the first brings weights and state back into the caches and is not counted.
Times are medians over tokens and rounds; a ratio is the median over rounds of the ratio of two
turns of one round, each its own median. Exponents are fitted to the ratios at the longer half of
the positions.
Bytes are those of all memory that a state keeps alive, so that a small view of a large tensor
would count as the latter.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import yaml
from scaling_report import bar, exponent, upper_half
from torch import Tensor
from tqdm import tqdm

from molflt.plots.figure import SERIES, picture
from molflt.sequence.language_model import LanguageModel, LanguageState

CONFIGS = Path(__file__).resolve().parents[1] / "configs" / "lm"
SIZES: dict[str, Any] = {
    **{"vocabulary": 1000, "dim": 128, "heads": 8, "layers": 4, "ffn_dim": 512},
    "absolute": "sinusoidal",
}
POSITIONS = (100, 300, 1000, 3000, 10_000)
PIECE = 1000  # tokens of a prompt at once: softmax would need 10^8 logits per head for all of them
TOKENS, ROUNDS, SECONDS = 8, 25, 240.0
SOFTMAX = "softmax"
COLUMNS = (
    *("mechanism", "position", "median_ms", "ratio", "softmax_ratio"),
    *("rounds", "tokens_per_round", "state_bytes"),
)

Key = tuple[str, int]  # mechanism, position
Times = dict[Key, list[list[float]]]  # seconds of each token of each round


class Result(NamedTuple):
    """All that was measured."""

    times: Times
    size: dict[Key, int]
    """bytes of the states"""

    def positions(self, name: str) -> list[int]:
        """Of a mechanism, from the first to the last."""
        return [position for own, position in self.times if own == name]

    @property
    def names(self) -> list[str]:
        """Mechanisms, in their order."""
        return list(dict.fromkeys(name for name, _ in self.times))

    def seconds(self, key: Key) -> float:
        """Median over tokens and rounds."""
        return median(token for turn in self.times[key] for token in turn)

    def ratio(self, one: Key, other: Key) -> float:
        """Median over rounds of the ratio of two turns."""
        turns = zip(self.times[one], self.times[other], strict=True)
        return median(median(a) / median(b) for a, b in turns)

    def growth(self, name: str) -> float:
        """Exponent of the ratios to the first position, over the longer half of the positions."""
        positions = self.positions(name)
        points = [(n, self.ratio((name, n), (name, positions[0]))) for n in positions]
        return exponent(upper_half(points))


def mechanisms() -> dict[str, dict[str, Any]]:
    """Model options of every mechanism of configs/lm; files that name data are sizes."""
    found = {}
    for path in sorted(CONFIGS.glob("*.yaml")):
        config = yaml.safe_load(path.read_text())
        if "data" not in config:
            found[path.stem] = config.get("model", {})
    return found


def build(options: dict[str, Any], longest: int) -> LanguageModel:
    """A model for as many tokens, in evaluation mode, the same for the same options."""
    torch.manual_seed(0)
    return LanguageModel(**{**SIZES, "max_length": longest, **options}).eval()


def chosen(names: Sequence[str] | None, longest: int) -> dict[str, LanguageModel]:
    """Models by name; of all mechanisms, those that have a state.

    Raises:
        ValueError: an unknown mechanism, or one without a state.
    """
    known = mechanisms()
    for name in names or ():
        if name not in known:
            raise ValueError(f"mechanism {name!r} is unknown; expected some of {', '.join(known)}")
    models = {name: build(known[name], longest) for name in names or known}
    for name in names or ():
        if not models[name].decodes:
            raise ValueError(f"mechanism {name!r} leaves no state to decode from; leave it out")
    return {name: model for name, model in models.items() if model.decodes}


def states(
    model: LanguageModel, tokens: Tensor, positions: Sequence[int]
) -> Iterator[LanguageState]:
    """The state after each number of tokens, the last of which came alone.

    Args:
        model: in evaluation mode.
        tokens: ids (1, n), n at least the last position.
        positions: increasing, from 1 on.
    """
    state: LanguageState | None = None
    for end in positions:
        start = 0 if state is None else state.length
        for piece in tokens[:, start : end - 1].split(PIECE, dim=1):
            if piece.shape[1]:
                _, state = model.advance(piece, state)
        _, state = model.advance(tokens[:, end - 1 : end], state)
        yield state


def held(state: Any) -> int:
    """Bytes of the storages behind all tensors of a state, each counted once."""
    storages: dict[int, int] = {}

    def visit(part: Any) -> None:
        if isinstance(part, Tensor):
            storage = part.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(part, (tuple, list)):
            for child in part:
                visit(child)

    visit(state)
    return sum(storages.values())


def turn(model: LanguageModel, state: LanguageState, tokens: Tensor) -> list[float]:
    """Seconds of each token but the first, one after another from a state.

    Of the processor, which has one thread to run: by the clock, a token that takes longer than a
    slice of the scheduler looks three times as long on a busy machine, and a shorter one does not.
    """
    seconds = []
    for token in tokens.split(1, dim=1):
        start = time.thread_time()
        _, state = model.decode(token, state)
        seconds.append(time.thread_time() - start)
    return seconds[1:]


def measure(
    names: Sequence[str] | None,
    positions: Sequence[int],
    rounds: int = ROUNDS,
    limit: float = SECONDS,
    now: Callable[[], float] = time.perf_counter,
) -> Result:
    """Times and sizes of states.

    Args:
        names: mechanisms, None for all that have a state.
        positions: tokens so far, increasing.
        rounds: most turns of each mechanism at each position.
        limit: seconds after which no further round begins; the first one always does.
        now: a clock, in seconds.

    Raises:
        ValueError: a mechanism or a number outside its range.
    """
    if not positions or positions[0] < 1 or any(a >= b for a, b in pairwise(positions)):
        raise ValueError(
            f"positions must increase, from 1 on; got {' '.join(map(str, positions))}; sort them"
        )
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1; got {rounds}")
    begin = now()
    models = chosen(names, positions[-1] + TOKENS + 1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(SIZES["vocabulary"], (1, positions[-1]), generator=generator)
    new = torch.randint(SIZES["vocabulary"], (1, TOKENS + 1), generator=generator)
    with torch.inference_mode():
        kept: dict[Key, LanguageState] = {}
        for name, model in tqdm(models.items(), desc="prompts", leave=False):
            for position, state in zip(positions, states(model, tokens, positions), strict=True):
                kept[name, position] = state
        times: Times = {key: [] for key in kept}
        for index in tqdm(range(rounds), desc="rounds", leave=False):
            if index and now() - begin > limit:
                break
            for position in positions:
                for name, model in models.items():
                    times[name, position].append(turn(model, kept[name, position], new))
    return Result(times, {key: held(state) for key, state in kept.items()})


def rows(result: Result) -> list[dict[str, Any]]:
    """Rows of the CSV; `softmax_ratio` is softmax's time in units of this mechanism's."""
    table = []
    for (name, position), turns in result.times.items():
        key, first = (name, position), (name, result.positions(name)[0])
        other = (SOFTMAX, position)
        against = f"{result.ratio(other, key):.4g}" if other in result.times else ""
        cells = (f"{1e3 * result.seconds(key):.4g}", f"{result.ratio(key, first):.4g}", against)
        counts = (len(turns), len(turns[0]), result.size[key])
        table.append(dict(zip(COLUMNS, (name, position, *cells, *counts), strict=True)))
    return table


def table(result: Result) -> str:
    """Markdown: time at the first position, ratios to it, exponents, states."""
    positions = result.positions(result.names[0])
    first, last = positions[0], positions[-1]
    head = ["", f"ms at {first}", *(f"{n} / {first}" for n in positions[1:]), "time ~ n^"]
    head += [f"softmax / it, {last}", f"state at {first}, KiB", f"at {last}"]
    lines = [bar(head), bar(["---"] * len(head))]
    for name in result.names:
        start, end = (name, first), (name, last)
        cells = [name, f"{1e3 * result.seconds(start):.1f}"]
        cells += [f"{result.ratio((name, n), start):.2f}" for n in positions[1:]]
        cells.append(f"{result.growth(name):.2f}")
        softmax = (SOFTMAX, last)
        cells.append(f"{result.ratio(softmax, end):.2f}" if softmax in result.times else "")
        lines.append(bar([*cells, *(f"{result.size[key] / 1024:.0f}" for key in (start, end))]))
    without = sorted(set(mechanisms()) - set(result.names))
    return "\n".join([*lines, "", f"Not measured, or without a state: {', '.join(without)}."])


def draw(png: Path, result: Result) -> None:
    """Time per token and bytes of the state in doubly logarithmic panels."""
    from matplotlib.ticker import LogLocator, NullLocator

    with picture(png, figsize=(7.6, 4.6)) as figure:
        panels = figure.subplots(1, 2, sharex=True)
        linear = [name for name in result.names if name != SOFTMAX]
        for name in result.names:
            index = -1 if name == SOFTMAX else linear.index(name)
            positions = result.positions(name)
            style = {"marker": "o", "markersize": 3, "linewidth": 1.2, "label": name}
            style["color"] = SERIES[-1] if index < 0 else SERIES[index % (len(SERIES) - 1)]
            style["linestyle"] = "-" if index < len(SERIES) - 1 else "--"
            time_of = [1e3 * result.seconds((name, n)) for n in positions]
            panels[0].plot(positions, time_of, **style)
            panels[1].plot(positions, [result.size[name, n] for n in positions], **style)
        for axes, label in zip(panels, ("ms per token", "state, bytes"), strict=True):
            axes.set(xscale="log", yscale="log", xlabel="tokens so far", ylabel=label)
            axes.grid(alpha=0.25)
        panels[0].yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
        panels[0].yaxis.set_major_formatter("{x:g}")
        panels[0].yaxis.set_minor_locator(NullLocator())
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize="small")


def write(out: Path, result: Result) -> None:
    """Writes decoding.csv, decoding.png and decoding.md, and prints the last."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "decoding.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows(result))
    draw(out / "decoding.png", result)
    text = f"{table(result)}\n"
    (out / "decoding.md").write_text(text)
    print(text)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/decoding"))
    parser.add_argument("--positions", type=int, nargs="+", default=list(POSITIONS))
    parser.add_argument("--mechanisms", nargs="+", metavar="NAME", help="files of configs/lm")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="most turns of a mechanism")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="after these no further round begins"
    )
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Returns 2 for options outside their range."""
    options = parse(words)
    torch.set_num_threads(1)
    try:
        result = measure(options.mechanisms, options.positions, options.rounds, options.seconds)
    except ValueError as error:
        print(f"decoding.py: error: {error}", file=sys.stderr)
        return 2
    write(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
