"""Models that decode from a state; the time of a step along a sequence, by tenths of the sequence.

Times are processor times: medians over the steps of a tenth and over rounds. Ratios are medians
over rounds of the ratio of two medians, or two sums, of one round. The size of a state counts all
memory that is kept after the last step.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
import yaml
from torch import Tensor
from tqdm import tqdm

from kit.pictures import curves, legend
from kit.rows import Rows, choose, markdown, names, pick
from kit.turns import paired
from molflt.plots.figure import SERIES, picture
from molflt.sequence import EncoderDecoder, LanguageModel, PixelModel

SOFTMAX = "softmax"
TENTHS = 10
CONFIGS = Path(__file__).resolve().parents[2] / "configs"

Model = TypeVar("Model", LanguageModel, PixelModel, EncoderDecoder)


def decoders(folder: str, given: Sequence[str], build: Callable[..., Model]) -> dict[str, Model]:
    """Models of the configurations in a folder by name; by default all that decode from a state.

    Args:
        folder: name below configs/; files that name data are sizes, not mechanisms.
        given: names of files; all if empty.
        build: makes a model from the options `model` of a file.
    """
    paths = sorted((CONFIGS / folder).glob("*.yaml"))
    configs = {path.stem: yaml.safe_load(path.read_text()) for path in paths}
    known = {name: one.get("model", {}) for name, one in configs.items() if "data" not in one}
    models = {}
    for name in choose(given, known):
        torch.manual_seed(0)
        model = build(**known[name]).eval()
        if model.decodes:
            models[name] = model
        elif given:
            raise ValueError(f"mechanism {name!r} leaves no state to decode from; leave it out")
    return models


def held(state: object) -> int:
    """Bytes of the storages of all tensors in a state, each storage counted once."""
    storages: dict[int, int] = {}

    def visit(part: object) -> None:
        if isinstance(part, Tensor):
            storage = part.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(part, (tuple, list)):
            for child in part:
                visit(child)

    visit(state)
    return sum(storages.values())


def styles_of(mechanisms: Sequence[str]) -> dict[str, tuple[int, str]]:
    """Color and line of each mechanism; the last color is softmax's, which comes last."""
    colors = len(SERIES) - 1
    order = sorted(mechanisms, key=SOFTMAX.__eq__)
    styles = {name: (i % colors, "-" if i < colors else "--") for i, name in enumerate(order)}
    return {**styles, SOFTMAX: (colors, "-")} if SOFTMAX in styles else styles


def measure_tenths(
    models: Mapping[str, Model],
    grow: Callable[[Model, int], list[float]],
    remembered: Callable[[Model], int],
    rounds: int,
    count: int,
) -> Rows:
    """A row for each mechanism and tenth; in every round all mechanisms take turns.

    Args:
        models: by mechanism.
        grow: returns the seconds of each step of a model in the round of this number.
        remembered: returns the bytes of a model's last state.
        rounds: number of rounds.
        count: number of sequences that grow together.
    """
    times: dict[str, list[list[float]]] = {name: [] for name in models}
    for turn in tqdm(range(rounds), desc="rounds", leave=False):
        for name, model in models.items():
            times[name].append(grow(model, turn))
    sizes = {name: remembered(model) for name, model in models.items()}

    def row(name: str, tenth: int) -> dict[str, Any]:
        parts = [[_tenth(one, part) for one in times[name]] for part in (0, tenth)]
        first, own = ([median(one) for one in part] for part in parts)
        sums = [sum(one) for one in times[name]]
        softmax = [sum(one) for one in times[SOFTMAX]] if SOFTMAX in times else None
        return {
            **{"mechanism": name, "tenth": tenth + 1},
            "median_ms": 1e3 * median(chain.from_iterable(parts[1])),
            "ratio": paired(own, first),
            "sequences_per_s": count / median(sums),
            "softmax_ratio": paired(softmax, sums) if softmax else None,
            **{"steps": len(times[name][0]), "sequences": count, "rounds": len(sums)},
            "state_bytes": sizes[name],
        }

    return [row(name, tenth) for name in times for tenth in range(TENTHS)]


def _tenth(seconds: list[float], number: int) -> list[float]:
    return seconds[number * len(seconds) // TENTHS : (number + 1) * len(seconds) // TENTHS]


def tenths_table(rows: Rows, step: str, sequences: str) -> str:
    """Markdown: time in the first, a middle and the last tenth, sequences per second, states.

    Args:
        rows: of `measure_tenths`.
        step: name of a step, such as "byte".
        sequences: name of the sequences, such as "images".
    """
    head = ["", f"ms a {step}, first tenth", "middle / first", "last / first", f"{sequences}/s"]
    head += ["softmax's time / its", "state, KiB"]
    lines = []
    for name in names(rows, "mechanism"):
        first, middle, last = (
            pick(rows, mechanism=name, tenth=tenth)[0] for tenth in (1, TENTHS // 2 + 1, TENTHS)
        )
        softmax = first["softmax_ratio"]
        ratio = None if softmax is None else f"{softmax:.2f}"
        cells = [f"{first['median_ms']:.2f}", f"{middle['ratio']:.2f}", f"{last['ratio']:.2f}"]
        cells += [f"{first['sequences_per_s']:.3f}"]
        lines.append([name, *cells, ratio, f"{first['state_bytes'] / 1024:.0f}"])
    return markdown(head, lines)


def draw_tenths(png: Path, rows: Rows, step: str) -> None:
    """Time of a step along the sequence."""
    styles = styles_of(names(rows, "mechanism"))
    with picture(png, figsize=(6.0, 4.0)) as figure:
        axes = figure.subplots()
        points = {
            name: [
                ((row["tenth"] - 0.5) / TENTHS * row["steps"], row["median_ms"])
                for row in pick(rows, mechanism=name)
            ]
            for name in styles
        }
        curves(axes, points, styles, xlabel=f"{step}s so far", ylabel=f"ms per {step}")
        axes.set(xscale="linear", yscale="linear", xlim=(0, None), ylim=(0, None))
        legend(figure, axes)
