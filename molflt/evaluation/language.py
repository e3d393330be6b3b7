"""Evaluation of a language model: perplexity per token, where it comes from, where heads look."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from tqdm import tqdm

from molflt import plots
from molflt.checkpoint import load_run
from molflt.data.text import TokenBlocks, read_blocks
from molflt.data.vocabulary import Vocabulary
from molflt.evaluation.attention import attention_of, locality_of
from molflt.evaluation.inference import resolve_device
from molflt.evaluation.report import align, write_results
from molflt.tasks.language import language_metrics

__all__ = ["evaluate", "load_vocabulary", "token_losses"]

ATTENTION_TOKENS = 128  # of the picture of attention matrices


def evaluate(
    run: Path,
    splits: Sequence[str] | None = None,
    data: Path | None = None,
    checkpoint: str = "best",
    out: Path | None = None,
    batch_size: int = 64,
    device: str = "auto",
) -> dict[str, dict[str, Any]]:
    """Evaluates a language model: perplexity per token of each text.

    Each block of the training's length is judged by itself, without what stood before it, as the
    papers do. Writes results.json, losses.png (loss against the place in the block), attention.png
    (each head of the last layer on the first tokens) and, if there is one, encoding.png.

    Args:
        run: folder of a training run.
        splits: some of "train", "val" and "test"; by default "val", and "test" if the run names it.
        data: another text instead, a file or an hf: name.
        checkpoint: best, last, or a safetensors file.
        out: folder to write; by default the run's.
        batch_size: blocks in a batch.
        device: auto, cpu, cuda or cuda:N.

    Returns:
        Per split: perplexity, bits_per_token, tokens, and the shares of attention on the nearest
        and farthest 10 % of the tokens, mean over heads and layers, of the first block.

    Raises:
        FileNotFoundError: if the run, its checkpoint, its vocabulary, or a text is missing.
        ValueError: if a text cannot be used, or the vocabulary is another model's.
    """
    run, out = Path(run), run if out is None else Path(out)
    model, config = load_run(run, checkpoint, device := resolve_device(device))
    vocabulary = load_vocabulary(run, model.vocabulary)
    sources = _sources(config["data"], splits, data)
    length = config["data"]["length"]
    results: dict[str, dict[str, Any]] = {}
    curves: dict[str, NDArray[np.float64]] = {}
    for split, source in sources.items():
        blocks = read_blocks(source, vocabulary, length, split)
        losses = token_losses(model, blocks, batch_size, device, split)
        counted = losses[np.isfinite(losses)]
        results[split] = {
            **language_metrics(float(counted.mean())),
            "tokens": len(counted),
            **_locality(model, blocks, device),
        }
        curves[split] = losses
    write_results(out, {split: _finite(found) for split, found in results.items()})
    plots.losses_by_place(curves, out / "losses.png")
    first = torch.as_tensor(blocks[0][0][:ATTENTION_TOKENS], device=device)[None]
    matrices = attention_of(model.stack, lambda: model(first))
    title = f"last layer, first {first.shape[1]} tokens of {split}"
    plots.attention_matrices(matrices[-1][0], out / "attention.png", title=title)
    written = [out / name for name in ("results.json", "losses.png", "attention.png")]
    if model.stack.position is not None and plots.has_bias(model.stack.position):
        step = model.position_scale  # of neighboring tokens, in the encoding's unit of length
        reach = (min(length, model.longest or length) - 1) * step
        unit = "tokens" if step == 1 else f"{1 / step:g} tokens"
        plots.rpe_curves(model.stack.position, out / "encoding.png", reach, unit)
        written.append(out / "encoding.png")
    print(f"{run}, checkpoint {checkpoint}, blocks of {length} tokens\n\n{_table(results)}\n")
    print("written: " + ", ".join(map(str, written)))
    return results


def load_vocabulary(run: Path, size: int) -> Vocabulary:
    """The vocabulary of a run.

    Args:
        run: folder of a training run.
        size: number of ids that its model has.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if it is damaged, or of another model.
    """
    path = run / "vocabulary.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected the vocabulary of this run")
    vocabulary = Vocabulary.from_json(path.read_bytes(), str(path))
    if len(vocabulary) != size:
        raise ValueError(
            f"{path}: {len(vocabulary):,} tokens, but the checkpoint has {size:,}; expected the "
            "vocabulary that the model was trained with; put it back"
        )
    return vocabulary


def token_losses(
    model: Any, blocks: TokenBlocks, batch_size: int, device: str, name: str
) -> NDArray[np.float64]:
    """Negative log-likelihood of each token of a text, nats: (blocks, length); NaN where none is.

    Args:
        model: `molflt.sequence.LanguageModel`, on `device` and in evaluation mode.
        blocks: the text.
        batch_size: blocks in a batch.
        device: where the model is.
        name: what the progress bar says.

    Raises:
        ValueError: if a loss is not finite.
    """
    found = []
    with torch.inference_mode():
        batches = DataLoader(blocks, batch_size=batch_size)
        for inputs, targets in tqdm(batches, desc=name, leave=False, disable=None):
            score = model.log_likelihood(inputs.to(device), targets.to(device))
            loss = -score.double().cpu().numpy()
            if not np.isfinite(loss).all():
                raise ValueError(
                    f"{name}: the probability of a token is not finite; expected a number; use "
                    "another checkpoint"
                )
            found.append(np.where(targets.numpy() < 0, np.nan, loss))
    return np.concatenate(found)


def _sources(
    data: Mapping[str, Any], splits: Sequence[str] | None, other: Path | None
) -> dict[str, str]:
    if other is not None:
        if splits:
            raise ValueError("give either --splits or --data; got both")
        return {Path(other).name: str(other)}
    named = {name: data[name] for name in ("train", "val", "test") if data[name]}
    wanted = list(dict.fromkeys(splits or [name for name in named if name != "train"]))
    for name in wanted:
        if name not in named:
            raise ValueError(f"the run has no split {name!r}; expected some of {', '.join(named)}")
    return {name: named[name] for name in wanted}


def _finite(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """With null for the perplexity of a diverged model, which JSON has no number for."""
    return {name: None if value == math.inf else value for name, value in metrics.items()}


def _locality(model: Any, blocks: TokenBlocks, device: str) -> dict[str, float | None]:
    """Of the first block."""
    tokens = blocks[0][0][blocks[0][1] >= 0].to(device)[None]
    place = torch.arange(tokens.shape[1])
    distances = (place[:, None] - place).abs()
    return locality_of(attention_of(model.stack, lambda: model(tokens)), distances, causal=True)


def _table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """One line per text; shares of attention on near and far tokens beside the perplexities."""
    head = ("text", "perplexity", "bits/token", "tokens", "nearest 10 %", "farthest 10 %")
    rows = [
        (
            name,
            f"{row['perplexity']:.2f}",
            f"{row['bits_per_token']:.3f}",
            f"{row['tokens']:,}",
            *("-" if row[key] is None else f"{row[key]:.3f}" for key in ("nearest", "farthest")),
        )
        for name, row in results.items()
    ]
    note = "10 %: attention on that share of the tokens before, mean over heads and layers"
    return f"{align([head, *rows])}\n\n{note}"
