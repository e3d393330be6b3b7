"""Replace softmax in a trained model without further training and evaluate the model.

    python scripts/conversion.py runs/softmax-normalized-rpe
    python scripts/conversion.py runs/softmax --features 8 16 32 64 --draws 5 --beam 1
    python scripts/conversion.py runs/lm-softmax-normalized --features 64 --polynomial

As in section 4.5 and figure 2 of NPRF (arXiv:2106.12566), softmax is replaced by positive random
features. The paper compares translation models that were trained with and without normalized
queries and keys, and with and without a relative encoding. The table lists the metric of the
trained model, and the mean and standard deviation of the metric over draws of the features.
--polynomial adds polynomial features, which are not random. The metric is BLEU for translation
models and perplexity per token for language models.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from kit.rows import markdown, mean_sd
from kit.words import described, guarded
from torch import nn

from molflt.attention import convert_weights_
from molflt.attention.checks import no_effect
from molflt.sequence import EncoderDecoder, LanguageModel
from molflt.training.checkpoint import load_run
from molflt.training.recipes import Recipe

METRICS = {"translation": ("BLEU", "bleu"), "language": ("perplexity", "perplexity")}
DEGREES = 2, 3


def converted(model: nn.Module, options: dict[str, Any], draw: int, **own: object) -> nn.Module:
    """Returns a model with the same weights but attention options `own`; `draw` is the seed."""
    torch.manual_seed(draw)
    given = {**options, "vocabulary": model.vocabulary, **own}
    if isinstance(model, EncoderDecoder):
        decoder = {k: v for k, v in (options.get("decoder") or {}).items() if k not in own}
        given["decoder"] = decoder or None
    made = type(model)(**given)
    convert_weights_(model, made)
    return made.to(next(model.parameters()).device).eval()


def expect_softmax(run: Path, model: nn.Module, config: dict[str, Any]) -> None:
    """Raises ValueError unless all layers of a translation or language model use softmax."""
    mixings: set[str] = set()
    if isinstance(model, EncoderDecoder):
        mixings = {*model.encoder.mixings, *model.decoder.stack.mixings}
    elif isinstance(model, LanguageModel):
        mixings = set(model.stack.mixings)
    if mixings != {"softmax"}:
        raise ValueError(
            f"{run}: expected a run of the recipe translation or language with model.mixing "
            f"softmax; got {config['recipe']}, {config['model'].get('mixing')}"
        )


def score(model: nn.Module, config: dict[str, Any], options: argparse.Namespace) -> float:
    """Computes the metric of a model in the same way as `molflt evaluate`."""
    names = ("batch_size", "beam", "length_penalty")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    with tempfile.TemporaryDirectory() as folder:  # for figures, which are not needed
        evaluate, out = Recipe.of(config).load("evaluate"), Path(folder)
        found = evaluate(options.run, model, config, out, splits=[options.split], **given)
    return found.results[options.split][METRICS[config["recipe"]][1]]


def measure(options: argparse.Namespace) -> str:
    """Returns a table with a row for the trained model and a row for each kind of conversion."""
    model, config = load_run(options.run, options.checkpoint, options.device)
    expect_softmax(options.run, model, config)
    if isinstance(model, LanguageModel):
        no_effect("on a language model", beam=options.beam, length_penalty=options.length_penalty)
    rows = [["softmax, as trained", f"{score(model, config, options):.2f}", 1]]

    def add(name: str, draws: int, **own: object) -> None:
        models = (converted(model, config["model"], i, **own) for i in range(draws))
        rows.append([name, mean_sd([score(one, config, options) for one in models], 2), draws])

    for features in options.features:
        add(f"{features} features", options.draws, mixing="linear", num_features=features)
    for degree in DEGREES if options.polynomial else ():
        kernel = {"mixing": "quadratic", "feature_map": "polynomial", "degree": degree}
        add(f"polynomial of degree {degree}", 1, **kernel)
    return markdown(["attention", METRICS[config["recipe"]][0], "draws"], rows)


@guarded
def main(words: list[str] | None = None) -> None:
    parser = described(__doc__)
    parser.add_argument("run", type=Path, help="translation or language run with softmax")
    parser.add_argument("--features", nargs="+", type=int, default=[8, 16, 32, 64, 128])
    parser.add_argument("--polynomial", action="store_true", help="add polynomials of degree 2, 3")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--split", default="val", choices=["train", "val", "test"])
    parser.add_argument("--beam", type=int, help="only for translation; default: 5")
    parser.add_argument("--length-penalty", type=float, help="only for translation; default: 1")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--checkpoint", default="best")
    parser.add_argument("--device", default="auto")
    print(measure(parser.parse_args(words)))


if __name__ == "__main__":
    raise SystemExit(main())
