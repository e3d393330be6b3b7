"""Time of a step along a sequence, by tenths of the sequence.

beam       a step adds one token to every hypothesis; each mechanism of configs/translation that has
           a state translates the same sources together, with random weights that never end a
           sentence
sampling   a step is a byte; each mechanism samples the same number of images together, without
           given bytes

In every round all mechanisms take turns. Times are processor times: medians over the steps of a
tenth and over rounds. Ratios are medians over rounds of the ratio of two medians, or two sums, of
one round. The size of a state counts all memory that is kept after the last step.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from kit import Benchmark
from kit.decoding import SOFTMAX, Model, decoders, held, styles_of
from kit.pictures import curves, legend
from kit.rows import Rows, markdown, names, pick
from kit.turns import paired
from torch import Tensor
from tqdm import tqdm

from molflt.plots.figure import picture
from molflt.sequence import EncoderDecoder, PixelModel, beam_search, sample
from molflt.sequence.pixels import START

TENTHS = 10
BEAM_SIZES: dict[str, Any] = {"vocabulary": 5000, "heads": 4, "layers": 3, "ffn_dim": 512}
BEGIN, END = 0, 1
PIXEL_SIZES: dict[str, Any] = {"dim": 128, "heads": 8, "layers": 2, "ffn_dim": 512}
CHANNELS = 3


def measure_tenths(
    models: Mapping[str, Model],
    grow: Callable[[Model, int], list[float]],
    remembered: Callable[[Model], int],
    rounds: int,
    count: int,
) -> Rows:
    """A row for each mechanism and tenth; in every round all mechanisms take turns.

    `grow` returns the seconds of each step of a model in a round, `remembered` the bytes of its
    last state, and `count` is the number of sequences that grow together.
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
    """Markdown: time in the first, a middle and the last tenth, sequences per second, states."""
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


def search(model: EncoderDecoder, source: Tensor, beam: int, tokens: int) -> list[float]:
    """Seconds of each step of a search that ends at its limit."""
    marks: list[float] = []
    plain = model.log_probabilities

    def marked(hidden: Tensor) -> Tensor:  # called once in each step
        marks.append(time.thread_time())
        return plain(hidden)

    model.log_probabilities = marked  # type: ignore[method-assign]
    try:
        found = beam_search(model, source, begin=BEGIN, end=END, beam=beam, limit=tokens + 1)
    finally:
        del model.log_probabilities
    if any(len(one.tokens) < tokens for one in found):
        raise RuntimeError(f"a search ended before its limit of {tokens} tokens")
    return [after - before for before, after in pairwise(marks)]


def remembered_by_search(model: EncoderDecoder, source: Tensor, beam: int, tokens: int) -> int:
    """Bytes of the state after the last token of all hypotheses."""
    target = torch.full((len(source) * beam, tokens), BEGIN)
    with torch.inference_mode():
        _, state = model.advance(target[:, 1:], model.begin(model.encode(source)))
        return held(model.advance(target[:, :1], state)[1])


def measure_beam(
    tokens: int = 1000,
    sources: int = 4,
    words: int = 32,
    beam: int = 5,
    mechanisms: tuple[str, ...] = (),
    rounds: int = 5,
) -> Rows:
    """Times and sizes of states: `tokens` steps for `sources` sources of `words` tokens."""
    build = partial(EncoderDecoder, **BEAM_SIZES, max_length=tokens + 1)
    models = decoders("translation", mechanisms, build)
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(END + 1, BEAM_SIZES["vocabulary"], (sources, words), generator=generator)
    for model in models.values():
        model.head.weight.data[END] = 0.0  # far less likely than the best of all others
    return measure_tenths(
        models,
        lambda model, _: search(model, source, beam, tokens),
        lambda model: remembered_by_search(model, source, beam, tokens),
        rounds,
        sources,
    )


def draw_images(model: PixelModel, images: int, seed: int) -> list[float]:
    """Seconds of each byte of images that are sampled together."""
    start = torch.full((images, 1), START)
    drawn = sample(model, start, model.longest, generator=torch.Generator().manual_seed(seed))
    seconds, since = [], time.thread_time()
    for _ in drawn:
        now = time.thread_time()
        seconds.append(now - since)
        since = now
    return seconds


def remembered(model: PixelModel, images: int) -> int:
    """Bytes of the state after the last byte of all images."""
    last = torch.full((images, 1), START)
    with torch.inference_mode():
        _, state = model.advance(last.expand(-1, model.longest - 1))
        return held(model.advance(last, state)[1])


def measure_sampling(
    side: int = 32, images: int = 4, mechanisms: tuple[str, ...] = (), rounds: int = 3
) -> Rows:
    """Times and sizes of states."""
    return measure_tenths(
        decoders("pixels", mechanisms, partial(PixelModel, CHANNELS, side, **PIXEL_SIZES)),
        lambda model, turn: draw_images(model, images, turn),
        lambda model: remembered(model, images),
        rounds,
        images,
    )


BENCHMARKS = {
    "beam": Benchmark(
        "Time of a step of beam search, from the first token of a translation to the last.",
        measure_beam,
        partial(tenths_table, step="token", sequences="sentences"),
        {"tokens": 10, "sources": 2, "words": 3, "beam": 2, "rounds": 1},
        partial(draw_tenths, step="token"),
    ),
    "sampling": Benchmark(
        "Time of a byte while images are sampled, from the first to the last.",
        measure_sampling,
        partial(tenths_table, step="byte", sequences="images"),
        {"side": 4, "images": 2, "rounds": 1},
        partial(draw_tenths, step="byte"),
    ),
}
