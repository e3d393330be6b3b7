"""Evaluation of language models: perplexity, loss against the position, attention."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from molflt import plots
from molflt.data.text.datamodule import TokenBlocks, read_blocks
from molflt.evaluation.common import (
    attention_of,
    batches,
    device_of,
    draw_attention,
    draw_encoding,
    expect_finite,
    load_vocabulary,
    locality_of,
    named_sources,
)
from molflt.evaluation.proteins import Residues
from molflt.evaluation.results import Evaluation, Results, begin_results, results_table
from molflt.sequence.language_model import LanguageModel
from molflt.tasks.language import LanguageTask
from molflt.training.config import Config

__all__ = ["evaluate", "metrics_of", "token_losses"]

_ATTENTION_TOKENS = 128  # tokens in the picture of attention matrices
_COLUMNS = {
    "perplexity": ("perplexity", 2),
    "bits_per_token": ("bits/token", 3),
    "tokens": ("tokens", 0),
    "nearest": ("nearest 10 %", 3),
    "farthest": ("farthest 10 %", 3),
}
_NOTE = "10 %: attention on that share of the preceding tokens, mean over heads and layers"


def evaluate(
    run: Path,
    model: LanguageModel,
    config: Config,
    out: Path,
    splits: list[str] | None = None,
    data: Path | None = None,
    batch_size: int = 64,
) -> Evaluation:
    """Evaluates a language model: perplexity per token of each text.

    Each block has the length used in training and is evaluated without the preceding text, as in
    the literature. Writes losses.png (loss against the position in the block), attention.png (each
    head of the last layer, for the first tokens) and, with a relative encoding, encoding.png. For
    protein models, also compares the metrics of residues with the unigram model of the training
    file and writes substitutions.png.

    Args:
        splits: any of train, val and test; by default val, and also test if the run names it.
        data: another text to evaluate instead: a file or an hf: name.
        batch_size: blocks in a batch.

    Returns:
        Per split: perplexity, bits_per_token, tokens, nearest and farthest. The last two are the
        attention on the nearest and farthest 10 % of the tokens of the first block, averaged over
        heads and layers. For proteins also residue_perplexity, residue_accuracy_percent, residues
        (their number, without ends of records), unigram_perplexity and unigram_accuracy_percent.
    """
    vocabulary = load_vocabulary(run, model.vocabulary)
    length, train = int(str(config["data"]["length"])), str(config["data"]["train"])
    results: Results = {}
    curves: dict[str, NDArray[np.float64]] = {}
    residues = None
    if vocabulary.level == "protein":  # the unigram model also predicts ends of records
        possible = np.ones(len(vocabulary), dtype=bool)
        residues = Residues(train, lambda: read_blocks(train, vocabulary, length).ids, possible)
    texts = {  # read all of them before evaluating the first
        split: read_blocks(source, vocabulary, length, split)
        for split, source in named_sources(config["data"], splits, data).items()
    }
    for split, blocks in texts.items():
        right: list[NDArray[np.bool_]] | None = None if residues is None else []
        losses = curves[split] = token_losses(model, blocks, batch_size, split, right)
        counted = losses[np.isfinite(losses)]
        scores = metrics_of(counted)
        results[split] = {**scores, "tokens": len(counted), **_locality(model, blocks)}
        if residues is not None and right is not None:
            own, there = blocks.ids != blocks.eos, np.isfinite(losses)
            hits = np.concatenate(right)[there][own]
            results[split] |= residues.judge(
                metrics_of(counted[own])["perplexity"], 100 * float(hits.mean()), blocks.ids[own]
            )
    begin_results(out, "losses.png", "attention.png", "encoding.png", "substitutions.png")
    files = [out / "losses.png"]
    plots.losses_by_place(curves, files[0])
    first = blocks[0][0][:_ATTENTION_TOKENS].to(device_of(model))[None]
    title = f"last layer, first {first.shape[1]} tokens of {split}"
    files += draw_attention(model.stack, lambda: model(first), out / "attention.png", title)
    position, scale = model.stack.position, model.position_scale
    files += draw_encoding(position, scale, length, out / "encoding.png")
    text = f"{results_table('text', _COLUMNS, results)}\n\n{_NOTE}"
    if residues is not None:
        files.append(out / "substitutions.png")
        text += residues.report(results, model.head, vocabulary.ids, files[-1])
    return Evaluation(results, f", blocks of {length} tokens\n\n{text}\n", files)


def metrics_of(losses: NDArray[np.float64]) -> dict[str, float]:
    """Returns perplexity and bits per token from negative log-likelihoods of tokens in nats."""
    return LanguageTask.sums(torch.tensor(losses.sum()), torch.tensor(len(losses))).metrics()


def token_losses(
    model: LanguageModel,
    blocks: TokenBlocks,
    batch_size: int,
    name: str,
    right: list[NDArray[np.bool_]] | None = None,
) -> NDArray[np.float64]:
    """Returns the negative log-likelihood of each token, nats, (blocks, length); NaN for padding.

    For each batch, appends to `right` a mask of the tokens that were the most probable ones,
    (batch, length). With None, the logits are not kept in memory.
    """
    device, found = device_of(model), []
    with batches(
        DataLoader(blocks, batch_size), name, f"{batch_size} x {blocks.length:,} tokens"
    ) as loaded:
        for inputs, targets in loaded:
            wanted = targets.to(device)
            if right is None:
                score = model.log_likelihood(inputs.to(device), wanted)
            else:
                log_p = model.log_probabilities(model(inputs.to(device)))
                score = log_p.gather(2, wanted.clamp(min=0)[..., None])[..., 0]
                right.append((log_p.argmax(dim=2) == wanted).cpu().numpy())
            loss = -score.double().cpu()
            expect_finite(name, loss)
            found.append(np.where(targets.numpy() < 0, np.nan, loss.numpy()))
    return np.concatenate(found)


def _locality(model: LanguageModel, blocks: TokenBlocks) -> dict[str, float | None]:
    """Returns `locality_of` for the first block."""
    tokens = blocks[0][0][blocks[0][1] >= 0].to(device_of(model))[None]
    place = torch.arange(tokens.shape[1])
    distances = (place[:, None] - place).abs()
    return locality_of(attention_of(model.stack, lambda: model(tokens)), distances, causal=True)
