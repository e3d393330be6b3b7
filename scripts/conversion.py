"""A trained softmax translation model with kernelized attention, without training: its BLEU.

    python scripts/conversion.py runs/softmax-normalized-rpe
    python scripts/conversion.py runs/softmax --features 8 16 32 64 --draws 5 --beam 1

NPRF (arXiv:2106.12566), section 4.5, fig. 2: models trained with and without normalized queries and
keys, with and without a relative encoding, in all of whose attention softmax is replaced by
positive random features. Run it for each of the four. Mean and standard deviation are over draws of
the features; the first row is the model as it was trained.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch
from kit.rows import markdown
from kit.words import described

from molflt.attention import convert_weights_
from molflt.data.text.parallel import read_parallel
from molflt.evaluation.masked import load_tokenizer
from molflt.evaluation.splits import named_sources
from molflt.evaluation.translation import bleu, translate
from molflt.sequence import EncoderDecoder
from molflt.training.checkpoint import load_run


def converted(model: EncoderDecoder, options: dict, features: int, draw: int) -> EncoderDecoder:
    """The same weights in kernelized attention, with so many features of their own draw."""
    torch.manual_seed(draw)
    own = {"mixing": "linear", "num_features": features}
    decoder = {k: v for k, v in (options.get("decoder") or {}).items() if k not in own}
    # the data have told the run how many ids there are
    given = {**options, "vocabulary": model.vocabulary, "decoder": decoder or None, **own}
    made = EncoderDecoder(**given)
    convert_weights_(model, made)
    return made.to(model.head.weight.device).eval()


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Options of the script."""
    parser = described(__doc__)
    parser.add_argument("run", type=Path, help="folder of a run of translation with softmax")
    parser.add_argument("--features", nargs="+", type=int, default=[8, 16, 32, 64, 128])
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--split", default="val", choices=["train", "val", "test"])
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--length-penalty", type=float, default=1.0)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--checkpoint", default="best")
    parser.add_argument("--device", default="auto")
    return parser.parse_args(words)


def measure(options: argparse.Namespace) -> list[list[str]]:
    """A row for the trained model, and one for each number of features."""
    model, config = load_run(options.run, options.checkpoint, options.device)
    translates = isinstance(model, EncoderDecoder)
    if not translates or {*model.encoder.mixings, *model.decoder.stack.mixings} != {"softmax"}:
        raise ValueError(
            f"{options.run}: expected a run of the recipe translation with model.mixing softmax; "
            f"got {config['recipe']}, {config['model'].get('mixing')}"
        )
    data = config["data"]
    (name,) = named_sources(data, [options.split], None).values()
    text = read_parallel(name, str(data["source"]), str(data["target"]))
    tokenizer = load_tokenizer(options.run, model.vocabulary)

    def score(one: EncoderDecoder) -> float:
        search = options.beam, options.length_penalty, options.batch_size, options.split
        told = translate(one, tokenizer, text.source, *search)
        return bleu(told, text.target, bool(data["lowercase"])).bleu

    rows = [["softmax", f"{score(model):.2f}", "", "1"]]
    for features in options.features:
        found = [
            score(converted(model, config["model"], features, draw))
            for draw in range(options.draws)
        ]
        spread = f"{statistics.stdev(found):.2f}" if len(found) > 1 else ""
        mean = f"{statistics.fmean(found):.2f}"
        rows.append([str(features), mean, spread, str(len(found))])
    return rows


def main(words: list[str] | None = None) -> int:
    """Prints the table; returns 2 for a run that cannot be converted."""
    try:
        options = parse(words)
        rows = measure(options)
    except (ValueError, OSError) as error:
        print(f"conversion.py: error: {error}", file=sys.stderr)
        return 2
    print(markdown(["features", "BLEU", "standard deviation", "draws"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
