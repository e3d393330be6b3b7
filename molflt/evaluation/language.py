"""Evaluation of a language model: perplexity per token, where it comes from, where heads look."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from tqdm import tqdm

from molflt import plots
from molflt.data.text.datamodule import TokenBlocks, read_blocks
from molflt.data.text.vocabulary import Vocabulary
from molflt.evaluation.attention import _attention_of, _locality_of
from molflt.evaluation.proteins import Unigram, draw_substitutions, residue_table, unigram_of
from molflt.evaluation.report import Report, align
from molflt.evaluation.results import begin_results
from molflt.evaluation.splits import named_sources
from molflt.evaluation.tokens import draw_encoding, expect_finite, expect_size, read_kept
from molflt.memory import within_memory
from molflt.sequence.language_model import LanguageModel
from molflt.tasks.language import LanguageTask
from molflt.training.config import Config

__all__ = ["evaluate", "load_vocabulary", "metrics_of", "token_losses", "vocabulary_of"]

_ATTENTION_TOKENS = 128  # of the picture of attention matrices


def evaluate(
    run: Path,
    model: LanguageModel,
    config: Config,
    out: Path,
    splits: list[str] | None = None,
    data: Path | None = None,
    batch_size: int = 64,
) -> Report:
    """Evaluates a language model: perplexity per token of each text.

    Each block of the training's length is judged by itself, without what stood before it, as the
    papers do. Writes losses.png (loss against the place in the block), attention.png (each head of
    the last layer on the first tokens) and, if there is one, encoding.png. Proteins: also per
    residue, beside the unigram model of the training file, and substitutions.png.

    Args:
        run: folder of the training run.
        model: in evaluation mode.
        config: the run's.
        out: folder to write.
        splits: some of train, val and test; by default val, and test if the run names it.
        data: another text instead, a file or an hf: name.
        batch_size: blocks in a batch.

    Returns:
        Per split: perplexity, bits_per_token, tokens, and the shares of attention on the nearest
        and farthest 10 % of the tokens, mean over heads and layers, of the first block. Of proteins
        also residue_perplexity, residue_accuracy_percent, residues (without what ends records),
        unigram_perplexity and unigram_accuracy_percent.

    Raises:
        FileNotFoundError: if the run's vocabulary or a text is missing.
        ValueError: if a text cannot be used, or the vocabulary is another model's.
    """
    vocabulary = load_vocabulary(run, model.vocabulary)
    length = int(str(config["data"]["length"]))
    results: dict[str, dict[str, float | None]] = {}
    curves: dict[str, NDArray[np.float64]] = {}
    proteins = vocabulary.level == "protein"
    train = str(config["data"]["train"])
    baseline, note = _baseline(train, vocabulary, length) if proteins else (None, "")
    texts = {  # all of them, before the first is judged
        split: read_blocks(source, vocabulary, length, split)
        for split, source in named_sources(config["data"], splits, data).items()
    }
    for split, blocks in texts.items():
        right: list[NDArray[np.bool_]] | None = [] if proteins else None
        losses = curves[split] = token_losses(model, blocks, batch_size, split, right)
        counted = losses[np.isfinite(losses)]
        scores = metrics_of(counted)
        results[split] = {**scores, "tokens": len(counted), **_locality(model, blocks)}
        if right is not None:
            results[split] |= _per_residue(blocks, losses, right, baseline)
    begin_results(out, "losses.png", "attention.png", "encoding.png", "substitutions.png")
    files = [out / "losses.png", out / "attention.png"]
    plots.losses_by_place(curves, files[0])
    first = blocks[0][0][:_ATTENTION_TOKENS].to(next(model.parameters()).device)[None]
    matrices = _attention_of(model.stack, lambda: model(first), last=1)
    title = f"last layer, first {first.shape[1]} tokens of {split}"
    plots.attention_matrices(matrices[-1][0], files[1], title=title)
    own = model.stack.position, model.position_scale, length, model.longest
    files += draw_encoding(*own, out / "encoding.png")
    text = _table(results)
    if proteins:
        png, about = draw_substitutions(model.head, vocabulary.ids, out / "substitutions.png")
        files.append(png)
        text = f"{text}\n\n{residue_table(results)}\n\n{note}\n{about}"
    return Report(results, f", blocks of {length} tokens\n\n{text}\n", files)


def load_vocabulary(run: Path, size: int) -> Vocabulary:
    """The vocabulary of a run.

    Args:
        run: folder of a training run.
        size: number of ids that its model has.
    """
    path = run / "vocabulary.json"
    return vocabulary_of(read_kept(path, "vocabulary"), str(path), size)


def vocabulary_of(content: bytes, name: str, size: int) -> Vocabulary:
    """As `load_vocabulary`, from what the file of that name holds."""
    vocabulary = Vocabulary.from_json(content, name)
    expect_size(name, len(vocabulary), size, "vocabulary")
    return vocabulary


def _baseline(source: str, vocabulary: Vocabulary, length: int) -> tuple[Unigram | None, str]:
    """See `unigram_of`; records end, so that <eos> is one of what can come."""
    possible = np.ones(len(vocabulary), dtype=bool)
    return unigram_of(source, lambda: read_blocks(source, vocabulary, length).ids, possible)


def _per_residue(
    blocks: TokenBlocks,
    losses: NDArray[np.float64],
    right: list[NDArray[np.bool_]],
    baseline: Unigram | None,
) -> dict[str, float | None]:
    """Metrics of the residues among the tokens of a text, and of the baseline on these."""
    ids, own, there = blocks.ids, blocks.ids != blocks.eos, np.isfinite(losses)
    nats, hits = losses[there][own], np.concatenate(right)[there][own]
    return {
        "residue_perplexity": metrics_of(nats)["perplexity"],
        "residue_accuracy_percent": 100 * float(hits.mean()),
        "residues": len(nats),
        **({} if baseline is None else baseline.judge(ids[own])),
    }


def metrics_of(losses: NDArray[np.float64]) -> dict[str, float]:
    """Perplexity and bits per token, from the negative log-likelihoods of tokens, nats."""
    return LanguageTask.sums(torch.tensor(losses.sum()), torch.tensor(len(losses))).metrics()


def token_losses(
    model: LanguageModel,
    blocks: TokenBlocks,
    batch_size: int,
    name: str,
    right: list[NDArray[np.bool_]] | None = None,
) -> NDArray[np.float64]:
    """Negative log-likelihood of each token of a text, nats: (blocks, length); NaN where none is.

    Args:
        model: in evaluation mode.
        blocks: of the text.
        batch_size: blocks in a batch.
        name: of the text, for messages.
        right: takes whether each token was the most probable one, (batch, length) of each batch;
            None saves all logits, which a large vocabulary has too many of.
    """
    device = next(model.parameters()).device
    found = []
    batch_of = f"{name}: a batch of {batch_size} x {blocks.length:,} tokens"
    with torch.inference_mode(), within_memory(lambda: batch_of, "lower --batch-size"):
        batches = DataLoader(blocks, batch_size=batch_size)
        for inputs, targets in tqdm(batches, desc=name, leave=False, disable=None):
            if right is None:
                score = model.log_likelihood(inputs.to(device), targets.to(device))
            else:
                log_p, wanted = (
                    model.log_probabilities(model(inputs.to(device))),
                    targets.to(device),
                )
                score = log_p.gather(2, wanted.clamp(min=0)[..., None])[..., 0]
                right.append((log_p.argmax(dim=2) == wanted).cpu().numpy())
            loss = -score.double().cpu()
            expect_finite(name, loss)
            found.append(np.where(targets.numpy() < 0, np.nan, loss.numpy()))
    return np.concatenate(found)


def _locality(model: LanguageModel, blocks: TokenBlocks) -> dict[str, float | None]:
    """Of the first block."""
    tokens = blocks[0][0][blocks[0][1] >= 0].to(next(model.parameters()).device)[None]
    place = torch.arange(tokens.shape[1])
    distances = (place[:, None] - place).abs()
    return _locality_of(_attention_of(model.stack, lambda: model(tokens)), distances, causal=True)


def _table(results: Mapping[str, Mapping[str, float | None]]) -> str:
    """One line per text; shares of attention on near and far tokens next to the perplexities."""
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
