"""Time and peak memory of one attention layer against the length: ours and others' in one run.

    python scripts/scaling.py --out runs/scaling
    python scripts/scaling.py --out runs/scaling --lengths 512 1024 --mechanisms flt performer
    python scripts/scaling.py --chunks          # time of the causal scan by its chunk size

One sequence of tokens of width 512, 8 heads of 64, m = 64, float32, one thread, on the CPU; a layer
with its projections of queries, keys, values and outputs (FNet has none), and its encoding.

Time: all mechanisms take turns, round after round, so that a busy moment hits all; the CSV has
medians over rounds, and ratios of two mechanisms are medians of the ratios within each round.
Memory (Linux): every measurement has a process of its own, forked from one that has computed
nothing. It warms up on 64 tokens, sets the kernel's peak of resident memory to the present value
(/proc/self/clear_refs) and reports by how much one pass raises it; parameters and input are there
before. It sees what any library allocates, and no block is reused in silence, because the allocator
is told to give every block above 64 KiB back to the system (MALLOC_MMAP_THRESHOLD_).
What would need more than 6 GB or 60 s, judged from the lengths before, is skipped and says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import scaling_report as report
import torch
from scaling_report import PASSES, Costs, Key, Times, expected, exponent  # noqa: F401
from torch import Tensor, nn
from tqdm import tqdm

from molflt.attention import Attention, Features, make_position
from molflt.attention.causal import causal as causal_scan
from molflt.attention.encoding import Position
from molflt.attention.fourier import FourierMixer

HEADS, HEAD_DIM, FEATURES, NODES = 8, 64, 64, 32
DIM = HEADS * HEAD_DIM
LENGTHS, QUICK_LENGTHS = (512, 1024, 2048, 4096, 8192), (256, 512, 1024)
MAX_MIB, MAX_SECONDS = 6e9 / 2**20, 60.0
ROUNDS = 9  # at most
CHUNKS = (32, 64, 128, 256, 512)
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}


class Layer(nn.Module):
    """Attention with its encoding, evaluated anew in every pass as in training."""

    def __init__(self, mixing: nn.Module, position: Position | None, places: Tensor) -> None:
        super().__init__()
        self.mixing, self.position, self.places = mixing, position, places

    def forward(self, x: Tensor) -> Tensor:
        if self.position is None:
            return self.mixing(x)
        return self.mixing(x, self.position(self.mixing.mixing, self.places, self.places))


def ours(length: int, causal: bool, position: str = "none", dim: int = 1, **options: Any) -> Layer:
    """Our layer; places along a line, or random ones in space at the density of a metal."""
    places = torch.arange(length)[None, :, None].float()
    if dim == 3:
        places = torch.rand(1, length, 3) * (12.0 * length) ** (1 / 3)
    sizes = {
        "toeplitz": {"max_tokens": length},
        "spectral": {"spectrum": "gaussian_basis", "dim": dim, "num_nodes": NODES},
    }
    encoding = make_position(position, HEADS, HEAD_DIM, **sizes.get(position, {}))
    options.setdefault("num_features", FEATURES)
    mixing = Attention(DIM, HEADS, causal=causal, position=encoding, **options)
    return Layer(mixing, encoding, places)


def performer_pytorch(length: int, causal: bool) -> nn.Module:
    """Its chunked causal form in PyTorch: the other one needs CUDA and fast-transformers."""
    from performer_pytorch import SelfAttention

    return SelfAttention(DIM, causal=causal, heads=HEADS, dim_head=HEAD_DIM, nb_features=FEATURES)


def pyg(length: int, causal: bool) -> nn.Module:
    """PyTorch Geometric's Performer; it fixes m = d log d = 266, so m is set afterwards."""
    from torch_geometric.nn.attention import PerformerAttention
    from torch_geometric.nn.attention.performer import orthogonal_matrix

    layer = PerformerAttention(DIM, HEADS, head_channels=HEAD_DIM)
    layer.fast_attn.num_rows = FEATURES
    layer.fast_attn.projection_matrix = orthogonal_matrix(FEATURES, HEAD_DIM)
    return layer


def transformers_fnet(length: int, causal: bool) -> nn.Module:
    """Hugging Face's Fourier sublayer; its outputs come in a tuple."""
    from transformers import FNetConfig
    from transformers.models.fnet.modeling_fnet import FNetBasicFourierTransform

    class First(FNetBasicFourierTransform):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[0]

    return First(FNetConfig(hidden_size=DIM))


class Mechanism(NamedTuple):
    """How a layer is built, whose it is, which forms it has, and whether its memory is O(N)."""

    build: Callable[[int, bool], nn.Module]
    who: str = "molflt"
    causal: tuple[bool, ...] = (False, True)
    linear: bool = True


BOTH, ONE_WAY = (False, True), (False,)
MECHANISMS = {
    "softmax": Mechanism(partial(ours, mixing="softmax")),  # SDPA keeps no N x N matrix
    "softmax, spectral mask": Mechanism(
        partial(ours, mixing="softmax", position="spectral", dim=3), causal=ONE_WAY, linear=False
    ),
    "softmax, Toeplitz bias": Mechanism(
        partial(ours, mixing="softmax", position="toeplitz"), linear=False
    ),
    "performer": Mechanism(ours),
    "performer, relu": Mechanism(partial(ours, feature_map="relu"), causal=ONE_WAY),
    "flt": Mechanism(partial(ours, position="spectral", dim=3)),
    "flt, l = 1": Mechanism(partial(ours, position="spectral")),
    "log-linear": Mechanism(partial(ours, position="toeplitz")),
    "elu": Mechanism(partial(ours, feature_map="elu")),
    "fnet": Mechanism(lambda length, causal: FourierMixer(DIM), causal=ONE_WAY),
    "performer-pytorch": Mechanism(performer_pytorch, "performer-pytorch"),
    "PyG performer, relu": Mechanism(pyg, "torch_geometric", ONE_WAY),
    "transformers fnet": Mechanism(transformers_fnet, "transformers", ONE_WAY),
}


def prepare(name: str, causal: bool, length: int, which: str) -> Callable[[], None]:
    """A function that makes one pass."""
    torch.manual_seed(0)
    with contextlib.redirect_stdout(sys.stderr):  # one of them prints
        layer = MECHANISMS[name].build(length, causal)
    back = which != PASSES[0]
    x = torch.randn(1, length, DIM, requires_grad=back)

    def once() -> None:
        with torch.set_grad_enabled(back):
            out = layer(x)
        if back:
            x.grad = None
            layer.zero_grad(set_to_none=True)
            out.sum().backward()

    return once


class Bench(NamedTuple):
    """What a script measures, and the most that a single pass may take."""

    script: str
    mechanisms: Mapping[str, Mechanism]
    prepare: Callable[[str, bool, int, str], Callable[[], None]]
    most_mib: float
    most_seconds: float
    budget: float = 12.0
    """seconds after which a mechanism stops taking turns"""
    clock: Callable[[], float] = time.perf_counter


def resident(field: str) -> float:
    """MiB of this process: VmRSS at present, VmHWM at most."""
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", text)[1]) / 1024


def growth(work: Callable[[], None]) -> float:
    """MiB by which a call raises this process's resident memory at its peak."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def cost(bench: Bench, name: str, causal: bool, length: int, which: str) -> dict[str, Any]:
    """Peak memory of one pass, alone and with all else in the process, and its seconds as a first
    estimate; or why there is none.
    """
    try:
        bench.prepare(name, causal, 64, which)()
        work = bench.prepare(name, causal, length, which)
        start = bench.clock()
        found = {"MiB": growth(work), "seconds": bench.clock() - start}
        return {**found, "process": resident("VmHWM")}
    except (ImportError, RuntimeError, MemoryError) as error:
        return {"note": f"{type(error).__name__}: {error}".splitlines()[0]}


def serve(bench: Bench) -> None:
    """Answers keys on standard input by their `cost`, each in a fork of this process."""
    torch.set_num_threads(1)
    for mechanism in bench.mechanisms.values():
        with contextlib.suppress(ImportError), contextlib.redirect_stdout(sys.stderr):
            mechanism.build(64, False)  # imports; no backward, which would break forks
    for line in sys.stdin:
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            os.write(write, json.dumps(cost(bench, *json.loads(line))).encode())
            os._exit(0)
        os.close(write)
        with open(read) as answer:
            print(answer.read() or '{"note": "the process was killed"}', flush=True)
        os.waitpid(child, 0)


@contextlib.contextmanager
def server(script: str) -> Iterator[Callable[[Key], dict[str, Any]]]:
    """Asks a process that runs `serve`."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        raise SystemExit("peak memory is read from /proc/self/clear_refs, which only Linux has")
    command = [sys.executable, script, "--serve"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, **ALLOCATOR}, **pipes) as process:

        def ask(key: Key) -> dict[str, Any]:
            process.stdin.write(json.dumps(key) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


def take_turns(
    works: dict[Key, tuple[Callable[[], None], int]],
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Seconds of every round in which a mechanism took part, after a round that is not counted."""
    times: Times = {key: [] for key in works}
    for turn in range(-1, max((rounds for _, rounds in works.values()), default=0)):
        for key, (work, rounds) in works.items():
            if turn >= rounds or (turn < 0 and rounds == 1):
                continue
            start = clock()
            work()
            if turn >= 0:
                times[key].append(clock() - start)
    return times


def measure(
    names: list[str],
    lengths: list[int],
    most: int,
    passes: tuple[str, ...] = PASSES,
    bench: Bench | None = None,
) -> tuple[Costs, Times]:
    """Costs (peak memory or a note) and seconds per round, of at most so many, by key."""
    bench = bench or tokens()
    costs: Costs = {}
    times: Times = {}
    groups = [(n, c, p) for n in lengths for c in BOTH for p in passes]
    with server(bench.script) as ask:
        for length, causal, which in tqdm(groups, desc="scaling", unit=" groups", leave=False):
            works = {}
            for name in names:
                key = (name, causal, length, which)
                if causal not in bench.mechanisms[name].causal:
                    continue
                mib, seconds = (expected(costs, key, what) for what in ("MiB", "seconds"))
                if mib > bench.most_mib or seconds > bench.most_seconds:
                    need = f"about {mib * 2**20 / 1e9:.1f} GB and {seconds:.0f} s"
                    costs[key] = {"note": f"skipped: would need {need}"}
                    continue
                costs[key] = ask(key)
                if "note" in costs[key]:
                    continue
                rounds = min(most, int(bench.budget / costs[key]["seconds"]))
                if rounds:
                    works[key] = bench.prepare(*key), rounds
                else:  # too long to be run again
                    times[key] = [costs[key]["seconds"]]
            times.update(take_turns(works, bench.clock))
    return costs, times


def tokens() -> Bench:
    """What this script measures."""
    return Bench(__file__, MECHANISMS, prepare, MAX_MIB, MAX_SECONDS)


def features(tokens: int, width: int) -> Features:
    """Logarithms of random positive features."""
    return Features(None, torch.randn(1, HEADS, tokens, width, requires_grad=True))


def chunks(lengths: list[int]) -> str:
    """Markdown: milliseconds of the causal scan, forward and backward, by tokens per chunk."""
    lines = [["m", "tokens", *map(str, CHUNKS)], ["---"] * (2 + len(CHUNKS))]
    for width in (16, 64, 256):
        for length in lengths:
            query, key = features(length, width), features(length, width)
            value = torch.randn(1, HEADS, length, HEAD_DIM, requires_grad=True)

            def work(chunk: int, q: Features = query, k: Features = key, v: Tensor = value) -> None:
                causal_scan(q, k, v, chunk=chunk)[0].ratio().sum().backward()

            times = take_turns(
                {(str(c), True, length, ""): (partial(work, c), ROUNDS) for c in CHUNKS}
            )
            cells = [f"{1e3 * statistics.median(own):.0f}" for own in times.values()]
            lines.append([str(width), str(length), *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/scaling"))
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--mechanisms", nargs="+", choices=MECHANISMS, default=list(MECHANISMS))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="most turns of a mechanism")
    parser.add_argument(
        "--quick", action="store_true", help="short sequences, one round, no inference"
    )
    parser.add_argument("--chunks", action="store_true", help="the causal scan by its chunk size")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    options = parse(words)
    torch.set_num_threads(1)
    if options.serve:
        serve(tokens())
        return 0
    lengths = sorted(options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS))
    if options.chunks:
        print(chunks(lengths))
        return 0
    few = {"most": 1, "passes": PASSES[1:]} if options.quick else {"most": options.rounds}
    costs, times = measure(options.mechanisms, lengths, **few)
    report.write(options.out, costs, times, MECHANISMS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
